"""Deformable attention in plain PyTorch, for devices without a kernel: by ``grid_sample``, else by its definition.

``grid_sample`` reads a level of all images at once. Its positions are those of the definition up to rounding, and so is
its derivative at pixel centres. NaN and infinite locations, which it treats differently on each device, are moved
beside the map; where they are to propagate, the definition serves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.arguments import at_least_float32
from ...core.backends import Backend, Gradients, never
from ...core.devices import has_grid_sample
from ...core.gradients import gradients_by_image
from . import reference
from .operands import Options, Terms


class _Level(NamedTuple):
    """A level as ``grid_sample`` takes it: (B * M, d, H, W), (B * M, Q, K, 2) from -1 to 1, and weights."""

    maps: Tensor
    grid: Tensor
    weights: Tensor  # (B * M, 1, Q, K)

    def samples(self) -> Tensor:
        """Return (B * M, d, Q, K)."""
        return torch.grid_sampler_2d(self.maps, self.grid, 0, 0, False)  # bilinear, zeros beyond


def _levels(terms: Terms, options: Options) -> Iterator[_Level]:
    value, locations, weights = at_least_float32(*terms)
    B, _, M, d = value.shape
    grid = locations.flatten(3, -2).transpose(1, 2).flatten(0, 1)
    grid = grid.nan_to_num(-1, -1, -1).clamp(-1, 2) * 2 - 1
    weights = weights.flatten(3).transpose(1, 2).flatten(0, 1).unsqueeze(1)
    levels = options.levels()
    rows = value.split([H * W for H, W, _ in levels], 1)
    counts = [count for *_, count in levels]
    for pixels, (H, W, _), places, shares in zip(rows, levels, grid.split(counts, 2), weights.split(counts, 3)):
        yield _Level(pixels.permute(0, 2, 3, 1).reshape(B * M, d, H, W), places, shares)


def _refuses_grid_sample(terms: Terms, options: Options, backward: bool = False) -> bool:
    filled = all(options.points) and all(term.numel() for term in terms)
    return options.propagates_nan or not filled or not has_grid_sample(terms.value, backward)


def forward(terms: Terms, options: Options) -> Tensor:
    if _refuses_grid_sample(terms, options):
        return reference.deformable_attention(terms, options)
    B, _, M, d = terms.value.shape
    output: Any = sum((level.samples() * level.weights).sum(3) for level in _levels(terms, options))
    return output.view(B, M * d, -1).transpose(1, 2).to(terms.value.dtype).contiguous()


def backward(grad_output: Tensor, terms: Terms, options: Options, needs: dict[str, bool]) -> Gradients:
    if _refuses_grid_sample(terms, options, backward=True):
        return gradients_by_image(lambda one: reference.deformable_attention(one, options), grad_output, terms, needs)
    B, S, M, d = terms.value.shape
    (grad,) = at_least_float32(grad_output)
    grad = grad.view(B, -1, M, d).permute(0, 2, 3, 1).reshape(B * M, d, -1, 1)
    of_maps, of_grid, of_weights = [], [], []
    for level in _levels(terms, options):
        if needs["weights"]:
            of_weights.append((level.samples() * grad).sum(1))
        if needs["value"] or needs["locations"]:
            maps, grid = torch.ops.aten.grid_sampler_2d_backward(
                level.weights * grad, level.maps, level.grid, 0, 0, False, [needs["value"], True]
            )
            of_maps.append(maps.flatten(2) if needs["value"] else maps)
            of_grid.append(grid)
    grads: Gradients = {}
    if needs["value"]:
        grads["value"] = torch.cat(of_maps, 2).view(B, M, d, S).permute(0, 3, 1, 2)
    for name, parts in (("locations", of_grid), ("weights", of_weights)):
        if needs[name]:
            by_query = torch.cat(parts, 2).unflatten(0, (B, M)).transpose(1, 2)
            grads[name] = (by_query * 2 if name == "locations" else by_query).reshape(getattr(terms, name).shape)
    return {name: grad.to(getattr(terms, name).dtype).contiguous() for name, grad in grads.items() if grad is not None}


BACKEND = Backend("eager", never, forward, backward)
