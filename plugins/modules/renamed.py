"""Old names of arguments, attributes and methods, which work with a DeprecationWarning that gives the new name."""

from __future__ import annotations

import functools
import inspect
import operator
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

REMOVAL = "will be removed in attn_plugins 0.4"


def renamed_argument(old: str, new: str) -> Callable[[F], F]:
    """Decorate a constructor to accept the keyword ``old`` for ``new``.

    Raises:
        TypeError: a call passes both.
    """

    def decorate(function: F) -> F:
        positions = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if old in options:
                if new in options or len(args) > positions.index(new):
                    raise TypeError(f"{old} is the old name of {new}: give {new} alone")
                _warn(old, new)
                options[new] = options.pop(old)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate


def keyword_only(*names: str) -> Callable[[F], F]:
    """Decorate a constructor to accept the keyword-only arguments ``names`` by position, in order after the others."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            given = dict(zip(names, args[positional:]))
            if given and len(args) <= positional + len(names) and not given.keys() & options.keys():
                _warn_by_position(given)
                return function(*args[:positional], **given, **options)
            return function(*args, **options)

        return call  # type: ignore[return-value]

    return decorate


def renamed_method(old: str, new: str = "reset_parameters") -> Callable[[Any], None]:
    """Return a deprecated method ``old`` that calls ``new``, which may be that of a child: ``'child.method'``."""

    def method(self: Any) -> None:
        _warn(f"{type(self).__name__}.{old}", new)
        operator.attrgetter(new)(self)()

    method.__name__, method.__doc__ = old, f"Call ``{new}``; the old name."
    return method


def renamed_attribute(old: str, new: str) -> property:
    """Return a deprecated read-only property ``old`` that returns ``new``."""

    def get(self: Any) -> Any:
        _warn(f"{type(self).__name__}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"``{new}``; the old name.")


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is the old name of {new} and {REMOVAL}", DeprecationWarning, stacklevel=3)


def _warn_by_position(given: dict[str, Any]) -> None:
    message = f"{', '.join(given)} by position {REMOVAL}: pass them by keyword"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
