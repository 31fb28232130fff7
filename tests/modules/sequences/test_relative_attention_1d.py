"""Self-attention with relative position representations: Shaw et al. (2018), Eq. 3 to 5, in plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attn_plugins.modules import RelativeSelfAttention
from tests.helpers.module_inputs import drawn
from tests.modules.loops import softmax


def build(*, dtype=torch.float64, **options) -> RelativeSelfAttention:
    torch.manual_seed(0)
    module = RelativeSelfAttention(**{"embed_dim": 6, "num_heads": 3, "max_distance": 2, **options}).to(dtype)
    return drawn(module)


def tokens(T=7, B=2, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(B, T, 6, dtype=dtype)


@torch.no_grad()
def by_loops(module: RelativeSelfAttention, x: torch.Tensor, hidden=None) -> torch.Tensor:
    """Compute the definition for every query, key and head separately."""
    B, T, C = x.shape
    M, k = module.num_heads, module.max_distance
    d = C // M
    q, key, v = (layer(x).numpy() for layer in (module.q_proj, module.k_proj, module.v_proj))

    def vector(table, m, i, j):
        row = max(-k, min(k, j - i)) + k  # a causal table ends at offset 0
        return table[m if module.per_head else 0, row].numpy()

    output = np.zeros((B, T, C))
    for b, m, i in itertools.product(range(B), range(M), range(T)):
        head = slice(m * d, (m + 1) * d)
        keys = [j for j in range(T) if not (module.causal and j > i) and not (hidden is not None and hidden[b, j])]
        if not keys:
            continue
        e = [q[b, i, head] @ (key[b, j, head] + vector(module.key_table, m, i, j)) / math.sqrt(d) for j in keys]
        for weight, j in zip(softmax(e), keys):
            added = 0 if module.value_table is None else vector(module.value_table, m, i, j)
            output[b, i, head] += weight * (v[b, j, head] + added)
    return module.out_proj(torch.from_numpy(output))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("max_distance", "values", "per_head"), [(1, True, False), (2, True, True), (6, False, True), (16, False, False)]
)
def test_equals_the_formula(max_distance, values, per_head, causal):
    module, x = build(max_distance=max_distance, causal=causal, values=values, per_head=per_head), tokens()
    hidden = torch.tensor([[False] * 7, [True] * 2 + [False, True] + [False] * 3])
    expected = by_loops(module, x, hidden)
    torch.testing.assert_close(module(x, key_padding_mask=hidden), expected)
    torch.testing.assert_close(module(x)[0], expected[0])


def test_dropout_is_of_the_weights_of_both_values():
    module, x = build(dropout=0.4), tokens()
    torch.manual_seed(3)
    output = module(x)
    torch.manual_seed(3)
    weights = F.dropout(module.attention_maps(x), 0.4)
    value = module.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    offsets = (torch.arange(7) - torch.arange(7)[:, None]).clamp(-2, 2) + 2
    expected = weights @ value + torch.einsum("bmts,tsd->bmtd", weights, module.value_table[0][offsets])
    torch.testing.assert_close(output, module.out_proj(expected.transpose(1, 2).flatten(2)))
