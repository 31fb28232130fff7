"""Calls of global attention with any of its terms."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.ops.contract_examples import Example, global_attention

TERMS = ("query key", "row_logits", "column_logits", "key_logits")
COMBINATIONS = [" ".join(terms) for count in range(5) for terms in itertools.combinations(TERMS, count)]
ALL = COMBINATIONS[-1]
# Axes in which logits are of size 1: none, or all that row logits do without columns, column logits without rows.
FULL, BROADCAST = {}, dict(row_logits=(0, 3), column_logits=(1, 2), key_logits=(0,))


def drawn(terms: str = ALL, dtype: torch.dtype = torch.float64, device: str = "cpu", **extents: Any) -> Example:
    return global_attention(f"value {terms}")("small", **extents).to(device, dtype)
