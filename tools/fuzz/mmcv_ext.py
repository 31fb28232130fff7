"""Random calls of the stand-in for mmcv's operators: any layout and dtype against float64, then with a broken argument.

Box suppression is compared with a plain greedy loop. mmcv's results go into tensors of the caller, its targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_plugins import mmcv_ext

from .call import in_one_line, in_words
from .draw import Draw

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass
class Scene:
    """A call."""

    name: str
    arguments: dict[str, Any]
    targets: tuple[str, ...] = ()  # tensors that it writes and whose values count
    expected: Callable[[dict[str, Any]], list[Tensor]] | None = None  # None: the function itself in float64
    others: tuple[str, ...] = ()  # further tensors that it writes
    source: Any = None  # the Draw that it comes from

    def run(self, arguments: dict[str, Any]) -> list[Tensor]:
        """Call the function on fresh targets and return all results."""
        arguments = {n: v.clone() if n in (*self.targets, *self.others) else v for n, v in arguments.items()}
        answer = getattr(mmcv_ext, self.name)(**arguments)
        returned = answer if isinstance(answer, (list, tuple)) else [answer]
        flat = [item if isinstance(item, Tensor) else torch.tensor(item) for item in returned if item is not None]
        return [*flat, *(arguments[target] for target in self.targets)]

    def describe(self) -> str:
        return "\n".join([self.name, *(f"    {n:16} {in_words(v)}" for n, v in self.arguments.items())])

    def problems(self) -> tuple[list[str], float]:
        """Return the faults of the call, and its largest error, 1 at the tolerance."""
        tensors = {n: v for n, v in self.arguments.items() if isinstance(v, Tensor)}
        before = {name: value.clone() for name, value in tensors.items()}
        floats = {n: v for n, v in tensors.items() if v.is_floating_point()}
        limit = max((TOLERANCE[t.dtype] for t in floats.values()), default=0.0)
        exact = {**self.arguments, **{n: v.double().contiguous() for n, v in floats.items()}}
        results, expected = self.run(self.arguments), (self.expected or self.run)(exact)
        faults, largest = [], 0.0
        for number, (result, wanted) in enumerate(zip(results, expected)):
            if result.shape != wanted.shape:
                faults.append(f"result {number} has shape {tuple(result.shape)}, not {tuple(wanted.shape)}")
            elif result.numel():
                result, wanted = result.cpu().double(), wanted.cpu().double()
                scale = max(1.0, float(wanted.nan_to_num(0, 0, 0).abs().max()))
                error = float((result - wanted).nan_to_num(0, 0, 0).abs().max()) / scale
                largest = max(largest, error / limit)
                if error > limit or not torch.equal(result.isfinite(), wanted.isfinite()):
                    faults.append(f"result {number} differs by {error:.2g} of its size, {limit:g} are allowed")
        written = [
            name for name, value in tensors.items() if not torch.equal(before[name].nan_to_num(), value.nan_to_num())
        ]
        return [*faults, *(f"{name} was written to" for name in written)], largest

    def broken(self) -> list[str]:
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
        if name in (*self.targets, *self.others) or not value.numel():
            return []
        try:
            self.run({**self.arguments, name: wrong})
        except (ValueError, TypeError):
            pass
        except Exception as error:
            return [f"with {name} = {in_words(wrong)}: {type(error).__name__}: {in_one_line(error)}"]
        return []


# --- scenes -------------------------------------------------------------------------------------------------------


def draw(source: Draw) -> Scene:
    return replace(source.choice(SCENES)(source), source=source)


def _boxes(source: Draw, count: int) -> Tensor:
    corner = torch.rand(count, 2, generator=source.generator, dtype=torch.float64) * 40
    size = torch.rand(count, 2, generator=source.generator, dtype=torch.float64) * 20
    boxes = torch.cat((corner, corner + size), 1)
    return boxes.round() if source.chance(0.3) else boxes


def _scores(source: Draw, count: int) -> Tensor:
    scores = torch.rand(count, generator=source.generator, dtype=torch.float64)
    return (scores * 8).round() / 8 if source.chance(0.4) else scores  # many equal scores


def _greedy(arguments: dict[str, Any]) -> list[Tensor]:
    """Suppress in float32, as mmcv does, by a plain loop."""
    boxes, offset = arguments["boxes"].float(), arguments["offset"]
    threshold = torch.tensor(arguments["iou_threshold"], dtype=torch.float32)
    left, kept = arguments["scores"].float().sort(descending=True).indices.tolist(), []
    while left:
        first, kept = left[0], [*kept, left[0]]
        a, others = boxes[first], boxes[left[1:]]
        sides = (torch.minimum(a[2:], others[:, 2:]) - torch.maximum(a[:2], others[:, :2]) + offset).clamp(min=0)
        areas = [(b[..., 2] - b[..., 0] + offset) * (b[..., 3] - b[..., 1] + offset) for b in (a, others)]
        shared = sides.prod(1)
        near = shared / (areas[0] + areas[1] - shared) > threshold
        left = [n for n, suppressed in zip(left[1:], near.tolist()) if not suppressed]
    return [torch.tensor(kept, dtype=torch.int64)]


def nms(source: Draw) -> Scene:
    count = source.rarely_none(source.extent(60), 0.1)
    boxes = source.finish(_boxes(source, count).float(), torch.float32)
    scores = _scores(source, count).float()  # contiguous: the order of equal scores depends on strides
    options = dict(iou_threshold=source.choice((0.0, 0.3, 0.5, 0.7, 1.0)), offset=source.choice((0, 0, 1)))
    return Scene("nms", dict(boxes=boxes, scores=scores, **options), expected=_greedy)


def softnms(source: Draw) -> Scene:
    count = source.rarely_none(source.extent(60), 0.1)
    options = dict(iou_threshold=0.4, sigma=source.choice((0.2, 0.5)), min_score=source.choice((0.0, 0.05)))
    boxes, scores = (source.finish(t.float(), torch.float32) for t in (_boxes(source, count), _scores(source, count)))
    given = dict(
        boxes=boxes, scores=scores, dets=torch.zeros(count, 5), method=source.integer(0, 2), offset=0, **options
    )

    def by_reference(arguments: dict[str, Any]) -> list[Tensor]:
        dets = torch.zeros(count, 5)
        rest = [arguments[n] for n in ("iou_threshold", "sigma", "min_score", "method", "offset")]
        boxes, scores = arguments["boxes"].float(), arguments["scores"].float()
        return [mmcv_ext.boxes.soft_nms_reference(boxes, scores, dets, *rest), dets]

    return Scene("softnms", given, ("dets",), by_reference)


def bbox_overlaps(source: Draw) -> Scene:
    count, dtype, aligned = source.extent(20), source.choice((torch.float32, torch.float64)), source.chance(0.5)
    others = count if aligned else source.extent(20)
    a, b = (source.finish(_boxes(source, n), dtype) for n in (count, others))
    ious = torch.zeros(count if aligned else (count, others), dtype=dtype)
    options = dict(mode=source.integer(0, 1), aligned=aligned, offset=source.integer(0, 1))
    return Scene("bbox_overlaps", dict(bboxes1=a, bboxes2=b, ious=ious, **options), ("ious",))


def _maps(source: Draw, dtype: torch.dtype) -> Tensor:
    return source.finish(source.normal(source.integer(1, 3), source.extent(9), *source.extents(2, 200)), dtype)


def _regions(source: Draw, maps: Tensor, stride: int) -> Tensor:
    """Return regions that may cross the border; in half precision they lie within, where rounding moves no sample."""
    B, _, H, W = maps.shape
    count = source.rarely_none(source.extent(12), 0.1)
    size = torch.tensor([W, H], dtype=torch.float64) * stride
    corners = torch.rand(count, 2, 2, generator=source.generator, dtype=torch.float64)
    if maps.dtype in (torch.float32, torch.float64):
        corners = 1.4 * corners - 0.2
    boxes = torch.cat((corners.amin(1) * size, corners.amax(1) * size), 1)
    image = torch.randint(0, B, (count, 1), generator=source.generator, dtype=torch.float64)
    return source.finish(torch.cat((image, boxes), 1), maps.dtype)


def roi_align(source: Draw) -> Scene:
    dtype = source.choice((torch.float64, torch.float32, torch.float32, torch.bfloat16))
    maps, stride, size = _maps(source, dtype), source.choice((1, 4)), (source.integer(1, 4), source.integer(1, 4))
    rois, mode = _regions(source, maps, stride), source.integer(0, 1)
    shape = (len(rois), maps.shape[1], *size)
    argmax = {n: torch.zeros(shape if mode == 0 else 0, dtype=dtype) for n in ("argmax_y", "argmax_x")}
    options = dict(aligned_height=size[0], aligned_width=size[1], spatial_scale=1 / stride, pool_mode=mode)
    options |= dict(sampling_ratio=source.integer(1, 3), aligned=source.chance(0.5))
    given = dict(input=maps, rois=rois, output=torch.zeros(shape, dtype=dtype), **argmax, **options)
    return Scene("roi_align_forward", given, ("output",), others=("argmax_y", "argmax_x"))  # samples may be equal


def deform_roi_pool(source: Draw) -> Scene:
    dtype = source.choice((torch.float64, torch.float32))
    maps, size = _maps(source, dtype), (source.integer(1, 4), source.integer(1, 4))
    rois = _regions(source, maps, 1)
    offset = source.finish(source.normal(len(rois), 2, *size) if source.chance(0.7) else torch.zeros(0), dtype)
    options = dict(pooled_height=size[0], pooled_width=size[1], spatial_scale=1.0, gamma=0.1)
    output = torch.zeros(len(rois), maps.shape[1], *size, dtype=dtype)
    given = dict(input=maps, rois=rois, offset=offset, output=output, sampling_ratio=source.integer(1, 3), **options)
    return Scene("deform_roi_pool_forward", given, ("output",))


def carafe(source: Draw) -> Scene:
    dtype, groups, scale = source.choice(list(TOLERANCE)), source.integer(1, 2), source.integer(1, 3)
    B, C, kernel = source.integer(1, 2), groups * source.integer(1, 3), source.choice((1, 3, 5))
    H, W = source.extents(2, 60)
    features = source.finish(source.normal(B, C, H, W), dtype)
    masks = source.finish(source.normal(B, groups * kernel**2, H * scale, W * scale), dtype)
    options = dict(kernel_size=kernel, group_size=groups, scale_factor=scale)
    output = torch.zeros(B, C, H * scale, W * scale, dtype=dtype)
    return Scene("carafe_naive_forward", dict(features=features, masks=masks, output=output, **options), ("output",))


def psa_mask(source: Draw) -> Scene:
    dtype, mask = source.choice(list(TOLERANCE)), (source.integer(1, 7), source.integer(1, 7))
    B, (H, W) = source.integer(1, 2), source.extents(2, 40)
    sizes = dict(h_feature=H, w_feature=W, h_mask=mask[0], w_mask=mask[1])
    sizes |= dict(half_h_mask=(mask[0] - 1) // 2, half_w_mask=(mask[1] - 1) // 2)
    masks = source.finish(source.normal(B, mask[0] * mask[1], H, W), dtype)
    given = dict(input=masks, output=torch.zeros(B, H * W, H, W, dtype=dtype), psa_type=source.integer(0, 1), num_=B)
    return Scene("psamask_forward", {**given, **sizes}, ("output",))


def focal_loss(source: Draw) -> Scene:
    dtype, (N, C) = source.choice((torch.float64, torch.float32)), source.extents(2, 200)
    target = torch.randint(0, C + 1, (N,), generator=source.generator)
    weight = source.finish(source.normal(C).abs() if source.chance(0.5) else torch.zeros(0), dtype)
    given = dict(input=source.finish(2 * source.normal(N, C), dtype), target=target, weight=weight)
    name, target_name = source.choice((("forward", "output"), ("backward", "grad_input")))
    given |= {target_name: torch.zeros(N, C, dtype=dtype), "gamma": source.choice((0.5, 2.0)), "alpha": 0.25}
    return Scene(f"sigmoid_focal_loss_{name}", given, (target_name,))


def modulated_deform_conv(source: Draw) -> Scene:
    dtype, D, groups = source.choice((torch.float64, torch.float32)), source.integer(1, 2), source.integer(1, 2)
    B, C, (H, W) = source.integer(1, 2), 2 * source.integer(1, 4), source.extents(2, 100)
    kernel, stride, dilation = source.choice((1, 3)), source.integer(1, 2), source.integer(1, 2)
    pad = dilation * (kernel // 2)
    Ho, Wo = ((n + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for n in (H, W))
    draw = lambda *shape: source.finish(source.normal(*shape), dtype)  # noqa: E731
    given = dict(input=draw(B, C, H, W), weight=draw(2 * groups, C // groups, kernel, kernel), bias=draw(2 * groups))
    given |= dict(offset=draw(B, 2 * D * kernel**2, Ho, Wo), mask=draw(B, D * kernel**2, Ho, Wo))
    given |= {n: torch.zeros(0, dtype=dtype) for n in ("ones", "columns")}
    options = dict(kernel_h=kernel, kernel_w=kernel, stride_h=stride, stride_w=stride, pad_h=pad, pad_w=pad)
    options |= dict(dilation_h=dilation, dilation_w=dilation, group=groups, deformable_group=D, with_bias=True)
    output = torch.zeros(B, 2 * groups, Ho, Wo, dtype=dtype)
    return Scene("modulated_deform_conv_forward", {**given, "output": output, **options}, ("output",))


SCENES = (nms, softnms, bbox_overlaps, roi_align, deform_roi_pool, carafe, psa_mask, focal_loss, modulated_deform_conv)
