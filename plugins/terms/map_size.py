"""Check of the size of a map or a window, shared by the terms."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.arguments import is_size


def check_size(name: str, size: Sequence[int]) -> tuple[int, int]:
    """Return ``size`` as a tuple.

    Raises:
        ValueError: ``size`` is not two ints of at least 1, rows and columns.
    """
    numbers = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else ()
    if len(numbers) != 2 or not all(is_size(n) and n >= 1 for n in numbers):
        raise ValueError(f"{name} must be two ints, rows and columns, each at least 1, got {size!r}")
    return numbers[0], numbers[1]
