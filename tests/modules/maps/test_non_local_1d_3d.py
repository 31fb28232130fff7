"""The non-local blocks of sequences and clips: plain loops over the lecture's formulas, and mmcv's modules."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from attn_plugins.modules import NonLocal1d, NonLocal2d, NonLocal3d
from attn_plugins.modules.maps.non_local_block import MODES

KINDS = {1: NonLocal1d, 3: NonLocal3d}
NORMS = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}
SIZES = {1: [(5,), (6,), (1,)], 3: [(2, 3, 4), (3, 4, 5), (2, 1, 3), (1, 5, 1)]}
CASES = [(axes, size) for axes, sizes in SIZES.items() for size in sizes]


def build(axes, mode="embedded_gaussian", *, dtype=torch.float64, **options) -> nn.Module:
    torch.manual_seed(0)
    module = KINDS[axes](6, mode=mode, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.to(dtype)


def linear(conv, column):
    """Apply a convolution of size 1 at one position."""
    return conv.weight.detach().flatten(1).numpy() @ column + conv.bias.detach().numpy()


def places(size):
    return list(itertools.product(*map(range, size)))


def by_loops(module, x: np.ndarray) -> np.ndarray:
    """Compute one sample (C, *size), every query and key separately, with max pooling as sub-sampling."""
    size = x.shape[1:]
    embed = {name: linear if getattr(module, name) is not None else None for name in ("theta", "phi", "g")}

    def at(name, place):
        column = x[(slice(None), *place)]
        return column if embed[name] is None else linear(getattr(module, name), column)

    strides = [1] * len(size)
    if module.sub_sample:
        wanted = {1: [2], 3: [1, 2, 2]}[len(size)]
        strides = [s if n > 1 else 1 for s, n in zip(wanted, size)]
    keys, values = [], []
    for corner in places([n // s for n, s in zip(size, strides)]):
        cell = [tuple(c * s + o for c, s, o in zip(corner, strides, offset)) for offset in places(strides)]
        keys.append(np.max([at("phi", place) for place in cell], 0))
        values.append(np.max([at("g", place) for place in cell], 0))
    y = np.zeros_like(x)
    for place in places(size):
        query = at("theta", place)
        if module.mode == "gaussian":
            f = np.array([np.exp(query @ key) for key in keys])
        elif module.mode == "embedded_gaussian":
            f = np.array([np.exp(query @ key / (len(query) ** 0.5 if module.use_scale else 1)) for key in keys])
        elif module.mode == "dot_product":
            f = np.array([query @ key for key in keys])
        else:
            w = module.concat_project.weight.detach().flatten().numpy()
            f = np.array([max(w @ np.concatenate([query, key]), 0.0) for key in keys])
        f /= f.sum() if "gaussian" in module.mode else len(keys)
        y[(slice(None), *place)] = linear(module.conv_out, sum(a * value for a, value in zip(f, values)))
    return x + y


@torch.no_grad()
@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes, size", CASES)
def test_equals_the_formula(axes, size, mode, sub_sample):
    module, x = build(axes, mode, sub_sample=sub_sample), torch.randn(2, 6, *size, dtype=torch.float64)
    for sample, found in zip(x, module(x)):
        np.testing.assert_allclose(found.numpy(), by_loops(module, sample.numpy()), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("options", [dict(use_scale=False), dict(reduction=1), dict(reduction=9)])
@pytest.mark.parametrize("axes", KINDS)
def test_other_widths_and_scales_equal_the_formula(axes, options):
    module, x = build(axes, **options), torch.randn(1, 6, *SIZES[axes][0], dtype=torch.float64)
    np.testing.assert_allclose(module(x)[0].numpy(), by_loops(module, x[0].numpy()), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_a_clip_of_one_frame_is_a_map(mode):
    clip, flat = build(3, mode, sub_sample=True), NonLocal2d(6, mode=mode, sub_sample=True).double()
    shapes = {name: tensor.shape for name, tensor in flat.state_dict().items()}
    flat.load_state_dict({name: tensor.reshape(shapes[name]) for name, tensor in clip.state_dict().items()})
    x = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(clip(x.unsqueeze(2)).squeeze(2), flat(x))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", KINDS)
def test_changes_nothing_at_the_start(axes, mode, norm):
    x = torch.randn(2, 16, *SIZES[axes][0])
    module = KINDS[axes](16, mode=mode, norm_layer=NORMS[axes] if norm else None)
    torch.testing.assert_close(module(x), x, rtol=0, atol=0)
    assert module.g.weight.any()
    assert (module.norm is None) != norm


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", KINDS)
def test_memory_formats_and_an_empty_batch(axes, mode):
    module, x = build(axes, mode), torch.randn(2, 6, *SIZES[axes][0], dtype=torch.float64)
    expected = module(x)
    assert expected.is_contiguous()
    torch.testing.assert_close(module(torch.stack([x, x], -1)[..., 0]), expected)  # strided view
    if axes == 3:
        found = module(x.contiguous(memory_format=torch.channels_last_3d))
        assert found.is_contiguous(memory_format=torch.channels_last_3d)
        torch.testing.assert_close(found, expected)
    assert module(x[:0]).shape == (0, *x.shape[1:])


@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode", ["gaussian", "embedded_gaussian"])
@pytest.mark.parametrize("axes", KINDS)
def test_attention_maps(axes, mode, sub_sample):
    module, size = build(axes, mode, sub_sample=sub_sample), {1: (5,), 3: (2, 3, 4)}[axes]
    x = torch.randn(2, 6, *size, dtype=torch.float64)
    maps, value = module.attention_maps(x), module.projected(x)[2]
    assert maps.shape == (2, 1, *size, *value.shape[2:])
    weights = maps.reshape(2, np.prod(size), -1)
    attended = (weights @ value.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, size)
    torch.testing.assert_close(x + module.conv_out(attended), module(x))
    queries = [(0,) * axes, tuple(n - 1 for n in size)]
    chosen = torch.stack([maps[(slice(None), slice(None), *query)] for query in queries], 2)
    torch.testing.assert_close(module.attention_maps(x, torch.tensor(queries)), chosen)
    with pytest.raises(ValueError, match=r"queries must lie on a map of \("):
        module.attention_maps(x, torch.tensor([size]))
    with pytest.raises(ValueError, match=rf"queries must be whole numbers of shape \(Q, {axes}\)"):
        module.attention_maps(x, torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="mode 'dot_product' has no attention weights"):
        build(axes, "dot_product").attention_maps(x)


@pytest.mark.parametrize("axes, shape", [(1, "L"), (3, "T, H, W")])
def test_bad_input(axes, shape):
    module, good = build(axes), torch.randn(2, 6, *SIZES[axes][0], dtype=torch.float64)
    for x in (good[0], good[:, :5], good[..., :0]):
        with pytest.raises(ValueError, match=rf"x must have shape \(B, 6, {shape}\) with at least one position, got"):
            module(x)
    with pytest.raises(TypeError, match="x must have the module's dtype"):
        module(good.float())
    with pytest.raises(ValueError, match="mode must be one of gaussian"):
        KINDS[axes](6, mode="softmax")
    with pytest.raises(ValueError, match="reduction must be a positive int, got 0"):
        KINDS[axes](6, reduction=0)


# --- mmcv -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [dict(), dict(use_scale=False), dict(reduction=3), dict(norm=True)])
@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axes", KINDS)
def test_equals_mmcv(axes, mode, sub_sample, options):
    """Compare results, gradients and state_dict. mmcv's concatenation has no gradient: it modifies a ReLU's output."""
    non_local = pytest.importorskip("mmcv.cnn.bricks.non_local", reason="mmcv is not installed")
    norm, options = options.get("norm"), {k: v for k, v in options.items() if k != "norm"}
    torch.manual_seed(0)
    norm_cfg = dict(type=f"BN{axes}d") if norm else None
    theirs = getattr(non_local, f"NonLocal{axes}d")(8, sub_sample, mode=mode, norm_cfg=norm_cfg, **options).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = KINDS[axes](8, mode=mode, sub_sample=sub_sample, norm_layer=NORMS[axes] if norm else None, **options)
    ours = ours.double()
    weights = theirs.state_dict()
    assert ("g.0.conv.weight" in weights) == sub_sample
    ours.load_state_dict(weights)
    x, y = (torch.randn(2, 8, *{1: (7,), 3: (2, 4, 5)}[axes], dtype=torch.float64).requires_grad_() for _ in range(2))
    y.data = x.data.clone()
    found, expected = ours(x), theirs(y)
    torch.testing.assert_close(found, expected)
    if mode != "concatenation":
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    again = KINDS[axes](8, mode=mode, sub_sample=sub_sample, norm_layer=NORMS[axes] if norm else None, **options)
    again.double().load_state_dict(ours.state_dict())  # names of our own
    torch.testing.assert_close(again.eval()(x), ours.eval()(x))
