"""Multi-head spatial attention on sequences: Zhu et al. (2019), Eq. 1 and 2, in plain loops, and padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules import SequenceCache
from tests.helpers.spatial_attention_1d import BITS, MODES, build, by_loops, in_steps, inputs


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


def test_content_alone_is_the_transformers_attention():
    module, (x, source) = build("1000", "cross", scale=2**-0.5, bias=False), inputs("cross")
    theirs = nn.MultiheadAttention(6, 3, bias=False, kdim=5, vdim=5, batch_first=True).double()
    names = dict(q_proj_weight="q_proj", k_proj_weight="k_proj", v_proj_weight="v_proj")
    weights = {name: getattr(module, layer).weight for name, layer in names.items()}
    theirs.load_state_dict({**weights, "out_proj.weight": module.out_proj.weight})
    mask = torch.tensor([[False] * 7, [True] * 2 + [False] * 3 + [True] * 2])
    expected, weights = theirs(x, source, source, key_padding_mask=mask, average_attn_weights=False)
    torch.testing.assert_close(module(x, source, key_padding_mask=mask), expected)
    torch.testing.assert_close(module.attention_maps(x, source, key_padding_mask=mask), weights)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", ["1000", "1010", "1100", "1111"])
def test_biases_of_queries_and_keys(bits, mode):
    module = build(bits, mode, query_key_bias=True)
    arguments = inputs(mode)
    torch.testing.assert_close(module(*arguments), by_loops(module, *arguments))
    if mode == "causal":
        torch.testing.assert_close(in_steps(module, *arguments), module(*arguments))


def test_with_all_biases_it_is_the_transformers_attention():
    module, (x,) = build("1000", scale=2**-0.5, query_key_bias=True), inputs("self")
    theirs = nn.MultiheadAttention(6, 3, batch_first=True).double()
    layers = module.q_proj, module.k_proj, module.v_proj
    theirs.load_state_dict({
        "in_proj_weight": torch.cat([layer.weight for layer in layers]),
        "in_proj_bias": torch.cat([layer.bias for layer in layers]),
        **{f"out_proj.{name}": value for name, value in module.out_proj.state_dict().items()},
    })  # fmt: skip
    torch.testing.assert_close(module(x), theirs(x, x, x)[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", ["1111", "0010", "0000"])
def test_attention_maps(bits, mode):
    module, arguments = build(bits, mode), inputs(mode)
    maps = module.attention_maps(*arguments)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 3, 5, dtype=torch.float64))
    value = module.v_proj(arguments[-1]).unflatten(2, (3, 2)).transpose(1, 2)
    torch.testing.assert_close(module.out_proj((maps @ value).transpose(1, 2).flatten(2)), module(*arguments))
    torch.testing.assert_close(module.attention_maps(*arguments, queries=torch.tensor([4, 1])), maps[:, :, [4, 1]])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention_range", [-1, 3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("mode", MODES)
def test_padding_changes_no_other_token(mode, bits, attention_range, side):
    module, arguments = build(bits, mode, attention_range=attention_range), inputs(mode, B=1)
    whole = module(*arguments)
    keys = arguments[-1]
    noise = torch.randn(1, 3, keys.shape[2], dtype=torch.float64)
    padded = torch.cat((noise, keys) if side == "left" else (keys, noise), 1)
    mask = torch.zeros(1, padded.shape[1], dtype=torch.bool)
    mask[:, slice(0, 3) if side == "left" else slice(-3, None)] = True
    if mode == "cross":
        torch.testing.assert_close(module(arguments[0], padded, key_padding_mask=mask), whole)
        maps = module.attention_maps(arguments[0], padded, key_padding_mask=mask)
        assert not maps[..., mask[0]].any()
        torch.testing.assert_close(maps[..., ~mask[0]], module.attention_maps(*arguments))
    else:
        torch.testing.assert_close(module(padded, key_padding_mask=mask)[:, ~mask[0]], whole)


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
