"""The demo without a detector: train an attention-augmented network on digits, and draw its attention.

::

    python -m tools.demo_quick      writes to work_dirs/demo-quick: one minute on two cores after set-up

It needs only torch and timm. It writes the weights, ``log.csv``, a PNG of every layer and ``attention.html``, a page
on which a click or the arrow keys choose the pixel whose attention is shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools import command_parser
from tools.datasets import image_folders
from tools.train.__main__ import main as train
from tools.view.__main__ import main as view

ROOT = Path(__file__).parents[1]


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("demo_quick", __doc__)
    parser.add_argument("--epochs", type=int, default=15, metavar="N", help="default %(default)s")
    parser.add_argument("--data", type=Path, default=ROOT / "data/digit_folders", metavar="DIR")
    parser.add_argument("--output", type=Path, default=ROOT / "work_dirs/demo-quick", metavar="DIR")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    if not options.data.is_dir() and image_folders.main(["digits", str(options.data)]):
        return 1
    config = ROOT / "configs/timm/digits.yaml"
    training = [str(config), "--data", str(options.data), "--output", str(options.output), "--device", "cpu",
                "--epochs", str(options.epochs), "--set", "precision=float32"]  # fmt: skip
    if train(training):
        return 1
    picture = sorted((options.data / "val/eight").iterdir())[0]
    drawing = ["aa_wide_resnet28_10", str(picture), "--checkpoint", str(options.output / "best.safetensors"),
               "--pixels", "2,4", "--pixels", "5,3", "--output", str(options.output / "attention")]  # fmt: skip
    status = view(drawing)
    if not status:
        print(f"open {options.output / 'attention' / 'attention.html'} in a browser")
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
