"""Logging of other libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Preserve the logging configuration while fairseq is imported, which turns on debug output of all libraries."""
    root, silent = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(silent)  # with a handler present, fairseq adds none
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(silent)
