"""Relative attention of augmented convolutions against timm's and TensorFlow-style code, and whole networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attn_plugins.modules import AAConv2d
from attn_plugins.ops import global_attention
from attn_plugins.terms.relative_position import relative_logits

from ..case import Case, normal, problem

B, M, D = 8, 8, 20
SIZES = (14, 28, 40)


def ours(query: Tensor, key: Tensor, value: Tensor, height_rel: Tensor, width_rel: Tensor) -> Tensor:
    S = query.shape[2]
    row = relative_logits(query, height_rel.t().expand(M, -1, -1), S, "row")
    column = relative_logits(query, width_rel.t().expand(M, -1, -1), S, "column")
    return global_attention(query, key, value, row_logits=row, column_logits=column)


def timm_and_sdpa(query: Tensor, key: Tensor, value: Tensor, height_rel: Tensor, width_rel: Tensor) -> Tensor:
    """Compute the logits of all pairs with timm's PosEmbedRel, and pass them to SDPA as its mask."""
    from timm.layers.bottleneck_attn import rel_logits_1d

    S = query.shape[2]
    q = query.flatten(0, 1)
    columns = rel_logits_1d(q, width_rel, permute_mask=(0, 1, 3, 2, 4))
    rows = rel_logits_1d(q.transpose(1, 2), height_rel, permute_mask=(0, 3, 1, 4, 2))
    mask = (rows + columns).reshape(B, M, S * S, S * S)
    output = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), attn_mask=mask, scale=1.0
    )
    return output.unflatten(2, (S, S))


def relative_to_absolute(x: Tensor) -> Tensor:
    n, L, _ = x.shape
    x = nn.functional.pad(x, (0, 1)).flatten(1)
    return nn.functional.pad(x, (0, L - 1)).view(n, L + 1, 2 * L - 1)[:, :L, L - 1 :]


def tensorflow_style(query: Tensor, key: Tensor, value: Tensor, height_rel: Tensor, width_rel: Tensor) -> Tensor:
    """Compute attention as in the paper's appendix: logits, both relative logits tiled, softmax, product."""
    S = query.shape[2]

    def one_axis(q: Tensor, table: Tensor) -> Tensor:
        logits = torch.einsum("bmxyd,rd->bmxyr", q, table)
        return relative_to_absolute(logits.flatten(0, 2)).view(B, M, S, S, S)

    logits = torch.einsum("bmhwd,bmyxd->bmhwyx", query, key)
    logits = logits + one_axis(query, width_rel).unsqueeze(4)
    logits = logits + one_axis(query.transpose(2, 3), height_rel).transpose(2, 3).unsqueeze(5)
    weights = logits.flatten(4).softmax(-1)
    return torch.einsum("bmhwk,bmkd->bmhwd", weights, value.flatten(2, 3))


def model(name: str) -> nn.Module:
    import timm

    import attn_plugins.timm  # noqa: F401  registers the models

    return timm.create_model(name)


def cases(device: str) -> list[Case]:
    rows = []
    for S, dv in (*((S, D) for S in SIZES), (14, 3)):
        heads = (B, M, S, S, D), (B, M, S, S, D), (B, M, S, S, dv)
        rows += problem(
            f"relative attention, {S}x{S}, batch {B}, {M} heads, d {D}, d_v {dv}",
            device,
            normal(*heads, (2 * S - 1, D), (2 * S - 1, D), scale=D**-0.25),
            lambda: ours,
            {"timm + SDPA": lambda: timm_and_sdpa, "TensorFlow-style": lambda: tensorflow_style},
            main=S == 28,
        )
    for C, S, dv in ((128, 28, 8), (256, 14, 24), (512, 7, 48)):
        rows += problem(
            f"layer 3x3, {C} channels, {S}x{S}, batch {B}, d_k 160, d_v {dv}",
            device,
            normal((B, C, S, S)),
            lambda C=C, S=S, dv=dv: AAConv2d(C, C, 3, 160, dv, 8, input_size=S, pool=S == 28),
            {"plain convolution": lambda C=C: nn.Conv2d(C, C, 3, padding=1, bias=False)},
            main=False,
        )
    batch = 8 if device == "cpu" else 128
    return rows + problem(
        f"aa_resnet50, 224x224, batch {batch}",
        device,
        normal((batch, 3, 224, 224)),
        lambda: model("aa_resnet50"),
        {"resnet50": lambda: model("resnet50")},
    )
