"""Run the notebooks of ``docs/notebooks`` and write their outputs into them.

::

    python -m tools.notebooks           all of them: about two minutes on two cores
    python -m tools.notebooks NAME      one, by its file name without the suffix

A notebook runs in an empty folder. Cells tagged ``skip-execution``, which install packages or download weights, are not
run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools import command_parser, need
from tools.files import write_text

FILES = sorted((Path(__file__).parents[1] / "docs/notebooks").glob("*.ipynb"))
SKIP = "skip-execution"
SECONDS = 1200  # limit of a cell, and of the start of the kernel


def run(file: Path) -> Any:
    """Return the notebook in ``file`` with the outputs of its cells.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raises an error.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, 4)
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    with TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=SECONDS,
            startup_timeout=SECONDS,
            skip_cells_with_tag=SKIP,
            coalesce_streams=True,
            record_timing=False,
            resources=dict(metadata=dict(path=folder)),
        ).execute(env=environment)
    notebook.metadata.language_info = dict(name="python")  # without the version
    return notebook


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("notebooks", __doc__)
    names = {file.stem: file for file in FILES}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    chosen = parser.parse_args(arguments).names or list(names)
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"NAME must be one of {', '.join(names)}, got {', '.join(unknown)}")
    need("nbclient", "nbformat", "ipykernel")
    import nbformat

    for name in chosen:
        print(f"{name} ...", flush=True)
        write_text(names[name], nbformat.writes(run(names[name])) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
