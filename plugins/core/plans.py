"""Plans: what Triton's backends did for a call, repeated for calls of the same kind.

What they decide (tiles, strides, variants of a kernel) depends on shapes, strides, dtypes and options alone, and takes
several times as long as the launch that follows. If the first call of a kind launches kernels, the second is recorded,
PyTorch's operations and launches in order; later ones repeat them with their own tensors. Calls that other backends
serve are not recorded, because recording keeps all tensors of a call, which may exceed the memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .devices import device_of

MOST = 1024  # kinds of calls that are kept
_plans: dict[tuple[Any, ...], Plan | bool] = {}  # True: to be recorded, False: not repeatable


class Step(NamedTuple):
    """One operation or launch: its function, its arguments, and which of them are tensors of the call, by number."""

    function: Callable[..., Any]
    args: list[Any]
    tensors: list[tuple[int, int]]
    adds: bool  # the result is a new tensor of the call


class Plan(NamedTuple):
    """Steps of a call, and the numbers of the tensors that it returns; ``single`` where that is one, in no tuple."""

    steps: list[Step]
    results: list[int]
    single: bool

    def repeat(self, tensors: list[Tensor]) -> Any:
        with device_of(tensors[0]):
            for function, args, places, adds in self.steps:
                args = args.copy()
                for place, number in places:
                    args[place] = tensors[number]
                result = function(*args)
                if adds:
                    tensors.append(result)
        return tensors[self.results[0]] if self.single else tuple([tensors[number] for number in self.results])


class _Recorder(TorchDispatchMode):
    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        # All tensors of the call are held until it ends: the id of a freed one would be that of a later one, and the
        # repeated call would read its memory instead.
        self.tensors = list(tensors)
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.steps: list[Step] = []
        self.repeatable = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.repeatable &= isinstance(result, Tensor) and not any(map(_holds_tensors, kwargs.values()))
        function = getattr(func, "_op", func)  # without a frame of Python
        self.add(partial(function, **kwargs) if kwargs else function, args, result)
        return result

    def add(self, function: Callable[..., Any], args: Sequence[Any], result: Tensor | None) -> None:
        tensors = [(n, self.numbers.get(id(arg), -1)) for n, arg in enumerate(args) if isinstance(arg, Tensor)]
        lists = (arg for arg in args if isinstance(arg, (list, tuple)))
        self.repeatable &= all(number >= 0 for _, number in tensors) and not any(map(_holds_tensors, lists))
        before = len(self.tensors)
        if result is not None and id(result) not in self.numbers:
            self.numbers[id(result)] = before
            self.tensors.append(result)
        constants = [None if isinstance(arg, Tensor) else arg for arg in args]
        self.steps.append(Step(function, constants, tensors, adds=len(self.tensors) > before))

    def plan(self, results: Any) -> Plan | bool:
        single = isinstance(results, Tensor)
        numbers = [self.numbers.get(id(result), -1) for result in ([results] if single else results)]
        return self.repeatable and min(numbers) >= 0 and Plan(self.steps, numbers, single)


def _holds_tensors(argument: Any) -> bool:
    return isinstance(argument, Tensor) or (isinstance(argument, (list, tuple)) and any(map(_holds_tensors, argument)))


class _State(threading.local):
    recorder: _Recorder | None = None
    launches = 0


_state = _State()


def forget() -> None:
    """Drop all plans, so that the next calls choose again."""
    _plans.clear()


def launched(run: Callable[..., Any] | None, args: Sequence[Any]) -> None:
    """Count and record the launch of a kernel by ``run`` with ``args``; None where that may not be repeated."""
    _state.launches += 1
    if (recorder := _state.recorder) is not None:
        recorder.repeatable &= run is not None
        recorder.add(run or len, args, None)


def replay(function: Callable[..., Any], state: tuple[Any, ...], args: Sequence[Any]) -> Any:
    """Return ``function(*args)``, a tensor or a tuple of tensors, by the plan of such calls where there is one.

    Args:
        function: Depends on nothing but ``args`` and ``state``.
        state: Hashable, with a name of the function.
        args: Tensors, None, numbers, and lists of numbers.
    """
    kind = [*state]
    tensors = []
    for arg in args:
        if isinstance(arg, Tensor):
            tensors.append(arg)
            # With the alignment: if it was one of 16 bytes, Triton compiled the recorded launch for loads of as many,
            # which fault at other addresses.
            kind += (arg.shape, arg.stride(), arg.dtype, arg.data_ptr() % 16)
        else:
            kind.append(tuple(arg) if isinstance(arg, list) else arg)
    key = tuple(kind)
    plan = _plans.get(key)
    if isinstance(plan, Plan):
        return plan.repeat(tensors)
    # Not where one tensor is two arguments, as in attention of a map to itself: the recorder knows tensors by id, and
    # a later call of these shapes would have one of its arguments in both places.
    if plan and len({*map(id, tensors)}) == len(tensors):
        _state.recorder = _Recorder(tensors)
        try:
            with _state.recorder as recorder:
                results = function(*args)
        finally:
            _state.recorder = None
        _plans[key] = recorder.plan(results)
        return results
    before = _state.launches
    results = function(*args)
    if plan is None:
        if len(_plans) >= MOST:
            forget()
        _plans[key] = _state.launches > before
    return results
