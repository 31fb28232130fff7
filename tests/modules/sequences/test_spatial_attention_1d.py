"""Multi-head spatial attention on sequences: Zhu et al. (2019), Eq. 1 and 2, in plain loops, and padding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules import MultiheadSpatialAttention, SequenceCache
from tests.helpers.module_checks import check_dropout
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


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_batch(mode):
    module, arguments = build("1111", mode), inputs(mode, B=0)
    assert module(*arguments).shape == (0, 5, 6)
    assert module.attention_maps(*arguments).shape == (0, 3, 5, 7 if mode == "cross" else 5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", BITS)
def test_every_parameter_learns(bits, mode):
    for attention_range in (-1, 3):
        module, arguments = build(bits, mode, attention_range=attention_range), inputs(mode)
        module(*arguments).square().sum().backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("bits", ["1111", "0010", "0001"])
def test_export_for_any_length(bits):
    module = build(bits, "causal", dtype=torch.float32)
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(module, inputs("causal", dtype=torch.float32), dynamic_shapes=({1: length},))
    (x,) = inputs("causal", T=23, dtype=torch.float32)
    torch.testing.assert_close(exported.module()(x), module(x))


def test_dropout_is_of_the_weights_and_of_training_alone():
    check_dropout(build("1111", dropout=0.4), build("1111"), *inputs("self"))


def test_state_dict():
    module, (x,) = build("1111"), inputs("self")
    other = MultiheadSpatialAttention(6, 3).double()
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(x), module(x), rtol=0, atol=0)
    names = {"q_proj.weight", "k_proj.weight", "position_proj.weight", "content_bias", "position_bias"}
    ends = {"v_proj.weight", "v_proj.bias", "out_proj.weight", "out_proj.bias"}
    assert set(module.state_dict()) == names | ends
    assert set(build("0000").state_dict()) == ends
    assert set(build("0010").state_dict()) == {"k_proj.weight", "content_bias"} | ends
    assert set(build("0001", bias=False).state_dict()) == {
        "position_proj.weight", "position_bias", "v_proj.weight", "out_proj.weight"
    }  # fmt: skip


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(attention_type="12"), "attention_type must be a string of four bits such as '1111', got '12'"),
        (dict(attention_type="1121"), "attention_type must be a string of four bits"),
        (
            dict(attention_type="0111", query_key_bias=True),
            "query_key_bias needs the first bit of attention_type, got '0111'",
        ),
        (dict(attention_range=4), "attention_range must be -1 .* or a positive odd int .* got 4"),
        (dict(attention_range=0), "attention_range must be"),
        (dict(num_heads=4), "num_heads must divide embed_dim = 6, got 4"),
        (dict(num_heads=0), "num_heads must be a positive int, got 0"),
        (dict(embed_dim=9, num_heads=3), "embed_dim must be even for relative positions"),
        (dict(dropout=1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (dict(causal=True, kdim=5), "kdim must be a positive int, and embed_dim = 6 with causal, got 5"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        MultiheadSpatialAttention(**{"embed_dim": 6, "num_heads": 3, **options})


def test_bad_input():
    (x,) = inputs("self")
    module, causal, cross = build(), build(mode="causal"), build(mode="cross")
    source = inputs("cross")[1]
    mask = torch.zeros(2, 7, dtype=torch.bool)
    for call, kind, words in [
        (lambda: module(x[:, :, :4]), ValueError, r"query must have shape \(B, T, 6\) with at least one token"),
        (lambda: module(x[:, :0]), ValueError, "at least one token"),
        (lambda: module(x.float()), TypeError, "query must have the module's dtype torch.float64, got torch.float32"),
        (lambda: module(x, key_padding_mask=mask), ValueError, r"key_padding_mask must have shape \(2, 5\)"),
        (lambda: cross(x, source, key_padding_mask=mask.T), ValueError, r"key_padding_mask must have shape \(2, 7\)"),
        (lambda: cross(x, source, key_padding_mask=mask.long()), TypeError, "must be a bool Tensor"),
        (lambda: cross(x, source[:1]), ValueError, "key must have query's batch size 2, got 1"),
        (lambda: cross(x, source, source[:, 1:]), ValueError, "value must have key's length 7, got 6"),
        (lambda: cross(x), ValueError, "key must be given: its kdim = 5"),
        (lambda: module(x, value=torch.randn_like(x)), ValueError, "value must be None without key"),
        (lambda: causal(x, x.clone()), ValueError, "key must be None with causal=True"),
        (lambda: module(x, cache=SequenceCache()), ValueError, "cache needs causal=True or a key"),
        (lambda: causal(x, cache={}), TypeError, "cache must be a SequenceCache, got dict"),
    ]:
        with pytest.raises(kind, match=words):
            call()
    cache = SequenceCache()
    cross(x, source, cache=cache)
    with pytest.raises(ValueError, match="key must be that of the cache, of length 7, got 6"):
        cross(x, source[:, 1:], cache=cache)
    with pytest.raises(ValueError, match="cache must be of query's batch size 1, got one of 2"):
        cross(x[:1], source[:1], cache=cache)


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
