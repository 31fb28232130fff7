"""Other libraries' logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Leave logging as it is while fairseq is imported, one of whose modules shows every library's debugging."""
    root, silent = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(silent)  # where there is a handler, fairseq adds none
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(silent)
