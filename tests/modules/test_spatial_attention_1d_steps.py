"""Multi-head spatial attention on sequences, step by step: causality, caches, reordered beams."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.modules import SequenceCache
from tests.helpers.spatial_attention_1d import BITS, build, in_steps, inputs


@pytest.mark.parametrize("bits", ["1111", "0100", "0010", "0001", "0000"])
@pytest.mark.parametrize("attention_range", [-1, 5])
def test_the_future_is_not_seen(bits, attention_range):
    module, (x,) = build(bits, "causal", attention_range=attention_range), inputs("causal", T=9)
    before = module(x)
    for t in range(8):
        changed = x.clone()
        changed[:, t + 1 :] += torch.randn_like(changed[:, t + 1 :])
        torch.testing.assert_close(module(changed)[:, : t + 1], before[:, : t + 1], rtol=0, atol=1e-12)
        assert not torch.allclose(module(changed)[:, t + 1 :], before[:, t + 1 :])


@pytest.mark.parametrize("mode", ["causal", "cross"])
@pytest.mark.parametrize("attention_range", [-1, 1, 5])
@pytest.mark.parametrize("bits", BITS)
def test_step_by_step_equals_the_full_pass(bits, attention_range, mode):
    module, arguments = build(bits, mode, attention_range=attention_range), inputs(mode, T=8)
    full = module(*arguments)
    torch.testing.assert_close(in_steps(module, *arguments), full)
    torch.testing.assert_close(in_steps(module, *arguments, sizes=[3, 1, 4]), full)


def test_a_long_decoding():
    """Decode beyond the table of encodings that the first step creates."""
    module, (x,) = build("0111", "causal"), inputs("causal", T=150, B=1)
    torch.testing.assert_close(in_steps(module, x), module(x))
    module, (x, source) = build("0111", "cross"), inputs("cross", T=90, S=40, B=1)
    torch.testing.assert_close(in_steps(module, x, source), module(x, source))


@pytest.mark.parametrize("mode", ["causal", "cross"])
@pytest.mark.parametrize("attention_range", [-1, 5])
def test_after_a_reorder_of_the_beam(attention_range, mode):
    module, arguments = build("1111", mode, attention_range=attention_range), inputs(mode, T=8, B=3)
    mask = None
    if mode == "cross":  # of other lengths, on either side
        mask = torch.zeros(3, 7, dtype=torch.bool)
        mask[0, 5:] = mask[2, :2] = True
    x, keys = arguments[0], arguments[1:]
    cache, order = SequenceCache(), torch.tensor([2, 0, 0, 1])
    for t in range(4):
        module(x[:, t : t + 1], *keys, key_padding_mask=mask, cache=cache)
    assert cache.reorder(order) is cache
    rest = torch.randn(4, 4, 6, dtype=torch.float64)
    keys = tuple(k[order] for k in keys)
    mask = None if mask is None else mask[order]
    ours = in_steps(module, rest, *keys, cache=cache, key_padding_mask=mask)
    full = module(torch.cat((x[order, :4], rest), 1), *keys, key_padding_mask=mask)
    torch.testing.assert_close(ours, full[:, 4:])


def test_the_range_bounds_the_cache():
    module, (x,) = build("1111", "causal", attention_range=5), inputs("causal", T=20)
    cache = SequenceCache()
    in_steps(module, x, cache=cache)
    assert cache.value.shape[2] == cache.key.shape[2] == 2
    assert cache.steps == 20


def test_attention_maps_leave_the_cache():
    module, (x, source) = build("1111", "cross"), inputs("cross")
    cache = SequenceCache()
    for t in range(3):
        maps = module.attention_maps(x[:, t : t + 1], source, cache=cache)
        assert cache.steps == t
        torch.testing.assert_close(maps, module.attention_maps(x, source)[:, :, t : t + 1])
        module(x[:, t : t + 1], source, cache=cache)
