"""Attention of TimeSformer in space and time: of every step, from a patch of a frame or the cls token.

As a map, a clip is a mosaic: its frames in rows, from left to right. Shapes: T frames, (H, W) the grid of a frame's
patches, M heads, Q queries, P class tokens and registers, C channels; S sequences of tokens, 1 or, where frames are
sequences of their own, T; N patches of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules.tokens.space_time_attention import RegionAttention
from attn_plugins.modules.tokens.space_time_regions import ClipGrid, grouped, ungrouped

from .maps import CLS, Handle, Keep, Maps, Query, Weights
from .patches import in_blocks, path, prefix_names


@dataclass(kw_only=True)
class Steps(Maps):
    """A step of a TimeSformer's attention, or the rollout over all steps of all blocks.

    In a rollout every step counts as a layer with its own residual connection; prefix tokens bypass steps in which
    they take no part.
    """

    clip: ClipGrid  # (T, H, W)
    alone: bool  # whether each frame is a sequence of its own
    layer: Any = None  # the step
    arguments: tuple[Tensor, ClipGrid, int] | None = None  # of its forward: the input (S, P + N, C), the grid and P
    steps: Sequence[Steps] = ()  # of a rollout
    mean_first = True

    @property
    def title(self) -> str:
        """Name and region."""
        return self.name if self.layer is None else f"{self.name} ({self.layer.region})"

    @property
    def frames(self) -> tuple[int, int]:
        """Rows and columns of the mosaic's frames."""
        return layout(self.clip[0])

    def weigh(self, queries: Sequence[Query], blank: bool = False) -> Weights:
        """See :meth:`.Maps.weigh`; if every frame has a cls token, their mean is returned for the cls token."""
        (T, H, W), P = self.clip, len(self.prefix)
        S, across = T if self.alone else 1, self.frames[1]
        N = T * H * W // S
        rows = torch.zeros(len(queries), S, P + N)  # with 1 at the place of a query
        for row, cell in zip(rows, queries):
            if cell == CLS:
                row[:, 0] = 1 / S
            else:
                y, x = cell
                number = ((y // H * across + x // W) * H + y % H) * W + x % W
                row[number // N, P + number % N] = 1
        weights = self.products(rows, blank)
        maps = mosaic(weights[..., P:].flatten(2).unflatten(2, self.clip))
        return maps, weights[..., :P].flatten(2) if P else None

    def products(self, rows: Tensor, blank: bool = False) -> Tensor:
        """Multiply rows (Q, S, P + N) with the weights of every head, without the matrix over all tokens.

        A patch has its group's weights; a prefix token is averaged over the groups. With ``blank`` the tokens are
        equal, whose weights are uniform.

        Returns:
            (M, Q, S, P + N).
        """
        if self.arguments is None:
            P = len(self.prefix)
            for step in reversed(self.steps):
                passed, rows = rows.split((P - len(step.prefix), rows.shape[2] - P + len(step.prefix)), 2)
                rows = torch.cat((passed, (rows + step.products(rows, blank).mean(0)) / 2), 2)
            return rows[None]
        x, grid, prefix = self.arguments
        region = self.layer.region
        weights = self.layer.group_weights(torch.zeros_like(x) if blank else x, grid, prefix)
        columns = rows.movedim(0, -1)  # (S, P + N, Q)
        parts = grouped(columns[:, prefix:].unflatten(1, grid), region)  # (S, G, L, Q)
        first = columns[:, None, :prefix] / sum(part.shape[1] for part in parts)
        products, before = [], rows.new_zeros(len(x), prefix, self.layer.num_heads * len(rows))
        for part, own in zip(parts, weights):
            whole = torch.cat((first.expand(-1, part.shape[1], -1, -1), part), 2)
            product = torch.einsum("sgkq,sgmkt->sgtmq", whole, own).flatten(3)
            before = before + product[:, :, :prefix].sum(1)
            products.append(product[:, :, prefix:])
        patches = ungrouped(products, region, grid).flatten(1, 3)
        return torch.cat((before, patches), 1).unflatten(2, (-1, len(rows))).permute(2, 3, 0, 1)

    def thinned(self, cells: int) -> tuple[int, int]:
        """Return a reduced size of the mosaic: as many rows and columns of every frame, at most ``cells`` cells."""
        (T, H, W), (down, across) = self.clip, self.frames
        most = max(1, cells // T)
        h = min(H, isqrt(most))
        return down * h, across * min(W, most // h)


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


def steps(model: nn.Module) -> dict[str, str]:
    """Return the attention steps of all blocks of TimeSformers, by name; kinds are empty."""
    return {name: "" for *_, name, module in in_blocks(model) if isinstance(module, RegionAttention)}


def watch_steps(model: nn.Module, names: Iterable[str], keep: Keep) -> Iterator[Handle]:
    """See :data:`.Watch`; for one clip."""

    def record(name: str, vit: Any, layer: Any, arguments: tuple[Any, ...]) -> None:
        x, grid, prefix = arguments = arguments[:3]
        alone = vit.time_embed is None
        clip = (len(x), *grid[1:]) if alone else tuple(grid)
        size = tuple(n * cells for n, cells in zip(layout(clip[0]), clip[1:]))
        before = prefix_names(vit)[:prefix]
        keep(Steps(name=name, size=size, prefix=before, clip=clip, alone=alone, layer=layer, arguments=arguments))

    for _, vit, name, layer in in_blocks(model):
        if name in names:
            yield layer.register_forward_pre_hook(partial(record, name, vit))


def clip_rollouts(model: nn.Module, captured: dict[str, Any]) -> dict[str, Maps]:
    """Return the rollout of every TimeSformer over all steps of all its blocks."""
    own: dict[str, list[Steps]] = {}
    for start, _, name, _ in in_blocks(model):
        if name in captured:
            own.setdefault(path(start, "rollout"), []).append(captured[name])
    return {
        name: replace(layers[-1], name=name, rolled=True, layer=None, arguments=None, steps=layers)
        for name, layers in own.items()
    }
