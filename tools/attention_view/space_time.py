"""Attention of TimeSformer in space and time: of every step, from a patch of a frame or the cls token.

Shapes: T frames, (H, W) the grid of a frame's patches, M heads, Q queries, P class tokens and registers, C channels; S
sequences of tokens, 1 or, where frames are sequences of their own, T; N patches of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attn_plugins.modules.space_time_attention import RegionAttention
from attn_plugins.modules.space_time_regions import ClipGrid, grouped, ungrouped

from .vit import CLS, Cell, PatchMaps, QueryMaps, prefix_names, vision_transformers

Place = tuple[int, int, int] | Literal["cls"]  # frame, row and column of a patch, or the cls token


@dataclass
class Attended(QueryMaps):
    """A :class:`QueryMaps` with frames: ``maps`` is (len(names), Q, T, H, W).

    Attributes:
        keys: (Q, T, H, W), True for patches that are a query's keys.
    """

    keys: Tensor | None = None


@dataclass
class ClipMaps(PatchMaps):
    """A step of a TimeSformer's attention, or its rollout, for one clip.

    As a single map, the clip is a mosaic: its frames in rows, from left to right (:func:`mosaic`).

    Attributes:
        weigh: Maps rows (Q, S, P + N) to their products with the weights of every head, (M, Q, S, P + N). If its second
            argument is true, the weights are those of equal tokens, which are uniform.
        x: Input of the step, (S, P + N, C); None for the rollout.
        clip: (T, H, W).
        alone: Whether each frame is a sequence of its own.
        region: Region that defines the step's groups; None for the rollout.
    """

    weigh: Callable[..., Tensor]
    clip: ClipGrid = (1, 1, 1)
    alone: bool = False
    region: str | None = None

    @property
    def title(self) -> str:
        """Name and region."""
        return self.name if self.region is None else f"{self.name} ({self.region})"

    def weights(self) -> Tensor:
        """Return the weights of all tokens for all tokens, (1, M, S * (P + N), S * (P + N)), as the step used them."""
        S, N = self._sequences
        one = torch.eye(S * (len(self.prefix) + N)).unflatten(1, (S, -1))
        return self.weigh(one).flatten(2)[None]

    def attended(self, places: Sequence[Place]) -> Attended:
        """Return the mean of all heads, then every head, for patches and the cls token.

        If every frame has a cls token, their mean is returned for the cls token.

        Raises:
            ValueError: the layer has no cls token.
        """
        if CLS in places and not self.cls:
            raise ValueError(f"{self.name} has no cls token")
        rows, P = self._rows(places), len(self.prefix)
        weights = self.weigh(rows).float()
        names = [f"head {n + 1}" for n in range(len(weights))]
        if self.x is None:
            names = ["rollout"]
        elif len(weights) > 1:
            weights, names = torch.cat((weights.mean(0, keepdim=True), weights)), ["mean of heads", *names]
        keys = self.weigh(rows, True)[0] != 0
        return Attended(
            names,
            weights[..., P:].flatten(2).unflatten(2, self.clip),
            1 / keys.sum((1, 2)),
            weights[..., :P].sum((2, 3)) if P else None,
            keys[..., P:].flatten(1).unflatten(1, self.clip),
        )

    def look(self, cells: Sequence[Cell]) -> QueryMaps:
        """Return the result of :meth:`attended` for cells of the mosaic, as mosaics."""
        (_, H, W), (_, across) = self.clip, layout(self.clip[0])
        places: list[Place] = [
            CLS if isinstance(cell, str) else (cell[0] // H * across + cell[1] // W, cell[0] % H, cell[1] % W)
            for cell in cells
        ]
        found = self.attended(places)
        return QueryMaps(found.names, mosaic(found.maps), found.uniform, found.elsewhere)

    def of_mosaic(self, cells: int) -> tuple[int, int]:
        """Return a reduced size of the mosaic: as many rows and columns of every frame, at most ``cells`` cells."""
        (T, H, W), (down, across) = self.clip, layout(self.clip[0])
        most = max(1, cells // T)
        h = min(H, isqrt(most))
        return down * h, across * min(W, most // h)

    @property
    def _sequences(self) -> tuple[int, int]:
        T, H, W = self.clip
        return (T, H * W) if self.alone else (1, T * H * W)

    def _rows(self, places: Sequence[Place]) -> Tensor:
        """Return rows (Q, S, P + N) with 1 at the place of a query."""
        (_, H, W), (S, N), P = self.clip, self._sequences, len(self.prefix)
        rows = torch.zeros(len(places), S, P + N)
        for row, place in zip(rows, places):
            if isinstance(place, str):
                row[:, 0] = 1 / S
            else:
                number = (place[0] * H + place[1]) * W + place[2]
                row[number // N, P + number % N] = 1
        return rows


def layout(frames: int) -> tuple[int, int]:
    """Return the rows and columns of a mosaic of ``frames`` frames, as narrow as possible.

    >>> layout(8), layout(7)
    ((2, 4), (1, 7))
    """
    down = next(n for n in range(isqrt(frames), 0, -1) if frames % n == 0)
    return down, frames // down


def mosaic(maps: Tensor) -> Tensor:
    """Arrange frames (..., T, H, W) in rows, from left to right: (..., R * H, T / R * W)."""
    maps = maps.unflatten(-3, layout(maps.shape[-3]))  # (..., R, T / R, H, W)
    return maps.transpose(-3, -2).flatten(-4, -3).flatten(-2)


def products(
    rows: Tensor, blank: bool = False, *, attention: RegionAttention, x: Tensor, grid: ClipGrid, prefix: int
) -> Tensor:
    """Multiply rows with the weights of a step, without materialising its matrix over all tokens.

    A patch has its group's weights. A prefix token is averaged over the groups.

    Args:
        rows: (Q, S, P + N).
        blank: Whether to replace ``x`` by zeros.
        attention: The step.
        x: (S, P + N, C).
        grid: Grid of a sequence's patches.
        prefix: P.

    Returns:
        (M, Q, S, P + N).
    """
    weights = attention.group_weights(torch.zeros_like(x) if blank else x, grid, prefix)
    columns = rows.movedim(0, -1)  # (S, P + N, Q)
    parts = grouped(columns[:, prefix:].unflatten(1, grid), attention.region)  # (S, G, L, Q)
    first = columns[:, None, :prefix] / sum(part.shape[1] for part in parts)
    found, before = [], rows.new_zeros(len(x), prefix, attention.num_heads * len(rows))
    for part, own in zip(parts, weights):
        whole = torch.cat((first.expand(-1, part.shape[1], -1, -1), part), 2)
        product = torch.einsum("sgkq,sgmkt->sgtmq", whole, own).flatten(3)
        before = before + product[:, :, :prefix].sum(1)
        found.append(product[:, :, prefix:])
    patches = ungrouped(found, attention.region, grid).flatten(1, 3)
    return torch.cat((before, patches), 1).unflatten(2, (-1, len(rows))).permute(2, 3, 0, 1)


def timesformers(model: nn.Module) -> dict[str, Any]:
    """Return the TimeSformers in ``model`` by name; ``''`` is the model itself."""
    return {
        name: vit
        for name, vit in vision_transformers(model).items()
        if any(isinstance(module, RegionAttention) for module in vit.blocks.modules())
    }


def step_layers(model: nn.Module) -> dict[str, RegionAttention]:
    """Return the attention steps of all blocks of :func:`timesformers`, by name, in the order of the calls."""
    return {
        f"{start}.blocks.{name}" if start else f"blocks.{name}": module
        for start, vit in timesformers(model).items()
        for name, module in vit.blocks.named_modules()
        if isinstance(module, RegionAttention)
    }


@contextmanager
def capture_clip(model: nn.Module) -> Iterator[dict[str, ClipMaps]]:
    """Record the inputs of all layers of :func:`step_layers` in a forward pass of one clip.

    Weights are computed on demand, and all hooks are removed afterwards.

    Yields:
        The captured layers by name, in the order of the calls.
    """
    captured: dict[str, ClipMaps] = {}

    def keep(name: str, vit: Any, layer: Any, arguments: tuple[Tensor, ClipGrid, int]) -> None:
        x, grid, prefix = arguments
        alone = vit.time_embed is None
        clip = (len(x), *grid[1:]) if alone else tuple(grid)
        weigh = partial(products, attention=layer, x=x, grid=grid, prefix=prefix)
        size = tuple(n * cells for n, cells in zip(layout(clip[0]), clip[1:]))
        captured.pop(name, None)
        names = prefix_names(vit)[:prefix]
        captured[name] = ClipMaps(name, weigh, x, size, names, clip=clip, alone=alone, region=layer.region)

    with ExitStack() as stack:
        layers = step_layers(model)
        for start, vit in timesformers(model).items():
            for name, layer in layers.items():
                if name.startswith(f"{start}.blocks" if start else "blocks"):
                    stack.callback(layer.register_forward_pre_hook(partial(keep, name, vit)).remove)
        yield captured


def clip_rollouts(model: nn.Module, captured: Mapping[str, ClipMaps]) -> dict[str, ClipMaps]:
    """Return the rollout of every TimeSformer over all steps of all its blocks.

    Every step counts as a layer with its own residual connection, as in :func:`.vit.rollout`; prefix tokens bypass
    steps in which they take no part.

    Args:
        model: The model.
        captured: Result of :func:`capture_clip`.
    """
    found = {}
    for start in timesformers(model):
        first = f"{start}.blocks." if start else "blocks."
        steps = [captured[name] for name in step_layers(model) if name.startswith(first)]
        name = f"{start}.rollout" if start else "rollout"
        found[name] = replace(steps[-1], name=name, weigh=partial(_rolled, steps), x=None, region=None)
    return found


def _rolled(steps: Sequence[ClipMaps], rows: Tensor, blank: bool = False) -> Tensor:
    P = len(steps[-1].prefix)
    for step in reversed(steps):
        passed, rows = rows.split((P - len(step.prefix), rows.shape[2] - P + len(step.prefix)), 2)
        rows = torch.cat((passed, (rows + step.weigh(rows, blank).mean(0)) / 2), 2)
    return rows[None]
