"""The non-local block in its four modes: plain loops over the lecture's formulas, and mmcv's module."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attn_plugins.modules import NonLocal2d, capture_attention
from attn_plugins.modules.maps import non_local_sums
from attn_plugins.modules.maps.non_local_block import MODES
from attn_plugins.modules.maps.non_local_sums import rectified_sums
from attn_plugins.terms.relative_table import resize_table
from tests.helpers.module_checks import check_maps_that_do_not_fit

GAUSSIAN = ["gaussian", "embedded_gaussian"]
KINDS = [(mode, "none") for mode in MODES] + [(mode, "relative") for mode in GAUSSIAN]


def build(mode="embedded_gaussian", position="none", *, size=(4, 5), dtype=torch.float64, **options) -> NonLocal2d:
    torch.manual_seed(0)
    module = NonLocal2d(6, mode=mode, position=position, input_size=size, **options)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    return module.to(dtype)


@torch.no_grad()
def by_loops(module: NonLocal2d, image: torch.Tensor) -> torch.Tensor:
    """Compute the definition for every query and key separately."""
    _, _, H, W = image.shape
    query = image if module.mode == "gaussian" else module.theta(image)
    key = image if module.mode == "gaussian" else module.phi(image)
    value, step = module.g(image), (1, 1)
    if module.sub_sample:
        step = (min(H, 2), min(W, 2))
        key, value = F.max_pool2d(key, step), F.max_pool2d(value, step)
    q, k, v = (t[0].numpy() for t in (query, key, value))
    scale = q.shape[0] ** -0.5 if module.mode == "embedded_gaussian" and module.use_scale else 1.0
    output = np.zeros((v.shape[0], H, W))
    keys = list(itertools.product(range(k.shape[1]), range(k.shape[2])))
    for y, x in itertools.product(range(H), range(W)):
        pairwise = []
        for r, c in keys:
            theta, phi = q[:, y, x], k[:, r, c]
            if module.position == "relative":
                phi = phi + module.height_rel[r * step[0] - y + H - 1].numpy()
                phi = phi + module.width_rel[c * step[1] - x + W - 1].numpy()
            if module.mode == "concatenation":
                joined = np.concatenate((theta, phi)) @ module.concat_project.weight.flatten().numpy()
                pairwise.append(max(joined, 0) / len(keys))
            elif module.mode == "dot_product":
                pairwise.append(theta @ phi / len(keys))
            else:
                pairwise.append(np.exp(scale * (theta @ phi)))
        if "gaussian" in module.mode:
            pairwise = np.array(pairwise) / sum(pairwise)
        output[:, y, x] = sum(f * v[:, r, c] for f, (r, c) in zip(pairwise, keys))
    added = module.conv_out(torch.from_numpy(output)[None])
    return image + (added if module.norm is None else module.norm(added))


@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode, position", KINDS)
@pytest.mark.parametrize("size", [(4, 5), (6, 3), (1, 4), (5, 1), (1, 1)])
def test_equals_the_formula(mode, position, size, sub_sample):
    module = build(mode, position, size=size, sub_sample=sub_sample)
    image = torch.randn(1, 6, *size, dtype=torch.float64)
    torch.testing.assert_close(module(image), by_loops(module, image))


@pytest.mark.parametrize("options", [dict(use_scale=False), dict(reduction=1), dict(reduction=3), dict(reduction=9)])
def test_other_widths_and_scales_equal_the_formula(options):
    for mode in MODES:
        module, image = build(mode, **options), torch.randn(1, 6, 4, 5, dtype=torch.float64)
        torch.testing.assert_close(module(image), by_loops(module, image))


@pytest.mark.parametrize("norm_layer", [None, nn.BatchNorm2d])
@pytest.mark.parametrize("mode, position", KINDS)
def test_changes_nothing_at_the_start(mode, position, norm_layer):
    x = torch.randn(2, 16, 5, 7)
    module = NonLocal2d(16, mode=mode, position=position, input_size=4, norm_layer=norm_layer)
    torch.testing.assert_close(module(x), x, rtol=0, atol=0)
    assert module.g.weight.any()


def test_a_map_of_another_size_interpolates_the_tables():
    module, exact = build(position="relative", size=(4, 5)), build(position="relative", size=(7, 3))
    exact.load_state_dict(module.state_dict())
    torch.testing.assert_close(exact.height_rel, resize_table(module.height_rel, 7))
    x = torch.randn(2, 6, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(module(x), exact(x))
    with pytest.raises(ValueError, match=r"attends on a \(7, 3\) map, but the relative tables are made for \(4, 5\)"):
        build(position="relative", resize_tables=False)(x)


@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode, position", KINDS)
def test_any_size_and_an_empty_batch(mode, position, sub_sample):
    module = build(mode, position, dtype=torch.float32, sub_sample=sub_sample)
    for size in ((1, 1), (1, 6), (7, 1), (3, 8)):
        assert module(torch.randn(2, 6, *size)).isfinite().all()
        assert module(torch.randn(0, 6, *size)).shape == (0, 6, *size)


def test_dot_products_of_many_keys_stay_in_float16():
    query, key, value = (torch.full((1, 4096, 8), n, dtype=torch.float16) for n in (1.0, 12.0, 12.0))
    found = non_local_sums.dot_products(query, key, value)
    torch.testing.assert_close(found, torch.full((1, 4096, 8), 8 * 144.0, dtype=torch.float16), rtol=1e-2, atol=0)


# --- the concatenation without pairs ------------------------------------------------------------------------------


def of_all_pairs(a, b, value):
    return torch.relu(a.unsqueeze(2) + b.unsqueeze(1)) @ value / b.shape[1]


@pytest.mark.parametrize("queries, keys", [(40, 30), (1, 7), (9, 1), (1, 1)])
@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_rectified_sums_equal_those_of_all_pairs(queries, keys, shift):
    """Includes the cases where all pairs are positive and where none is."""
    generator = torch.Generator().manual_seed(queries)
    a, b, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, queries), (3, keys), (3, keys, 4))
    )
    found, expected = (f(a + shift, b, value) for f in (rectified_sums, of_all_pairs))
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for got, wanted in zip(*(torch.autograd.grad((r * weight).sum(), (a, b, value)) for r in (found, expected))):
        torch.testing.assert_close(got, wanted)


def test_rectified_sums_of_equal_and_opposite_terms():
    """Ties, and pairs of exactly 0, give the same result on either side."""
    a = torch.tensor([[1.0, -1.0, 0.0, 2.0]])
    b = torch.tensor([[-1.0, -1.0, 1.0, 0.0, 1.0]])
    value = torch.randn(1, 5, 3)
    torch.testing.assert_close(rectified_sums(a, b, value), of_all_pairs(a, b, value))


def test_rectified_sums_keep_their_precision():
    """A small term of one key is not lost among many with large sums."""
    b = torch.cat((torch.full((1, 3000), 1e3), torch.full((1, 1), 2e3)), 1)
    value = torch.randn(1, 3001, 2)
    value[:, -1] = 1e-3
    a = torch.full((1, 2), -1999.9)
    torch.testing.assert_close(rectified_sums(a, b, value), of_all_pairs(*(t.double() for t in (a, b, value))).float())


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 23])
def test_prefix_sums_by_products(rows):
    """Deterministic mode on CUDA uses this implementation."""
    x = torch.randn(2, rows, 3, dtype=torch.float64)
    torch.testing.assert_close(non_local_sums._prefix_sums_by_products(x), x.cumsum(1))


@pytest.mark.parametrize("mode", ["dot_product", "concatenation"])
def test_no_tensor_has_all_pairs(mode):
    """Neither the forward nor the backward stores all pairs."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            results = function(*args, **(kwargs or {}))
            for tensor in results if isinstance(results, (tuple, list)) else [results]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return results

    module = build(mode, dtype=torch.float32)
    x = torch.randn(1, 6, 24, 24, requires_grad=True)
    with Watch():
        module(x).square().sum().backward()
    assert 6 * 24 * 24 <= largest <= 2 * 6 * 24 * 24 < 24**4


# --- attention maps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode, position", [kind for kind in KINDS if kind[0] in GAUSSIAN])
def test_attention_maps(mode, position, sub_sample):
    module, x = build(mode, position, sub_sample=sub_sample), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    maps = module.attention_maps(x)
    value = module.g(x)
    if sub_sample:
        value = F.max_pool2d(value, 2)
    assert maps.shape == (2, 1, 4, 5, *value.shape[2:])
    attended = torch.einsum("bhwij,bcij->bchw", maps[:, 0], value)
    torch.testing.assert_close(x + module.conv_out(attended), module(x))
    queries = torch.tensor([[1, 4], [3, 0]])
    chosen = torch.stack([maps[:, :, 1, 4], maps[:, :, 3, 0]], 2)
    torch.testing.assert_close(module.attention_maps(x, queries), chosen)
    with capture_attention(nn.Sequential(module)) as captured:
        module(x)
    assert captured["0"].size == (4, 5)
    torch.testing.assert_close(captured["0"].maps(queries), chosen)
    with pytest.raises(ValueError, match="queries must lie on the map of 4 rows and 5 columns"):
        module.attention_maps(x, torch.tensor([[4, 0]]))


@pytest.mark.parametrize("mode", ["dot_product", "concatenation"])
def test_modes_without_attention_weights_say_so(mode):
    with pytest.raises(ValueError, match=f"mode '{mode}' has no attention weights"):
        build(mode).attention_maps(torch.randn(1, 6, 4, 5, dtype=torch.float64))


# --- mmcv ---------------------------------------------------------------------------------------------------------


def mmcv_pair(mode, sub_sample, norm=False, **options) -> tuple[nn.Module, NonLocal2d]:
    bricks = pytest.importorskip("mmcv.cnn", reason="mmcv is not installed")
    norm_cfg = dict(type="BN") if norm else None
    theirs = bricks.NonLocal2d(16, mode=mode, sub_sample=sub_sample, norm_cfg=norm_cfg, **options)
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    norm_layer = nn.BatchNorm2d if norm else None
    return theirs.double(), NonLocal2d(16, mode=mode, sub_sample=sub_sample, norm_layer=norm_layer, **options).double()


@pytest.mark.parametrize("options", [dict(), dict(use_scale=False), dict(reduction=3), dict(norm=True)])
@pytest.mark.parametrize("sub_sample", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_equals_mmcv(mode, sub_sample, options):
    """Compare results, gradients and state_dict. mmcv's concatenation has no gradient: it modifies a ReLU's output."""
    theirs, ours = mmcv_pair(mode, sub_sample, **options)
    weights = theirs.state_dict()
    assert ("g.0.conv.weight" in weights) == sub_sample
    ours.load_state_dict(weights)
    assert "g.conv.weight" in weights or "g.0.conv.weight" in weights  # the input is not modified
    x, y = (torch.randn(2, 16, 6, 9, dtype=torch.float64).requires_grad_() for _ in range(2))
    y.data = x.data.clone()
    found, expected = ours(x), theirs(y)
    torch.testing.assert_close(found, expected)
    if mode != "concatenation":
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    if options.get("norm"):
        torch.testing.assert_close(ours.norm.running_mean, theirs.conv_out.bn.running_mean)


def test_mmcv_checkpoints_load_within_models():
    theirs, ours = mmcv_pair("embedded_gaussian", True, norm=True)
    weights = nn.ModuleDict(dict(head=nn.Sequential(nn.Conv2d(1, 1, 1), theirs))).state_dict()
    model = nn.ModuleDict(dict(head=nn.Sequential(nn.Conv2d(1, 1, 1), ours)))
    model.load_state_dict(weights)
    x = torch.randn(2, 16, 6, 9, dtype=torch.float64)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    again = mmcv_pair("embedded_gaussian", True, norm=True)[1]
    again.load_state_dict(ours.state_dict())  # names of our own
    torch.testing.assert_close(again.eval()(x), ours(x))
    with pytest.raises(RuntimeError, match=r"conv_out\.bn\.weight"):  # absent without norm_layer
        mmcv_pair("embedded_gaussian", True)[1].load_state_dict(theirs.state_dict())

    loader = pytest.importorskip("mmengine.runner.checkpoint", reason="mmengine is not installed")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    loader.load_state_dict(model, weights, strict=True)
    torch.testing.assert_close(ours(x), theirs(x))


def test_starts_as_mmcv_does():
    theirs, _ = mmcv_pair("concatenation", False)
    theirs.init_weights()
    ours = NonLocal2d(16, mode="concatenation")
    assert not theirs.conv_out.conv.weight.any()
    assert not ours.conv_out.weight.any()
    for name in ("g", "theta", "phi"):
        assert getattr(ours, name).weight.std().item() == pytest.approx(0.01, rel=0.3)
        assert not getattr(ours, name).bias.any()


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(in_channels=0), "in_channels must be a positive int, got 0"),
        (dict(reduction=0), "reduction must be a positive int, got 0"),
        (dict(mode="cosine"), "mode must be one of gaussian, .*, got 'cosine'"),
        (dict(position="absolute"), "position must be one of none, relative, got 'absolute'"),
        (dict(position="relative"), r"position 'relative' needs input_size=\(H, W\)"),
        (dict(position="relative", input_size=4, mode="dot_product"), "needs mode 'gaussian' or 'embedded_gaussian'"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        NonLocal2d(**{"in_channels": 8, **options})


def test_bad_input():
    check_maps_that_do_not_fit(build)
