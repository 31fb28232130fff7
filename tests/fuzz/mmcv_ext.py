"""Random calls of the stand-in for mmcv's operators on boxes: any layout and dtype, against float64 and plain loops.

mmcv's results go into tensors of the caller, the targets.
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
        return faults


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


CALLS = (nms, softnms)
