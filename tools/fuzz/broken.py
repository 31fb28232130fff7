"""Valid calls with one broken argument, which must raise a ValueError or a TypeError that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .call import Call, in_one_line, in_words
from .draw import DTYPES, Draw


def draw(call: Call) -> tuple[str, Any] | None:
    """Draw name and value of one broken argument; return None if twenty attempts find none."""
    source = call.source
    for _ in range(20):
        name = source.choice(list(call.arguments))
        value = call.arguments[name]
        if isinstance(value, Tensor):
            for broken in _tensor(source, call, name, value):
                return name, broken
        elif name in call.options:
            return name, _option(source, call.options[name], value)
    return None


def problems(call: Call) -> list[str]:
    """Describe faults in the operator's response to one broken argument, if one can be drawn."""
    if (mistake := draw(call)) is None:
        return []
    name, value = mistake
    arguments = {**call.arguments, name: value}
    what = f"with {name} = {in_words(value)}"
    try:
        output = call.function(**arguments)
    except (ValueError, TypeError) as error:
        if re.search(rf"\b{name}\b", str(error)):
            return []
        return [f"{what}: the {type(error).__name__} does not name {name}: {in_one_line(error)}"]
    except Exception as error:
        return [f"{what}: {type(error).__name__} instead of ValueError or TypeError: {in_one_line(error)}"]
    return [f"{what}: no error, but a result of shape {tuple(output.shape)}"]


def _tensor(source: Draw, call: Call, name: str, value: Tensor) -> Iterator[Any]:
    """Yield one broken value for a tensor, or nothing if the drawn value is legal."""
    kind = source.choice(("rank", "size", "size", "size", "dtype", "device", "type", "layout"))
    others = [n for n in call.floats() if n != name]
    if kind == "rank" and value.dim():
        axis = source.random.randrange(value.dim())
        if source.chance(0.5) or value.shape[axis] == 0:
            yield value.unsqueeze(axis)
        else:
            yield value.select(axis, 0)
    elif kind == "size" and value.dim():
        axis = source.random.randrange(value.dim())
        size = value.shape[axis]
        size = source.choice([n for n in (0, 1, size - 1, size + 1, size + 1, 2 * size, 3 * size + 1) if n >= 0])
        shape = (*value.shape[:axis], size, *value.shape[axis + 1 :])
        shapes = {n: tuple(t.shape) for n, t in call.tensors().items()}
        if not call.legal({**shapes, name: shape}):
            yield torch.zeros(shape, dtype=value.dtype, device=value.device)
    elif kind == "dtype":
        wrong = [torch.int64, torch.bool, torch.complex64, torch.uint8]
        if not value.is_floating_point():
            wrong = [torch.int64, torch.float32]
        elif others and not call.mixes:
            wrong += [dtype for dtype in DTYPES if dtype != value.dtype]
        yield torch.zeros(value.shape, dtype=source.choice(wrong), device=value.device)
    elif kind == "device" and others:
        yield value.to("meta")
    elif kind == "layout" and value.is_floating_point():
        yield value.to_sparse()
    elif kind == "type":
        wrong = [value.tolist(), 3, "value", object, [value], value.numel() > 0]
        if name == "outside_logits":  # may also be a number
            wrong = [value.tolist(), "value", object, [value]]
        if not call.given(set(call.tensors()) - {name}):
            wrong += [None] * 3
        yield source.choice(wrong)


def _option(source: Draw, kind: str, value: Any) -> Any:
    """Draw a broken value for an option of one of the kinds of :attr:`.Call.options`."""
    wrong: list[Any] = ["3", object, [None], torch.ones(3), {}, 1j]
    if not kind.endswith("?"):
        wrong.append(None)
    if kind.startswith("number"):
        wrong += [float("nan"), float("nan"), float("inf"), [1.0]]
        if not kind.endswith("?"):  # -inf is a valid outside logit
            wrong.append(-float("inf"))
    elif kind.startswith("ints"):
        least = int(kind.removesuffix("?").partition(">=")[2])
        length = len(value) if isinstance(value, (tuple, list)) else 2
        numbers = [least - 1, -3, 2.5, float("nan"), 2**63, 2**31]
        wrong += [*numbers, [], [least] * (length + 2), [*[least] * (length - 1), source.choice(numbers)]]
    elif kind.startswith("bool"):
        wrong += [2, 1.0, [True], float("nan")]
    return source.choice(wrong)
