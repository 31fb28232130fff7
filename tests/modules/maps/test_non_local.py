"""The non-local block of sequences, maps and clips in its four modes: the lecture's loops, and mmcv's modules."""

from __future__ import annotations

import itertools
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from attn_plugins.modules import NonLocal1d, NonLocal2d, NonLocal3d
from attn_plugins.modules.maps.parts import non_local_sums
from attn_plugins.modules.maps.parts.non_local_block import MODES
from attn_plugins.modules.maps.parts.non_local_sums import rectified_sums
from tests.helpers.module_inputs import drawn
from tests.modules.loops import linear

KINDS = {1: NonLocal1d, 2: NonLocal2d, 3: NonLocal3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIZES = {
    1: [(5,), (6,), (1,)],
    2: [(4, 5), (6, 3), (1, 4), (5, 1), (1, 1)],
    3: [(2, 3, 4), (3, 4, 5), (2, 1, 3), (1, 5, 1)],
}
CASES = [
    (size, mode, dict(sub_sample=n % 2 == 0))
    for sizes in SIZES.values()
    for n, size in enumerate(sizes)
    for mode in MODES
]
CASES += [
    (size, mode, dict(position="relative", input_size=size, sub_sample=sub_sample))
    for size, mode, sub_sample in zip(SIZES[2], cycle(MODES[:2]), cycle([True, False, False]))
]
CASES += [(SIZES[2][0], mode, options) for mode in MODES
          for options in (dict(use_scale=False), dict(reduction=1), dict(reduction=3), dict(reduction=9))]  # fmt: skip


def build(axes=2, mode="embedded_gaussian", *, dtype=torch.float64, **options) -> nn.Module:
    return drawn(KINDS[axes](6, mode=mode, **options)).to(dtype)


def places(size):
    return list(itertools.product(*map(range, size)))


def by_loops(module, x: np.ndarray) -> np.ndarray:
    """Compute one sample (C, *size), every query and key separately, with max pooling as sub-sampling."""
    size = x.shape[1:]
    tables = [t.detach().numpy() for t in (getattr(module, "height_rel", None), getattr(module, "width_rel", None))
              if t is not None]  # fmt: skip

    def at(name, place):
        column, conv = x[(slice(None), *place)], getattr(module, name)
        return column if conv is None else linear(conv, column)

    strides = [1] * len(size)
    if module.sub_sample:
        wanted = {1: [2], 2: [2, 2], 3: [1, 2, 2]}[len(size)]
        strides = [s if n > 1 else 1 for s, n in zip(wanted, size)]
    keys, values, corners = [], [], []
    for corner in places([n // s for n, s in zip(size, strides)]):
        corners.append([c * s for c, s in zip(corner, strides)])
        cell = [tuple(c + o for c, o in zip(corners[-1], offset)) for offset in places(strides)]
        keys.append(np.max([at("phi", place) for place in cell], 0))
        values.append(np.max([at("g", place) for place in cell], 0))
    y = np.zeros_like(x)
    for place in places(size):
        query, pairwise = at("theta", place), []
        for key, corner in zip(keys, corners):
            for table, c, q, n in zip(tables, corner, place, size):
                key = key + table[c - q + n - 1]
            if module.mode == "concatenation":
                weight = module.concat_project.weight.detach().flatten().numpy()
                pairwise.append(max(weight @ np.concatenate([query, key]), 0.0))
            elif module.mode == "dot_product":
                pairwise.append(query @ key)
            else:
                scaled = module.mode == "embedded_gaussian" and module.use_scale
                pairwise.append(np.exp(query @ key * (len(query) ** -0.5 if scaled else 1)))
        f = np.array(pairwise) / (sum(pairwise) if "gaussian" in module.mode else len(keys))
        y[(slice(None), *place)] = linear(module.conv_out, sum(a * value for a, value in zip(f, values)))
    return x + y


@torch.no_grad()
@pytest.mark.parametrize(("size", "mode", "options"), CASES, ids=str)
def test_equals_the_formula(size, mode, options):
    module, x = build(len(size), mode, **options), torch.randn(1, 6, *size, dtype=torch.float64)
    np.testing.assert_allclose(module(x)[0].numpy(), by_loops(module, x[0].numpy()), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("mode", MODES)
def test_a_clip_keeps_its_memory_format(mode):
    module, x = build(3, mode), torch.randn(2, 6, 2, 3, 4, dtype=torch.float64)
    expected = module(x)
    assert expected.is_contiguous()
    output = module(x.contiguous(memory_format=torch.channels_last_3d))
    assert output.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(output, expected)


def test_dot_products_of_many_keys_stay_in_float16():
    query, key, value = (torch.full((1, 4096, 8), n, dtype=torch.float16) for n in (1.0, 12.0, 12.0))
    products = non_local_sums.dot_products(query, key, value)
    torch.testing.assert_close(products, torch.full((1, 4096, 8), 8 * 144.0, dtype=torch.float16), rtol=1e-2, atol=0)


# --- the concatenation without pairs ------------------------------------------------------------------------------


def of_all_pairs(a, b, value):
    return torch.relu(a.unsqueeze(2) + b.unsqueeze(1)) @ value / b.shape[1]


@pytest.mark.parametrize(
    ("queries", "keys", "shift"), [(40, 30, 0.0), (40, 30, 5.0), (1, 7, -5.0), (9, 1, 0.0), (1, 1, 0.0)]
)
def test_rectified_sums_equal_those_of_all_pairs(queries, keys, shift):
    """Includes pairs that are all positive, none of which is, and ties and zeros, which are the same on either side."""
    tied = torch.tensor([[1.0, -1.0, 0.0, 2.0]]), torch.tensor([[-1.0, -1.0, 1.0, 0.0, 1.0]]), torch.randn(1, 5, 3)
    torch.testing.assert_close(rectified_sums(*tied), of_all_pairs(*tied))
    generator = torch.Generator().manual_seed(queries)
    a, b, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, queries), (3, keys), (3, keys, 4))
    )
    sums, expected = (f(a + shift, b, value) for f in (rectified_sums, of_all_pairs))
    torch.testing.assert_close(sums, expected)
    weight = torch.randn(sums.shape, generator=generator, dtype=torch.float64)
    for got, wanted in zip(*(torch.autograd.grad((r * weight).sum(), (a, b, value)) for r in (sums, expected))):
        torch.testing.assert_close(got, wanted)


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
    sizes = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            results = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor))
            return results

    module = build(mode=mode, dtype=torch.float32)
    x = torch.randn(1, 6, 24, 24, requires_grad=True)
    with Watch():
        module(x).square().sum().backward()
    assert 6 * 24 * 24 <= max(sizes) <= 2 * 6 * 24 * 24 < 24**4


# --- mmcv -------------------------------------------------------------------------------------------------------------


def mmcv_pair(axes, mode, sub_sample, norm=False, **options) -> tuple[nn.Module, nn.Module]:
    non_local = pytest.importorskip("mmcv.cnn.bricks.non_local", reason="mmcv is not installed")
    options = dict(mode=mode, sub_sample=sub_sample, **options)
    norm_cfg = dict(type=f"BN{axes}d" if axes != 2 else "BN") if norm else None
    theirs = getattr(non_local, f"NonLocal{axes}d")(8, norm_cfg=norm_cfg, **options)
    return drawn(theirs, 0.3).double(), KINDS[axes](8, norm_layer=NORMS[axes] if norm else None, **options).double()


@pytest.mark.parametrize(
    ("axes", "sub_sample", "options"),
    [(1, True, dict()), (2, False, dict(use_scale=False)), (2, True, dict(norm=True)), (3, True, dict(reduction=3)),
     (3, False, dict(norm=True))],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_mmcv_checkpoints_load_within_models(axes, mode, sub_sample, options):
    theirs, ours = mmcv_pair(axes, mode, sub_sample, **options)
    assert not options.get("norm") or not ours.norm.weight.any()  # as theirs at the start
    stock, model = (nn.ModuleDict(dict(head=nn.Sequential(nn.Conv2d(1, 1, 1), layer))) for layer in (theirs, ours))
    weights = stock.state_dict()
    assert ("head.1.g.0.conv.weight" in weights) == sub_sample
    model.load_state_dict(weights)
    assert weights.keys() == stock.state_dict().keys()  # the input is not modified
    x = torch.randn(2, 8, *{1: (7,), 2: (6, 9), 3: (2, 4, 5)}[axes], dtype=torch.float64)
    expected = theirs(x)
    torch.testing.assert_close(ours(x), expected)
    if options.get("norm"):
        torch.testing.assert_close(ours.norm.running_mean, theirs.conv_out.bn.running_mean)
        with pytest.raises(RuntimeError, match=r"conv_out\.bn\.weight"):  # absent without norm_layer
            mmcv_pair(axes, mode, sub_sample)[1].load_state_dict(theirs.state_dict())

    loader = pytest.importorskip("mmengine.runner.checkpoint", reason="mmengine is not installed")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    loader.load_state_dict(model, weights, strict=True)
    torch.testing.assert_close(ours(x), expected)


def test_starts_as_mmcv_does():
    ours = NonLocal2d(64, mode="concatenation")
    for name in ("g", "theta", "phi"):
        assert getattr(ours, name).weight.std().item() == pytest.approx(0.01, rel=0.3)
        assert not getattr(ours, name).bias.any()
