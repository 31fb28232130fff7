"""Sequence attention with a band of position logits against SDPA with the equivalent mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_plugins.ops import sequence_attention

from ..case import COMPILED, Case, Peer, normal, problem
from .flex import blocks, flex, flex_peer

LENGTHS = (256, 512, 1024, 2048)
KERNELS = (7, 21, 31)


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


def attend(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None = None) -> Tensor:
    return sequence_attention(query, key, value, position_logits=logits, scale=query.shape[-1] ** -0.5)


def sdpa(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=logits)


def flex_band(T: int, K: int, causal: bool) -> Callable[..., Tensor]:
    left = K - 1 if causal else K // 2
    mask = blocks(lambda b, h, q, n: q >= n, T, T) if causal else None

    def run(query: Tensor, key: Tensor, value: Tensor, band: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
            tap = n - q + left
            inside = (tap >= 0) & (tap < K)
            return torch.where(inside, s + band[b, h, q, tap.clamp(0, K - 1)], s)

        return flex(query, key, value, score, mask, query.shape[-1] ** -0.5)

    return torch.compile(run, dynamic=False)


def cases(device: str) -> list[Case]:
    B, M, d, rows = 4, 8, 64, []
    settings = [(T, K, False) for T in LENGTHS for K in KERNELS] + [(T, 11, True) for T in LENGTHS]
    for T, K, causal in settings:
        main = T == 1024 and K in (21, 11)
        peers = {"SDPA with a mask": Peer(lambda causal=causal: lambda *t: masked(*t, causal))}
        if device == "cuda" and (main or K == 21):
            peers |= flex_peer(lambda s=(T, K, causal): flex_band(*s))
        rows += problem(
            f"{'causal ' if causal else ''}band, B {B}, M {M}, d {d}, T {T}, k {K}",
            device,
            normal(*[(B, M, T, d)] * 3, (B, M, T, K)),
            lambda causal=causal: lambda *t: ours(*t, causal),
            peers,
            definitions=COMPILED if main else (),
            main=main,
        )
    for title, logits in (("content", None), ("logits of pairs", (2, M, 1024, 1024))):
        rows += problem(
            f"{title}, B 2, M {M}, d {d}, T 1024", device, normal(*[(2, M, 1024, d)] * 3, logits), lambda: attend,
            {"SDPA": lambda: sdpa}, kinds=("bfloat16",),
        )  # fmt: skip
    return rows
