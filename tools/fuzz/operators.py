"""What is fuzzed, and its calls by number: operators, ``mmcv_ext``, the stand-in for mmcv's, and ``modules``."""

from __future__ import annotations

from torch import Tensor

from . import attention, broken, check, mmcv_ext, module_calls, sampled
from .call import Call, in_one_line
from .draw import Draw

OPERATORS = {
    "window_attention": attention.window,
    "global_attention": attention.everywhere,
    "sequence_attention": attention.sequence,
    "criss_cross_attention": attention.criss_cross,
    "deform_conv2d": sampled.convolution,
    "deformable_attention": sampled.deformable,
}
OTHERS = {"mmcv_ext": mmcv_ext.draw, "modules": module_calls.Scene}
NAMES = (*OPERATORS, *OTHERS)


def legal_call(operator: str, seed: int, index: int, device: str = "cpu") -> Call:
    """Return call number ``index`` of a run, with a gradient of its output and its source of random numbers."""
    source = Draw(operator, seed, index, device)
    call = OPERATORS[operator](source)
    call.deterministic = source.chance(0.3)
    call.backend = "torch" if source.chance(0.2) else None
    call.workspace = source.choice((1 << 10, 1 << 13)) if source.chance(0.5) else None
    call.differentiated = [name for name in call.floats() if source.chance(0.6)]
    meta = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in call.arguments.items()}
    shape = call.function(**meta).shape
    call.grad = source.finish(source.normal(*shape), call.dtype())
    call.source = source
    return call


def drawn(name: str, seed: int, index: int, device: str = "cpu") -> Call | mmcv_ext.Scene | module_calls.Scene:
    """Return a call by its number."""
    if name in OPERATORS:
        return legal_call(name, seed, index, device)
    return OTHERS[name](Draw(name, seed, index, device))


def judge(name: str, seed: int, index: int, device: str = "cpu") -> tuple[list[str], float]:
    """Run one call, then the same call with one argument broken; return its faults, and its error in roundings."""
    try:
        call = drawn(name, seed, index, device)
        faults, roundings = check.problems(call) if isinstance(call, Call) else call.problems()
    except Exception as error:
        return [f"{type(error).__name__}: {in_one_line(error, 300)}"], 0.0
    return faults + (broken.problems(call) if isinstance(call, Call) else call.broken()), roundings
