"""Multi-head attention: torch's module, and decoding beside another sequence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules import MultiheadAttention, SequenceCache
from tests.helpers.module_inputs import drawn


def build(dtype=torch.float64, **options) -> MultiheadAttention:
    torch.manual_seed(0)
    module = MultiheadAttention(**{"embed_dim": 6, "num_heads": 3, **options}).to(dtype)
    return drawn(module)


def draw(*shape: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(*shape, 6, dtype=dtype)


def torchs_own(module: MultiheadAttention) -> nn.MultiheadAttention:
    own = nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    layers = (module.q_proj, module.k_proj, module.v_proj)
    own.load_state_dict(
        {
            "in_proj_weight": torch.cat([layer.weight for layer in layers]),
            "in_proj_bias": torch.cat([layer.bias for layer in layers]),
            "out_proj.weight": module.out_proj.weight,
            "out_proj.bias": module.out_proj.bias,
        }
    )
    return own


def test_equals_torchs():
    module = build()
    query, key = draw(2, 4), draw(2, 5)
    mask = torch.tensor([[False] * 3 + [True] * 2, [True] + [False] * 4])
    expected, weights = torchs_own(module)(query, key, key, key_padding_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(module(query, key, key_padding_mask=mask), expected)
    torch.testing.assert_close(module.attention_maps(query, key, key_padding_mask=mask), weights)
    torch.testing.assert_close(
        module.attention_maps(query, key, key_padding_mask=mask, queries=torch.tensor([3, 1])), weights[:, :, [3, 1]]
    )


def test_causal_equals_torchs():
    module, x = build(causal=True), draw(2, 5)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(module(x), torchs_own(module)(x, x, x, attn_mask=future)[0])


def test_another_sequence_is_projected_once():
    module, query, key = build(), draw(2, 4), draw(2, 5)
    calls = []
    module.k_proj.register_forward_hook(lambda *_: calls.append(1))
    full, cache = module(query, key), SequenceCache()
    steps = [module(query[:, t : t + 1], key, cache=cache) for t in range(4)]
    torch.testing.assert_close(torch.cat(steps, 1), full)
    assert len(calls) == 2
    assert cache.steps == 4


@pytest.mark.parametrize(
    "options, call, message",
    [
        ({}, dict(query=torch.zeros(2, 3, 6), key=torch.zeros(1, 3, 6)), "key must have query's batch size 2"),
        ({}, dict(query=torch.zeros(2, 3, 6), cache=SequenceCache()), "cache needs causal=True or a key"),
        (dict(causal=True), dict(query=torch.zeros(2, 3, 6), key=torch.zeros(2, 3, 6)), "key must be None with causal"),
    ],
)
def test_bad_input(options, call, message):
    module = build(torch.float32, **options)
    with pytest.raises(ValueError, match=message):
        module(**call)
