"""Choice of the backend that computes an operator: the first in its table that can and has no reason not to.

::

    with backend("reference"):          # the definition in plain PyTorch, for tests, debugging and benchmarks
        window_attention(...)
    print(explain(window_attention, query, key, value, None, 7))
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

logger = logging.getLogger("attn_plugins")
REFERENCE = "reference"
Gradients = dict[str, Tensor | None]  # by the names of the terms
_SERVING = {
    "eager": "its PyTorch implementation",
    "triton": "its Triton kernels",
    "torchvision": "torchvision's kernels",
}


def never(terms: Any, options: Any) -> None:
    """Return no reason: a backend that can compute everything."""


Predicate = Callable[[Any, Any], "str | None"]  # of terms and options; they depend on no backend that is forced


class Backend(NamedTuple):
    """One way to compute an operator.

    Attributes:
        name: As :func:`backend` and :func:`explain` know it.
        cannot: The reason, in words, why it is unable to compute these terms with these options, or None.
        forward: ``(terms, options)`` to the results, a tensor or a tuple, as the operator's ``fake`` promises them. It
            gets no call of an empty output.
        backward: ``(grad_output, terms, options, *kept, needs)`` to gradients by the names of the terms, as
            ``fake_gradient`` promises them. ``needs`` is True for terms whose gradients are needed; those of others
            are missing, None or empty.
        cannot_backward: Reasons that hold for the backward alone; ``cannot`` applies to it as well.
        prefers_not: The reason why others are to serve, mostly because they are faster; it computes if it is forced.
        prefers_not_backward: Likewise for the backward alone.
    """

    name: str
    cannot: Predicate
    forward: Callable[..., Any]
    backward: Callable[..., Gradients]
    cannot_backward: Predicate | None = None
    prefers_not: Predicate | None = None
    prefers_not_backward: Predicate | None = None

    def refusal(self, terms: Any, options: Any, backward: bool = False, forced: bool = False) -> str | None:
        """Return the reason why this backend does not serve a call, or None; forced, it has no preferences."""
        # Preferences last: they compare sizes, which an export for any size would keep as limits.
        preferences = () if forced else (self.prefers_not, self.prefers_not_backward if backward else None)
        for predicate in (self.cannot, self.cannot_backward if backward else None, *preferences):
            if predicate is not None and (reason := predicate(terms, options)) is not None:
                return reason
        return None


class Failure(str):
    """A reason that holds for every call on a kind of device: :func:`choose` warns once, naming what serves instead."""


class Choice(NamedTuple):
    """The backend that serves, and why those before it do not: some cannot, others could, but prefer not to."""

    serves: str
    refusals: dict[str, str]
    preferences: dict[str, str] = {}

    def __str__(self) -> str:
        lines = [f"{self.serves} serves", *(f"{name} cannot: {reason}" for name, reason in self.refusals.items())]
        lines += [f"{name} could, but is not chosen: {reason}" for name, reason in self.preferences.items()]
        return "\n".join(lines)


class _State(threading.local):
    forced: str | None = None
    explaining: bool = False


_state = _State()


class Explained(Exception):
    """Carries a choice out of a functional whose arguments were checked and that has computed nothing."""

    def __init__(self, choice: Choice):
        super().__init__(str(choice))
        self.choice = choice


def forced() -> str | None:
    """Return the name that :func:`backend` set in this thread, or None."""
    return _state.forced


# As torch.compiler.assume_constant_result does, which would import all of dynamo. A compiled graph keeps the backend
# that was set while tracing.
forced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def explaining() -> bool:
    """Return True within :func:`explain`."""
    return _state.explaining


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Let only backend ``name`` compute operators, forward and backward, in this thread.

    ``'reference'`` is the definition in plain PyTorch, which every operator has and which autograd differentiates.
    A forward's backend also computes its backward, in whichever thread and after this context as well, unless another
    is forced around the backward. Autograd computes gradients of CPU tensors in the thread that asks for them, of CUDA
    tensors in threads of its own, which a backend that is forced around the backward alone does not reach.

    Raises:
        ValueError: By the operator, where its table has no such backend or the backend cannot compute the call.
    """
    before, _state.forced = _state.forced, name
    try:
        yield
    finally:
        _state.forced = before


def explain(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Choice:
    """Return which backend serves a call, and why those before it in the table do not. Nothing is computed.

    Some cannot; others could, and do if :func:`backend` forces them, but are slower or meant for tests.

    Args:
        operator: A functional of :mod:`attn_plugins.ops`, such as ``window_attention``.
        *args: Its arguments, which are checked as usual.
        **kwargs: Likewise.

    Raises:
        TypeError: ``operator`` is not one of ours.
        ValueError: A backend is forced that cannot compute the call.
    """
    before, _state.explaining = _state.explaining, True
    try:
        operator(*args, **kwargs)
    except Explained as explained:
        return explained.choice
    finally:
        _state.explaining = before
    raise TypeError(f"operator must be a functional of attn_plugins.ops, got {operator!r}")


def closed_form() -> bool:
    """Return True where a functional may take a closed form, plain products instead of its operator; explains that."""
    if _state.explaining:
        raise Explained(Choice("closed form", {}))
    return _state.forced in (None, "closed form")


def choose(operator: str, table: Sequence[Backend], terms: Any, options: Any, backward: bool = False) -> Backend:
    """Return the backend that computes, and log once which one it is where compiled kernels do not run at all.

    Raises:
        ValueError: The backend that :func:`backend` forces is not in the table, or cannot compute the call.
    """
    name = _state.forced
    if backward and name == REFERENCE:  # of a forward that another backend computed
        name = None
    failed: dict[str, Failure] = {}
    for candidate in table:
        if name is not None and candidate.name != name:
            continue
        reason = candidate.refusal(terms, options, backward, forced=name is not None)
        if reason is None:
            for kind, failure in failed.items():
                _warn(operator, kind, candidate.name, failure)
            return candidate
        if isinstance(reason, Failure):
            failed[candidate.name] = reason
        if name is not None:
            raise ValueError(f"backend {name!r} does not compute this {operator}: {reason}")
        if logger.isEnabledFor(logging.DEBUG):
            _log(operator, candidate.name, reason)
    names = ", ".join([*(candidate.name for candidate in table), REFERENCE])
    raise ValueError(f"backend must be one of {names} for {operator}, got {name!r}")


def survey(table: Sequence[Backend], terms: Any, options: Any) -> Choice:
    """Return the choice of :func:`choose` with the reasons of the backends before it."""
    refusals: dict[str, str] = {}
    preferences: dict[str, str] = {}
    for candidate in table:
        if (reason := candidate.refusal(terms, options, forced=True)) is not None:
            refusals[candidate.name] = reason
        elif (reason := candidate.refusal(terms, options)) is not None:
            preferences[candidate.name] = reason
        else:
            return Choice(candidate.name, refusals, preferences)
    raise AssertionError("the last backend of a table can compute everything and has no preferences")


@lru_cache(maxsize=1024)  # reasons contain sizes
def _log(operator: str, name: str, reason: str) -> None:
    logger.debug("%s is not computed by %s: %s", operator, name, reason)


@cache
def _warn(operator: str, kind: str, name: str, reason: str) -> None:
    logger.warning("attn_plugins computes %s on %s with %s: %s", operator, kind, _SERVING.get(name, name), reason)
