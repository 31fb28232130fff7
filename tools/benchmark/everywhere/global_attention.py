"""Generalized attention against mmcv's module, and the operator against SDPA with materialised logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_plugins.modules import GeneralizedAttention2d
from attn_plugins.ops import global_attention

from ..case import Case, Run, forward, forward_backward

# (attention_type, (B, C, H, W), num_heads, kv_stride); the goals apply to the first
CPU_MODULES = (
    ("1111", (1, 256, 50, 84), 9, 2),
    ("1111", (2, 512, 25, 42), 9, 2),
    ("1111", (2, 256, 25, 42), 8, 1),
    ("1000", (1, 256, 50, 84), 9, 2),
    ("0011", (1, 256, 50, 84), 9, 2),
    ("0010", (1, 256, 50, 84), 9, 2),
    ("0001", (1, 256, 50, 84), 9, 2),
)
CUDA_MODULES = (*CPU_MODULES, ("1111", (4, 256, 50, 84), 8, 2), ("1111", (2, 256, 100, 152), 8, 2))
GOALS = {"cpu": 2.5, "cuda": 3.0}
PASSES = (("forward", forward), ("forward+backward", forward_backward))


def ours(attention_type: str, C: int, num_heads: int, kv_stride: int) -> nn.Module:
    return GeneralizedAttention2d.mmcv_compatible(
        C, num_heads=num_heads, kv_stride=kv_stride, attention_type=attention_type
    )


def mmcv(attention_type: str, C: int, num_heads: int, kv_stride: int) -> nn.Module:
    from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention

    return GeneralizedAttention(C, num_heads=num_heads, kv_stride=kv_stride, attention_type=attention_type)


def module_case(setting: tuple, device: str, dtype: torch.dtype, passes: str, build: Callable) -> Case:
    attention_type, (B, C, H, W), num_heads, kv_stride = setting

    def prepare(make: Callable[..., nn.Module]) -> Callable[[], Run]:
        def run() -> Run:
            module = make(attention_type, C, num_heads, kv_stride).to(device, dtype)
            nn.init.ones_(module.gamma)  # with 0, no gradient would reach the attention
            x = torch.randn(B, C, H, W, device=device, dtype=dtype)
            if build is forward:
                return forward(module, x)
            return forward_backward(module, x, parameters=tuple(p for p in module.parameters() if p.requires_grad))

        return run

    name = f"module {attention_type}, ({B},{C},{H},{W}), {num_heads} heads, kv_stride {kv_stride}, "
    name += f"{str(dtype).removeprefix('torch.')}, {passes}"
    return Case(name, prepare(ours), {"mmcv": prepare(mmcv)}, GOALS[device] if setting == CPU_MODULES[0] else None)


def run_ours(query: Tensor, key: Tensor, value: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return global_attention(query, key, value, row_logits=row, column_logits=column)


def sdpa_with_mask(query: Tensor, key: Tensor, value: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Compute SDPA with all logits of the position terms as its mask."""
    mask = (row.unsqueeze(-1) + column.unsqueeze(-2)).flatten(4).flatten(2, 3)
    output = nn.functional.scaled_dot_product_attention(
        query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3), attn_mask=mask, scale=1.0
    )
    return output.unflatten(2, query.shape[2:4])


def operator_case(device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]) -> Case:
    B, M, Hq, Wq, Hk, Wk, d = 1, 8, 50, 84, 25, 42, 32

    def tensors() -> tuple[Tensor, ...]:
        shapes = ((Hq, Wq, d), (Hk, Wk, d), (Hk, Wk, d), (Hq, Wq, Hk), (Hq, Wq, Wk))
        return tuple(torch.randn(B, M, *shape, device=device, dtype=dtype) for shape in shapes)

    return Case(
        f"operator, {Hq}x{Wq} queries, {Hk}x{Wk} keys, {M} heads x {d}, {str(dtype).removeprefix('torch.')}, {passes}",
        lambda: build(run_ours, *tensors()),
        {"SDPA with mask": lambda: build(sdpa_with_mask, *tensors())},
    )


def cases(device: str) -> list[Case]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    settings = CPU_MODULES if device == "cpu" else CUDA_MODULES
    found = [
        module_case(setting, device, dtype, passes, build)
        for setting in settings
        for dtype in dtypes
        for passes, build in PASSES
    ]
    return found + [operator_case(device, dtype, passes, build) for dtype in dtypes for passes, build in PASSES]
