"""The demo without a detector: train an attention-augmented network on digits, and draw its attention.

::

    python -m tools.demo_quick      writes to work_dirs/demo-quick: one minute on two cores after set-up

It needs only torch and timm. It writes the weights, ``log.csv``, a PNG of every layer and ``attention.html``, a page
on which a click or the arrow keys choose the pixel whose attention is shown.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from tools import command_parser, need
from tools.datasets.digits_on_photographs import CLASSES, digit_samples
from tools.datasets.folders import new_folder
from tools.train.__main__ import main as train
from tools.view.__main__ import main as view

ROOT = Path(__file__).parents[1]


def write_digits(folder: Path, most: int = 200) -> None:
    """Write ``most`` of each of scikit-learn's digits to ``train/CLASS`` and, every fifth, to ``val/CLASS``."""
    need("sklearn")
    seen = Counter[str]()
    with new_folder(folder) as partial:
        for opacity, digit in zip(*digit_samples()):
            name = CLASSES[digit]
            seen[name] += 1
            if seen[name] <= most:
                file = partial / ("train" if seen[name] % 5 else "val") / name / f"{seen[name]:03}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((opacity * 255).round().astype(np.uint8)).convert("RGB").save(file)


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("demo_quick", __doc__)
    parser.add_argument("--epochs", type=int, default=15, metavar="N", help="default %(default)s")
    parser.add_argument("--data", type=Path, default=ROOT / "data/digit_folders", metavar="DIR")
    parser.add_argument("--output", type=Path, default=ROOT / "work_dirs/demo-quick", metavar="DIR")
    options = parser.parse_args(arguments)
    if options.epochs < 1:
        parser.error(f"--epochs must be at least 1, got {options.epochs}")
    if not options.data.is_dir():
        write_digits(options.data)
    config = ROOT / "configs/timm/tools_train/digits.yaml"
    training = [str(config), "--data", str(options.data), "--output", str(options.output), "--device", "cpu"]
    if status := train([*training, "--set", f"epochs={options.epochs}"]):
        return status
    picture = sorted((options.data / "val/eight").iterdir())[0]
    drawing = ["aa_wide_resnet28_10", str(picture), "--checkpoint", str(options.output / "best.safetensors"),
               "--pixels", "2,4", "--pixels", "5,3", "--output", str(options.output / "attention")]  # fmt: skip
    if status := view(drawing):
        return status
    print(f"open {options.output / 'attention' / 'attention.html'} in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main())
