"""Show where a model attends: the maps of all heads for chosen pixels of a picture.

::

    python -m tools.show_attention aa_resnet50 photo.jpg --checkpoint best.safetensors
    python -m tools.show_attention attn1111_resnet50 photo.jpg --pixels 60,80 --pixels 120,40 --layers 'layer4.*'
    python -m tools.show_attention configs/mmdet/….py photo.jpg --checkpoint epoch_12.pth
    python -m tools.show_attention aa_resnet50 photo.jpg --list

MODEL is timm's name of a model, or a config (a file or ``'mmdet::…'``) of mmdet or mmseg, with any of our attention
modules in it. Into ``--output`` go a PNG grid for every layer (heads in rows, pixels in columns, as in Bello et al.
2019, Fig. 9 and 10) and ``attention.html``, one self-contained page on which a click or the arrow keys choose the
pixel. In Python: ``attn_plugins.modules.capture_attention``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from attn_plugins.modules.capture import attention_layers
from tools.attention_view.grid import draw
from tools.attention_view.page import write_page
from tools.attention_view.view import ViewError, is_mm, load_mm, load_timm, parse_pixels, see_mm, see_timm
from tools.pictures import BadPicture, open_picture


def show(options: argparse.Namespace) -> list[Path]:
    """Do what the command line asks for; the files written."""
    image = None if options.image is None else open_picture(options.image)
    arguments: dict[str, Any] = {}
    for text in options.model_args:
        key, equals, value = text.partition("=")
        if not equals:
            raise ViewError(f"--model-args must be KEY=VALUE, got {text!r}")
        arguments[key] = yaml.safe_load(value)
    name, mm = options.model, is_mm(options.model)
    if mm and (arguments or options.input_size):
        raise ViewError("--model-args and --input-size are for timm's models: a config says both itself")
    model = (
        load_mm(options.model, options.checkpoint) if mm else load_timm(options.model, options.checkpoint, arguments)
    )
    if options.list:
        print("\n".join(attention_layers(model)) or "no attention layer of attn_plugins")
        return []
    if image is None:
        raise ViewError("IMAGE is missing")
    pixels = parse_pixels(options.pixels, (image.height, image.width))
    try:
        if mm:
            view = see_mm(model, options.image, options.layers)
        else:
            view = see_timm(model, image, options.layers, options.input_size and tuple(options.input_size))
    except ValueError as error:
        raise ViewError(str(error)) from error
    written = []
    for layer in view.captured.values():
        written.append(options.output / f"{layer.name}.png")
        draw(view, layer, pixels, written[-1])
    written.append(options.output / "attention.html")
    title = f"Attention of {Path(name).name} on {options.image.name}"
    for note in write_page(view, list(view.captured.values()), title, written[-1]):
        print(f"attention.html holds less of {note}")
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.show_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("image", metavar="IMAGE", type=Path, nargs="?")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights; without them the maps show noise")
    parser.add_argument("--model-args", action="append", default=[], metavar="KEY=VALUE", help="of a timm model")
    parser.add_argument(
        "--layers", action="append", default=[], metavar="PATTERN",
        help="names, with * and ?; default: the last attention layer of every stage",
    )  # fmt: skip
    parser.add_argument(
        "--pixels", action="append", default=[], metavar="Y,X", help="query pixels of the picture; default: four"
    )
    parser.add_argument("--input-size", type=int, nargs=2, metavar=("H", "W"), help="of a timm model's input")
    parser.add_argument("--output", type=Path, default=Path("work_dirs/attention"), metavar="DIR")
    parser.add_argument("--list", action="store_true", help="print the names of all attention layers")
    options = parser.parse_args(arguments)
    try:
        for file in show(options):
            print(file)
    except (BadPicture, ViewError) as error:
        print(f"show_attention: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
