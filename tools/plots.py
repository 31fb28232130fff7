"""Figures of matplotlib, written at once and the same each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.files import write


@contextmanager
def figure(
    out: Path, rows: int, columns: int, style: Mapping[str, Any], saving: Mapping[str, Any], **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes (rows, columns), and save it in the format of ``out`` afterwards.

    Args:
        style: Of matplotlib's ``rcParams``.
        saving: Options of ``savefig``.
        options: Of the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", **style}):
        made, axes = pyplot.subplots(rows, columns, layout="constrained", squeeze=False, **options)
        try:
            yield made, axes
            kind = out.suffix.removeprefix(".")
            metadata = {"Date": None} if kind == "svg" else {}
            write(out, lambda partial: made.savefig(partial, format=kind, metadata=metadata, **saving))
        finally:
            pyplot.close(made)
