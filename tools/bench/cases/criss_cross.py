"""Criss-cross attention against mmcv's module: as a module, as the operator, and with position logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_plugins.modules import CrissCrossAttention2d
from attn_plugins.ops import criss_cross_attention

from ..case import COMPILED, Case, Maker, Peer, normal, problem
from .flex import blocks, flex

# (B, C, H, W): Cityscapes at 769 and ADE20K at 512, both at stride 8
MODULES = {"cpu": ((1, 512, 97, 97), (2, 512, 64, 64)), "cuda": ((1, 512, 97, 97), (2, 512, 97, 97), (8, 512, 64, 64))}
# (B, M, H, W, d, dv), with position logits
OPERATORS = ((1, 1, 97, 97, 64, 512), (2, 8, 64, 64, 64, 64))


class Projections(nn.Module):
    """Parameters of mmcv's module, with its names and the same initial values in every instance."""

    def __init__(self, C: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query_conv, self.key_conv = nn.Conv2d(C, C // 8, 1), nn.Conv2d(C, C // 8, 1)
        self.value_conv = nn.Conv2d(C, C, 1)
        self.gamma = nn.Module()
        self.gamma.scale = nn.Parameter(torch.tensor(0.5))  # with 0, no gradient would reach the attention


class Plain(Projections):
    """Implementation in einsums, for use without mmcv."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (layer(x).unsqueeze(1) for layer in (self.query_conv, self.key_conv, self.value_conv))
        return x + self.gamma.scale * einsums(query, key, value, None).squeeze(1)


def einsums(query: Tensor, key: Tensor, value: Tensor, position_logits: Tensor | None) -> Tensor:
    """Compute criss-cross attention on heads (B, M, width, H, W), the output of channels-first projections."""
    H = query.shape[3]
    own = torch.eye(H, device=query.device, dtype=torch.bool).unsqueeze(1)
    column = torch.einsum("bmchw,bmciw->bmhwi", query, key)
    logits = torch.cat((column, torch.einsum("bmchw,bmchj->bmhwj", query, key)), -1)
    if position_logits is not None:
        logits = logits + position_logits
    own = nn.functional.pad(own, (0, logits.shape[-1] - H))
    weights = logits.masked_fill(own, float("-inf")).softmax(-1)
    column = torch.einsum("bmhwi,bmciw->bmchw", weights[..., :H], value)
    return column + torch.einsum("bmhwj,bmchj->bmchw", weights[..., H:], value)


def ours(C: int) -> nn.Module:
    module = CrissCrossAttention2d(C)
    module.load_state_dict(Projections(C).state_dict())
    return module


def mmcv(C: int) -> nn.Module:
    from mmcv.ops.cc_attention import CrissCrossAttention

    module = CrissCrossAttention(C)
    module.load_state_dict(Projections(C).state_dict())
    return module


def with_logits(function: Callable[..., Tensor], M: int) -> Callable[..., Tensor]:
    """Return a function of maps (B, M * width, H, W) and logits, for one of heads (B, M, width, H, W)."""
    return lambda q, k, v, logits: function(*(t.unflatten(1, (M, -1)) for t in (q, k, v)), logits)


def on_channels_last(query: Tensor, key: Tensor, value: Tensor, position_logits: Tensor) -> Tensor:
    output = criss_cross_attention(*(t.permute(0, 1, 3, 4, 2) for t in (query, key, value)), position_logits)
    return output.permute(0, 1, 4, 2, 3)


def flex_cross(S: int) -> Callable[..., Tensor]:
    mask = blocks(lambda b, h, q, n: (q // S == n // S) | (q % S == n % S), S * S, S * S)
    return torch.compile(lambda *heads: flex(*heads, mask=mask), dynamic=False)


def compiled(peers: dict[str, Maker], device: str) -> dict[str, Maker | Peer]:
    """Return the peers, on CUDA also compiled ones."""
    more = {f"{name}, compiled": Peer(make, compiled=True) for name, make in peers.items()}
    return {**peers, **(more if device == "cuda" else {})}


def cases(device: str) -> list[Case]:
    rows = []
    for shape in MODULES[device]:
        C = shape[1]
        peers = compiled({"mmcv": lambda C=C: mmcv(C), "einsum": lambda C=C: Plain(C)}, device)
        rows += problem(
            f"module, {shape}", device, normal(shape), lambda C=C: ours(C), peers,
            kinds=("float32", "autocast to bfloat16") if device == "cpu" else None, main=shape[:2] == (2, 512),
        )  # fmt: skip
    for B, M, H, W, d, dv in OPERATORS:
        peers = compiled({"einsum": lambda M=M: with_logits(einsums, M)}, device)
        maps = [(B, M * width, H, W) for width in (d, d, dv)]

        def inputs(dtype: torch.dtype, maps: list = maps, logits: tuple = (B, H, W, M, H + W)) -> list[Tensor]:
            return [
                *(torch.randn(shape, dtype=dtype) for shape in maps),
                torch.randn(logits, dtype=dtype).permute(0, 3, 1, 2, 4),
            ]

        rows += problem(
            f"operator with position logits, B {B}, {M} heads, {H}x{W}, d {d}, dv {dv}", device, inputs,
            lambda M=M: with_logits(on_channels_last, M), peers, channels_last=("ours",), main=False,
        )  # fmt: skip
    if device == "cuda":
        S = 97
        rows += problem(
            f"content, B 1, {S}x{S}, d 64, dv 512", device, normal(*[(1, 1, S, S, 64)] * 2, (1, 1, S, S, 512)),
            lambda: criss_cross_attention, {"FlexAttention": lambda: flex_cross(S)}, definitions=COMPILED,
        )  # fmt: skip
    return rows
