"""Rows of every public module at a realistic size, compared with the module on the operators' definitions."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attn_plugins import modules
from attn_plugins.modules import Modality
from attn_plugins.modules.entangled_attention import Entangled
from tools.benchmark.case import Case, Run

from .rows import COMPILED, DTYPES, OURS_COMPILED, definitions

Call = tuple[tuple[Any, ...], dict[str, Any]]
B, T, S, C = 4, 32, 36, 512  # captions: batch, words, regions, channels
STEPWISE = ("AttendedLSTM", "ShowAttendTell")  # a loop over words, which takes minutes to compile
LEVELS = ((100, 134), (50, 67), (25, 34), (13, 17))  # of an image of 800 x 1072


def map2d(channels: int = 256, height: int = 50, width: int = 68, batch: int = 2) -> Call:
    return (torch.randn(batch, channels, height, width),), {}


def tokens(length: int, channels: int = C, batch: int = B) -> Call:
    return (torch.randn(batch, length, channels),), {}


def both() -> tuple[Modality, Modality]:
    return Modality(torch.randn(B, S, C)), Modality(torch.randn(B, 12, C))


def named() -> dict[str, Modality]:
    return {"visual": Modality(torch.randn(B, S, C))}


def deformable() -> Call:
    keys = sum(h * w for h, w in LEVELS)
    query, reference = torch.randn(keys, 1, 256), torch.rand(1, keys, 4, 2)
    return (query,), dict(value=query.clone(), reference_points=reference, spatial_shapes=LEVELS)


# Modules and their inputs, by name.
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Call]]] = {
    "AAConv2d": (lambda: modules.AAConv2d(256, 256, 3, 160, 24, 8, input_size=14), lambda: map2d(256, 14, 14, 32)),
    "AlignmentAttention": (
        lambda: modules.AlignmentAttention("additive", C), lambda: ((torch.randn(B, T, C), torch.randn(B, S, C)), {}),
    ),
    "AttendedLSTM": (lambda: modules.AttendedLSTM(C), lambda: ((torch.randn(B, T, C), named()), {})),
    "BilateralCrissCross2d": (lambda: modules.BilateralCrissCross2d(512), lambda: map2d(512, 97, 97, 1)),
    "BilateralNonLocal2d": (lambda: modules.BilateralNonLocal2d(512), lambda: map2d(512, 64, 64, 1)),
    "BilateralSelfAttention": (lambda: modules.BilateralSelfAttention(C, 8), lambda: tokens(512)),
    "CausalDeformableConv1d": (
        lambda: modules.CausalDeformableConv1d(C, C, 3), lambda: ((torch.randn(8, C, 512),), {}),
    ),
    "CrissCrossAttention2d": (lambda: modules.CrissCrossAttention2d(512), lambda: map2d(512, 97, 97, 1)),
    "DeformableConv1d": (
        lambda: modules.DeformableConv1d(C, C, 3, padding=1), lambda: ((torch.randn(8, C, 512),), {}),
    ),
    "DeformableConv2d": (lambda: modules.DeformableConv2d(256, 256, 3, padding=1, modulated=True), map2d),
    "DualWayEncoder": (
        lambda: modules.DualWayEncoder(2048, C, 3), lambda: ((torch.randn(B, S, 2048), torch.randn(B, 12, C)), {}),
    ),
    "DynamicConv1d": (lambda: modules.DynamicConv1d(C, 31), lambda: ((torch.randn(8, C, 512),), {})),
    "DynamicConv2d": (lambda: modules.DynamicConv2d(256, 7), map2d),
    "EntangledAttention": (lambda: modules.EntangledAttention(C, 8), lambda: ((torch.randn(B, T, C), *both()), {})),
    "GatedBilateralController": (
        lambda: modules.GatedBilateralController(C),
        lambda: ((Entangled(*(torch.randn(B, T, C) for _ in range(4))), torch.randn(B, T, C)), {}),
    ),
    "GatedConvBlock": (
        lambda: modules.GatedConvBlock(C), lambda: ((torch.randn(B, T, C), torch.randn(B, T, C), named()), {}),
    ),
    "GeneralizedAttention2d": (lambda: modules.GeneralizedAttention2d(256, 8, kv_stride=2), map2d),
    "GeneralizedAttention2d, 0010": (lambda: modules.GeneralizedAttention2d(256, 8, "0010"), map2d),
    "LocalBilateralConv2d": (lambda: modules.LocalBilateralConv2d(256, 256, 7), lambda: map2d(256, 56, 56, 8)),
    "MultiScaleDeformableAttention": (lambda: modules.MultiScaleDeformableAttention(256, 8, dropout=0.0), deformable),
    "MultiheadAttention": (lambda: modules.MultiheadAttention(C, 8), lambda: tokens(512)),
    "MultiheadSpatialAttention": (lambda: modules.MultiheadSpatialAttention(C, 8), lambda: tokens(512)),
    "MultimodalDecoderBlock": (
        lambda: modules.MultimodalDecoderBlock(C, 8), lambda: ((torch.randn(B, T, C), *both()), {}),
    ),
    "NonLocal1d": (lambda: modules.NonLocal1d(C), lambda: ((torch.randn(B, C, 512),), {})),
    "NonLocal2d": (lambda: modules.NonLocal2d(512), lambda: map2d(512, 64, 64, 1)),
    "NonLocal3d": (lambda: modules.NonLocal3d(256), lambda: ((torch.randn(1, 256, 8, 28, 28),), {})),
    "RelativeSelfAttention": (lambda: modules.RelativeSelfAttention(C, 8), lambda: tokens(512)),
    "ShowAttendTell": (
        lambda: modules.ShowAttendTell(C, C, C), lambda: ((torch.randn(B, T, C), torch.randn(B, S, C)), {}),
    ),
    "SpaceTimeSelfAttention": (
        lambda: modules.SpaceTimeSelfAttention(384, 6),
        lambda: ((torch.randn(2, 1 + 8 * 196, 384), (8, 14, 14), 1), {}),
    ),
    "SpatialSelfAttention": (
        lambda: modules.SpatialSelfAttention(384, 6), lambda: ((torch.randn(32, 196, 384),), {"grid": (14, 14)}),
    ),
    "WindowSelfAttention": (
        lambda: modules.WindowSelfAttention(96, 3, 7, 3), lambda: ((torch.randn(16, 56, 56, 96),), {}),
    ),
}  # fmt: skip


def non_local(axes: int, channels: int) -> nn.Module:
    from mmcv.cnn.bricks import non_local

    return getattr(non_local, f"NonLocal{axes}d")(channels)


def criss_cross(channels: int) -> nn.Module:
    from mmcv.ops.cc_attention import CrissCrossAttention

    return CrissCrossAttention(channels)


# mmcv's modules in plain PyTorch that compute the same from the same parameters, by names of rows. That of generalized
# attention is beside ours of its variant, in the rows of global_attention.
MMCV: dict[str, Callable[[], nn.Module]] = {
    "CrissCrossAttention2d": lambda: criss_cross(512),
    "NonLocal1d": lambda: non_local(1, C),
    "NonLocal2d": lambda: non_local(2, 512),
    "NonLocal3d": lambda: non_local(3, 256),
}


def moved(call: Call, device: str, dtype: torch.dtype, gradients: bool) -> Call:
    """Move the arguments to a device, floating ones to ``dtype``, as leaves with or without gradients."""

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            return value.to(device)
        return value.to(device, dtype).requires_grad_(gradients)

    return pytree.tree_map(move, call)


def floating(values: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point()]


def module_run(call: Callable[..., Any], module: nn.Module, given: Call, backward: bool) -> Run:
    """Return a function that runs a module: the forward only, or also the gradients of inputs and parameters."""
    args, kwargs = given
    if not backward:

        def forward_alone() -> object:
            with torch.no_grad():
                return floating(call(*args, **kwargs))

        return forward_alone
    wanted = floating(given) + [parameter for parameter in module.parameters() if parameter.requires_grad]
    grads = [torch.randn_like(t) for t in floating(call(*args, **kwargs)) if t.requires_grad]

    def both_passes() -> object:
        outputs = [t for t in floating(call(*args, **kwargs)) if t.requires_grad]
        return torch.autograd.grad(outputs, wanted, grads, allow_unused=True)

    return both_passes


def opened(module: nn.Module) -> nn.Module:
    """Draw zero-initialised parameters (gates, gamma, offsets), so that no work is skipped and samples spread."""
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.05)
    return module


def with_own_code(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with a code object of its own, for which torch.compile reuses nothing.

    What was compiled from the definition would otherwise serve the module itself.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(), globals(), run.__name__, None, run.__closure__)


def module_case(name: str, dtype: torch.dtype, backward: bool, device: str) -> Case:
    make, inputs = MODULES[name]

    def prepare(by_definition: bool = False, compiled: bool = False, by_mmcv: bool = False) -> Callable[[], Run]:
        def run() -> Run:
            torch.manual_seed(0)
            module = copy.deepcopy(opened(make()))
            if by_mmcv:
                peer, state = MMCV[name](), module.state_dict()
                peer.load_state_dict({key: state[key.replace(".conv.", ".")] for key in peer.state_dict()})
                module = peer
            module = module.to(device, dtype).train(backward)
            torch.manual_seed(0)
            given = moved(inputs(), device, dtype, backward)
            call: Callable[..., Any] = torch.compile(with_own_code(module), dynamic=False) if compiled else module
            if not by_definition:
                return module_run(call, module, given, backward)
            with definitions():
                inner = module_run(call, module, given, backward)

            def defined() -> object:
                with definitions():
                    return inner()

            return defined

        return run

    words = "forward+backward" if backward else "forward"
    peers = {"definition": prepare(by_definition=True)}
    if name in MMCV:
        peers["mmcv"] = prepare(by_mmcv=True)
    if name not in STEPWISE:
        peers |= {COMPILED: prepare(by_definition=True, compiled=True), OURS_COMPILED: prepare(compiled=True)}
    return Case(f"{name}, {str(dtype).removeprefix('torch.')}, {words}", prepare(), peers)


def cases(device: str) -> list[Case]:
    """Return the rows of all modules, bfloat16 first."""
    return [
        module_case(name, dtype, backward, device)
        for dtype in DTYPES[:2]
        for backward in (True, False)
        for name in MODULES
    ]
