"""ViT-Adapter: maps at strides 4 to 32 from a plain vision transformer (Chen et al. 2023, section 3).

Shapes: B batch, C width of the transformer, S patches, Q tokens of the adapter, which are those of its maps at strides
8, 16 and 32, row by row, one map after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.checks import one_of, positive
from ..tokens.deformable_attention import MultiScaleDeformableAttention
from .parts.vit_backbone import Size, ViTBackbone, resample, to_map, to_tokens

STRIDES = (4, 8, 16, 32)
Norm = Callable[[int], nn.Module]
_layer_norm = partial(nn.LayerNorm, eps=1e-6)


class SpatialPrior(nn.Module):
    """Convolutions that make the adapter's four initial maps, (B, C, ·, ·), of pictures (section 3.3).

    Without ``finest``, the first map, which no attention reads, is None.
    """

    def __init__(self, channels: int, width: int, embed_dim: int, norm_layer: Norm, finest: bool = True) -> None:
        super().__init__()

        def conv(channels: int, out: int, stride: int = 2) -> list[nn.Module]:
            layer = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
            return [layer, norm_layer(out), nn.ReLU(inplace=True)]

        layers = [*conv(channels, width), *conv(width, width, 1), *conv(width, width, 1)]
        self.stem = nn.Sequential(*layers, nn.MaxPool2d(3, stride=2, padding=1))
        self.conv2 = nn.Sequential(*conv(width, 2 * width))
        self.conv3 = nn.Sequential(*conv(2 * width, 4 * width))
        self.conv4 = nn.Sequential(*conv(4 * width, 4 * width))
        self.fc1 = nn.Conv2d(width, embed_dim, 1) if finest else None
        self.fc2, self.fc3, self.fc4 = (nn.Conv2d(n * width, embed_dim, 1) for n in (2, 4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        c1 = self.stem(x)
        c2 = self.conv2(c1)
        c3 = self.conv3(c2)
        c4 = self.conv4(c3)
        return self.fc1(c1) if self.fc1 is not None else None, self.fc2(c2), self.fc3(c3), self.fc4(c4)


class ConvFFN(nn.Module):
    """Feed-forward layer with a depthwise 3×3 convolution on each map of ``sizes`` (section 3.5)."""

    def __init__(self, embed_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.dwconv = nn.Conv2d(hidden_dim, hidden_dim, 3, padding=1, groups=hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, embed_dim)

    def forward(self, x: Tensor, sizes: Sequence[Size]) -> Tensor:
        maps = split_maps(self.fc1(x), sizes)
        return self.fc2(F.gelu(torch.cat([to_tokens(self.dwconv(level)) for level in maps], 1)))


class Injector(nn.Module):
    """Patches (B, S, C) + γ · deformable attention to the adapter's tokens (B, Q, C) (Eq. 1).

    ``references`` (1, S, 3, 2) say where the patches lie on the adapter's maps of ``sizes``.
    """

    def __init__(self, attention: MultiScaleDeformableAttention, init_values: float) -> None:
        super().__init__()
        self.init_values = init_values
        self.query_norm, self.feat_norm = _layer_norm(attention.embed_dims), _layer_norm(attention.embed_dims)
        self.attn = attention
        self.gamma = nn.Parameter(torch.full((attention.embed_dims,), init_values))

    def forward(self, x: Tensor, c: Tensor, references: Tensor, sizes: Sequence[Size]) -> Tensor:
        places = dict(reference_points=references, spatial_shapes=sizes)
        zero = x.new_zeros(())
        return x + self.gamma * self.attn(self.query_norm(x), value=self.feat_norm(c), identity=zero, **places)


class Extractor(nn.Module):
    """Adapter's tokens (B, Q, C) + deformable attention to the patches (B, S, C), then a ConvFFN (Eq. 2, 3).

    ``references`` (1, Q, 1, 2) say where the tokens lie on the ``grid`` of patches. In training, a picture of the batch
    skips the ConvFFN with the probability ``drop_path_rate``.
    """

    def __init__(self, attention: MultiScaleDeformableAttention, cffn_ratio: float, drop_path_rate: float) -> None:
        super().__init__()
        C = attention.embed_dims
        self.query_norm, self.feat_norm = _layer_norm(C), _layer_norm(C)
        self.attn = attention
        self.drop_path_rate = drop_path_rate
        self.ffn_norm = _layer_norm(C) if cffn_ratio else None
        self.ffn = ConvFFN(C, int(C * cffn_ratio)) if cffn_ratio else None

    def forward(self, c: Tensor, x: Tensor, references: Tensor, grid: Size, sizes: Sequence[Size]) -> Tensor:
        places = dict(reference_points=references, spatial_shapes=(grid,))
        c = self.attn(self.query_norm(c), value=self.feat_norm(x), identity=c, **places)
        if self.ffn is None or self.ffn_norm is None:
            return c
        added = self.ffn(self.ffn_norm(c), sizes)
        if self.training and self.drop_path_rate:
            kept = 1 - self.drop_path_rate
            added = added * (added.new_empty(c.shape[0], 1, 1).bernoulli_(kept) / kept)
        return c + added


class ViTAdapter(ViTBackbone):
    """Vision transformer with ViT-Adapter: maps at strides 4, 8, 16 and 32 for detection and segmentation.

    ::

        c = tokens of the spatial prior's maps at strides 8, 16 and 32, + level_embed
        for the blocks of each interaction:
            patches = injector(patches, c)    # patches + gamma * deformable attention to c
            tokens = blocks(tokens)           # the adapter neither reads nor changes class tokens and registers
            c = extractor(c, patches)         # deformable attention to the patches, then a ConvFFN
        maps = norm(maps of c [+ patches, resampled]), the finest one by a transposed convolution

    With ``init_values`` 0 the transformer initially computes what it does alone. Pictures of any size are accepted: the
    transformer sees the picture padded to whole patches, and tokens are aligned in pixels. Where 32 and the patch size
    divide the picture's size, that is the paper's alignment.

    Source: Chen et al. (2023), "Vision Transformer Adapter for Dense Predictions", section 3; defaults, initialization
    and names of parameters are those of its code.

    Args:
        vit: See :class:`.ViTBackbone`.
        interaction_indexes: First and last block of each interaction; None for four of equal length.
        deform_num_heads: Heads of the deformable attention, which divide C and C * ``deform_ratio``.
        n_points: Points that each query samples from each map.
        conv_inplane: Channels of the spatial prior's stem.
        cffn_ratio: Width of the ConvFFN, as a fraction of C; 0 for none.
        deform_ratio: Width of the attention's values, as a fraction of C.
        init_values: Initial γ of the injectors.
        drop_path_rate: Stochastic depth of the extractors; the transformer has its own.
        use_injector: Whether the transformer reads from the adapter. Without, a frozen one has no backward pass.
        use_extra_extractor: Whether two more extractors follow the last one.
        add_vit_feature: Whether to add patches, resampled, to the maps.
        vit_features: ``'last'`` adds those after the last block to all maps, as in the paper's code for detection;
            ``'each'`` those after the n-th of four interactions to the n-th map, as in its code for segmentation.
        out_indices: Maps to return, 0 to 3.
        with_cp: Use activation checkpointing in training.
        norm_layer: Creates the normalizations of the spatial prior and of the maps.

    Shapes:
        (B, 3, H, W) -> tuple of (B, C, ⌈H / s⌉, ⌈W / s⌉), s = 4, 8, 16, 32

    Raises:
        TypeError: ``vit`` is no vision transformer like timm's.
        ValueError: An argument is out of range or inconsistent with ``vit``.
    """

    def __init__(
        self,
        vit: nn.Module,
        interaction_indexes: Sequence[Sequence[int]] | None = None,
        deform_num_heads: int = 6,
        n_points: int = 4,
        conv_inplane: int = 64,
        cffn_ratio: float = 0.25,
        deform_ratio: float = 1.0,
        init_values: float = 0.0,
        drop_path_rate: float = 0.0,
        use_injector: bool = True,
        use_extra_extractor: bool = True,
        add_vit_feature: bool = True,
        vit_features: Literal["last", "each"] = "last",
        out_indices: Sequence[int] = (0, 1, 2, 3),
        with_cp: bool = False,
        norm_layer: Norm = nn.BatchNorm2d,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(vit, with_cp)
        C = self.embed_dim
        one_of(Literal["last", "each"], vit_features=vit_features)
        positive(deform_num_heads=deform_num_heads, n_points=n_points, conv_inplane=conv_inplane)
        if C % deform_num_heads:
            raise ValueError(f"deform_num_heads must divide the width of vit, {C}, got {deform_num_heads}")
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"drop_path_rate must be at least 0 and below 1, got {drop_path_rate!r}")
        if cffn_ratio and C * cffn_ratio < 1:
            raise ValueError(f"cffn_ratio must be 0 or give a width of at least 1, got {cffn_ratio!r} of {C}")
        if not out_indices or any(i not in range(4) for i in out_indices):
            raise ValueError(f"out_indices must be from 0 to 3, got {out_indices!r}")
        self.interaction_indexes = _ranges(len(self.vit.blocks), interaction_indexes)
        if vit_features == "each" and len(self.interaction_indexes) != 4:
            raise ValueError(f"vit_features='each' needs 4 interactions, got {len(self.interaction_indexes)}")
        self.add_vit_feature, self.vit_features = add_vit_feature, vit_features
        self.out_indices = tuple(out_indices)

        def attention(levels: int) -> MultiScaleDeformableAttention:
            options: dict[str, Any] = dict(dropout=0.0, batch_first=True, value_proj_ratio=deform_ratio)
            return MultiScaleDeformableAttention(C, deform_num_heads, levels, n_points, **options)

        def extractor() -> Extractor:
            return Extractor(attention(1), cffn_ratio, drop_path_rate)

        def interaction(last: bool) -> nn.ModuleDict:
            parts = {"injector": Injector(attention(3), init_values)} if use_injector else {}
            extractors = [extractor() for _ in range(3 if last and use_extra_extractor else 1)]
            return nn.ModuleDict(
                {**parts, "extractor": extractors[0], "extra_extractors": nn.ModuleList(extractors[1:])}
            )

        count = len(self.interaction_indexes)
        self.level_embed = nn.Parameter(torch.empty(3, C, device=device, dtype=dtype))
        self.spm = SpatialPrior(self.in_channels, conv_inplane, C, norm_layer, finest=0 in self.out_indices)
        self.interactions = nn.ModuleList(interaction(n + 1 == count) for n in range(count))
        self.up = nn.ConvTranspose2d(C, C, 2, stride=2) if 0 in self.out_indices else None
        for index in self.out_indices:
            self.add_module(f"norm{index + 1}", norm_layer(C))
        for part in self._own():
            part.to(device=device, dtype=dtype)
        self.reset_parameters()

    def _own(self) -> list[nn.Module]:
        """Return the parts beside the transformer."""
        return [part for name, part in self.named_children() if name != "vit"]

    def reset_parameters(self) -> None:
        """Initialize the adapter; the transformer stays as it is."""
        nn.init.normal_(self.level_embed)
        for part in self._own():
            part.apply(_draw)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps of ``out_indices`` of pictures (B, 3, H, W).

        Raises:
            ValueError: ``x`` has another shape.
            TypeError: ``x`` is not a Tensor, or does not have the module's dtype.
        """
        tokens, grid, rotary = self.embed(x)
        finest, *coarse = self.spm(x)
        sizes = [(level.shape[2], level.shape[3]) for level in coarse]
        c = torch.cat([to_tokens(level) + embedding for level, embedding in zip(coarse, self.level_embed)], 1)
        levels, patches = [(size, (s, s)) for size, s in zip(sizes, STRIDES[1:])], [(grid, self.patch_size)]
        on_levels = reference_points(patches, levels, x.device)
        on_patches = reference_points(levels, patches, x.device)
        prefix = self.num_prefix_tokens
        layer: Any
        features = []
        for (first, last), layer in zip(self.interaction_indexes, self.interactions):
            if "injector" in layer:
                injected = self.checkpointed(layer["injector"], tokens[:, prefix:], c, on_levels, sizes)
                tokens = torch.cat((tokens[:, :prefix], injected), 1)
            tokens = self.run(tokens, grid, first, last, rotary)
            features.append(tokens)
            for extractor in (layer["extractor"], *layer["extra_extractors"]):
                c = self.checkpointed(extractor, c, tokens[:, prefix:], on_patches, grid, sizes)
        maps = [finest, *split_maps(c, sizes)]
        if finest is not None and self.up is not None:
            maps[0] = finest + self.up(maps[1])[..., : finest.shape[2], : finest.shape[3]]
        if self.add_vit_feature:
            for n in self.out_indices:
                patch_map = self.patches(features[n if self.vit_features == "each" else -1], grid)
                maps[n] = maps[n] + resample(patch_map, self.patch_size, STRIDES[n], maps[n].shape[2:])
        return tuple(self.get_submodule(f"norm{n + 1}")(maps[n]) for n in self.out_indices)


def split_maps(tokens: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    """View the tokens of several maps as maps (B, C, H, W)."""
    return [to_map(part, size) for part, size in zip(tokens.split([h * w for h, w in sizes], 1), sizes)]


def reference_points(
    queries: Sequence[tuple[Size, Size]], keys: Sequence[tuple[Size, Size]], device: Any = None
) -> Tensor:
    """Compute where the cells of some maps lie on others, all of which start at the picture's upper left corner.

    Args:
        queries: (H, W) and stride (in pixels, of rows and columns) of each map.
        keys: Likewise, of each map that is sampled.
        device: Device of the result.

    Returns:
        (1, Q, L, 2) as (x, y), 0 to 1 on each of the L sampled maps, in float32.
    """
    points = []
    for (rows, columns), step in keys:
        for (H, W), stride in queries:
            y = (torch.arange(H, device=device, dtype=torch.float32) + 0.5) * (stride[0] / (rows * step[0]))
            x = (torch.arange(W, device=device, dtype=torch.float32) + 0.5) * (stride[1] / (columns * step[1]))
            points.append(torch.stack((x.expand(H, W), y.unsqueeze(1).expand(H, W)), -1).flatten(0, 1))
    return torch.cat(points).unflatten(0, (len(keys), -1)).transpose(0, 1).unsqueeze(0)


def _ranges(depth: int, indexes: Sequence[Sequence[int]] | None = None) -> list[tuple[int, int]]:
    """Return the first and last block of each interaction."""
    if indexes is None:
        ends = [depth * (n + 1) // min(4, depth) for n in range(min(4, depth))]
        return [(first, last - 1) for first, last in zip([0, *ends], ends)]
    ranges = [(pair[0], pair[-1]) for pair in indexes]
    firsts = [0, *(last + 1 for _, last in ranges)]
    if firsts.pop() != depth or any(first != start or last < first for (first, last), start in zip(ranges, firsts)):
        raise ValueError(
            f"interaction_indexes must be the first and last of consecutive blocks, all {depth} of vit, such as "
            f"{_ranges(depth)}, got {indexes!r}"
        )
    return ranges


def _draw(module: Any) -> None:
    """Initialize a layer of the adapter; called on children before parents."""
    if isinstance(module, Injector):
        nn.init.constant_(module.gamma, module.init_values)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
