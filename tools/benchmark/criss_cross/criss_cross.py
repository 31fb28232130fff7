"""Criss-cross attention against mmcv's module: as a module, as the operator, and with position logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attn_plugins.modules import CrissCrossAttention2d
from attn_plugins.ops import criss_cross_attention

from ..case import Case, Run, forward, forward_backward

PASSES = (("forward", forward), ("forward+backward", forward_backward))
# (B, C, H, W): Cityscapes at 769 and ADE20K at 512, both at stride 8; the goals apply to the first
MODULES = {"cpu": ((1, 512, 97, 97), (2, 512, 64, 64)), "cuda": ((1, 512, 97, 97), (2, 512, 97, 97), (8, 512, 64, 64))}
# (B, M, H, W, d, dv), with position logits
OPERATORS = ((1, 1, 97, 97, 64, 512), (2, 8, 64, 64, 64, 64))
GOALS = {"cpu": 1.5, "cuda": 1.3}  # on CUDA against the fastest peer, which is compiled; 2.5 against the eager one


class Projections(nn.Module):
    """Parameters of mmcv's module, with its names and the same initial values in every instance."""

    def __init__(self, C: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query_conv, self.key_conv = nn.Conv2d(C, C // 8, 1), nn.Conv2d(C, C // 8, 1)
        self.value_conv = nn.Conv2d(C, C, 1)
        self.gamma = nn.Module()
        self.gamma.scale = nn.Parameter(torch.tensor(0.5))  # with 0, no gradient would reach the attention


class Operator(Projections):
    """The operator with minimal overhead: one product for all projections, gamma on the values.

    The product reads maps of any memory format and returns channels-last ones. The output is also channels-last, and
    ``x`` is added to it in place: only the values and the output are written with C channels.
    """

    def forward(self, x: Tensor) -> Tensor:
        value, gamma = self.value_conv, self.gamma.scale
        weight = torch.cat((self.query_conv.weight, self.key_conv.weight, value.weight * gamma)).flatten(1)
        bias = torch.cat((self.query_conv.bias, self.key_conv.bias, value.bias * gamma))
        pixels = x.flatten(2).transpose(1, 2)  # (B, H * W, C)
        projected = torch.baddbmm(bias, pixels, weight.t().expand(len(x), -1, -1))
        widths = [layer.out_channels for layer in (self.query_conv, self.key_conv, value)]
        query, key, values = projected.unflatten(1, x.shape[2:]).unsqueeze(1).split(widths, -1)
        output = criss_cross_attention(query, key, values)
        output += x.permute(0, 2, 3, 1).unsqueeze(1)
        return output.squeeze(1).permute(0, 3, 1, 2)


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


def compiled(make: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda C: torch.compile(make(C))  # type: ignore[return-value]


def module_case(
    title: str,
    make_ours: Callable[[int], nn.Module],
    shape: tuple,
    device: str,
    dtype: torch.dtype,
    passes: str,
    build: Callable[..., Run],
) -> Case:
    def prepare(make: Callable[[int], nn.Module]) -> Callable[[], Run]:
        def run() -> Run:
            module = make(shape[1]).to(device, dtype)
            x = torch.randn(*shape, device=device, dtype=dtype)
            if build is forward:
                return forward(module, x)
            return forward_backward(module, x, parameters=tuple(module.parameters()))

        return run

    peers = {"mmcv": mmcv, "einsum": Plain}
    if device == "cuda":
        peers |= {f"{name}, compiled": compiled(make) for name, make in tuple(peers.items())}
    return Case(
        f"{title}, {shape}, {str(dtype).removeprefix('torch.')}, {passes}",
        prepare(make_ours),
        {name: prepare(make) for name, make in peers.items()},
        GOALS[device],
    )


def on_channels_last(query: Tensor, key: Tensor, value: Tensor, position_logits: Tensor) -> Tensor:
    output = criss_cross_attention(*(t.permute(0, 1, 3, 4, 2) for t in (query, key, value)), position_logits)
    return output.permute(0, 1, 4, 2, 3)


def operator_case(setting: tuple, device: str, dtype: torch.dtype, passes: str, build: Callable[..., Run]) -> Case:
    """Return a case with projections in each implementation's preferred memory order."""
    B, M, H, W, d, dv = setting

    def prepare(function: Callable[..., Tensor], channels_last: bool) -> Callable[[], Run]:
        def run() -> Run:
            def draw(width: int) -> Tensor:
                heads = torch.randn(B, M * width, H, W, device=device, dtype=dtype)
                if channels_last:
                    heads = heads.contiguous(memory_format=torch.channels_last)
                return heads.unflatten(1, (M, width))

            logits = torch.randn(B, H, W, M, H + W, device=device, dtype=dtype).permute(0, 3, 1, 2, 4)
            return build(function, draw(d), draw(d), draw(dv), logits)

        return run

    peers = {"einsum": prepare(einsums, False)}
    if device == "cuda":
        peers["einsum, compiled"] = prepare(torch.compile(einsums), False)
    return Case(
        f"operator with position logits, B {B}, {M} heads, {H}x{W}, d {d}, dv {dv}, "
        f"{str(dtype).removeprefix('torch.')}, {passes}",
        prepare(on_channels_last, True),
        peers,
        GOALS[device],
    )


def cases(device: str) -> list[Case]:
    dtypes = (torch.float32,) if device == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
    every = [(device, dtype, passes, build) for dtype in dtypes for passes, build in PASSES]
    kinds = (("module", ours), ("operator and projections", Operator))
    found = [module_case(*kind, shape, *rest) for shape in MODULES[device] for kind in kinds for rest in every]
    return found + [operator_case(setting, *rest) for setting in OPERATORS for rest in every]
