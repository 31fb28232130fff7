"""Merge the shards of ``extract`` or ``caption`` into one result, once all of them have ended.

::

    python -m tools.caption merge data/coco/regions.npz
    python -m tools.caption merge work_dirs/captions

The result has the same bytes as from one process. The command writes nothing and names what is left if a shard is not
finished.

Exit code: 0, the result has all pictures; 1, it lacks some, which are listed; 2, nothing was written.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.caption import caption, extract


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("out", type=Path, metavar="OUT", help="the OUT of the shards")
    parser.add_argument("--overwrite", action="store_true", help="replace a file of regions")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    if caption.work_folder(options.out).is_dir():
        return caption.merge(options.out)
    return extract.merge(options.out, options.overwrite)
