"""What is fuzzed, and its calls by number: operators, ``mmcv_ext``, the stand-in for mmcv's, and ``modules``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from . import attention, broken, check, mmcv_ext, module_calls, sampled
from .call import Call
from .draw import Draw

OPERATORS = {
    "window_attention": attention.window,
    "global_attention": attention.everywhere,
    "sequence_attention": attention.sequence,
    "criss_cross_attention": attention.criss_cross,
    "deform_conv2d": sampled.convolution,
    "deformable_attention": sampled.deformable,
}
OTHERS = {"mmcv_ext": mmcv_ext, "modules": module_calls}
NAMES = (*OPERATORS, *OTHERS)


class Verdict(NamedTuple):
    """Result of one call: descriptions of its faults, and the largest error in roundings."""

    faults: list[str]
    roundings: float


def legal_call(operator: str, seed: int, index: int, device: str = "cpu") -> tuple[Draw, Call, Tensor]:
    """Return call number ``index`` of a run, its source of random numbers, and a gradient of its output."""
    source = Draw(operator, seed, index, device)
    call = OPERATORS[operator](source)
    call.deterministic = source.chance(0.3)
    call.backend = "torch" if source.chance(0.2) else None
    call.workspace = source.choice((1 << 10, 1 << 13)) if source.chance(0.5) else None
    call.differentiated = [name for name in call.floats() if source.chance(0.6)]
    meta = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in call.arguments.items()}
    shape = call.function(**meta).shape
    grad = source.finish(source.normal(*shape), call.dtype())
    call.buffers = source.buffers
    return source, call, grad


def judge(operator: str, seed: int, index: int, device: str = "cpu") -> Verdict:
    """Run one call, then the same call with one argument broken."""
    if operator in OTHERS:
        return Verdict(*OTHERS[operator].judge(seed, index, device))
    source, call, grad = legal_call(operator, seed, index, device)
    try:
        faults, roundings = check.problems(call, grad)
    except Exception as error:
        faults, roundings = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"], 0.0
    if (mistake := broken.draw(source, call)) is not None:
        faults += broken.problems(call, *mistake)
    return Verdict(faults, roundings)


def describe(operator: str, seed: int, index: int, device: str = "cpu") -> str:
    """Describe a call, one argument per line."""
    if operator in OTHERS:
        return OTHERS[operator].describe(seed, index, device)
    return legal_call(operator, seed, index, device)[1].describe()
