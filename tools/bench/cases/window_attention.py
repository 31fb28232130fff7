"""Window attention against the unfold formulation, and dynamic convolution against fairseq's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_plugins.ops import window_attention

from ..case import COMPILED, Case, Peer, in_half, normal, problem
from .flex import blocks, flex, flex_peer

KERNEL_SIZES = (3, 7, 13)
C, S = 256, 56
Maps = Callable[..., Tensor]


def heads(x: Tensor, M: int) -> Tensor:
    """View (B, C, H, W) as (B, M, H, W, C / M)."""
    return x.unflatten(1, (M, -1)).permute(0, 1, 3, 4, 2)


def maps(x: Tensor) -> Tensor:
    """Return (B, M, H, W, d) as (B, C, H, W)."""
    return x.permute(0, 1, 4, 2, 3).flatten(1, 2)


def ours(k: int, M: int, border: str) -> Maps:
    """Return our operator on channels-last maps, with heads as views."""

    def run(query: Tensor | None, key: Tensor | None, value: Tensor, logits: Tensor | None) -> Tensor:
        q, n, v = (None if t is None else heads(t, M) for t in (query, key, value))
        return maps(window_attention(q, n, v, logits, k, border=border))  # type: ignore[arg-type]

    return run


def unfolded(k: int, M: int, border: str) -> Maps:
    """Return attention with every window unfolded, as in most public code."""

    def run(query: Tensor | None, key: Tensor | None, value: Tensor, logits: Tensor | None) -> Tensor:
        B, C, H, W = value.shape

        def windows(x: Tensor) -> Tensor:
            if border == "inside":
                y, z = ((torch.arange(n, device=x.device) - k // 2).clamp(0, n - k) for n in (H, W))
                moved = F.unfold(x, k).unflatten(2, (H - k + 1, W - k + 1))[..., y.unsqueeze(1), z]
                return moved.reshape(B, M, C // M, k * k, H * W)
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

    return run


def flex_window(k: int, M: int) -> Maps:
    """Return FlexAttention with a window as its mask, and with logits of position if there are any."""

    def inside(b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
        return ((q // S - n // S).abs() <= k // 2) & ((q % S - n % S).abs() <= k // 2)

    mask = blocks(inside, S * S, S * S)

    def run(query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, q: Tensor, n: Tensor) -> Tensor:
            tap = (n // S - q // S + k // 2) * k + n % S - q % S + k // 2
            return s + logits.flatten(2, 3)[b, h, q, tap.clamp(0, k * k - 1)]  # type: ignore[union-attr]

        return maps(flex(*(heads(t, M) for t in (query, key, value)), None if logits is None else score, mask))

    return torch.compile(run, dynamic=False)


def natten(k: int, M: int) -> Maps:
    from natten import na2d

    if na2d.__module__.startswith("attn_plugins."):
        raise ImportError("natten is not installed: attn_plugins stands in for it")

    def run(query: Tensor, key: Tensor, value: Tensor, logits: None) -> Tensor:
        q, n, v = (heads(t, M).permute(0, 2, 3, 1, 4).contiguous() for t in (query, key, value))
        return maps(na2d(q, n, v, kernel_size=k, scale=1.0).permute(0, 3, 1, 2, 4))

    return run


def fairseq(method: str, C: int, K: int, M: int) -> Maps:
    """Return fairseq's module without its linear layer, which both would need."""
    from fairseq.modules.dynamic_convolution import DynamicConv1dTBC

    layer = DynamicConv1dTBC(C, K, padding_l=K // 2, num_heads=M, weight_softmax=True).eval()
    layer.weight_linear = torch.nn.Identity()
    layer.weight_linear.out_features = M * K
    return lambda x, weights: getattr(layer, method)(x, None, weights)


def dynamic_1d(K: int, M: int) -> Maps:
    def run(x: Tensor, weights: Tensor) -> Tensor:
        value, logits = (t.unflatten(2, (M, -1)).permute(1, 2, 0, 3) for t in (x, weights))
        return window_attention(None, None, value, logits, K, border="zero").permute(2, 0, 1, 3).flatten(2)

    return run


def cases(device: str) -> list[Case]:
    B = 1 if device == "cpu" else 16
    cpu, rows = device == "cpu", []

    def case(title: str, k: int, M: int, content: bool, position: bool, main: bool, border: str = "") -> list[Case]:
        shape, border = (B, C, S, S), border or ("exclude" if content else "zero")
        logits = (B, M, S, S, k * k) if position else None
        peers: dict[str, Peer] = {"unfold": Peer(lambda: unfolded(k, M, border))}
        if content and not cpu and border == "exclude":
            peers |= flex_peer(lambda: flex_window(k, M)) if position else {
                "FlexAttention": Peer(lambda: flex_window(k, M)), "NATTEN": Peer(lambda: natten(k, M)),
            }  # fmt: skip
        return problem(
            f"{title}, ({B},{C},{S},{S}), {k}x{k}, {M} heads",
            device,
            normal(*(shape if content else None for _ in range(2)), shape, logits),
            lambda: ours(k, M, border),
            peers,
            channels_last={"ours", *peers} - {"unfold"},
            definitions=COMPILED if content and main else (),
            main=main,
        )

    for k in KERNEL_SIZES:
        rows += case("content", k, 8, True, False, k == 7)
        rows += case("content and position", k, 8, True, True, k == 7)
    rows += case("neighborhood, content and position", 7, 8, True, True, False, "inside")
    T, batch, width, K, M = 512, 4, 512, 31, 16
    rows += problem(
        f"dynamic convolution 1-D, T {T}, B {batch}, C {width}, K {K}, {M} groups",
        device,
        normal((T, batch, width), (T, batch, M * K)),
        lambda: dynamic_1d(K, M),
        {
            "fairseq, band": lambda: fairseq("_forward_expanded", width, K, M),
            "fairseq, unfold": lambda: fairseq("_forward_unfolded", width, K, M),
        },
    )
    shape = 1, C, S, S
    content, taps = normal(shape, shape, shape, None), normal(None, None, shape, (1, 16, S, S, 49))
    rows += in_half(f"content, (1,{C},{S},{S}), 7x7, 8 heads", device, content, lambda: ours(7, 8, "exclude"))
    rows += in_half(f"dynamic convolution, (1,{C},{S},{S}), 7x7, 16 heads", device, taps, lambda: ours(7, 16, "zero"))
    return rows + case("dynamic convolution", 7, 16, False, True, True)
