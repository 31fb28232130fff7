"""Multi-head spatial attention on sequences: Zhu et al. (2019), Eq. 1 and 2, in plain loops, and padding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from attn_plugins.modules import MultiheadSpatialAttention, SequenceCache
from tests.helpers.module_inputs import drawn

BITS = ["".join(bits) for bits in itertools.product("01", repeat=4)]
MODES = ["self", "causal", "cross"]


def build(bits="1111", mode="self", *, dtype=torch.float64, **options) -> MultiheadSpatialAttention:
    torch.manual_seed(0)
    if mode == "cross":
        options.setdefault("kdim", 5)
    module = MultiheadSpatialAttention(6, 3, bits, causal=mode == "causal", **options).to(dtype)
    return drawn(module)


def inputs(mode, T=5, S=7, B=2, dtype=torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    query = torch.randn(B, T, 6, dtype=dtype)
    return (query, torch.randn(B, S, 5, dtype=dtype)) if mode == "cross" else (query,)


def in_steps(module, query, *keys, sizes=None, cache=None, **options) -> torch.Tensor:
    cache = SequenceCache() if cache is None else cache
    parts = query.split(sizes or 1, 1)
    return torch.cat([module(part, *keys, cache=cache, **options) for part in parts], 1)


@torch.no_grad()
def by_loops(module: MultiheadSpatialAttention, query, key=None, value=None, padding=None, source=0) -> torch.Tensor:
    """Compute the definition for every query, key and head separately; ``source`` is the source's first position."""
    key = query if key is None else key
    value = key if value is None else value
    B, T, C = query.shape
    S, M = key.shape[1], module.num_heads
    d = C // M

    def weight(layer):
        return None if layer is None else layer.weight.numpy()

    def project(layer, x):
        return layer.weight.numpy() @ x.numpy() + (0 if layer.bias is None else layer.bias.numpy())

    W = weight(module.position_proj)
    e1, e2, e3, e4 = (bit == "1" for bit in module.attention_type)
    output = np.zeros((B, T, C))
    for b, m, t in itertools.product(range(B), range(M), range(T)):
        head = slice(m * d, (m + 1) * d)
        logits = np.full(S, -np.inf)
        for s in range(S):
            offset = s - source - t
            if padding is not None and padding[b, s]:
                continue
            if module.causal and offset > 0:
                continue
            if module.attention_range != -1 and abs(offset) > (module.attention_range - 1) / 2:
                continue
            rates = [1 / 10000 ** (2 * i / C) for i in range(C // 2)]
            R = np.array([math.sin(offset * r) for r in rates] + [math.cos(offset * r) for r in rates])
            logits[s] = 0
            if e1:
                logits[s] += project(module.q_proj, query[b, t])[head] @ project(module.k_proj, key[b, s])[head]
            if e2:
                logits[s] += project(module.q_proj, query[b, t])[head] @ (W @ R)[head]
            if e3:
                logits[s] += module.content_bias[m].numpy() @ project(module.k_proj, key[b, s])[head]
            if e4:
                logits[s] += module.position_bias[m].numpy() @ (W @ R)[head]
            logits[s] *= module.scale
        weights = np.exp(logits - logits.max()) if np.isfinite(logits).any() else np.zeros(S)
        weights /= max(weights.sum(), 1e-300)
        output[b, t, head] = sum(weights[s] * module.v_proj(value[b, s]).numpy()[head] for s in range(S))
    return module.out_proj(torch.from_numpy(output))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attention_range", [-1, 5])
@pytest.mark.parametrize("bits", BITS)
def test_equals_the_formula(bits, attention_range, mode):
    module = build(bits, mode, attention_range=attention_range, scale=0.6)
    arguments = inputs(mode)
    torch.testing.assert_close(module(*arguments), by_loops(module, *arguments))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T, S", [(1, 1), (1, 6), (8, 3)])
@pytest.mark.parametrize("attention_range", [-1, 1, 3, 31])
def test_any_length(T, S, attention_range, mode):
    module = build("1111", mode, attention_range=attention_range)
    arguments = inputs(mode, T, S)
    torch.testing.assert_close(module(*arguments), by_loops(module, *arguments))


def test_value_apart_from_the_key():
    module = build("1111", "cross")
    query, key = inputs("cross")
    value = torch.randn_like(key)
    torch.testing.assert_close(module(query, key, value), by_loops(module, query, key, value))
    torch.testing.assert_close(module(query, key, key), module(query, key))
    module = build("1101")
    torch.testing.assert_close(module(query, query, query), module(query))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", ["1000", "1010", "1100", "1111"])
def test_biases_of_queries_and_keys(bits, mode):
    module = build(bits, mode, query_key_bias=True)
    arguments = inputs(mode)
    torch.testing.assert_close(module(*arguments), by_loops(module, *arguments))
    if mode == "causal":
        torch.testing.assert_close(in_steps(module, *arguments), module(*arguments))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention_range", [-1, 3])
@pytest.mark.parametrize("bits", BITS)
def test_padding_of_the_source_changes_nothing(bits, attention_range, side):
    module, arguments = build(bits, "cross", attention_range=attention_range), inputs("cross", B=1)
    keys = arguments[1]
    noise = torch.randn(1, 3, keys.shape[2], dtype=torch.float64)
    padded = torch.cat((noise, keys) if side == "left" else (keys, noise), 1)
    mask = torch.zeros(1, padded.shape[1], dtype=torch.bool)
    mask[:, slice(0, 3) if side == "left" else slice(-3, None)] = True
    torch.testing.assert_close(module(arguments[0], padded, key_padding_mask=mask), module(*arguments))
    maps = module.attention_maps(arguments[0], padded, key_padding_mask=mask)
    assert not maps[..., mask[0]].any()
    torch.testing.assert_close(maps[..., ~mask[0]], module.attention_maps(*arguments))


def test_padding_in_the_formula_and_step_by_step():
    module, (x,) = build("1111", "causal"), inputs("causal")
    mask = torch.tensor([[False] * 5, [True, True, False, False, True]])
    full = module(x, key_padding_mask=mask)
    torch.testing.assert_close(full, by_loops(module, x, padding=mask))
    cache = SequenceCache()
    steps = [module(x[:, t : t + 1], key_padding_mask=mask[:, t : t + 1], cache=cache) for t in range(5)]
    torch.testing.assert_close(torch.cat(steps, 1), full)
    cache = SequenceCache()  # pass a mask in some steps only
    steps = [module(x[:, :2], key_padding_mask=mask[:, :2], cache=cache), module(x[:, 2:4], cache=cache)]
    torch.testing.assert_close(torch.cat(steps, 1), full[:, :4])
    module, (x, source) = build("1111", "cross"), inputs("cross", B=1)
    mask = torch.tensor([[True, True, False, False, True, False, False]])
    torch.testing.assert_close(
        module(x, source, key_padding_mask=mask), by_loops(module, x, source, padding=mask, source=2)
    )


def test_only_padding_gives_the_bias():
    module, arguments = build("1111", "cross"), inputs("cross")
    mask = torch.tensor([[False] * 7, [True] * 7])
    assert not module.attention_maps(*arguments, key_padding_mask=mask)[1].any()
    output = module(*arguments, key_padding_mask=mask)
    torch.testing.assert_close(output[1], module.out_proj.bias.expand(5, -1))
    torch.testing.assert_close(output[0], module(*arguments)[0])


def test_state_dict():
    module = build("1111")
    names = {"q_proj.weight", "k_proj.weight", "position_proj.weight", "content_bias", "position_bias"}
    ends = {"v_proj.weight", "v_proj.bias", "out_proj.weight", "out_proj.bias"}
    assert set(module.state_dict()) == names | ends
    assert set(build("0000").state_dict()) == ends
    assert set(build("0010").state_dict()) == {"k_proj.weight", "content_bias"} | ends
    assert set(build("0001", bias=False).state_dict()) == {
        "position_proj.weight", "position_bias", "v_proj.weight", "out_proj.weight"
    }  # fmt: skip


def test_bad_input():
    (x,) = inputs("self")
    module, causal, cross = build(), build(mode="causal"), build(mode="cross")
    source = inputs("cross")[1]
    mask = torch.zeros(2, 7, dtype=torch.bool)
    for call, kind, words in [
        (lambda: cross(x, source, key_padding_mask=mask.T), ValueError, r"key_padding_mask must have shape \(2, 7\)"),
        (lambda: cross(x, source, key_padding_mask=mask.long()), TypeError, "must be a bool Tensor"),
        (lambda: cross(x, source[:1]), ValueError, "key must have query's batch size 2, got 1"),
        (lambda: cross(x, source, source[:, 1:]), ValueError, "value must have key's length 7, got 6"),
        (lambda: cross(x), ValueError, "key must be given: its kdim = 5"),
        (lambda: module(x, value=torch.randn_like(x)), ValueError, "value must be None without key"),
        (lambda: causal(x, x.clone()), ValueError, "key must be None with causal=True"),
        (lambda: module(x, cache=SequenceCache()), ValueError, "cache needs causal=True or a key"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    cache = SequenceCache()
    cross(x, source, cache=cache)
    with pytest.raises(ValueError, match="key must be that of the cache, of length 7, got 6"):
        cross(x, source[:, 1:], cache=cache)


@pytest.mark.parametrize("attention_range", [-1, 1, 5])
@pytest.mark.parametrize("bits", BITS)
def test_step_by_step_beside_a_source_equals_the_full_pass(bits, attention_range):
    module, arguments = build(bits, "cross", attention_range=attention_range), inputs("cross", T=8)
    full = module(*arguments)
    torch.testing.assert_close(in_steps(module, *arguments), full)
    torch.testing.assert_close(in_steps(module, *arguments, sizes=[3, 1, 4]), full)


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
