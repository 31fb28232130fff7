"""Random calls of the stand-in for mmcv's operators: any layout and dtype against float64, then a broken argument.

Box suppression is compared with a plain greedy loop. mmcv's results go into tensors of the caller, the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_plugins import mmcv_ext

from .broken import in_words
from .draw import Draw

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
DOUBLE, SINGLE = torch.float64, torch.float32
Arguments = dict[str, Any]


class ExtensionCall:
    """A call of one of ``CALLS``."""

    def __init__(self, source: Draw) -> None:
        self.source = source
        self.name, self.arguments, self.targets, *definition = source.choice(CALLS)(source)
        self.define: Callable[[Arguments], list[Tensor]] = definition[0] if definition else self.run

    def run(self, arguments: Arguments, dtype: torch.dtype | None = torch.float64) -> list[Tensor]:
        """Call the function on targets of zeros and return all results."""
        like = next(iter(self.arguments.values()))
        targets = {name: like.new_zeros(shape, dtype=dtype) for name, shape in self.targets.items()}
        answer = getattr(mmcv_ext, self.name)(**arguments, **targets)
        returned = answer if isinstance(answer, (list, tuple)) else [answer]
        results = [item if isinstance(item, Tensor) else torch.tensor(item) for item in returned if item is not None]
        return results + [target for name, target in targets.items() if "argmax" not in name]  # samples may be equal

    def describe(self) -> str:
        return "\n".join([self.name, *(f"    {n:16} {in_words(v)}" for n, v in self.arguments.items())])

    def problems(self) -> list[str]:
        faults: list[str] = []
        floats = {n: v for n, v in self.arguments.items() if isinstance(v, Tensor) and v.is_floating_point()}
        limit = max(TOLERANCE[t.dtype] for t in floats.values())
        with self.source.watched(faults):
            results = self.run(self.arguments, None)
        expected = self.define({**self.arguments, **{n: v.double().contiguous() for n, v in floats.items()}})
        for number, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            if result.shape != wanted.shape:
                faults.append(f"result {number} has shape {tuple(result.shape)}, not {tuple(wanted.shape)}")
            elif result.numel():
                result, wanted = result.double(), wanted.double()
                scale = max(1.0, float(wanted.nan_to_num(0, 0, 0).abs().max()))
                error = float((result - wanted).nan_to_num(0, 0, 0).abs().max()) / scale
                if error > limit or not torch.equal(result.isfinite(), wanted.isfinite()):
                    faults.append(f"result {number} differs by {error:.2g} of its size, {limit:g} are allowed")
        return faults + self._broken()

    def _broken(self) -> list[str]:
        """Call with one argument broken: it may raise ValueError or TypeError, or be a call that mmcv answers too."""
        name = self.source.choice([n for n, v in self.arguments.items() if isinstance(v, Tensor)])
        value = self.arguments[name]
        wrong = self.source.choice(
            [
                lambda: value.unsqueeze(0),
                lambda: torch.zeros(*value.shape[:-1], value.shape[-1] + 1, dtype=value.dtype),
                lambda: torch.zeros(value.shape, dtype=torch.complex64),
                lambda: value.to("meta"),
                lambda: torch.full_like(value, float("nan")) if value.is_floating_point() else value - 1000,
            ]
        )()
        try:
            if value.numel():
                self.run({**self.arguments, name: wrong}, None)
        except (ValueError, TypeError):
            pass
        except Exception as error:
            return [f"with {name} = {in_words(wrong)}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"]
        return []


def _boxes(source: Draw, count: int, dtype: torch.dtype = SINGLE) -> Tensor:
    corner, size = source.uniform(count, 2) * 40, source.uniform(count, 2) * 20
    boxes = torch.cat((corner, corner + size), 1)
    return source.finish(boxes.round() if source.chance(0.3) else boxes, dtype)


def _scores(source: Draw, count: int) -> Tensor:
    scores = source.uniform(count)
    return ((scores * 8).round() / 8 if source.chance(0.4) else scores).float()  # many equal scores


def _greedy(arguments: Arguments) -> list[Tensor]:
    """Suppress in float32, as mmcv does, by a plain loop."""
    boxes, offset = arguments["boxes"].float(), arguments["offset"]
    threshold = torch.tensor(arguments["iou_threshold"], dtype=SINGLE)
    left, kept = arguments["scores"].float().sort(descending=True).indices.tolist(), []
    while left:
        first, kept = left[0], [*kept, left[0]]
        a, others = boxes[first], boxes[left[1:]]
        sides = (torch.minimum(a[2:], others[:, 2:]) - torch.maximum(a[:2], others[:, :2]) + offset).clamp(min=0)
        areas = [(b[..., 2] - b[..., 0] + offset) * (b[..., 3] - b[..., 1] + offset) for b in (a, others)]
        overlaps = sides.prod(1) / (areas[0] + areas[1] - sides.prod(1)) > threshold
        left = [n for n, suppressed in zip(left[1:], overlaps.tolist()) if not suppressed]
    return [torch.tensor(kept, dtype=torch.int64)]


def nms(source: Draw) -> tuple:
    count = source.rarely_none(source.extent(60), 0.1)
    options = dict(iou_threshold=source.choice((0.0, 0.3, 0.5, 0.7, 1.0)), offset=source.choice((0, 0, 1)))
    # Contiguous scores: the order of equal ones depends on strides.
    return "nms", dict(boxes=_boxes(source, count), scores=_scores(source, count), **options), {}, _greedy


def softnms(source: Draw) -> tuple:
    count = source.rarely_none(source.extent(60), 0.1)
    given = dict(boxes=_boxes(source, count), scores=source.finish(_scores(source, count), SINGLE), iou_threshold=0.4)
    given |= dict(sigma=source.choice((0.2, 0.5)), min_score=source.choice((0.0, 0.05)), method=source.integer(0, 2))

    def define(arguments: Arguments) -> list[Tensor]:
        boxes, scores = (arguments.pop(name).float() for name in ("boxes", "scores"))
        dets = torch.zeros(count, 5)
        return [mmcv_ext.boxes.soft_nms_reference(boxes, scores, dets, **arguments), dets]

    return "softnms", dict(**given, offset=0), dict(dets=(count, 5)), define


def bbox_overlaps(source: Draw) -> tuple:
    count, dtype, aligned = source.extent(20), source.choice((SINGLE, DOUBLE)), source.chance(0.5)
    others = count if aligned else source.extent(20)
    boxes = dict(bboxes1=_boxes(source, count, dtype), bboxes2=_boxes(source, others, dtype))
    options = dict(mode=source.integer(0, 1), aligned=aligned, offset=source.integer(0, 1))
    return "bbox_overlaps", boxes | options, dict(ious=(count,) if aligned else (count, others))


def _regions(
    source: Draw, dtypes: tuple[torch.dtype, ...], strides: tuple[int, ...]
) -> tuple[Arguments, tuple[int, int]]:
    """Draw maps, and regions that may cross the border; in half precision they lie within, where no sample moves.

    Return the arguments, and the numbers of regions and channels.
    """
    dtype, stride = source.choice(dtypes), source.choice(strides)
    maps = source.finish(source.normal(source.integer(1, 3), source.extent(9), *source.extents(2, 200)), dtype)
    count = source.rarely_none(source.extent(12), 0.1)
    corners = source.uniform(count, 2, 2)
    if dtype in (SINGLE, DOUBLE):
        corners = 1.4 * corners - 0.2
    size = torch.tensor([maps.shape[3], maps.shape[2]], dtype=DOUBLE) * stride
    image = torch.randint(0, len(maps), (count, 1), generator=source.generator, dtype=DOUBLE)
    rois = torch.cat((image, corners.amin(1) * size, corners.amax(1) * size), 1)
    return dict(input=maps, rois=source.finish(rois, dtype), spatial_scale=1 / stride), (count, maps.shape[1])


def roi_align(source: Draw) -> tuple:
    given, shape = _regions(source, (DOUBLE, SINGLE, SINGLE, torch.bfloat16), (1, 4))
    h, w, mode = source.integer(1, 4), source.integer(1, 4), source.integer(0, 1)
    given |= dict(aligned_height=h, aligned_width=w, pool_mode=mode, sampling_ratio=source.integer(1, 3))
    argmax = dict.fromkeys(("argmax_y", "argmax_x"), 0 if mode else (*shape, h, w))
    return "roi_align_forward", dict(**given, aligned=source.chance(0.5)), dict(output=(*shape, h, w), **argmax)


def deform_roi_pool(source: Draw) -> tuple:
    given, shape = _regions(source, (DOUBLE, SINGLE), (1,))
    h, w = source.integer(1, 4), source.integer(1, 4)
    offset = source.normal(shape[0], 2, h, w) if source.chance(0.7) else torch.zeros(0)
    given |= dict(offset=source.finish(offset, given["input"].dtype), sampling_ratio=source.integer(1, 3), gamma=0.1)
    return "deform_roi_pool_forward", dict(**given, pooled_height=h, pooled_width=w), dict(output=(*shape, h, w))


def carafe(source: Draw) -> tuple:
    dtype, groups, scale = source.choice(list(TOLERANCE)), source.integer(1, 2), source.integer(1, 3)
    B, C, kernel = source.integer(1, 2), groups * source.integer(1, 3), source.choice((1, 3, 5))
    H, W = source.extents(2, 60)
    features = source.finish(source.normal(B, C, H, W), dtype)
    masks = source.finish(source.normal(B, groups * kernel**2, H * scale, W * scale), dtype)
    given = dict(features=features, masks=masks, kernel_size=kernel, group_size=groups, scale_factor=scale)
    return "carafe_naive_forward", given, dict(output=(B, C, H * scale, W * scale))


def psa_mask(source: Draw) -> tuple:
    dtype, (h, w) = source.choice(list(TOLERANCE)), (source.integer(1, 7), source.integer(1, 7))
    B, (H, W) = source.integer(1, 2), source.extents(2, 40)
    sizes = dict(h_feature=H, w_feature=W, h_mask=h, w_mask=w, half_h_mask=(h - 1) // 2, half_w_mask=(w - 1) // 2)
    given = dict(input=source.finish(source.normal(B, h * w, H, W), dtype), psa_type=source.integer(0, 1), num_=B)
    return "psamask_forward", given | sizes, dict(output=(B, H * W, H, W))


def focal_loss(source: Draw) -> tuple:
    dtype, (N, C) = source.choice((DOUBLE, SINGLE)), source.extents(2, 200)
    target = torch.randint(0, C + 1, (N,), generator=source.generator)
    weight = source.finish(source.normal(C).abs() if source.chance(0.5) else torch.zeros(0), dtype)
    given = dict(input=source.finish(2 * source.normal(N, C), dtype), target=target, weight=weight)
    name, result = source.choice((("forward", "output"), ("backward", "grad_input")))
    options = dict(gamma=source.choice((0.5, 2.0)), alpha=0.25)
    return f"sigmoid_focal_loss_{name}", given | options, {result: (N, C)}


def modulated_deform_conv(source: Draw) -> tuple:
    dtype, D, groups = source.choice((DOUBLE, SINGLE)), source.integer(1, 2), source.integer(1, 2)
    B, C, (H, W) = source.integer(1, 2), 2 * source.integer(1, 4), source.extents(2, 100)
    kernel, stride, dilation = source.choice((1, 3)), source.integer(1, 2), source.integer(1, 2)
    pad = dilation * (kernel // 2)
    Ho, Wo = ((n + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for n in (H, W))
    shapes = dict(input=(B, C, H, W), weight=(2 * groups, C // groups, kernel, kernel), bias=(2 * groups,))
    shapes |= dict(offset=(B, 2 * D * kernel**2, Ho, Wo), mask=(B, D * kernel**2, Ho, Wo))
    given = {name: source.finish(source.normal(*shape), dtype) for name, shape in shapes.items()}
    options = dict(kernel_h=kernel, kernel_w=kernel, stride_h=stride, stride_w=stride, pad_h=pad, pad_w=pad)
    options |= dict(dilation_h=dilation, dilation_w=dilation, group=groups, deformable_group=D, with_bias=True)
    return "modulated_deform_conv_forward", given | options, dict(output=(B, 2 * groups, Ho, Wo), ones=0, columns=0)


CALLS = (nms, softnms, bbox_overlaps, roi_align, deform_roi_pool, carafe, psa_mask, focal_loss, modulated_deform_conv)
