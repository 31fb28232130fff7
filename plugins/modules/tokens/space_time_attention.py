"""Attention of a clip's patches in space and time: the five patterns of TimeSformer.

Shapes: B batch, P tokens without a position (class tokens, registers), (T, H, W) a clip's grid of patches,
N = T * H * W, C channels, M heads, d width per head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.arguments import is_size
from ...core.axes import unflatten
from ...ops import global_attention, sequence_attention
from ..common.attention import attend
from ..common.bypass import drops, untouched
from ..common.checks import check_heads, check_sequence, one_of
from ..common.logits import SequenceLogits
from ..common.weights import weights_of
from .parts.space_time_regions import ClipGrid, Region, grouped, ungrouped

Pattern = Literal["space", "joint", "divided", "local_global", "axial"]

# The steps of each pattern: the prefix of the parameters' names, and the region. Prefix tokens join the last step.
STEPS: dict[str, tuple[tuple[str, Region], ...]] = {
    "space": (("", "space"),),
    "joint": (("", "joint"),),
    "divided": (("temporal_", "time"), ("", "space")),
    "local_global": (("local_", "local"), ("", "global")),
    "axial": (("temporal_", "time"), ("width_", "width"), ("", "height")),
}
_SHORT = 32  # keys; for fewer, sequence_attention is faster on CPUs (9.4 ms instead of PyTorch's 13.6 ms, forward and
# backward, for 196 * 12 groups of 8 patches with 64 channels)


class SpaceTimeSelfAttention(nn.Module):
    """Self-attention of a clip's patches (Bertasius et al. 2021, section 3 and Fig. 2, 3).

    ::

        pattern         steps           keys of the query at (t, y, x)
        'space'         space           the H * W patches of frame t
        'joint'         joint           all T * H * W patches
        'divided'       time            the T patches at (y, x)
                        space           the H * W patches of frame t
        'local_global'  local           T * H/2 * W/2 patches: the quarter of all frames that contains (y, x)
                        global          T/2 * H/2 * W/2 patches: those whose t, y and x each differ by a multiple of 2
        'axial'         time            the T patches at (y, x)
                        width           the W patches of row y in frame t
                        height          the H patches of column x in frame t

    Steps run in sequence, with separate projections. Each step before the last adds its projected result to the
    patches::

        x ← x + fc(attention(norm(x)))          fc is initially 0

    so that the module initially equals its last step: 'space' for 'divided', the global step for 'local_global' and the
    height step for 'axial'.

    Prefix tokens take part in the last step only. Each group has them as queries and keys, and their results are
    averaged over the groups, as in the official code of 'divided' (in the paper, the class token is a key of the
    temporal step as well). The official code does not include 'local_global' and 'axial'; this module's interpretation
    of the paper is that quarters do not overlap and that the stride of 2 is counted from the query, and it also chooses
    the order of the axes' steps and the use of prefix tokens. Each added step has a norm, an attention and ``fc``,
    which results in the parameter counts of the paper's Table 1.

    Args:
        embed_dim: C.
        num_heads: M; must divide C.
        pattern: As above.
        dropout: Dropout probability of the attention weights.
        qkv_bias: Whether the input projections have biases.
        proj_bias: Whether the output projections have biases.
        norm_layer: Callable that creates each step's norm from C; None for no norm. With norms, ``x + module(x)`` is
            the attention half of TimeSformer's block.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        pattern: Pattern = "divided",
        dropout: float = 0.0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        norm_layer: Callable[..., nn.Module] | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, dropout)
        one_of(Pattern, pattern=pattern)
        self.embed_dim, self.num_heads, self.pattern = embed_dim, num_heads, pattern
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        given = {name: value for name, value in factory.items() if value is not None}  # norms may accept neither
        for name, region in STEPS[pattern]:
            attention = RegionAttention(embed_dim, num_heads, region, dropout, qkv_bias, proj_bias, **factory)
            self.add_module(f"{name}norm1", nn.Identity() if norm_layer is None else norm_layer(embed_dim, **given))
            self.add_module(f"{name}attn", attention)
            if name:
                self.add_module(f"{name}fc", nn.Linear(embed_dim, embed_dim, **factory))
        self.reset_parameters()

    @property
    def added(self) -> tuple[str, ...]:
        """Prefixes of the parameter names of the steps before the last."""
        return tuple(name for name, _ in STEPS[self.pattern] if name)

    def reset_parameters(self) -> None:
        """Draw the projections, and zero ``fc`` of the steps before the last."""
        for child in self.children():
            if isinstance(child, RegionAttention):
                child.reset_parameters()
        self.reset_added()

    def reset_added(self) -> None:
        """Zero ``fc`` of the steps before the last."""
        for name in self.added:
            for parameter in self.get_submodule(f"{name}fc").parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, grid: ClipGrid, prefix_tokens: int = 0) -> Tensor:
        """Attend from every token to the tokens of its groups.

        Args:
            x: (B, P + N, C): P tokens without a position, then the patches, frame by frame and row by row.
            grid: (T, H, W) with T * H * W = N.
            prefix_tokens: P.

        Returns:
            (B, P + N, C), what a residual block adds to ``x``: the results of all steps.

        Raises:
            ValueError: A shape does not match.
            TypeError: ``x`` is not a Tensor, or does not have the module's dtype.
        """
        before, result = self.steps(x, grid, prefix_tokens)
        return result if before is x else before - x + result

    def steps(
        self, x: Tensor, grid: ClipGrid, prefix_tokens: int = 0, drop: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the steps, with ``drop`` applied to the groups' results, (B * G, P + L, C): to frames and to tracks.

        Returns:
            The tokens before the last step (``x`` itself if there is only one step) and the last step's result, each
            (B, P + N, C).
        """
        P = prefix_tokens
        last = self.get_submodule("attn")
        check_sequence("x", x, self.embed_dim, getattr(last, "qkv", last))
        check_clip_grid(grid, P, x.shape[1])
        for name in self.added:
            norm, attention, fc = (self.get_submodule(name + part) for part in ("norm1", "attn", "fc"))
            patches = x[:, P:]
            patches = patches + fc(attention(norm(patches), grid, 0, drop))
            x = torch.cat((x[:, :P], patches), 1) if P else patches
        return x, last(self.get_submodule("norm1")(x), grid, P, drop)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, pattern={self.pattern!r}"


class RegionAttention(nn.Module):
    """One step: each patch attends to the patches of its group and to prefix tokens. Parameters have timm's names."""

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        region: Region,
        dropout: float = 0.0,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.num_heads, self.region = num_heads, region
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias, **factory)
        self.attn_drop = nn.Dropout(dropout)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias, **factory)
        self.reset_parameters()

    def init_weights(self) -> None:
        """Do nothing: timm calls this in place of ``reset_parameters``, after its own rule for linear layers."""

    def reset_parameters(self) -> None:
        """Draw the projections as ``nn.MultiheadAttention`` does."""
        nn.init.xavier_uniform_(self.qkv.weight)
        self.proj.reset_parameters()
        for bias in (self.qkv.bias, self.proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(self, x: Tensor, grid: ClipGrid, prefix: int, drop: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Apply the step, (B, P + N, C) -> (B, P + N, C), with ``drop`` applied to the groups, (B * G, P + L, C)."""
        qkv = self.qkv(x)
        parts = grouped(unflatten(qkv[:, prefix:], 1, grid), self.region)
        parts = [self._attend(part, qkv[:, :prefix]) for part in parts]
        if drop is not None:
            parts = [unflatten(drop(self.proj(part).flatten(0, 1)), 0, part.shape[:2]) for part in parts]
        patches = ungrouped([part[:, :, prefix:] for part in parts], self.region, grid).flatten(1, 3)
        if prefix:
            means = torch.cat([part[:, :, :prefix] for part in parts], 1).mean(1)
            patches = torch.cat((means, patches), 1)
        return self.proj(patches) if drop is None else patches

    @torch.no_grad()
    def group_weights(self, x: Tensor, grid: ClipGrid, prefix: int) -> list[Tensor]:
        """Compute the attention weights within groups, without dropout.

        Args:
            x: (B, P + N, C).
            grid: (T, H, W).
            prefix: P.

        Returns:
            (B, G, M, P + L, P + L), with groups in the order of :func:`.space_time_regions.grouped`; several such
            tensors if groups differ in size. The result of a prefix token is the mean over all groups.
        """
        qkv = self.qkv(x)
        parts = grouped(unflatten(qkv[:, prefix:], 1, grid), self.region)
        heads = (self._heads(part, qkv[:, :prefix]) for part in parts)
        weights = [weights_of(SequenceLogits(q, k, v, scale=float(q.shape[3]) ** -0.5)) for q, k, v in heads]
        return [unflatten(groups, 0, part.shape[:2]) for groups, part in zip(weights, parts)]

    def _attend(self, groups: Tensor, prefix: Tensor) -> Tensor:
        """Attend within groups (B, G, L, 3 * C), each preceded by the prefix (B, P, 3 * C): (B, G, P + L, C)."""
        q, k, v = self._heads(groups, prefix)
        scale, L = float(q.shape[3]) ** -0.5, q.shape[2]  # a tensor while traced
        if not untouched(self.attn_drop, nn.Dropout):
            output = attend(SequenceLogits(q, k, v, scale=scale), self.attn_drop)
        elif drops(self.attn_drop):
            output = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p, scale=scale)
        elif L <= _SHORT and not q.is_cuda:
            output = sequence_attention(q, k, v, scale=scale)
        else:
            output = global_attention(*(t.unsqueeze(2) for t in (q, k, v)), scale=scale).squeeze(2)
        return output.transpose(1, 2).reshape(*groups.shape[:2], L, groups.shape[3] // 3)

    def _heads(self, groups: Tensor, prefix: Tensor) -> tuple[Tensor, ...]:
        """Split groups (B, G, L, 3 * C) after a prefix (B, P, 3 * C) into query, key and value (B * G, M, P + L, d)."""
        B, G, _, C = groups.shape
        if prefix.shape[1]:
            groups = torch.cat((prefix.unsqueeze(1).expand(-1, G, -1, -1), groups), 2)
        heads = self.num_heads, C // 3 // self.num_heads
        return groups.reshape(B * G, groups.shape[2], 3, *heads).permute(2, 0, 3, 1, 4).unbind()


def check_clip_grid(grid: ClipGrid, prefix_tokens: int, tokens: int) -> None:
    """Check that P + T * H * W tokens fit the grid (T, H, W) and the prefix."""
    if not is_size(prefix_tokens) or not 0 <= prefix_tokens < tokens:
        raise ValueError(f"prefix_tokens must be an int from 0 to {tokens - 1}, got {prefix_tokens!r}")
    sizes = tuple(grid) if isinstance(grid, (tuple, list, torch.Size)) else ()
    if len(sizes) != 3 or sizes[0] * sizes[1] * sizes[2] != tokens - prefix_tokens:
        raise ValueError(
            f"grid must be (T, H, W) and hold the {tokens - prefix_tokens} tokens behind the prefix of "
            f"{prefix_tokens}, got {grid!r}"
        )
