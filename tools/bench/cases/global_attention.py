"""Generalized attention against mmcv's module, and the operator against SDPA with materialised logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_plugins.modules import GeneralizedAttention2d
from attn_plugins.ops import global_attention

from ..case import COMPILED, Case, Peer, normal, problem
from .flex import flex, flex_peer

# (attention_type, (B, C, H, W), num_heads, kv_stride)
MODULES = (
    ("1111", (1, 256, 50, 84), 9, 2),
    ("1111", (2, 512, 25, 42), 9, 2),
    ("1111", (2, 256, 25, 42), 8, 1),
    ("1000", (1, 256, 50, 84), 9, 2),
    ("0011", (1, 256, 50, 84), 9, 2),
    ("0010", (1, 256, 50, 84), 9, 2),
    ("0001", (1, 256, 50, 84), 9, 2),
)
CUDA_MODULES = (*MODULES, ("1111", (4, 256, 50, 84), 8, 2), ("1111", (2, 256, 100, 152), 8, 2))


def module(ours: bool, attention_type: str, C: int, num_heads: int, kv_stride: int) -> nn.Module:
    if ours:
        make: Callable[..., nn.Module] = GeneralizedAttention2d.mmcv_compatible
    else:
        from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention as make
    made = make(C, num_heads=num_heads, kv_stride=kv_stride, attention_type=attention_type)
    nn.init.ones_(made.gamma)  # with 0, no gradient would reach the attention
    return made


def attend(
    query: Tensor, key: Tensor, value: Tensor, row: Tensor, column: Tensor, keys: Tensor | None = None
) -> Tensor:
    return global_attention(query, key, value, row_logits=row, column_logits=column, key_logits=keys)


def sdpa_with_mask(
    query: Tensor, key: Tensor, value: Tensor, row: Tensor, column: Tensor, keys: Tensor | None = None
) -> Tensor:
    """Compute SDPA with all logits of the position terms as its mask."""
    mask = row.unsqueeze(-1) + column.unsqueeze(-2)
    if keys is not None:
        mask = mask + keys[:, :, None, None]
    output = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), mask.flatten(4).flatten(2, 3), scale=1.0
    )
    return output.unflatten(2, query.shape[2:4])


def flex_global() -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, columns: Tensor, keys: Tensor) -> Tensor:
        Wk = key.shape[3]

        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
            place = rows.flatten(2, 3)[b, h, q, n // Wk] + columns.flatten(2, 3)[b, h, q, n % Wk]
            return s + place + keys.flatten(2)[b, h, n]

        return flex(query, key, value, score)

    return torch.compile(run, dynamic=False)


def cases(device: str) -> list[Case]:
    rows = []
    for setting in MODULES if device == "cpu" else CUDA_MODULES:
        kind, (B, C, H, W), heads, stride = setting
        rows += problem(
            f"module {kind}, ({B},{C},{H},{W}), {heads} heads, kv_stride {stride}",
            device,
            normal((B, C, H, W)),
            lambda s=(kind, C, heads, stride): module(True, *s),
            {"mmcv": lambda s=(kind, C, heads, stride): module(False, *s)},
            kinds=("float32", "autocast to bfloat16") if device == "cpu" and setting == MODULES[0] else None,
            main=setting[:2] in (MODULES[0][:2], MODULES[5][:2]),
        )
    M, Hq, Wq, Hk, Wk, d = 8, 50, 84, 25, 42, 32

    def shapes(B: int) -> list[tuple[int, ...]]:
        heads = [(B, M, Hq, Wq, d), (B, M, Hk, Wk, d), (B, M, Hk, Wk, d)]
        return [*heads, (B, M, Hq, Wq, Hk), (B, M, Hq, Wq, Wk)]

    title = f"{Hq}x{Wq} queries, {Hk}x{Wk} keys, {M} heads x {d}"
    rows += problem(
        f"operator, {title}",
        device,
        normal(*shapes(1)),
        lambda: attend,
        {"SDPA with mask": lambda: sdpa_with_mask},
        main=False,
    )
    if device == "cuda":
        peers: dict[str, Peer] = {**flex_peer(flex_global), "SDPA with mask": Peer(lambda: sdpa_with_mask)}
        inputs = normal(*shapes(2), (2, M, Hk, Wk))
        rows += problem(f"all terms, B 2, {title}", device, inputs, lambda: attend, peers, definitions=COMPILED)
    return rows
