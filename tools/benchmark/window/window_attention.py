"""Window attention against the unfold formulation, and dynamic convolution against fairseq's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_plugins.ops import window_attention

from ..case import Case, Run, forward, forward_backward

PASSES = (("forward", forward), ("forward+backward", forward_backward))
# kernel size -> goal on CPU; on CUDA there is one for all
LOCAL = {3: 3.0, 7: 8.0, 13: 12.0}
DYNAMIC_1D, DYNAMIC_2D = 4.0, 8.0
CUDA_GOALS = {"local": 10.0, "dynamic": 2.5}


def heads(x: Tensor, M: int) -> Tensor:
    """View (B, C, H, W) as (B, M, H, W, C / M)."""
    return x.unflatten(1, (M, -1)).permute(0, 1, 3, 4, 2)


def ours(query: Tensor | None, key: Tensor | None, value: Tensor, logits: Tensor | None, k: int, border: str) -> Tensor:
    """Compute our operator on channels-last maps, with heads as views."""
    M = 8 if logits is None else logits.shape[1]
    q, n, v = (
        None if t is None else heads(t.contiguous(memory_format=torch.channels_last), M) for t in (query, key, value)
    )
    assert v is not None
    return window_attention(q, n, v, logits, k, border=border).permute(0, 1, 4, 2, 3).flatten(1, 2)


def unfolded(
    query: Tensor | None, key: Tensor | None, value: Tensor, logits: Tensor | None, k: int, border: str
) -> Tensor:
    """Compute attention with every window unfolded, as in most public code."""
    B, C, H, W = value.shape
    M = 8 if logits is None else logits.shape[1]

    def windows(x: Tensor) -> Tensor:
        return F.unfold(x, k, padding=k // 2).view(B, M, C // M, k * k, H * W)

    total: Tensor | float = 0.0
    if query is not None and key is not None:
        total = (query.view(B, M, C // M, 1, H * W) * windows(key)).sum(2)
    if logits is not None:
        total = total + logits.flatten(2, 3).transpose(2, 3)
    assert isinstance(total, Tensor)
    if border == "exclude":
        outside = F.unfold(value.new_ones(1, 1, H, W), k, padding=k // 2) == 0
        total = total.masked_fill(outside, float("-inf"))
    return (total.softmax(2).unsqueeze(2) * windows(value)).sum(3).reshape(B, C, H, W)


def map_case(
    title: str, B: int, C: int, S: int, k: int, M: int, content: bool, geometric: bool, goal: float | None, device: str,
    dtype: torch.dtype, passes: str, build: Callable[..., Run],
) -> Case:  # fmt: skip
    border = "exclude" if content else "zero"

    def prepare(function: Callable[..., Tensor]) -> Callable[[], Run]:
        # Each implementation in its own memory format.
        layout = torch.channels_last if function is ours else torch.contiguous_format

        def run() -> Run:
            def draw() -> Tensor:
                return torch.randn(B, C, S, S, device=device, dtype=dtype).contiguous(memory_format=layout)

            maps = [draw() if content else None for _ in range(2)]
            logits = torch.randn(B, M, S, S, k * k, device=device, dtype=dtype) if geometric else None
            return build(lambda *t: function(*t, k, border), *maps, draw(), logits)

        return run

    return Case(
        f"{title}, ({B},{C},{S},{S}), {k}x{k}, {M} heads, {str(dtype).removeprefix('torch.')}, {passes}",
        prepare(ours),
        {"unfold": prepare(unfolded)},
        goal,
    )


def sequence_case(device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]) -> Case:
    """Return the case against fairseq's module without its linear layer, which both would need."""
    T, B, C, K, M = 512, 4, 512, 31, 16

    def prepare(make: Callable[[], Callable[..., Tensor]]) -> Callable[[], Run]:
        def run() -> Run:
            draw = (torch.randn(T, B, n, device=device, dtype=dtype) for n in (C, M * K))
            return build(make(), *draw)

        return run

    def fairseq(method: str) -> Callable[..., Tensor]:
        from fairseq.modules.dynamic_convolution import DynamicConv1dTBC

        layer = DynamicConv1dTBC(C, K, padding_l=K // 2, num_heads=M, weight_softmax=True).to(device, dtype).eval()
        layer.weight_linear = torch.nn.Identity()
        layer.weight_linear.out_features = M * K
        return lambda x, weights: getattr(layer, method)(x, None, weights)

    def own(x: Tensor, weights: Tensor) -> Tensor:
        value, logits = (t.unflatten(2, (M, -1)).permute(1, 2, 0, 3) for t in (x, weights))
        return window_attention(None, None, value, logits, K, border="zero").permute(2, 0, 1, 3).flatten(2)

    return Case(
        f"dynamic convolution 1-D, T {T}, B {B}, C {C}, K {K}, {M} groups, "
        f"{str(dtype).removeprefix('torch.')}, {passes}",
        prepare(lambda: own),
        {
            "fairseq, band": prepare(lambda: fairseq("_forward_expanded")),
            "fairseq, unfold": prepare(lambda: fairseq("_forward_unfolded")),
        },
        DYNAMIC_1D if device == "cpu" else CUDA_GOALS["dynamic"],
    )


def cases(device: str) -> list[Case]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    every = [(device, dtype, passes, build) for dtype in dtypes for passes, build in PASSES]
    B = 1 if device == "cpu" else 16
    found = []
    for k, goal in LOCAL.items():
        goal = goal if device == "cpu" else CUDA_GOALS["local"]
        found += [map_case("content", B, 256, 56, k, 8, True, False, goal, *rest) for rest in every]
        found += [map_case("content and position", B, 256, 56, k, 8, True, True, goal, *rest) for rest in every]
    found += [sequence_case(*rest) for rest in every]
    goal = DYNAMIC_2D if device == "cpu" else CUDA_GOALS["dynamic"]
    return found + [map_case("dynamic convolution", B, 256, 56, 7, 16, False, True, goal, *rest) for rest in every]
