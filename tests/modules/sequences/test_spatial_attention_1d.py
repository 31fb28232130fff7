"""Multi-head (spatial) attention on sequences: Zhu et al. (2019), Eq. 1 and 2, in plain loops; torch's own module."""

from __future__ import annotations

import itertools
import math
from itertools import cycle

import numpy as np
import pytest
import torch

from attn_plugins.modules import MultiheadAttention, MultiheadSpatialAttention, SequenceCache
from tests.helpers.module_inputs import drawn
from tests.modules.loops import attend, encode, zhu_logit

BITS = ["".join(bits) for bits in itertools.product("01", repeat=4)]
MODES = ["self", "causal", "cross"]


def build(bits="1111", mode="self", **options) -> MultiheadSpatialAttention:
    if mode == "cross":
        options.setdefault("kdim", 5)
    return drawn(MultiheadSpatialAttention(6, 3, bits, causal=mode == "causal", dtype=torch.float64, **options))


def inputs(mode, T=5, S=7, B=2) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    query, source = torch.randn(B, T, 6, dtype=torch.float64), torch.randn(B, S, 5, dtype=torch.float64)
    return (query, source) if mode == "cross" else (query,)


def in_steps(module, query, *keys, sizes=None, cache=None, **options) -> torch.Tensor:
    cache = SequenceCache() if cache is None else cache
    parts = query.split(sizes or 1, 1)
    return torch.cat([module(part, *keys, cache=cache, **options) for part in parts], 1)


@torch.no_grad()
def by_loops(module: MultiheadSpatialAttention, query, key=None, value=None, padding=None, source=0) -> torch.Tensor:
    """Compute the definition; ``source`` is the source's first position."""
    key = query if key is None else key
    value = key if value is None else value
    (B, T, C), S, d = query.shape, key.shape[1], query.shape[2] // module.num_heads
    e1, e2, e3, e4 = (bit == "1" for bit in module.attention_type)
    q = module.q_proj(query).numpy() if e1 or e2 else None
    k = module.k_proj(key).numpy() if e1 or e3 else None
    values = module.v_proj(value).numpy()

    def logit(b, head, t, s):
        offset, m = s - source - t, head.start // d
        if module.attention_range != -1 and abs(offset) > (module.attention_range - 1) / 2:
            return -np.inf
        R = (module.position_proj.weight.numpy() @ encode(offset, C))[head] if e2 or e4 else None
        u = module.content_bias[m].numpy() if e3 else None
        v = module.position_bias[m].numpy() if e4 else None
        at_query, at_key = (None if x is None else x[b, i, head] for x, i in ((q, t), (k, s)))
        return module.scale * zhu_logit(module.attention_type, at_query, at_key, u, v, R)

    logits = lambda b, head, t, keys: [logit(b, head, t, s) for s in keys]  # noqa: E731
    return attend(module, (B, T, S), logits, lambda b, head, t, s: values[b, s, head], padding)


BOTH = zip(BITS, cycle(MODES), cycle([-1, 5, -1, 1]))


@pytest.mark.parametrize(
    ("bits", "mode", "attention_range", "T", "S", "biases"),
    [
        *((bits, mode, reach, 5, 7, False) for bits, mode, reach in BOTH),
        *(("1111", mode, reach, 5, 7, False) for mode in MODES for reach in (-1, 3, 31)),
        *(("1111", mode, reach, T, S, False) for mode, reach, T, S in (("self", 3, 1, 1), ("cross", -1, 1, 6),
                                                                       ("cross", 3, 8, 3), ("causal", 1, 8, 8))),
        *((bits, mode, -1, 5, 7, True) for bits, mode in zip(("1000", "1010", "1100", "1111"), cycle(MODES))),
    ],
)  # fmt: skip
def test_equals_the_formula(bits, mode, attention_range, T, S, biases):
    module = build(bits, mode, attention_range=attention_range, scale=0.6, query_key_bias=biases)
    arguments = inputs(mode, T, S)
    torch.testing.assert_close(module(*arguments), by_loops(module, *arguments))
    hidden = torch.zeros(2, arguments[-1].shape[1], dtype=torch.bool)
    hidden[1, {"self": slice(-2, None), "causal": [0, -1], "cross": slice(None)}[mode]] = True
    expected = by_loops(module, *arguments, padding=hidden)
    torch.testing.assert_close(module(*arguments, key_padding_mask=hidden), expected)
    if biases and mode == "causal":
        torch.testing.assert_close(in_steps(module, *arguments), module(*arguments))


def test_value_apart_from_the_key():
    module = build("1111", "cross")
    query, key = inputs("cross")
    value = torch.randn_like(key)
    torch.testing.assert_close(module(query, key, value), by_loops(module, query, key, value))
    torch.testing.assert_close(module(query, key, key), module(query, key))
    module = build("1101")
    torch.testing.assert_close(module(query, query, query), module(query))


BESIDE = [("1111", -1), ("1111", 3), ("1000", 1), ("0110", -1), ("0010", 3), ("0001", -1), ("0101", 5), ("0000", -1)]


@pytest.mark.parametrize(("bits", "attention_range"), BESIDE)
def test_beside_a_source_padding_changes_nothing_and_steps_are_the_full_pass(bits, attention_range):
    module, (query, keys) = build(bits, "cross", attention_range=attention_range), inputs("cross", T=8, B=1)
    noise, full = torch.randn(1, 3, keys.shape[2], dtype=torch.float64), module(query, keys)
    for padded, side in ((torch.cat((noise, keys), 1), slice(0, 3)), (torch.cat((keys, noise), 1), slice(-3, None))):
        mask = torch.zeros(1, 10, dtype=torch.bool)
        mask[:, side] = True
        torch.testing.assert_close(module(query, padded, key_padding_mask=mask), full)
        maps = module.attention_maps(query, padded, key_padding_mask=mask)
        assert not maps[..., mask[0]].any()
        torch.testing.assert_close(maps[..., ~mask[0]], module.attention_maps(query, keys))
    torch.testing.assert_close(in_steps(module, query, keys), full)
    torch.testing.assert_close(in_steps(module, query, keys, sizes=[3, 1, 4]), full)


def test_bad_input():
    (x,) = inputs("self")
    module, causal, cross = build(), build(mode="causal"), build(mode="cross")
    source = inputs("cross")[1]
    for call, words in [
        (lambda: cross(x, source[:1]), "key must have query's batch size 2, got 1"),
        (lambda: cross(x, source, source[:, 1:]), "value must have key's length 7, got 6"),
        (lambda: cross(x), "key must be given: its kdim = 5"),
        (lambda: module(x, value=torch.randn_like(x)), "value must be None without key"),
        (lambda: causal(x, x.clone()), "key must be None with causal=True"),
        (lambda: module(x, cache=SequenceCache()), "cache needs causal=True or a key"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()
    cache = SequenceCache()
    cross(x, source, cache=cache)
    with pytest.raises(ValueError, match="key must be that of the cache, of length 7, got 6"):
        cross(x, source[:, 1:], cache=cache)


def test_a_long_decoding():
    """Decode beyond the table of encodings that the first step creates."""
    module, (x,) = build("0111", "causal"), inputs("causal", T=150, B=1)
    torch.testing.assert_close(in_steps(module, x), module(x))
    module, (x, source) = build("0111", "cross"), inputs("cross", T=90, S=40, B=1)
    torch.testing.assert_close(in_steps(module, x, source), module(x, source))


@pytest.mark.parametrize("attention_range", [-1, 5])
def test_after_a_reorder_of_the_beam(attention_range):
    """Sources of other lengths are padded on either side."""
    module, (x, *keys) = build("1111", "cross", attention_range=attention_range), inputs("cross", T=8, B=3)
    mask = torch.zeros(3, 7, dtype=torch.bool)
    mask[0, 5:] = mask[2, :2] = True
    cache, order = SequenceCache(), torch.tensor([2, 0, 0, 1])
    for t in range(4):
        module(x[:, t : t + 1], *keys, key_padding_mask=mask, cache=cache)
    assert cache.reorder(order) is cache
    rest = torch.randn(4, 4, 6, dtype=torch.float64)
    keys, mask = [k[order] for k in keys], mask[order]
    ours = in_steps(module, rest, *keys, cache=cache, key_padding_mask=mask)
    full = module(torch.cat((x[order, :4], rest), 1), *keys, key_padding_mask=mask)
    torch.testing.assert_close(ours, full[:, 4:])


@pytest.mark.parametrize("causal", [False, True])
def test_multi_head_attention_equals_torchs(causal):
    module = drawn(MultiheadAttention(6, 3, causal=causal, dtype=torch.float64))
    own = torch.nn.MultiheadAttention(6, 3, batch_first=True, dtype=torch.float64)
    own.out_proj.load_state_dict(module.out_proj.state_dict())
    layers = (module.q_proj, module.k_proj, module.v_proj)
    own.in_proj_weight.data = torch.cat([layer.weight for layer in layers])
    own.in_proj_bias.data = torch.cat([layer.bias for layer in layers])
    query, key = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    given = (query,) if causal else (query, key)
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] + [True] * 4])
    future = torch.ones(5, 5, dtype=torch.bool).triu(1) if causal else None
    expected, weights = own(query, given[-1], given[-1], mask, attn_mask=future, average_attn_weights=False)
    torch.testing.assert_close(module(*given, key_padding_mask=mask), expected)
    torch.testing.assert_close(module.attention_maps(*given, key_padding_mask=mask), weights)
    some = module.attention_maps(*given, key_padding_mask=mask, queries=torch.tensor([3, 1]))
    torch.testing.assert_close(some, weights[:, :, [3, 1]])


def test_the_projections_of_the_inputs_are_drawn_as_one():
    module = MultiheadSpatialAttention(64)
    joint, alone = math.sqrt(6 / (64 + 3 * 64)), math.sqrt(6 / (64 + 64))
    layers = {module.q_proj: joint, module.k_proj: joint, module.v_proj: joint, module.out_proj: alone}
    for layer, bound in layers.items():
        assert 0.99 * bound < layer.weight.abs().max() <= bound
