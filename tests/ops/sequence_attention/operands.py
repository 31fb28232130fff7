"""Calls of sequence attention with any of its terms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.ops.contract_examples import Example, sequence_attention

LOGITS = ("band_logits outside_logits position_logits", "band_logits outside_logits", "band_logits position_logits",
          "band_logits", "position_logits", "")  # fmt: skip
TERMS = [f"{content} {logits}" for content in ("query key", "") for logits in LOGITS][:-1]
ALL = TERMS[0]


def drawn(
    terms: str = ALL, dtype: torch.dtype = torch.float64, device: str = "cpu", *, mask: Tensor | None = None,
    ids: Tensor | None = None, lone: dict[str, tuple[int, ...]] | None = None, options: dict[str, Any] | None = None,
    **extents: int,
) -> Example:  # fmt: skip
    """Return a call, with a mask, ids of segments and options beside the tensors."""
    some = sequence_attention(f"value {terms}")("small", lone=lone or {}, **extents).to(device, dtype)
    masks = {n: t.to(device) for n, t in (("key_padding_mask", mask), ("segment_ids", ids)) if t is not None}
    return some._replace(call=partial(some.call, **options or {}), tensors={**some.tensors, **masks})


def padding(B: int, S: int) -> Tensor:
    """Return a mask with padding after the first sequence, before the second, and in all of the third."""
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, S - S // 3 :] = True
    if B > 1:
        mask[1, : S // 3] = True
    mask[2:] = True
    return mask


def identifiers(rows: int, S: int) -> Tensor | None:
    """Return ids (rows, S) of segments, in no order."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(1 + rows, (rows, S), generator=generator, dtype=torch.int32) if rows else None
