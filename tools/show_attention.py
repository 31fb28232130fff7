"""Show where a model attends: the maps of all heads for chosen pixels of a picture.

::

    python -m tools.show_attention aa_resnet50 photo.jpg --checkpoint best.safetensors
    python -m tools.show_attention attn1111_resnet50 photo.jpg --pixels 60,80 --pixels 120,40 --layers 'layer4.*'
    python -m tools.show_attention configs/mmdet/….py photo.jpg --checkpoint epoch_12.pth
    python -m tools.show_attention aa_resnet50 photo.jpg --list
    python -m tools.show_attention vit_small_patch16_224 photo.jpg --checkpoint vit.safetensors --pixels cls --rollout
    python -m tools.show_attention timesformer_small_patch16_224 clip.mp4 --checkpoint best.safetensors --pixels 3,60,80
    python -m tools.show_attention mmdet::detr/detr_r50_8xb2-150e_coco.py photo.jpg --checkpoint detr.pth
    python -m tools.show_attention configs/mmdet/….py --checkpoint epoch_50.pth --slots data/digits/val
    python -m tools.show_attention attn1111_resnet50 photo.jpg --checkpoint best.safetensors --parts
    python -m tools.show_attention --fairseq checkpoint_best.pt --data data-bin "a sentence to translate"

MODEL is a timm model name, or a config (a file or 'mmdet::…') of mmdet or mmseg, of a model that contains any of our
attention modules or is a transformer, stock or with our layers: timm's VisionTransformer and NaFlexVit (ViT, DeiT,
DINOv2), Swin and Swin V2, or TimeSformer, DETR and its relatives, MaskFormer, Mask2Former. A timm model receives the
whole picture, resized to --input-size, else to the size that a checkpoint of tools.train was trained at,
else to the model's own; a printed line says which.

The tool writes a PNG grid for every layer (heads in rows, pixels in columns, as in Bello et al. 2019, Fig. 9 and 10)
and attention.html, a self-contained page on which a click or the arrow keys choose the pixel. The greatest weight of a
map is shown beside the uniform weight, 1 / number of keys. In Python: attn_plugins.modules.capture_attention.

For timm's vision transformers a query may also be the cls token, by --pixels cls or a button of the page. The mean of
all heads comes first, and each map shows the weights of the cls token and registers beside it. --rollout adds the
attention rollout to the cls token, or to a patch, over all layers with residual connections (Abnar and Zuidema 2020).

TimeSformer receives a clip, a video or a folder of frames. For every step of its attention and every query, FRAME,Y,X
or cls, a PNG shows the frames in a row, each with its share of the weight; the page shows frames side by side. Each
step has its own keys, so 'divided' shows time and space separately. --rollout treats every step as a layer.

For a transformer with object queries, PNG and page show the objects with the highest scores: where each attends, with
its box or mask, or the points that deformable attention samples for it on every level, larger for larger weights. On
the page a click or the arrow keys choose the object. Deformable encoders show these points for the chosen pixels.
--slots draws the centres of every query's boxes over many pictures, as in Carion et al. 2020, Fig. 7.

--parts adds, for logits with several terms (content and position; ε1 to ε4), the attention of each term alone: the
softmax of its own logits, as in Fig. 3.4 of the thesis. LAYER.parts.png shows the parts and the whole in a row for
every query, averaged over heads; the page has a switch. --rollout and deformable attention have no parts.

--fairseq takes a checkpoint of fairseq-train, of our models or fairseq's own, and a sentence in place of MODEL. The
page and a PNG of every layer show self-attention in the sentence and in its translation, and the alignment of both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib  # noqa: F401 - fail here, before a model is built and run
import yaml

from tools.attention_view.clips import draw_clip, file_name, open_frames, parse_places, takes_clips, view_clip
from tools.attention_view.folder import RECORD, own_folder
from tools.attention_view.grid import draw
from tools.attention_view.mm import load_mm, mm_layers, view_mm, view_objects
from tools.attention_view.object_grid import (
    draw_object_maps,
    draw_object_masks,
    draw_object_samples,
    draw_pixel_samples,
)
from tools.attention_view.page import write_page
from tools.attention_view.parts import draw_parts, parts_of
from tools.attention_view.sentence_command import add_sentence_arguments, check_sentence_options, show_sentence
from tools.attention_view.slots import collect, draw_slots, pictures
from tools.attention_view.view import View, ViewError, is_mm, load_timm, parse_pixels, timm_layers, timm_size, view_timm
from tools.attention_view.vit import CLS, Cell, PatchMaps, has_cls
from tools.clips import is_clip
from tools.files import write_text
from tools.pictures import BadPicture, open_picture

NO_PARTS = "no layer shown has more than one term in its logits: there are no parts to show"


def show(options: argparse.Namespace) -> list[Path]:
    """Run the command line; return the files written."""
    check_sentence_options(options)
    if options.fairseq is not None:
        return show_sentence(options)
    arguments: dict[str, Any] = {}
    for text in options.model_args:
        key, equals, value = text.partition("=")
        if not equals:
            raise ViewError(f"--model-args must be KEY=VALUE, got {text!r}")
        arguments[key] = yaml.safe_load(value)
    if options.image is None and not options.list and not options.slots:
        raise ViewError("IMAGE is missing: name a picture, --slots or --list")
    name, mm = options.model, is_mm(options.model)
    if mm and (arguments or options.input_size):
        raise ViewError("--model-args and --input-size are for timm's models: a config says both itself")
    if options.slots and not mm:
        raise ViewError("--slots is for detectors and segmentors with object queries, by their config")
    if options.input_size and min(options.input_size) < 1:
        raise ViewError(f"--input-size must be H W, at least 1 each, got {options.input_size}")
    if options.objects < 1:
        raise ViewError(f"--objects must be at least 1, got {options.objects}")
    model = load_mm(name, options.checkpoint) if mm else load_timm(name, options.checkpoint, arguments)
    if options.list:
        print(listing(model, mm) or "no attention layer of attn_plugins, or of a transformer of timm, mmdet or mmseg")
        return []
    try:
        files = pictures(options.slots)
        written = [] if options.image is None else look(model, mm, options)
        if files:
            written.append(folder_of(options, options.image or options.slots[0]) / "slots.png")
            draw_slots(collect(partial(view_objects, model), files), written[-1])
        return written
    except (BadPicture, ViewError):
        raise
    except ValueError as error:
        raise ViewError(str(error)) from error


def listing(model: Any, mm: bool) -> str:
    """List the names of all attention layers, with the queries and keys of a transformer's layers."""
    plain = timm_layers(model)
    if not mm:
        return "\n".join(plain)
    return "\n".join(name if name in plain else f"{name}  ({what})" for name, what in mm_layers(model).items())


def look(model: Any, mm: bool, options: argparse.Namespace) -> list[Path]:
    """Run the model on the picture or clip and write its attention; return the files."""
    if not mm and takes_clips(model):
        return look_at_clip(model, options)
    if is_clip(options.image):
        raise ViewError(f"IMAGE must be a picture, for {options.model} sees no clips, got {options.image}")
    image = open_picture(options.image)
    pixels = parse_pixels(options.pixels, (image.height, image.width), has_cls(model))
    if mm:
        view = view_mm(model, options.image, options.layers, options.objects, options.least_score, options.rollout)
        if view.objects is not None and len(view.objects) and view.objects.scores[0] < options.least_score:
            print(f"no object has a score of {options.least_score:g}: the surest is shown, {view.objects.title(0)}")
    else:
        size, why = timm_size(model, options.checkpoint, options.input_size)
        view = view_timm(model, image, options.layers, size, options.rollout)
        print(f"input: {size[0]}×{size[1]} pixels, {why}")
    if any(isinstance(layer, PatchMaps) and not layer.cls for layer in view.maps):
        print("no cls token: its patches alone are queries")
    return write_view(view, pixels, options)


def look_at_clip(model: Any, options: argparse.Namespace) -> list[Path]:
    """Run :func:`look` for a TimeSformer."""
    frames = open_frames(model, options.image)
    places = parse_places(options.pixels, len(frames), (frames[0].height, frames[0].width), model)
    size, why = timm_size(model, options.checkpoint, options.input_size)
    view = view_clip(model, frames, options.layers, size, options.rollout)
    print(f"input: {len(frames)} frames of {size[0]}×{size[1]} pixels, {why}")
    if options.parts:
        print(NO_PARTS)
    output, written = folder_of(options, options.image), []
    for layer in view.maps:
        for place in places:
            if layer.cls or place != CLS:
                written.append(output / file_name(layer, place))
                draw_clip(view, layer, place, written[-1])
    return [*written, write_view_page(view, options, output)]


def folder_of(options: argparse.Namespace, image: Path) -> Path:
    """Return the folder for the files of a model and a picture."""
    if options.output is not None:
        return options.output
    identity = options.model, options.model_args, options.checkpoint, image
    output, record = own_folder(Path("work_dirs/attention"), *identity)
    write_text(output / RECORD, record)
    return output


def write_view(view: View, pixels: Sequence[Cell], options: argparse.Namespace) -> list[Path]:
    """Write the grids and the page; return the files."""
    output = folder_of(options, options.image)
    places: list[Any] = [pixel for pixel in pixels if pixel != CLS]
    drawn = []
    for layer in view.maps:
        shown = pixels if isinstance(layer, PatchMaps) and layer.cls else places
        drawn += [(layer.name, partial(draw, view, layer, shown))] if shown else []
        parts = parts_of(layer) if options.parts and shown else {}
        drawn += [(f"{layer.name}.parts", partial(draw_parts, view, layer, parts, shown))] if parts else []
    if options.parts and not any(name.endswith(".parts") for name, _ in drawn):
        print(NO_PARTS)
    if places:
        drawn += [(n.name, partial(draw_pixel_samples, view, n, places)) for n in view.samples(objects=False)]
    if view.objects is not None and len(view.objects):
        drawn += [(layer.name, partial(draw_object_maps, view, layer)) for layer in view.object_maps]
        drawn += [(layer.name, partial(draw_object_samples, view, layer)) for layer in view.samples(objects=True)]
        if view.objects.masks is not None:
            drawn.append(("masks", partial(draw_object_masks, view)))
    written = []
    for name, draw_one in drawn:
        written.append(output / f"{name}.png")
        draw_one(written[-1])
    return [*written, write_view_page(view, options, output)]


def write_view_page(view: View, options: argparse.Namespace, output: Path) -> Path:
    """Write the page; return the file."""
    file = output / "attention.html"
    title = f"Attention of {Path(options.model).name} on {options.image.name}"
    for note in write_page(view, title, file, options.parts):
        print(f"attention.html holds less of {note}")
    return file


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.show_attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", metavar="MODEL", help="timm's name, or a config of mmdet or mmseg; with --fairseq a sentence"
    )
    parser.add_argument(
        "image",
        metavar="IMAGE",
        type=Path,
        nargs="?",
        help="a picture, or for TimeSformer a clip; not needed with --slots or --list",
    )
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights; without them the maps show noise")
    parser.add_argument(
        "--model-args", action="append", default=[], metavar="KEY=VALUE",
        help="argument of a timm model; a checkpoint of tools.train brings its own; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--layers", action="append", default=[], metavar="PATTERN",
        help="names, with * and ?; default: the last attention layer of every stage; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--pixels",
        action="append",
        default=[],
        metavar="[FRAME,]Y,X",
        help="a query pixel of the picture or clip, or cls for a vision transformer's cls token; may be repeated; "
        "default: four pixels, or the middle of the clip, and cls where there is one",
    )
    parser.add_argument(
        "--rollout", action="store_true",
        help="for a vision transformer of timm: attention rollout to the cls token, or a patch, over all layers",
    )  # fmt: skip
    parser.add_argument(
        "--parts", action="store_true",
        help="add the attention of every term of the logits alone: another PNG, and a switch on the page",
    )  # fmt: skip
    parser.add_argument(
        "--input-size", type=int, nargs=2, metavar=("H", "W"),
        help="input size of a timm model; default: the training size of the checkpoint, else the model's own",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="DIR",
        help="default: a folder for this model and picture, work_dirs/attention/MODEL-CHECKPOINT/IMAGE",
    )  # fmt: skip
    parser.add_argument(
        "--objects", type=int, default=8, metavar="N",
        help="for a model with object queries: show at most N objects, those with the highest scores; default 8",
    )  # fmt: skip
    parser.add_argument(
        "--least-score", type=float, default=0.3, metavar="S",
        help="show objects with a score of at least S, from 0 to 1; default 0.3",
    )  # fmt: skip
    parser.add_argument(
        "--slots", type=Path, action="append", default=[], metavar="PATH",
        help="pictures, or a folder of them: also draw every object query's boxes in all of them; may be repeated",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of all attention layers")
    add_sentence_arguments(parser)
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
