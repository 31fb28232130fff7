"""A small vision transformer in plain PyTorch with the attributes that ``modules.ViTBackbone`` asks of timm's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PatchEmbed(nn.Module):
    def __init__(self, width: int, patch_size: int, **factory: Any) -> None:
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.proj = nn.Conv2d(3, width, patch_size, stride=patch_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).permute(0, 2, 3, 1)


class Block(nn.Module):
    """Attention with one head, then a feed-forward layer; ``rope`` shifts queries and keys, and is no rotation."""

    def __init__(self, width: int, **factory: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, **factory), nn.LayerNorm(width, **factory)
        self.qkv, self.proj = nn.Linear(width, 3 * width, **factory), nn.Linear(width, width, **factory)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width, **factory), nn.GELU(), nn.Linear(2 * width, width, **factory)
        )

    def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        if rope is not None:
            q, k = q + rope, k + rope
        x = x + self.proj((q @ k.transpose(1, 2) / q.shape[2] ** 0.5).softmax(-1) @ v)
        return x + self.mlp(self.norm2(x))


class TinyViT(nn.Module):
    """Vision transformer with a class token, and with positions for 2 × 2 patches, interpolated to others."""

    dynamic_img_size = True
    num_prefix_tokens = 1

    def __init__(
        self, width: int = 8, depth: int = 2, patch_size: int = 16, rope: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.embed_dim = width
        self.patch_embed = PatchEmbed(width, patch_size, **factory)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width, **factory))
        self.pos_embed = nn.Parameter(torch.empty(1, width, 2, 2, **factory))
        self.norm_pre = nn.Identity()
        self.blocks = nn.ModuleList(Block(width, **factory) for _ in range(depth))
        self.rope = rope
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.cls_token)
        nn.init.normal_(self.pos_embed)

    def _pos_embed(self, patches: Tensor) -> Any:
        positions = F.interpolate(self.pos_embed, size=patches.shape[1:3], mode="bilinear").permute(0, 2, 3, 1)
        tokens = (patches + positions).flatten(1, 2)
        tokens = torch.cat((self.cls_token.expand(tokens.shape[0], -1, -1), tokens), 1)
        return (tokens, positions.mean((1, 2), keepdim=True)[0]) if self.rope else tokens
