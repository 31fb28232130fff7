"""Self-attention with relative position representations: Shaw et al. (2018), Eq. 3 to 5, in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from attn_plugins.modules import RelativeSelfAttention
from tests.helpers.module_inputs import drawn
from tests.modules.loops import attend, check_with_padding


def build(**options) -> RelativeSelfAttention:
    return drawn(RelativeSelfAttention(6, 3, dtype=torch.float64, **{"max_distance": 2, **options}))


@torch.no_grad()
def by_loops(module: RelativeSelfAttention, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    B, T, C = x.shape
    d, k = C // module.num_heads, module.max_distance
    q, key, v = (layer(x).numpy() for layer in (module.q_proj, module.k_proj, module.v_proj))

    def vector(table, head, t, s):
        row = max(-k, min(k, s - t)) + k  # a causal table ends at offset 0
        return table[head.start // d if module.per_head else 0, row].numpy()

    def logits(b, head, t, keys):
        return [q[b, t, head] @ (key[b, s, head] + vector(module.key_table, head, t, s)) / math.sqrt(d) for s in keys]

    def value(b, head, t, s):
        return v[b, s, head] + (0 if module.value_table is None else vector(module.value_table, head, t, s))

    return attend(module, (B, T, T), logits, value, hidden)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("max_distance", "values", "per_head"), [(1, True, False), (2, True, True), (6, False, True), (16, False, False)]
)
def test_equals_the_formula(max_distance, values, per_head, causal):
    module = build(max_distance=max_distance, causal=causal, values=values, per_head=per_head)
    assert module.key_table.shape == (3 if per_head else 1, max_distance + 1 if causal else 2 * max_distance + 1, 2)
    check_with_padding(module, by_loops)


def test_dropout_is_of_the_weights_of_both_values():
    module, x = build(dropout=0.4), torch.randn(2, 7, 6, dtype=torch.float64)
    torch.manual_seed(3)
    output = module(x)
    torch.manual_seed(3)
    weights = F.dropout(module.attention_maps(x), 0.4)
    value = module.v_proj(x).unflatten(2, (3, 2)).transpose(1, 2)
    offsets = (torch.arange(7) - torch.arange(7)[:, None]).clamp(-2, 2) + 2
    expected = weights @ value + torch.einsum("bmts,tsd->bmtd", weights, module.value_table[0][offsets])
    torch.testing.assert_close(output, module.out_proj(expected.transpose(1, 2).flatten(2)))
