"""Valid calls with one broken argument, which must raise a ValueError or a TypeError that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .draw import DTYPES, Draw

if TYPE_CHECKING:
    from .call import Call

LEGAL = object()  # in place of a broken value: what was drawn is none


def draw(call: Call) -> tuple[str, Any] | None:
    """Draw name and value of one broken argument; return None if twenty attempts find none."""
    for _ in range(20):
        name = call.source.choice(list(call.arguments))
        value, wrong = call.arguments[name], LEGAL
        if isinstance(value, Tensor):
            wrong = _tensor(call.source, call, name, value)
        elif name in call.options:
            wrong = _option(call.source, call.options[name], value)
        if wrong is not LEGAL:
            return name, wrong
    return None


def problems(call: Call) -> list[str]:
    """Describe faults in the operator's response to one broken argument, if one can be drawn."""
    name, value = draw(call) or (None, None)
    return refused(name, value, lambda: call.function(**{**call.arguments, name: value})) if name else []


def refused(name: str, value: Any, call: Callable[[], Any]) -> list[str]:
    """Describe what is wrong with the error of a call whose argument ``name`` is broken."""
    try:
        call()
        fault = "no error"
    except (ValueError, TypeError) as error:
        if re.search(rf"\b{name}\b", str(error)):
            return []
        fault = f"the {type(error).__name__} does not name {name}: {error}"
    except Exception as error:
        fault = f"{type(error).__name__} instead of ValueError or TypeError: {error}"
    return [f"with {name} = {in_words(value)}: {' '.join(fault.split())[:250]}"]


def in_words(value: Any) -> str:
    """Describe an argument in a few words."""
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return f"{kind} strides {value.stride()}" if value.layout == torch.strided else f"{kind} {value.layout}"
    text = repr(value)
    return text if len(text) < 60 else f"{type(value).__name__} {text[:50]}..."


def _tensor(source: Draw, call: Call, name: str, value: Tensor) -> Any:
    """Draw a broken value for a tensor, or LEGAL."""
    kind = source.choice(("rank", "size", "size", "size", "dtype", "device", "type", "layout"))
    others = [n for n in call.floats() if n != name]
    if kind == "rank" and value.dim():
        axis = source.random.randrange(value.dim())
        longer = source.chance(0.5) or value.shape[axis] == 0
        return value.unsqueeze(axis) if longer else value.select(axis, 0)
    if kind == "size" and value.dim():
        axis = source.random.randrange(value.dim())
        size = value.shape[axis]
        size = source.choice([n for n in (0, 1, size - 1, size + 1, size + 1, 2 * size, 3 * size + 1) if n >= 0])
        shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
        shapes = {n: tuple(t.shape) for n, t in call.tensors().items()}
        legal = call.legal({**shapes, name: shape})
        return LEGAL if legal else torch.zeros(shape, dtype=value.dtype, device=value.device)
    if kind == "dtype":
        wrong = [torch.int64, torch.bool, torch.complex64, torch.uint8]
        if not value.is_floating_point():
            wrong = [torch.int64, torch.float32]
        elif others and not call.mixes:
            wrong += [dtype for dtype in DTYPES if dtype != value.dtype]
        return torch.zeros(value.shape, dtype=source.choice(wrong), device=value.device)
    if kind == "device" and others:
        return value.to("meta")
    if kind == "layout" and value.is_floating_point():
        return value.to_sparse()
    if kind == "type":
        wrong = [value.tolist(), 3, "value", object, [value], value.numel() > 0]
        if name == "outside_logits":  # may also be a number
            wrong = [value.tolist(), "value", object, [value]]
        return source.choice(wrong + ([] if call.given(set(call.tensors()) - {name}) else [None] * 3))
    return LEGAL


def _option(source: Draw, kind: str, value: Any) -> Any:
    """Draw a broken value for an option of one of the kinds of ``Call.options``."""
    wrong: list[Any] = ["3", object, [None], torch.ones(3), {}, 1j]
    if not kind.endswith("?"):
        wrong.append(None)
    if kind.startswith("number"):
        wrong += [float("nan"), float("nan"), float("inf"), [1.0]]
        wrong += [] if kind.endswith("?") else [-float("inf")]  # -inf is a valid outside logit
    elif kind.startswith("ints"):
        least = int(kind.removesuffix("?").partition(">=")[2])
        length = len(value) if isinstance(value, (tuple, list)) else 2
        numbers = [least - 1, -3, 2.5, float("nan"), 2**63, 2**31]
        wrong += [*numbers, [], [least] * (length + 2), [*[least] * (length - 1), source.choice(numbers)]]
    elif kind.startswith("bool"):
        wrong += [2, 1.0, [True], float("nan")]
    return source.choice(wrong)
