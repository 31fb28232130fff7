"""Criss-cross attention, with and without relative positions: plain loops and mmcv's module."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from attn_plugins.modules import CrissCrossAttention2d, capture_attention
from attn_plugins.terms.relative_table import resize_table
from tests.helpers.module_checks import check_maps_that_do_not_fit

POSITIONS = ["none", "relative"]


def build(position="relative", *, size=(4, 5), dtype=torch.float64, **options) -> CrissCrossAttention2d:
    torch.manual_seed(0)
    module = CrissCrossAttention2d(6, **{"reduction": 2, "position": position, "input_size": size, **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.to(dtype)


@torch.no_grad()
def by_loops(module: CrissCrossAttention2d, image: torch.Tensor) -> torch.Tensor:
    """Compute the definition for every query and key separately."""
    _, _, H, W = image.shape
    q, k, v = (layer(image)[0].numpy() for layer in (module.query_conv, module.key_conv, module.value_conv))
    output = np.zeros(v.shape)
    for y, x in itertools.product(range(H), range(W)):
        keys = [(y, c) for c in range(W)] + [(r, x) for r in range(H) if r != y]
        logits = []
        for r, c in keys:
            key = k[:, r, c]
            if module.position == "relative":
                relative = module.width_rel[c - x + W - 1] if r == y else module.height_rel[r - y + H - 1]
                key = key + relative.numpy()
            logits.append(module.scale * (q[:, y, x] @ key))
        weights = np.exp(np.array(logits) - max(logits))
        weights /= weights.sum()
        output[:, y, x] = sum(w * v[:, r, c] for w, (r, c) in zip(weights, keys))
    return image + module.gamma.scale * torch.from_numpy(output)[None]


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("size", [(4, 5), (6, 3), (1, 4), (4, 1), (1, 1)])
def test_equals_the_formula(position, size, scale):
    module = build(position, size=size, scale=scale)
    image = torch.randn(1, 6, *size, dtype=torch.float64)
    torch.testing.assert_close(module(image), by_loops(module, image))


def test_parameters():
    module = CrissCrossAttention2d(16, position="relative", input_size=(5, 7), dtype=torch.float64)
    assert module.height_rel.shape == (9, 2)
    assert module.width_rel.shape == (13, 2)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert CrissCrossAttention2d(4).width == 1
    plain = CrissCrossAttention2d(16)
    assert sum(p.numel() for p in plain.parameters()) == 2 * (16 * 2 + 2) + 16 * 16 + 16 + 1
    assert "reduction=8, position='relative', scale=1, input_size=(5, 7)" in repr(module)


def test_a_map_of_another_size_interpolates_the_tables():
    module, exact = build(size=(4, 5)), build(size=(7, 3))
    exact.load_state_dict(module.state_dict())
    torch.testing.assert_close(exact.height_rel, resize_table(module.height_rel, 7))
    torch.testing.assert_close(exact.width_rel, resize_table(module.width_rel, 3))
    x = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(module(x), exact(x))
    torch.testing.assert_close(module(x[:1]), by_loops(exact, x[:1]))

    fixed = build(size=(4, 5), resize_tables=False)
    assert fixed(x.new_zeros(1, 6, 4, 5)).shape == (1, 6, 4, 5)
    with pytest.raises(ValueError, match=r"attends on a \(7, 3\) map, but the relative tables are made for \(4, 5\)"):
        fixed(x)
    with pytest.raises(RuntimeError, match="size mismatch for height_rel"):
        fixed.load_state_dict(exact.state_dict())


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("size", [(1, 1), (1, 6), (6, 1), (3, 8)])
def test_any_size_and_an_empty_batch(position, size):
    module = build(position, dtype=torch.float32)
    assert module(torch.randn(2, 6, *size)).isfinite().all()
    assert module(torch.randn(0, 6, *size)).shape == (0, 6, *size)


@pytest.mark.parametrize("position", POSITIONS)
def test_gradients_and_every_parameter_learns(position):
    module = build(position, size=(3, 4))
    x = torch.randn(1, 6, 3, 4, dtype=torch.float64, requires_grad=True)
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():  # the keys' bias adds a constant to all logits of a query
        assert parameter.grad.abs().max() > 1e-9 or name == "key_conv.bias", name
    if position == "relative":
        assert not module.height_rel.grad[2].any()  # offset 0: the query is also a key of its row
        assert module.width_rel.grad[3].any()
    names = [name for name, _ in module.named_parameters() if "_rel" in name or name == "gamma.scale"]
    chosen = [module.get_parameter(name) for name in names]

    def function(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters)), (x,))

    assert torch.autograd.gradcheck(function, (x, *chosen))
    assert torch.autograd.gradgradcheck(function, (x, *chosen))


@pytest.mark.parametrize("position", POSITIONS)
def test_attention_maps(position):
    module, x = build(position), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    maps = module.attention_maps(x)
    assert maps.shape == (2, 1, 4, 5, 4, 5)
    value = module.value_conv(x)
    attended = torch.einsum("bhwij,bcij->bchw", maps[:, 0], value)
    torch.testing.assert_close(x + module.gamma.scale * attended, module(x))
    y, z = torch.arange(4), torch.arange(5)
    off = (y.view(4, 1, 1, 1) != y.view(4, 1)) & (z.view(5, 1, 1) != z)
    assert not maps[:, :, off].any()
    assert (maps[:, :, ~off] > 0).all()
    queries = torch.tensor([[1, 4], [3, 0]])
    chosen = torch.stack([maps[:, :, 1, 4], maps[:, :, 3, 0]], 2)
    torch.testing.assert_close(module.attention_maps(x, queries), chosen)
    with pytest.raises(ValueError, match="queries must lie on the map of 4 rows and 5 columns"):
        module.attention_maps(x, torch.tensor([[4, 0]]))
    model = nn.Sequential(OrderedDict(attention=module))
    with capture_attention(model) as captured:
        model(x)
    assert captured["attention"].size == (4, 5)
    torch.testing.assert_close(captured["attention"].maps(queries), chosen)


@pytest.mark.parametrize("channels", [16, 24])
def test_equals_mmcv(channels):
    """Compare results, gradients and state_dict."""
    stock = pytest.importorskip("mmcv.ops.cc_attention", reason="mmcv is not installed").CrissCrossAttention
    assert stock.__module__ == "mmcv.ops.cc_attention"  # mmcv's layer, not our drop-in
    theirs, ours = stock(channels).double(), CrissCrossAttention2d(channels, dtype=torch.float64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, channels, 6, 9, dtype=torch.float64)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, msg=name)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(in_channels=0), "in_channels must be a positive int, got 0"),
        (dict(reduction=1.5), "reduction must be a positive int, got 1.5"),
        (dict(position="absolute"), "position must be one of none, relative, got 'absolute'"),
        (dict(position="relative"), r"position 'relative' needs input_size=\(H, W\)"),
        (dict(position="relative", input_size=(3, 0)), "input_size must be an int or two ints, each at least 1"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        CrissCrossAttention2d(**{"in_channels": 8, **options})


def test_bad_input():
    check_maps_that_do_not_fit(build)
    with pytest.raises(TypeError, match="x must be a Tensor, got list"):
        build()([1.0])
