"""Boxes and lanes: overlaps and suppression.

Shapes: N boxes of (x1, y1, x2, y2). ``offset`` 1 counts the last pixel of a box: its width is x2 - x1 + 1.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
import torchvision  # noqa: F401  defines torch.ops.torchvision
from torch import Tensor

from ..core import library
from .calls import check, check_floats, check_shape, operator, widened

SOFT_NMS_METHODS = {0: "naive", 1: "linear", 2: "gaussian"}


def float32(number: float) -> float:
    """Round to float32, as mmcv's arguments are: an overlap may equal the threshold exactly."""
    return struct.unpack("f", struct.pack("f", number))[0]


def _check_boxes(boxes: Tensor, scores: Tensor, offset: int) -> None:
    check_shape("boxes", boxes, "N", 4)
    check_shape("scores", scores, len(boxes))
    check_floats("boxes", boxes=boxes, scores=scores)
    check(offset in (0, 1), f"offset must be 0 or 1, got {offset}")


@operator
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the boxes that greedy suppression keeps, by falling score."""
    return suppress(boxes, scores, float32(iou_threshold), offset)


def suppress(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Compute :func:`nms` for a threshold that is not rounded to float32.

    torchvision sorts stably and mmcv does not, so that boxes of equal scores are sorted here.
    """
    _check_boxes(boxes, scores, offset)
    order = scores.sort(descending=True).indices
    ordered = widened(boxes)[order]
    if offset:
        ordered = ordered + ordered.new_tensor([0, 0, offset, offset])
    ranks = torch.arange(order.shape[0], 0, -1, dtype=ordered.dtype, device=boxes.device)
    return order[torch.ops.torchvision.nms(ordered, ranks, iou_threshold)]


@operator
def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Write (x1, y1, x2, y2, decayed score) into the first rows of ``dets``; return the indices of these boxes.

    Args:
        boxes: (N, 4) on the CPU.
        scores: (N,).
        dets: (N, 5), of which the first K rows are written.
        iou_threshold: Overlap from which the methods 0 and 1 decay a score.
        sigma: Squared scale of the Gaussian of method 2.
        min_score: Boxes are dropped once their score is smaller.
        method: 0 drops, 1 decays linearly, 2 decays by a Gaussian (Bodla et al. 2017).
        offset: 0 or 1.

    Returns:
        (K,) indices, in the order of selection.
    """
    _check_boxes(boxes, scores, offset)
    check_shape("dets", dets, len(boxes), 5)
    check(method in SOFT_NMS_METHODS, f"method must be one of {SOFT_NMS_METHODS}, got {method}")
    check(method != 2 or sigma > 0, f"sigma must be positive, got {sigma}")
    boxes, scores = (tensor.detach().cpu().float().contiguous() for tensor in (boxes, scores))
    kept = torch.empty(len(boxes), 5)
    arguments = (iou_threshold, sigma, min_score, method, offset)
    if library.has_schemas():
        indices = torch.empty(len(boxes), dtype=torch.int64)
        indices = indices[: torch.ops.attn_plugins.soft_nms_(boxes, scores, kept, indices, *arguments)]
    else:
        indices = soft_nms_reference(boxes, scores, kept, *arguments)
    dets[: len(indices)] = kept[: len(indices)].to(dets)
    return indices


def soft_nms_reference(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Compute :func:`softnms` in float32 with NumPy.

    The order of the remaining boxes decides ties, so it follows mmcv's: the first box takes the place of the selected
    one, and the last box that of a dropped one.
    """
    left, value, index = boxes.numpy().copy(), scores.numpy().copy(), np.arange(len(boxes))
    threshold, scale, minimum = np.float32(iou_threshold), np.float32(sigma), np.float32(min_score)
    selected: list[int] = []
    while len(left):
        # NaN, the score beside two boxes without area, is exceeded by nothing and exceeds nothing.
        best = 0 if np.isnan(value[0]) else int(np.nan_to_num(value, nan=-np.inf, posinf=np.inf).argmax())
        dets[len(selected)] = torch.tensor([*left[best], value[best]])
        selected.append(int(index[best]))
        box = left[best].copy()
        order = np.arange(len(left))
        order[best] = 0
        left, value, index = (array[order[1:]] for array in (left, value, index))
        overlap = _overlaps(box, left, offset)
        if method == 2:
            value = value * np.exp(-(overlap * overlap) / scale)
        else:
            value = np.where(overlap >= threshold, value * (1 - overlap if method else np.float32(0)), value)
        order = _fill_gaps(value < minimum)
        left, value, index = (array[order] for array in (left, value, index))
    return torch.tensor(selected, dtype=torch.int64)


def _overlaps(box: np.ndarray, boxes: np.ndarray, offset: int) -> np.ndarray:
    """Return the intersection over union of a box with others."""
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2]) + np.float32(offset)
    intersection = np.maximum(np.float32(0), sides).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2] + np.float32(offset)).prod(1)
    area = (box[2:] - box[:2] + np.float32(offset)).prod()
    with np.errstate(divide="ignore", invalid="ignore"):
        return intersection / (area + areas - intersection)


def _fill_gaps(dropped: np.ndarray) -> np.ndarray:
    """Return the order of the boxes that stay, the last of them in the places of dropped ones."""
    order = np.arange(len(dropped))
    count = len(order) - int(dropped.sum())
    gaps = order[:count][dropped[:count]]
    order[gaps] = order[count:][~dropped[count:]][::-1]
    return order[:count]


@operator
def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Return groups of indices by falling score: a kept box, then the boxes that it suppresses.

    Args:
        dets: (N, 5), boxes and scores.
        iou_threshold: Overlap from which a box is suppressed.
    """
    check_shape("dets", dets, "N", 5)
    check_floats("dets", dets=dets)
    dets = dets.float().cpu()
    order = dets[:, 4].sort(descending=True).indices.numpy()
    boxes, groups = dets[:, :4].numpy(), []
    while len(order):
        first, rest = order[0], order[1:]
        suppressed = _overlaps(boxes[first], boxes[rest], 0) >= np.float32(iou_threshold)
        groups.append([int(first), *map(int, rest[suppressed])])
        order = rest[~suppressed]
    return groups


@operator
def line_nms_forward(boxes: Tensor, scores: Tensor, overlap: float, top_k: int) -> list[Tensor]:
    """Suppress lanes whose mean distance to a better lane is small (Zheng et al. 2022, CLRNet).

    Lanes are compared in the order of their scores. mmcv's CUDA kernel (2.3.6) takes one lane of a pair from the
    unsorted tensor, which suppresses wrong lanes unless ``scores`` fall already.

    Args:
        boxes: (N, 5 + P): two logits, start as a fraction of the height, x, length in points, and x at P heights.
        scores: (N,).
        overlap: Mean distance over the common heights below which a lane is suppressed, in the unit of x.
        top_k: Maximum number of lanes to keep.

    Returns:
        (N,) indices of the kept lanes by falling score, then zeros; their number, a scalar; (N,) the rank of the lane
        that suppresses (or is) lane n, from 1, and 0 for a lane that was not reached.
    """
    check(boxes.dim() == 2 and boxes.shape[1] > 5, f"boxes must have shape (N, 5 + P), got {tuple(boxes.shape)}")
    check_shape("scores", scores, len(boxes))
    check_floats("boxes", boxes=boxes, scores=scores)
    points = boxes.shape[1] - 5
    order = scores.sort(descending=True).indices.cpu()
    lanes = widened(boxes)[order.to(boxes.device)].cpu()
    start = (lanes[:, 2] * (points - 1) + 0.5).trunc().long()
    length = lanes[:, 4].trunc().long()
    end = (start + length - 1).clamp(max=points - 1)
    places = torch.arange(points)
    keep = torch.zeros(len(lanes), dtype=torch.int64)
    parents = torch.zeros(len(lanes), dtype=torch.int64)
    removed = torch.zeros(len(lanes), dtype=torch.bool)
    count = 0
    for n in range(len(lanes)):
        if removed[n] or count >= top_k:
            continue
        low, high = start[n:].clamp(min=int(start[n])), end[n:].clamp(max=int(end[n]))
        common = (places >= low[:, None]) & (places <= high[:, None])
        distance = ((lanes[n:, 5:] - lanes[n, 5:]).abs() * common).sum(1)
        similar = (distance < overlap * (high - low + 1)) & (high >= low) & (low >= 0)
        similar[0] = False
        keep[count] = order[n]
        count += 1
        parents[order[n:][similar]] = count
        parents[order[n]] = count
        removed[n:] |= similar
    device = boxes.device
    return [keep.to(device), torch.tensor(count, device=device), parents.to(device)]


@operator
def bbox_overlaps(bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool, offset: int) -> None:
    """Write the intersection over the union (``mode`` 0) or over the first area (1) into ``ious``.

    Args:
        bboxes1: (N, 4).
        bboxes2: (K, 4); (N, 4) if ``aligned``.
        ious: (N, K), or (N,) if ``aligned``.
        mode: 0 or 1.
        aligned: Compare each box with its partner instead of all pairs.
        offset: 0 or 1.
    """
    check_shape("bboxes1", bboxes1, "N", 4)
    check_shape("bboxes2", bboxes2, len(bboxes1) if aligned else "K", 4)
    check_floats("bboxes1", bboxes1=bboxes1, bboxes2=bboxes2, ious=ious)
    check_shape("ious", ious, *((len(bboxes1),) if aligned else (len(bboxes1), len(bboxes2))))
    check(mode in (0, 1), f"mode must be 0 (union) or 1 (first box), got {mode}")
    check(offset in (0, 1), f"offset must be 0 or 1, got {offset}")
    a, b = widened(bboxes1), widened(bboxes2)  # areas exceed float16
    if not aligned:
        a, b = a[:, None], b[None]
    sides = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2]) + offset).clamp_(min=0)
    intersection = sides.prod(-1)
    area = (a[..., 2:] - a[..., :2] + offset).prod(-1)
    if mode == 0:
        area = area + (b[..., 2:] - b[..., :2] + offset).prod(-1) - intersection
    ious.copy_(intersection / area)
