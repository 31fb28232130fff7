"""Multi-head spatial attention on sequences in torch: gradients, compilation, dtypes, state_dict, errors."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.modules import MultiheadSpatialAttention, SequenceCache
from tests.helpers.module_checks import check_dropout
from tests.helpers.spatial_attention_1d import BITS, MODES, build, in_steps, inputs


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits, attention_range", [("1111", -1), ("0111", 3), ("0010", -1)])
def test_gradients(bits, attention_range, mode):
    module = build(bits, mode, attention_range=attention_range)
    arguments = tuple(x.requires_grad_() for x in inputs(mode, T=3, S=4, B=1))
    parameters = dict(module.named_parameters())

    def function(*values):
        count = len(arguments)
        return torch.func.functional_call(module, dict(zip(parameters, values[count:])), values[:count])

    assert torch.autograd.gradcheck(function, (*arguments, *parameters.values()))
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    assert torch.autograd.gradgradcheck(module, arguments)


@pytest.mark.parametrize("attention_range, mode", [(3, "self"), (-1, "causal"), (-1, "cross")])
def test_compile_and_export(attention_range, mode):
    module = build("1111", mode, dtype=torch.float32, attention_range=attention_range)
    arguments, longer = inputs(mode, dtype=torch.float32), inputs(mode, 9, 11, dtype=torch.float32)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*arguments), module(*arguments))
    torch.testing.assert_close(compiled(*longer), module(*longer))
    torch._dynamo.reset()
    static = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(static(*arguments), module(*arguments))
    exported = torch.export.export(module, arguments).module()
    torch.testing.assert_close(exported(*arguments), module(*arguments))


@pytest.mark.parametrize("bits", ["1111", "0010", "0001"])
def test_export_for_any_length(bits):
    module = build(bits, "causal", dtype=torch.float32)
    length = torch.export.Dim("length", min=2, max=512)
    exported = torch.export.export(module, inputs("causal", dtype=torch.float32), dynamic_shapes=({1: length},))
    (x,) = inputs("causal", T=23, dtype=torch.float32)
    torch.testing.assert_close(exported.module()(x), module(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", ["1111", "0110", "0010", "0001"])
def test_half_precision(bits, mode):
    module, arguments = build(bits, mode, dtype=torch.float32), inputs(mode, dtype=torch.float32)
    expected = module(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(*arguments).float(), expected, rtol=0.1, atol=0.15)
        if mode != "self":
            torch.testing.assert_close(in_steps(module, *arguments).float(), expected, rtol=0.1, atol=0.15)
    module.bfloat16()
    output = module(*(x.bfloat16() for x in arguments))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.1, atol=0.15)


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
