"""The stand-in for mmcv's operators, called through mmcv, against plain loops, torchvision and compiled mmcv."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from mmcv import ops
from torch import Tensor

from attn_plugins import mmcv_ext
from attn_plugins.mmcv_ext import boxes as mmcv_ext_boxes
from tests.mm import mmcv_ext_definitions as definitions
from tests.mm.mmcv_ext_helpers import extension, stand_in  # noqa: F401 - a fixture
from tools.bench.compiled_mmcv import extension as compiled

pytestmark = pytest.mark.usefixtures("stand_in")


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def regions(height: int, width: int) -> Tensor:
    """Regions of a 4-times larger picture: inside, over every border, of a pixel, without area."""
    h, w = 4 * height, 4 * width
    return torch.tensor(
        [
            [0, 3.2, 5.1, 21.7, 30.3],
            [1, -7.0, -9.5, 0.7 * w, 0.6 * h],
            [1, 0.4 * w, 0.3 * h, w + 9, h + 5],
            [0, 8, 8, 9, 9],
            [0, 4, 4, 4, 12],
            [1, 0, 0, w, h],
        ]
    )


# Each returns the leaves, mmcv's answer, and that of the definition.
def roi_align(mode: str, ratio: int, aligned: bool) -> tuple:
    x, rois = leaf(2, 3, 9, 12), regions(9, 12)
    call = lambda x: ops.roi_align(x, rois, (3, 2), 0.25, ratio, mode, aligned)  # noqa: E731
    return (x,), call, lambda x: definitions.roi_align(x, rois, (3, 2), 0.25, ratio, mode, aligned)


def roi_pool() -> tuple:
    x, rois = leaf(2, 3, 9, 12), regions(9, 12)
    return (x,), lambda x: ops.roi_pool(x, rois, (3, 2), 0.25), lambda x: definitions.roi_pool(x, rois, (3, 2), 0.25)


def deform_roi_pool(ratio: int) -> tuple:
    x, rois, offset = leaf(2, 3, 9, 12), regions(9, 12), leaf(6, 2, 3, 2)
    geometry = ((3, 2), 0.25, ratio, 0.1)
    call = lambda x, offset: ops.deform_roi_pool(x, rois, offset, *geometry)  # noqa: E731
    return (x, offset), call, lambda x, offset: definitions.deform_roi_pool(x, rois, offset, *geometry)


def carafe(function: Callable, groups: int) -> tuple:
    x, masks = leaf(2, 4, 3, 4), leaf(2, 9 * groups, 6, 8)
    return (x, masks), lambda *t: function(*t, 3, groups, 2), lambda *t: definitions.carafe(*t, 3, groups, 2)


def psa_mask(kind: int, mask: tuple[int, int]) -> tuple:
    x = leaf(2, mask[0] * mask[1], 4, 5)
    return (x,), lambda x: ops.psa_mask.psa_mask(x, kind, mask), lambda x: definitions.psa_mask(x, kind, mask)


def sigmoid_focal_loss(weighted: bool) -> tuple:
    x, target = leaf(7, 5), torch.tensor([0, 4, 5, 2, 2, 1, 5])  # 5: background
    weight = torch.rand(5) if weighted else None
    one_hot = F.one_hot(target, 6)[:, :5].float()

    def define(x: Tensor) -> Tensor:
        loss = torchvision.ops.sigmoid_focal_loss(x, one_hot, 0.3, 1.5)
        return loss if weight is None else loss * weight[target.clamp(max=4)][:, None]

    return (x,), lambda x: ops.sigmoid_focal_loss(x, target, 1.5, 0.3, weight, "none"), define


def softmax_focal_loss(weighted: bool) -> tuple:
    x, target = leaf(6, 5), torch.tensor([0, 4, -1, 2, 2, 1])
    weight = torch.rand(5) if weighted else None
    # mmcv multiplies (N, C) gradients by (N,) gradients of "none" losses, so their sum is compared.
    call = lambda x: ops.softmax_focal_loss(x, target, 1.5, 0.3, weight, "sum")  # noqa: E731
    return (x,), call, lambda x: definitions.softmax_focal_loss(x, target, 1.5, 0.3, weight).sum()


def deform_conv(modulated: bool) -> tuple:
    x, offset, weight = leaf(2, 8, 5, 11), leaf(2, 36, 5, 4), leaf(4, 4, 3, 3)
    geometry = ((1, 2), (1, 0), (1, 2))
    if not modulated:
        call = lambda x, o, w: ops.deform_conv2d(x, o, w, *geometry, 2, 2)  # noqa: E731
        return (x, offset, weight), call, lambda x, o, w: torchvision.ops.deform_conv2d(x, o, w, None, *geometry)
    mask, bias = leaf(2, 18, 5, 4), leaf(4)
    call = lambda x, o, m, w, b: ops.modulated_deform_conv2d(x, o, m, w, b, *geometry, 2, 2)  # noqa: E731
    define = lambda x, o, m, w, b: torchvision.ops.deform_conv2d(x, o, w, b, *geometry, m)  # noqa: E731
    return (x, offset, mask, weight, bias), call, define


def ms_deform_attn() -> tuple:
    shapes = torch.tensor([[3, 4], [2, 3]])
    value, locations, weight = leaf(2, 18, 2, 4), (1.2 * torch.rand(2, 5, 2, 2, 3, 2) - 0.1), leaf(2, 5, 2, 2, 3)
    function = ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction.apply
    call = lambda *t: function(t[0], shapes, torch.tensor([0, 12]), *t[1:], 64)  # noqa: E731
    define = lambda *t: ops.multi_scale_deform_attn.multi_scale_deformable_attn_pytorch(t[0], shapes, *t[1:])  # noqa: E731
    return (value, locations.requires_grad_(), weight), call, define


CASES: dict[str, Callable[[], tuple]] = {
    **{
        f"roi_align-{mode}-{ratio}-{'aligned' if aligned else 'legacy'}": (
            lambda mode=mode, ratio=ratio, aligned=aligned: roi_align(mode, ratio, aligned)
        )
        for mode in ("avg", "max")
        for ratio in (0, 2)
        for aligned in (True, False)
    },
    "roi_pool": roi_pool,
    "deform_roi_pool-adaptive": lambda: deform_roi_pool(0),
    "deform_roi_pool-2": lambda: deform_roi_pool(2),
    "carafe": lambda: carafe(ops.carafe, 1),
    "carafe-groups": lambda: carafe(ops.carafe, 2),
    "psa_mask-collect": lambda: psa_mask(0, (3, 5)),
    "psa_mask-distribute": lambda: psa_mask(1, (7, 9)),
    "sigmoid_focal_loss": lambda: sigmoid_focal_loss(False),
    "sigmoid_focal_loss-weights": lambda: sigmoid_focal_loss(True),
    "softmax_focal_loss": lambda: softmax_focal_loss(False),
    "softmax_focal_loss-weights": lambda: softmax_focal_loss(True),
    "deform_conv": lambda: deform_conv(False),
    "modulated_deform_conv": lambda: deform_conv(True),
    "ms_deform_attn": ms_deform_attn,
}
# Those for which mmcv compiles a kernel for CPUs.
ON_CPU = ("roi_align", "psa_mask", "deform_conv", "modulated_deform_conv")


def results(leaves: tuple, function: Callable) -> list[Tensor]:
    """Return the output and the gradients of all leaves for a fixed gradient."""
    output = function(*leaves)
    leaves = tuple(leaf for leaf in leaves if leaf.numel())
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output, *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


@pytest.mark.parametrize("name", CASES)
def test_equals_its_definition(name: str) -> None:
    leaves, call, define = CASES[name]()
    for ours, expected in zip(results(leaves, call), results(leaves, define)):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.peers
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(ON_CPU)])
def test_equals_compiled_mmcv(name: str) -> None:
    leaves, call, _ = CASES[name]()
    ours = results(leaves, call)
    with extension(compiled()):
        theirs = results(leaves, call)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_autocast_leaves_the_kernels_their_dtype() -> None:
    leaves, call, define = CASES["deform_roi_pool-2"]()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(call(*leaves), define(*leaves), rtol=1e-4, atol=2e-5)


def test_no_regions_give_empty_outputs_and_zero_gradients(monkeypatch) -> None:
    monkeypatch.setattr("tests.mm.test_mmcv_ext.regions", lambda height, width: torch.zeros(0, 5))
    for name in ("roi_align-avg-0-aligned", "roi_align-max-0-aligned", "roi_pool", "deform_roi_pool-2"):
        leaves, call, _ = CASES[name]()
        leaves = tuple(t[:0].detach().requires_grad_() if t.shape[0] == 6 else t for t in leaves)
        output, *grads = results(leaves, call)
        assert output.shape[0] == 0
        assert not any(grad.any() for grad in grads)


def test_a_maximum_just_a_pixel_outside_has_its_gradient() -> None:
    x, rois = leaf(1, 2, 5, 3), torch.tensor([[0, -4, 0, 4, 24.0], [0, 0, -4, 12, 4.0]])  # samples at -1 and 0
    ours, expected = (f(x, rois, (1, 1), 0.25, 2, "max", True) for f in (ops.roi_align, definitions.roi_align))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, expected)))


def test_regions_beside_the_map_in_one_direction_pool_zeros() -> None:
    x, rois = leaf(1, 2, 9, 12), torch.tensor([[0, 8, 100, 20, 140.0], [0, 100, 8, 140, 20.0]])
    assert not any(result.any() for result in results((x,), lambda x: ops.roi_pool(x, rois, (3, 2), 0.25)))


# --- boxes --------------------------------------------------------------------------------------------------------


def random_boxes(count: int, step: float = 0.0) -> Tensor:
    """Return boxes on a 60-pixel square; with ``step``, corners on a grid, so that overlaps equal thresholds."""
    corner, size = 40 * torch.rand(count, 2), 2 + 18 * torch.rand(count, 2)
    boxes = torch.cat((corner, corner + size), 1)
    return boxes if not step else (boxes / step).round() * step


@pytest.mark.parametrize("step, offset", [(0.0, 0), (5.0, 0), (5.0, 1)])
def test_nms_equals_its_definition(step: float, offset: int) -> None:
    boxes, scores = random_boxes(80, step), (torch.rand(80) * 20).round() / 20  # many equal scores
    for threshold in (0.3, 0.5):
        dets, kept = ops.nms(boxes, scores, threshold, offset=offset)
        assert kept.tolist() == definitions.nms(boxes, scores, threshold, offset)
        assert torch.equal(dets, torch.cat((boxes, scores[:, None]), 1)[kept])
    scores = torch.rand(80)  # filtering changes the order of equal ones
    _, kept = ops.nms(boxes, scores, 0.5, offset=offset, score_threshold=0.4, max_num=5)
    assert kept.tolist() == [n for n in definitions.nms(boxes, scores, 0.5, offset) if scores[n] > 0.4][:5]


def test_no_boxes_and_numpy_boxes() -> None:
    for call in (lambda b, s: ops.nms(b, s, 0.5), ops.soft_nms):
        dets, kept = call(torch.zeros(0, 4), torch.zeros(0))
        assert (dets.shape, kept.shape, kept.dtype) == ((0, 5), (0,), torch.int64)
    boxes, scores = random_boxes(20), torch.rand(20)
    dets, kept = ops.nms(boxes.numpy(), scores.numpy(), 0.4)
    assert isinstance(dets, np.ndarray)
    assert kept.tolist() == definitions.nms(boxes, scores, 0.4)


def test_batched_nms_keeps_classes_apart() -> None:
    boxes, scores, labels = random_boxes(40), torch.rand(40), torch.arange(40) % 3
    _, kept = ops.batched_nms(boxes, scores, labels, dict(type="nms", iou_threshold=0.4))
    expected = [torch.nonzero(labels == c)[:, 0][definitions.nms(boxes[labels == c], scores[labels == c], 0.4)]
                for c in range(3)]  # fmt: skip
    assert sorted(kept.tolist()) == sorted(torch.cat(expected).tolist())


@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
def test_soft_nms(method: str, monkeypatch) -> None:
    boxes, scores = random_boxes(60), torch.rand(60)
    dets, kept = ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, method)
    expected, decayed = definitions.soft_nms(boxes, scores, 0.3, 0.5, 0.05, method)
    assert kept.tolist() == expected
    torch.testing.assert_close(dets, torch.cat((boxes[kept], torch.tensor(decayed)[:, None]), 1))
    monkeypatch.setattr(mmcv_ext_boxes.library, "has_schemas", lambda: False)
    slow, order = ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, method)
    assert order.tolist() == expected
    torch.testing.assert_close(slow, dets)


def test_nms_match() -> None:
    dets = torch.cat((random_boxes(40), torch.rand(40, 1)), 1)
    groups = ops.nms_match(dets, 0.3)
    assert [int(group[0]) for group in groups] == definitions.nms(dets[:, :4], dets[:, 4], 0.3)
    assert sorted(int(n) for group in groups for n in group) == list(range(40))
    for group in groups:
        assert all(definitions.overlap(dets[group[0], :4].tolist(), dets[n, :4].tolist()) >= 0.3 for n in group[1:])
        assert (dets[group, 4].diff() <= 0).all()


def test_line_nms() -> None:
    lanes = torch.rand(30, 5 + 72)
    lanes[:, 4] = 72 * torch.rand(30)
    lanes[:, 5:] = 300 * torch.rand(30, 1) + 10 * torch.rand(30, 72)
    scores = torch.rand(30)
    for top_k in (4, 100):
        keep, count, parents = ops.line_nms(lanes, scores, 40.0, top_k)
        expected = definitions.line_nms(lanes, scores, 40.0, top_k)
        assert keep[: int(count)].tolist() == expected
        assert not keep[int(count) :].any()
        assert parents[expected].tolist() == list(range(1, len(expected) + 1))
    lanes = torch.zeros(2, 5 + 72)
    lanes[:, 4], lanes[1, 5:] = 72, 40  # as far away as the threshold, which is not near
    assert int(ops.line_nms(lanes, torch.tensor([0.9, 0.8]), 40.0, 4)[1]) == 2


@pytest.mark.parametrize("mode, aligned", [("iou", True), ("iou", False), ("iof", False)])
def test_bbox_overlaps(mode: str, aligned: bool) -> None:
    a, b = random_boxes(6, 1.0), random_boxes(6, 1.0)
    for offset in (0, 1):
        ious = ops.bbox_overlaps(a, b, mode, aligned, offset)
        for i in range(6):
            for j in [i] if aligned else range(6):
                expected = definitions.overlap(a[i].tolist(), b[j].tolist(), offset)
                if mode == "iof":
                    areas = [float((x[2] - x[0] + offset) * (x[3] - x[1] + offset)) for x in (a[i], b[j])]
                    expected *= sum(areas) / (1 + expected) / areas[0]
                assert float(ious[i] if aligned else ious[i, j]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.peers
@pytest.mark.parametrize("step", [0.0, 5.0])
def test_boxes_equal_compiled_mmcv(step: float) -> None:
    boxes, scores = random_boxes(300, step), (torch.rand(300) * 50).round() / 50
    calls = [
        *[lambda o=o: ops.nms(boxes, scores, 0.5, offset=o) for o in (0, 1)],
        *[lambda m=m: ops.soft_nms(boxes, scores, 0.3, 0.5, 0.05, m) for m in ("naive", "linear", "gaussian")],
        lambda: ops.nms_match(torch.cat((boxes, scores[:, None]), 1), 0.5),
        lambda: ops.bbox_overlaps(boxes, boxes.flip(0), "iof", offset=1),
    ]
    for call in calls:
        ours = call()
        with extension(compiled()):
            theirs = call()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


# --- maps and statistics ------------------------------------------------------------------------------------------


def test_masked_convolution() -> None:
    x, mask = torch.randn(1, 3, 6, 7), torch.rand(1, 6, 7) > 0.6
    layer = ops.MaskedConv2d(3, 4, 3, padding=1)
    expected = torch.where(mask[:, None], layer(x), 0)
    torch.testing.assert_close(layer(x, mask), expected)
    assert not layer(x, torch.zeros(1, 6, 7)).any()


def test_synchronized_batch_norm_of_one_process_is_batch_norm() -> None:
    x = (3 * torch.randn(4, 5, 6, 7) + 1).requires_grad_()
    running = [torch.randn(5), torch.rand(5), torch.randn(5), torch.rand(5)]
    weight, bias = leaf(5), leaf(5)
    call = lambda x, w, b: ops.sync_bn.SyncBatchNormFunction.apply(  # noqa: E731
        x, running[0], running[1], w, b, 0.2, 1e-3, -1, 1, "default"
    )
    expected_running = [running[0].clone(), running[1].clone()]
    define = lambda x, w, b: F.batch_norm(x, *expected_running, w, b, True, 0.2, 1e-3)  # noqa: E731
    for ours, expected in zip(results((x, weight, bias), call), results((x, weight, bias), define)):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(running[:2], expected_running)


def test_offsets_of_a_finer_level_are_read_as_mmcv_reads_them() -> None:
    """DyHead passes maps that are larger than the output; mmcv reads their memory from the start."""
    x, weight, offset, mask = leaf(2, 4, 8, 10), leaf(4, 4, 3, 3), leaf(2, 18, 8, 10), leaf(2, 9, 8, 10)

    def define(x: Tensor, weight: Tensor, *maps: Tensor) -> Tensor:
        offset, mask = (m.flatten(1)[:, : m.shape[1] * 20].view(2, -1, 4, 5) for m in maps)
        return torchvision.ops.deform_conv2d(x, offset, weight, None, 2, 1, 1, mask)

    expected = results((x, weight, offset, mask), define)
    for memory_format in (torch.contiguous_format, torch.channels_last):  # the gradients have it as well
        maps = [m.detach().to(memory_format=memory_format).requires_grad_() for m in (offset, mask)]
        ours = results((x, weight, *maps), lambda x, w, o, m: ops.modulated_deform_conv2d(x, o, m, w, None, 2, 1))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=2e-5)


# --- bad input ----------------------------------------------------------------------------------------------------

BOXES, SCORES, SOFT = torch.rand(3, 4), torch.rand(3), torch.rand(3, 5)
MAP, CONVOLVED, FILTERS = torch.rand(1, 2, 4, 4), torch.rand(1, 4, 4, 4), torch.rand(2, 2, 3, 3)
NOWHERE = torch.tensor([[0, 0, 0, torch.nan, 3]])  # at which torchvision's and mmcv's kernels read beyond the map
FOCAL = torch.rand(2, 3), torch.rand(2), torch.rand(0), torch.rand(2, 3), 2, 0.2
WRONG: dict[str, tuple[Callable, tuple]] = {
    "boxes must have shape": (mmcv_ext.nms, (torch.rand(3, 5), SCORES, 0.5, 0)),
    "scores must have shape": (mmcv_ext.nms, (BOXES, torch.rand(2), 0.5, 0)),
    "boxes must be a float": (mmcv_ext.nms, (BOXES.long(), SCORES, 0.5, 0)),
    "offset must be 0 or 1": (mmcv_ext.nms, (BOXES, SCORES, 0.5, 2)),
    "scores must be on": (mmcv_ext.nms, (BOXES, SCORES.to("meta"), 0.5, 0)),
    "method must be": (mmcv_ext.softnms, (BOXES, SCORES, SOFT, 0.5, 0.5, 0, 3, 0)),
    "sigma must be positive": (mmcv_ext.softnms, (BOXES, SCORES, SOFT, 0.5, 0, 0, 2, 0)),
    "rois must have x1 <= x2": (ops.roi_align, (MAP, torch.tensor([[0, 3, 3, 1, 4.0]]), (2, 2))),
    "rois must name images": (ops.roi_align, (MAP, torch.full((1, 5), torch.nan), (2, 2))),
    "rois must name images from 0 to 0": (ops.roi_align, (MAP, torch.tensor([[1, 0, 0, 1, 4.0]]), (2, 2))),
    "rois must be finite and below 1e37, got .*nan": (ops.roi_align, (MAP, NOWHERE, (2, 2), 1.0, 2, "avg", False)),
    "rois must be finite and below 1e37, got .*inf": (ops.roi_pool, (MAP, NOWHERE.nan_to_num(torch.inf), (2, 2))),
    "rois must be finite and below 1e37, got .*e\\+38": (ops.roi_align, (MAP, NOWHERE.nan_to_num(3e38), (2, 2), 8.0)),
    "output size must be positive": (ops.roi_align, (MAP, torch.tensor([[0, 0, 0, 1, 4.0]]), (0, 2))),
    "offset must have shape": (ops.deform_conv2d, (MAP, torch.rand(1, 18, 3, 4), FILTERS, 1, 1)),
    "input must have 2 channels": (ops.deform_conv2d, (CONVOLVED, torch.rand(1, 18, 4, 4), FILTERS, 1, 1)),
    "target must hold integers": (mmcv_ext.sigmoid_focal_loss_forward, FOCAL),
}


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_one_error(message: str) -> None:
    function, inputs = WRONG[message]
    with pytest.raises((ValueError, TypeError), match=message):
        function(*inputs)


def test_other_operators_say_how_to_get_them() -> None:
    with pytest.raises(NotImplementedError, match=r"knn_forward.*pip install .*onedl-mmcv"):
        mmcv_ext.knn_forward()
    assert not hasattr(mmcv_ext, "__wrapped__")


@pytest.mark.slow
def test_not_imported_beside_a_compiled_extension(tmp_path: Path) -> None:
    (tmp_path / "_ext.py").write_text("def __getattr__(name):\n    return print\n")
    code = (
        f"import mmcv, mmengine.optim, sys\nthere = {{*sys.modules}}\nmmcv.__path__.append({str(tmp_path)!r})\n"
        "import attn_plugins.mmcv.drop_in\n"
        "new = sys.modules.keys() - there\n"
        "print(*(name for name in new if name.startswith(('attn_plugins.mmcv_ext', 'torchvision'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
