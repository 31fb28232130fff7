"""Definitions of mmcv's operators in plain loops, differentiable where mmcv's are. Written from the papers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def bilinear(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Interpolate (C, H, W) at one position: clamped to the border up to a pixel outside, 0 beyond."""
    H, W = image.shape[1:]
    if y < -1 or y > H or x < -1 or x > W:
        return image.new_zeros(image.shape[0])
    total = image.new_zeros(image.shape[0])
    for i, wy in weights(y, H):
        for j, wx in weights(x, W):
            total = total + image[:, i, j] * wy * wx
    return total


def weights(position: Tensor, size: int) -> list[tuple[int, Tensor | float]]:
    if position <= 0:
        position = position - position.detach()  # the derivative of the first interval, unless it has no second pixel
    low = int(position.detach().floor())
    if low >= size - 1:
        return [(size - 1, 1.0)]
    return [(low, 1 - (position - low)), (low + 1, position - low)]


def bin_samples(low: Tensor, step: Tensor, number: int, count: int) -> list[Tensor]:
    return [low + number * step + (n + 0.5) * step / count for n in range(count)]


def roi_align(input, rois, size, scale=1.0, ratio=0, mode="avg", aligned=True):
    return torch.stack([torch.stack([torch.stack([
        pool_bin(input, roi, i, j, size, scale, ratio, mode, aligned) for j in range(size[1])], -1)
        for i in range(size[0])], -2) for roi in rois])  # fmt: skip


def pool_bin(input, roi, i, j, size, scale, ratio, mode, aligned, moved=(0.0, 0.0)):
    x1, y1, x2, y2 = roi[1:].float() * scale - (0.5 if aligned else 0.0)
    width, height = x2 - x1, y2 - y1
    if not aligned:
        width, height = width.clamp(min=1), height.clamp(min=1)
    gh, gw = (ratio or max(0, math.ceil(extent / bins)) for extent, bins in zip((height, width), size))
    samples = [
        bilinear(input[int(roi[0])], y, x)
        for y in bin_samples(y1 + moved[0], height / size[0], i, gh)
        for x in bin_samples(x1 + moved[1], width / size[1], j, gw)
    ]
    if not samples:
        return input.new_full((input.shape[1],), 0.0 if mode == "avg" else -10000.0)
    return torch.stack(samples).mean(0) if mode == "avg" else torch.stack(samples).amax(0)


def deform_roi_pool(input, rois, offset, size, scale, ratio, gamma):
    output = []
    for n, roi in enumerate(rois):
        width, height = (roi[3:] - roi[1:3]).float() * scale
        for i in range(size[0]):
            for j in range(size[1]):
                moved = (gamma * height * offset[n, 1, i, j], gamma * width * offset[n, 0, i, j])
                output.append(pool_bin(input, roi, i, j, size, scale, ratio, "avg", True, moved))
    return torch.stack(output).view(len(rois), *size, -1).movedim(-1, 1)


def roi_pool(input, rois, size, scale):
    H, W = input.shape[2:]
    output = []
    for roi in rois.float():
        x1, y1 = (roi[1:3] * scale).tolist()
        x2, y2 = ((roi[3:] + 1) * scale).tolist()
        for i in range(size[0]):
            for j in range(size[1]):
                top, bottom = edges(y1, y2, i, size[0], H)
                left, right = edges(x1, x2, j, size[1], W)
                part = input[int(roi[0]), :, top:bottom, left:right].flatten(1)
                empty = part.shape[1] == 0 or x2 <= x1 or y2 <= y1
                output.append(input.new_zeros(input.shape[1]) if empty else part.amax(1))
    return torch.stack(output).view(len(rois), *size, -1).movedim(-1, 1)


def edges(low, high, number, bins, limit):
    step = (high - low) / bins
    first, last = math.floor(low + number * step), math.ceil(low + (number + 1) * step)
    return min(max(first, 0), limit), min(max(last, 0), limit)


def carafe(features, masks, kernel, groups, scale):
    B, C, H, W = features.shape
    output = []
    for b in range(B):
        for c in range(C):
            group = c // (C // groups)
            for h in range(H * scale):
                for w in range(W * scale):
                    total = features.new_zeros(())
                    for i in range(kernel):
                        for j in range(kernel):
                            y, x = h // scale + i - kernel // 2, w // scale + j - kernel // 2
                            if 0 <= y < H and 0 <= x < W:
                                total = total + features[b, c, y, x] * masks[b, (group * kernel + i) * kernel + j, h, w]
                    output.append(total)
    return torch.stack(output).view(B, C, H * scale, W * scale)


def psa_mask(input, mode, size):
    B, _, H, W = input.shape
    output = torch.zeros(B, H * W, H, W, dtype=input.dtype)
    for h in range(H):
        for w in range(W):
            for i in range(size[0]):
                for j in range(size[1]):
                    y, x = h + i - (size[0] - 1) // 2, w + j - (size[1] - 1) // 2
                    if 0 <= y < H and 0 <= x < W:
                        value = input[:, i * size[1] + j, h, w]
                        if mode == 0:
                            output[:, y * W + x, h, w] = value
                        else:
                            output[:, h * W + w, y, x] = value
    return output


def overlap(a, b, offset=0):
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]) + offset)
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]) + offset)
    areas = [(box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b)]
    union = sum(areas) - width * height
    return width * height / union if union else math.nan


def nms(boxes, scores, threshold, offset=0):
    """Return indices by falling score; equal scores in the order of an unstable ``torch.sort``."""
    left, kept = scores.sort(descending=True).indices.tolist(), []
    boxes = boxes.tolist()
    while left:
        kept.append(left[0])
        left = [n for n in left[1:] if not overlap(boxes[kept[-1]], boxes[n], offset) > threshold]
    return kept


def soft_nms(boxes, scores, threshold, sigma, minimum, method):
    """Return selected indices and decayed scores, for scores without ties (Bodla et al. 2017, Fig. 2)."""
    boxes, scores = boxes.tolist(), scores.tolist()
    left, kept, decayed = list(range(len(boxes))), [], []
    while left:
        best = max(left, key=lambda n: scores[n])
        kept.append(best)
        decayed.append(scores[best])
        left.remove(best)
        for n in left:
            iou = overlap(boxes[best], boxes[n])
            if method == "gaussian":
                scores[n] *= math.exp(-(iou**2) / sigma)
            elif iou >= threshold:
                scores[n] *= 1 - iou if method == "linear" else 0
        left = [n for n in left if scores[n] >= minimum]
    return kept, decayed


def line_nms(lanes, scores, threshold, top_k):
    """Return the kept lanes: those not nearer than the threshold to a better one (Zheng et al. 2022)."""
    points = lanes.shape[1] - 5
    left, kept = scores.argsort(descending=True).tolist(), []
    while left and len(kept) < top_k:
        best = left.pop(0)
        kept.append(best)
        left = [n for n in left if not near(lanes[best], lanes[n], points, threshold)]
    return kept


def near(a, b, points, threshold):
    starts = [int(lane[2] * (points - 1) + 0.5) for lane in (a, b)]
    ends = [start + int(lane[4]) - 1 for start, lane in zip(starts, (a, b))]
    low, high = max(starts), min(*ends, points - 1)
    if high < low:
        return False
    distances = [abs(float(a[5 + n] - b[5 + n])) for n in range(low, high + 1)]
    return sum(distances) / len(distances) < threshold


def softmax_focal_loss(logits, target, gamma, alpha, weight):
    labels = target.clamp(min=0)
    p = logits.softmax(1).gather(1, labels[:, None])[:, 0]
    loss = -alpha * (1 - p) ** gamma * p.log() * (1 if weight is None else weight[labels])
    return torch.where(target < 0, 0, loss)
