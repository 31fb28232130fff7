"""Sequence attention with a band of position logits against SDPA with the equivalent mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_plugins.ops import sequence_attention

from ..case import Case, Run, forward, forward_backward

PASSES = (("forward", forward), ("forward+backward", forward_backward))
LENGTHS = (256, 512, 1024, 2048)
KERNELS = (7, 21, 31)
GOAL = 1.5  # forward and backward


def ours(query: Tensor, key: Tensor, value: Tensor, band: Tensor, causal: bool) -> Tensor:
    scale = query.shape[-1] ** -0.5
    return sequence_attention(query, key, value, band_logits=band, causal=causal, scale=scale)


def masked(query: Tensor, key: Tensor, value: Tensor, band: Tensor, causal: bool) -> Tensor:
    """Compute SDPA with the band as its mask, by a padded view: T rows of length T + K, read one shorter."""
    B, M, T, K = band.shape
    sheared = F.pad(band, (0, T)).flatten(2)[..., : T * (T + K - 1)].unflatten(2, (T, T + K - 1))
    left = K - 1 if causal else K // 2
    mask = sheared[..., left : left + T]
    if mask.is_cuda:
        mask = mask.contiguous()  # SDPA ends with a misaligned address otherwise
    if causal:
        later = torch.ones(T, T, dtype=torch.bool, device=band.device).triu(1)
        mask = mask.masked_fill(later, float("-inf"))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def case(T: int, K: int, causal: bool, device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]) -> Case:
    B, M, d = 4, 8, 64

    def prepare(function: Callable[..., Tensor]) -> Callable[[], Run]:
        def run() -> Run:
            shapes = (*((B, M, T, d),) * 3, (B, M, T, K))
            tensors = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
            return build(lambda *t: function(*t, causal), *tensors)

        return run

    return Case(
        f"{'causal ' if causal else ''}band, B {B}, M {M}, d {d}, T {T}, k {K}, "
        f"{str(dtype).removeprefix('torch.')}, {passes}",
        prepare(ours),
        {"SDPA with a mask": prepare(masked)},
        GOAL if passes != "forward" else None,
    )


def cases(device: str) -> list[Case]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    every = [(device, dtype, passes, build) for dtype in dtypes for passes, build in PASSES]
    found = [case(T, K, False, *rest) for T in LENGTHS for K in KERNELS for rest in every]
    return found + [case(T, 11, True, *rest) for T in LENGTHS for rest in every]
