"""Average the parameters of fairseq checkpoints, as fairseq's own script does, which its package does not include.

::

    python -m tools.average_checkpoints checkpoints/wmt14_en_de_relative --last 10
    python -m tools.average_checkpoints first.pt second.pt --output average.pt

A folder stands for its ``checkpoint1.pt``, ``checkpoint2.pt``, ... (with ``--updates`` for ``checkpoint_1_500.pt``,
...), of which the last are averaged. The average is written to ``average.pt`` next to the first checkpoint, or to
``--output``; ``fairseq-generate --path`` and ``from_pretrained`` read it. Checkpoints are loaded safely
(``weights_only``): they hold tensors, plain Python values and an ``argparse.Namespace``.
"""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch

from tools import command_parser, files

EPOCHS, UPDATES = re.compile(r"checkpoint(\d+)\.pt"), re.compile(r"checkpoint_\d+_(\d+)\.pt")


def last_of(folder: Path, count: int, name: re.Pattern[str]) -> list[Path]:
    """Return the ``count`` checkpoints with the highest numbers; raise a ValueError if the folder has fewer."""
    numbered = sorted((int(match[1]), path) for path in folder.iterdir() if (match := name.fullmatch(path.name)))
    if len(numbered) < count:
        raise ValueError(f"--last {count} needs as many {name.pattern} in {folder}, found {len(numbered)}")
    return [path for _, path in numbered[-count:]]


def load(path: Path) -> dict[str, Any]:
    """Load a fairseq checkpoint; raise a ValueError if the file is not a fairseq checkpoint."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a fairseq checkpoint that loads safely") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ValueError(f"{path} is not a fairseq checkpoint: it has no 'model'")
    return checkpoint


def average(paths: list[Path]) -> dict[str, Any]:
    """Return the first checkpoint with its model replaced by the mean of all models, summed in float64.

    Raises:
        ValueError: A file is not a fairseq checkpoint, or its model differs from the first one's.
    """
    state = load(paths[0])
    totals = {name: tensor.double() for name, tensor in state["model"].items()}
    for path in paths[1:]:
        model = load(path)["model"]
        differ = [
            n for n in {**totals, **model} if n not in totals or n not in model or totals[n].shape != model[n].shape
        ]
        if differ:
            raise ValueError(f"{path} is of another model than {paths[0]}: {', '.join(differ[:3])} differ")
        for name, tensor in model.items():
            totals[name] += tensor.double()
    for name, tensor in state["model"].items():
        mean = totals[name] / len(paths)
        state["model"][name] = (mean if tensor.is_floating_point() else mean.round()).to(tensor.dtype)
    state["last_optimizer_state"] = None  # useless for an average, and twice its size
    return state


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("average_checkpoints", __doc__)
    parser.add_argument("inputs", type=Path, nargs="+", metavar="CHECKPOINT_OR_FOLDER")
    parser.add_argument("--last", type=int, default=10, metavar="N", help="of a folder, default %(default)s")
    parser.add_argument("--updates", action="store_true", help="average checkpoints saved by updates, not by epochs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: average.pt next to the first checkpoint")
    options = parser.parse_args(arguments)
    if options.last < 1:
        parser.error(f"--last must be at least 1, got {options.last}")
    torch.serialization.add_safe_globals([argparse.Namespace])
    try:
        paths: list[Path] = []
        for path in options.inputs:
            paths += last_of(path, options.last, UPDATES if options.updates else EPOCHS) if path.is_dir() else [path]
        output = options.output or paths[0].with_name("average.pt")
        state = average(paths)
        files.write(output, lambda partial: torch.save(state, partial))
    except (OSError, ValueError) as error:
        print(f"average_checkpoints: {error}", file=sys.stderr)
        return 2
    print(f"written: {output}, the average of {', '.join(path.name for path in paths)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
