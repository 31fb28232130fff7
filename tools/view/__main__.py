"""Show where a model attends: the maps of all heads, or sampling points, for chosen pixels of a picture.

::

    python -m tools.view aa_resnet50 photo.jpg --checkpoint best.safetensors
    python -m tools.view attn1111_resnet50 photo.jpg --pixels 60,80 --pixels 120,40 --layers 'layer4.*' --parts
    python -m tools.view configs/mmdet/….py photo.jpg --checkpoint epoch_12.pth
    python -m tools.view configs/mmdet/….py photo.jpg --checkpoint epoch_12.pth --follow 2
    python -m tools.view aa_resnet50 --list

MODEL is a timm model name, or a config (a file or 'mmdet::…') of mmdet or mmseg, of a model that contains any of our
attention modules, or an encoder with multi-scale deformable attention, mmcv's or ours (Deformable DETR, DINO,
Mask2Former). A timm model receives the whole picture, resized.

The tool writes a PNG of each layer shown (heads in rows, pixels in columns, as in Bello et al. 2019, Fig. 9 and 10) and
attention.html, a self-contained page on which a click or the arrow keys choose the pixel. The greatest weight of a map
is shown beside the uniform weight, 1 / number of keys. Deformable attention shows the points that a pixel reads on
every level, larger for larger weights. In Python: attn_plugins.modules.capture_attention.

--parts shows, for logits with several terms (content and position; ε1 to ε4), the softmax of each term's own logits, as
in Fig. 3.4 of the thesis, averaged over heads.

--follow draws into sampling.png, for a detector of mmdet with our deformable convolutions, the points that they read
for each query pixel (a ring; by default the centres of the detections with the highest scores) and, in the same block,
what the key-content term (epsilon 3, "0010") attends to, one map per head.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib  # noqa: F401 - fail here, before a model is built and run
import yaml

from tools import command_parser
from tools.pictures import BadPicture, open_picture
from tools.view import figures
from tools.view.layers import ViewError, is_deformable, known_layers
from tools.view.models import is_mm, load_mm, load_timm, refusing, timm_size, view_mm, view_timm
from tools.view.page import write_page

ROOT = Path("work_dirs/attention")
MANY: dict[str, Any] = dict(action="append", default=[])
OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("model", "timm's name, or a config of mmdet or mmseg", dict(metavar="MODEL")),
    ("image", "a picture; not needed with --list", dict(metavar="IMAGE", type=Path, nargs="?")),
    ("--checkpoint", "weights; without them the maps of a timm model show noise", dict(type=Path, metavar="FILE")),
    ("--model-args", "argument of a timm model; checkpoints of train.py and tools.train bring theirs; may be repeated",
     dict(**MANY, metavar="KEY=VALUE")),
    ("--layers", "names, with * and ?; default: the last attention layer of every stage; may be repeated",
     dict(**MANY, metavar="PATTERN")),
    ("--pixels", "a query pixel of the picture; may be repeated; default: four pixels", dict(**MANY, metavar="Y,X")),
    ("--parts", "add a PNG of the attention of every term of the logits alone", dict(action="store_true")),
    ("--input-size", "input size of a timm model; default: the training size of the checkpoint, else the model's own",
     dict(type=int, nargs=2, metavar=("H", "W"))),
    ("--output", "default: work_dirs/attention/MODEL-CHECKPOINT/IMAGE", dict(type=Path, metavar="DIR")),
    ("--follow", "draw what N deformable convolutions, one after another, read for a pixel; default 2; --layers names "
     "the last of them", dict(type=int, nargs="?", const=2, metavar="N")),
    ("--device", "with --follow; default cpu", dict(default="cpu")),
    ("--list", "print the names of all layers that can be shown", dict(action="store_true")),
]  # fmt: skip


def show(options: argparse.Namespace) -> list[Path]:
    """Run the command line; return the files written."""
    check(options)
    if is_mm(options.model):
        model = load_mm(options.model, options.checkpoint, options.device)
    else:
        model, training = load_timm(options.model, options.checkpoint, arguments_of(options.model_args))
    if options.list:
        print("\n".join(known_layers(model)) or "no layer that can be shown")
        return []
    picture = open_picture(options.image)
    pixels = parse_pixels(options.pixels, (picture.height, picture.width))
    output = options.output or folder_of(options.model, options.checkpoint, options.image)
    if options.follow is not None:
        from tools.view.follow import follow_picture

        file, queries = output / "sampling.png", pixels if options.pixels else None
        print(follow_picture(model, options.image, file, queries, options.layers, options.follow))
        return [file]
    if is_mm(options.model):
        view = view_mm(model, options.image, options.layers)
    else:
        (H, W), why = timm_size(model, training, options.input_size)
        view = view_timm(model, picture, options.layers, (H, W))
        print(f"input: {H}×{W} pixels, {why}")
    written = []
    for call in view.layers:
        written.append(output / f"{call.name}.png")
        if is_deformable(call.layer):
            figures.draw_points(view, call, pixels, written[-1])
            continue
        figures.draw_heads(view, call, pixels, written[-1])
        if options.parts and figures.draw_parts(view, call, pixels, output / f"{call.name}.parts.png"):
            written.append(output / f"{call.name}.parts.png")
    if options.parts and not any(file.stem.endswith(".parts") for file in written):
        print("no layer shown has more than one term in its logits: there are no parts to show")
    written.append(output / "attention.html")
    title = f"Attention of {Path(options.model).name} on {options.image.name}"
    for note in write_page(view, title, written[-1]):
        print(f"attention.html holds less of {note}")
    return written


def check(options: argparse.Namespace) -> None:
    """Raise a ViewError if the options do not fit together."""
    mm, following, checkpoint = is_mm(options.model), options.follow is not None, options.checkpoint
    for wrong, message in (
        (options.image is None and not options.list, "IMAGE is missing: name a picture, or --list"),
        (checkpoint is not None and not checkpoint.is_file(), f"--checkpoint must be a file, got {checkpoint}"),
        (mm and checkpoint is None and not options.list, f"--checkpoint is missing: {options.model} has no weights"),
        (mm and (options.model_args or options.input_size),
         "--model-args and --input-size are for timm's models: a config says both itself"),
        (following and (not mm or options.follow < 1),
         "--follow needs a config of mmdet, and at least 1 layer to follow"),
        (options.device != "cpu" and not following, "--device is for --follow"),
        (options.input_size and min(options.input_size) < 1,
         f"--input-size must be H W, at least 1 each, got {options.input_size}"),
    ):  # fmt: skip
        if wrong:
            raise ViewError(message)


def arguments_of(texts: Sequence[str]) -> dict[str, Any]:
    """Parse --model-args."""
    arguments: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ViewError(f"--model-args must be KEY=VALUE, got {text!r}")
        with refusing(f"--model-args must be KEY=VALUE with a value in YAML, got {text!r}", yaml.YAMLError):
            arguments[key] = yaml.safe_load(value)
    return arguments


def parse_pixels(texts: Sequence[str], size: tuple[int, int]) -> list[tuple[int, int]]:
    """Parse ``'y,x'`` texts as pixels of a picture of ``size``; without any, return four spread over the picture."""
    H, W = size
    pixels = []
    for text in texts:
        if re.fullmatch(r"\d+,\d+", text) is None:
            raise ViewError(f"--pixels must be Y,X in pixels of the picture, got {text!r}")
        y, x = map(int, text.split(","))
        if y >= H or x >= W:
            raise ViewError(f"--pixels must lie in the picture of {H} rows and {W} columns, got {text!r}")
        pixels.append((y, x))
    return pixels or [(H * i // 3, W * j // 3) for i in (1, 2) for j in (1, 2)]


def folder_of(model: str, checkpoint: Path | None, image: Path) -> Path:
    """Return the folder for the files of a model and a picture."""
    name = Path(model.rpartition("::")[2]).stem if is_mm(model) else model.replace("/", "_")
    if checkpoint is not None:
        stem = Path(checkpoint.name.removesuffix(".tar")).stem
        name = "-".join(filter(None, (name, checkpoint.resolve().parent.name, stem)))
    return ROOT / name / image.stem


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("view", __doc__)
    for flag, words, more in OPTIONS:
        parser.add_argument(flag, help=words, **more)
    try:
        for file in show(parser.parse_args(arguments)):
            print(file)
    except (BadPicture, ValueError, OSError) as error:
        print(f"view: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
