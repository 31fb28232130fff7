"""Random calls of soft non-maximum suppression, the stand-in for mmcv's operators' own kernel, against plain loops."""

from __future__ import annotations

import torch

from attn_plugins import mmcv_ext

from .broken import in_words
from .draw import Draw


class SoftNms:
    """A call with boxes and scores of any layout, many of them equal or none."""

    def __init__(self, source: Draw) -> None:
        self.source, self.count = source, source.rarely_none(source.extent(60), 0.1)
        corners, scores = source.uniform(self.count, 2) * 40, source.uniform(self.count)
        boxes = torch.cat((corners, corners + source.uniform(self.count, 2) * 20), 1)
        self.arguments = dict(
            boxes=source.finish(boxes.round() if source.chance(0.3) else boxes, torch.float32),
            scores=source.finish((scores * 8).round() / 8 if source.chance(0.4) else scores, torch.float32),
            iou_threshold=source.random.uniform(0.2, 0.7),
            sigma=source.choice((0.2, 0.5)),
            min_score=source.choice((0.0, 0.05)),
            method=source.integer(0, 2),
            offset=0,
        )

    def describe(self) -> str:
        return "\n".join(["softnms", *(f"    {n:16} {in_words(v)}" for n, v in self.arguments.items())])

    def problems(self) -> list[str]:
        faults: list[str] = []
        kept, expected = torch.zeros(2, self.count, 5)
        with self.source.watched(faults):
            indices = mmcv_ext.softnms(**self.arguments, dets=kept)
        boxes, scores = (self.arguments[name].contiguous() for name in ("boxes", "scores"))
        wanted = mmcv_ext.boxes.soft_nms_reference(
            **{**self.arguments, "boxes": boxes, "scores": scores}, dets=expected
        )
        if not torch.equal(indices, wanted):
            faults.append(f"the boxes {indices.tolist()} are kept, not {wanted.tolist()}")
        elif self.count and float((kept - expected).abs().max()) > 1e-3:
            faults.append(f"boxes and scores differ by {float((kept - expected).abs().max()):.2g}")
        return faults
