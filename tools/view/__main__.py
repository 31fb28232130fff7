"""Show where a model attends: the maps of all heads for chosen pixels, clips, detected objects or words.

::

    python -m tools.view aa_resnet50 photo.jpg --checkpoint best.safetensors
    python -m tools.view attn1111_resnet50 photo.jpg --pixels 60,80 --pixels 120,40 --layers 'layer4.*' --parts
    python -m tools.view configs/mmdet/….py photo.jpg --checkpoint epoch_12.pth
    python -m tools.view aa_resnet50 --list
    python -m tools.view vit_small_patch16_224 photo.jpg --checkpoint vit.safetensors --pixels cls --rollout
    python -m tools.view timesformer_small_patch16_224 clip.mp4 --checkpoint best.safetensors --pixels 3,60,80
    python -m tools.view mmdet::detr/detr_r50_8xb2-150e_coco.py photo.jpg --checkpoint detr.pth
    python -m tools.view configs/mmdet/….py --checkpoint epoch_50.pth --slots data/digits/val
    python -m tools.view configs/mmdet/….py photo.jpg --checkpoint epoch_12.pth --follow 2
    python -m tools.view --fairseq checkpoint_best.pt --data data-bin "a sentence to translate"

MODEL is a timm model name, or a config (a file or 'mmdet::…') of mmdet or mmseg, of a model that contains any of our
attention modules or is a transformer, stock or with our layers: timm's VisionTransformer and NaFlexVit (ViT, DeiT,
DINOv2), Swin and Swin V2, or TimeSformer, DETR and its relatives, MaskFormer, Mask2Former; with --fairseq a sentence.
A timm model receives the whole picture, resized.

The tool writes a PNG grid for every layer (heads in rows, pixels in columns, as in Bello et al. 2019, Fig. 9 and 10)
and attention.html, a self-contained page on which a click or the arrow keys choose the pixel, the object or the word.
The greatest weight of a map is shown beside the uniform weight, 1 / number of keys. In Python:
attn_plugins.modules.capture_attention.

Vision transformers show the mean of all heads first, and the weights of the cls token and registers beside each map.
--rollout is attention rollout over all layers with residual connections (Abnar and Zuidema 2020).

TimeSformer receives a clip, a video or a folder of frames. For every step of its attention and every query a PNG shows
the frames in a row, each with its share of the weight. Each step has its own keys, so 'divided' shows time and space
separately, and is a layer of the rollout.

For a transformer with object queries, PNG and page show the objects with the highest scores: where each attends, with
its box or mask, or the points that deformable attention samples for it on every level, larger for larger weights.
Deformable encoders show these points for the chosen pixels. --slots draws the centres of every query's boxes over many
pictures, as in Carion et al. 2020, Fig. 7.

--parts shows, for logits with several terms (content and position; ε1 to ε4), the softmax of each term's own logits, as
in Fig. 3.4 of the thesis, averaged over heads. --rollout and deformable attention have no parts.

--follow draws into sampling.png, for a detector of mmdet with our deformable convolutions, the points that they read
for each query pixel (a ring; by default the centres of the detections with the highest scores) and, in the same block,
what the key-content term (epsilon 3, "0010") attends to, one map per head.

--fairseq shows self-attention in the sentence and in its translation, and the alignment of both, of our models or
fairseq's own.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib  # noqa: F401 - fail here, before a model is built and run
import yaml

from tools import command_parser
from tools.pictures import BadPicture, open_picture
from tools.view import figures
from tools.view.clips import steps
from tools.view.folder import own_folder
from tools.view.maps import CLS, ViewError
from tools.view.models import (
    View,
    chosen_layers,
    is_mm,
    known_layers,
    load,
    open_input,
    timm_size,
    view_mm,
    view_objects,
    view_timm,
)
from tools.view.objects import collect, pictures
from tools.view.page import write_page, write_sentence_page
from tools.view.patches import has_cls

NO_PARTS = "no layer shown has more than one term in its logits: there are no parts to show"
Option = tuple[str, str, dict[str, Any]]
MANY: dict[str, Any] = dict(action="append", default=[])
OPTIONS: list[Option] = [
    ("model", "timm's name, or a config of mmdet or mmseg; with --fairseq a sentence", dict(metavar="MODEL")),
    ("image", "a picture, or for TimeSformer a clip; not needed with --slots or --list",
     dict(metavar="IMAGE", type=Path, nargs="?")),
    ("--checkpoint", "weights; without them the maps show noise", dict(type=Path, metavar="FILE")),
    ("--model-args", "argument of a timm model; a checkpoint of tools.train brings its own; may be repeated",
     dict(**MANY, metavar="KEY=VALUE")),
    ("--layers", "names, with * and ?; default: the last attention layer of every stage; may be repeated",
     dict(**MANY, metavar="PATTERN")),
    ("--pixels", "a query pixel of the picture or clip, or cls for a vision transformer's cls token; may be repeated; "
     "default: four pixels, or the middle of the clip, and cls where there is one",
     dict(**MANY, metavar="[FRAME,]Y,X")),
    ("--rollout", "for a vision transformer of timm: attention rollout to the cls token, or a patch, over all layers",
     dict(action="store_true")),
    ("--parts", "add the attention of every term of the logits alone: another PNG, and a switch on the page",
     dict(action="store_true")),
    ("--cut", "with --parts: leave out weights below W, as Fig. 3.4 of the thesis does with 0.02; default 0",
     dict(type=float, default=0.0, metavar="W")),
    ("--input-size", "input size of a timm model; default: the training size of the checkpoint, else the model's own",
     dict(type=int, nargs=2, metavar=("H", "W"))),
    ("--output", "default: a folder for this model and picture, work_dirs/attention/MODEL-CHECKPOINT/IMAGE",
     dict(type=Path, metavar="DIR")),
    ("--objects", "for a model with object queries: show at most N objects, those with the highest scores; default 8",
     dict(type=int, default=8, metavar="N")),
    ("--least-score", "show objects with a score of at least S, from 0 to 1; default 0.3",
     dict(type=float, default=0.3, metavar="S")),
    ("--slots", "pictures, or a folder of them: also draw every object query's boxes in all of them; may be repeated",
     dict(**MANY, type=Path, metavar="PATH")),
    ("--follow", "draw what N deformable convolutions, one after another, read for a pixel; default 2; --layers names "
     "the last of them", dict(type=int, nargs="?", const=2, metavar="N")),
    ("--device", "with --follow; default cpu", dict(default="cpu")),
    ("--list", "print the names of all attention layers", dict(action="store_true")),
]  # fmt: skip
SENTENCE_OPTIONS: list[Option] = [
    ("--fairseq", "checkpoint of fairseq-train: show attention within the sentence MODEL, its translation, and between "
     "both", dict(type=Path, metavar="CHECKPOINT")),
    ("--data", "fairseq-preprocess's folder, with the dictionaries; default: the folder of the training",
     dict(type=Path, metavar="DIR")),
    ("--sentencepiece-model", "splits the sentence into the corpus's pieces; default: words or pieces are separated by "
     "spaces", dict(type=Path, metavar="FILE")),
    ("--target", "the translation to show; default: the model's own", dict(metavar="TEXT")),
    ("--beam", "beam size for the model's translation; default 4", dict(type=int, default=4, metavar="N")),
]  # fmt: skip
# Options for pictures only and for sentences only.
OF_PICTURES = (
    "checkpoint", "model_args", "pixels", "rollout", "cut", "input_size", "objects", "least_score", "slots", "follow",
    "device",
)  # fmt: skip
OF_SENTENCES = "data", "sentencepiece_model", "target", "beam"
Drawings = list[tuple[str, Callable[[Path], object]]]  # a PNG's name, and what draws it


def show(options: argparse.Namespace) -> list[Path]:
    """Run the command line; return the files written."""
    if options.fairseq is not None:
        return show_sentence(options)
    mm = is_mm(options.model)
    model = load(options.model, options.checkpoint, arguments_of(options), options.device)
    if options.list:
        lines = [f"{name}  ({kind})" if mm and kind else name for name, kind in known_layers(model).items()]
        print("\n".join(lines) or "no attention layer of attn_plugins, or of a transformer of timm, mmdet or mmseg")
        return []
    files = pictures(options.slots)
    written = [] if options.image is None else show_picture(model, mm, options)
    if files:
        written.append(folder_of(options, options.image or options.slots[0]) / "slots.png")
        figures.draw_slots(collect(partial(view_objects, model), files), written[-1])
    return written


def check(options: argparse.Namespace, default: Callable[[str], Any]) -> None:
    """Raise a ViewError if the options do not fit together."""
    sentence, mm = options.fairseq is not None, is_mm(options.model)
    for name in OF_PICTURES if sentence else OF_SENTENCES:
        if getattr(options, name) != default(name):
            kind = "pictures, not for --fairseq" if sentence else "sentences: it needs --fairseq CHECKPOINT"
            raise ViewError(f"--{name.replace('_', '-')} is for {kind}")
    missing = not sentence and options.image is None and not options.list and not options.slots
    following = options.follow is not None
    for wrong, message in (
        (sentence and options.image is not None,
         f"the sentence must be one argument, in quotes, got {options.model!r} and more"),
        (options.beam < 1, f"--beam must be at least 1, got {options.beam}"),
        (missing, "IMAGE is missing: name a picture, --slots or --list"),
        (mm and (options.model_args or options.input_size),
         "--model-args and --input-size are for timm's models: a config says both itself"),
        (options.slots and not mm, "--slots is for detectors and segmentors with object queries, by their config"),
        (following and (not mm or options.image is None or options.follow < 1),
         "--follow needs a config of mmdet, a picture, and at least 1 layer to follow"),
        (options.device != "cpu" and not following, "--device is for --follow"),
        (options.input_size and min(options.input_size) < 1,
         f"--input-size must be H W, at least 1 each, got {options.input_size}"),
        (options.cut and not (options.parts and 0 < options.cut < 1),
         f"--cut must be a weight between 0 and 1, with --parts, got {options.cut:g}"),
        (options.objects < 1, f"--objects must be at least 1, got {options.objects}"),
    ):  # fmt: skip
        if wrong:
            raise ViewError(message)


def arguments_of(options: argparse.Namespace) -> dict[str, Any]:
    """Parse --model-args."""
    arguments: dict[str, Any] = {}
    for text in options.model_args:
        key, equals, value = text.partition("=")
        if not equals:
            raise ViewError(f"--model-args must be KEY=VALUE, got {text!r}")
        arguments[key] = yaml.safe_load(value)
    return arguments


def folder_of(options: argparse.Namespace, image: Path) -> Path:
    """Return the folder for the files of a model and a picture."""
    return options.output or own_folder(options.model, options.model_args, options.checkpoint, image)


def show_picture(model: Any, mm: bool, options: argparse.Namespace) -> list[Path]:
    """Run the model on the picture or clip and write its attention; return the files."""
    frames = [open_picture(options.image)] if mm else open_input(model, options.image, options.model)
    clip = not mm and bool(steps(model))
    size = frames[0].height, frames[0].width
    if options.follow is not None:
        from tools.view.follow import follow_picture

        pixels = parse_pixels(options.pixels, size) if options.pixels else None
        file = folder_of(options, options.image) / "sampling.png"
        print(follow_picture(model, options.image, file, pixels, options.layers, options.follow))
        return [file]
    pixels = parse_pixels(options.pixels, size, has_cls(model), len(frames) if clip else None)
    if mm:
        view = view_mm(model, options.image, options.layers, options.objects, options.least_score, options.rollout)
        if view.objects is not None and len(view.objects) and view.objects.scores[0] < options.least_score:
            print(f"no object has a score of {options.least_score:g}: the surest is shown, {view.objects.title(0)}")
    else:
        (H, W), why = timm_size(model, options.checkpoint, options.input_size)
        view = view_timm(model, frames, options.layers, (H, W), options.rollout)
        print(f"input: {f'{len(frames)} frames of ' if clip else ''}{H}×{W} pixels, {why}")
    if not clip and any(layer.mean_first and not layer.cls for layer in view.maps):
        print("no cls token: its patches alone are queries")
    output = folder_of(options, options.image)
    drawings = (
        of_clip(view, pixels) if clip else [*of_pixels(view, pixels, options.parts, options.cut), *of_objects(view)]
    )
    if options.parts and not any(name.endswith(".parts") for name, _ in drawings):
        print(NO_PARTS)
    written = draw(drawings, output)
    title = f"Attention of {Path(options.model).name} on {options.image.name}"
    for note in write_page(view, title, written[-1], options.parts):
        print(f"attention.html holds less of {note}")
    return written


def parse_pixels(
    texts: Sequence[str], size: tuple[int, int], cls: bool = False, frames: int | None = None
) -> list[Any]:
    """Parse ``'y,x'`` texts as pixels of a file of ``size``, or ``'t,y,x'`` of a clip of ``frames``, and ``'cls'``.

    Without texts: the cls token, if any, and four pixels spread over the picture, or a clip's middle.
    """
    H, W = size
    limits, form, where = size, "Y,X in pixels of the picture", f"picture of {H} rows and {W} columns"
    lacking = "vision transformer of timm with a cls token: this model has none"
    if frames is not None:
        limits, form = (frames, H, W), "FRAME,Y,X of a clip, frames counted from 0, or cls"
        where, lacking = f"clip of {frames} frames of {H}×{W} pixels", "model with a cls token: this one has none"
    if not texts:
        middle = [(H * i // 3, W * j // 3) for i in (1, 2) for j in (1, 2)]
        return [*[CLS] * cls, *(middle if frames is None else [(frames // 2, H // 2, W // 2)])]
    pixels: list[Any] = []
    for text in texts:
        if text == CLS:
            if not cls:
                raise ViewError(f"--pixels cls needs a {lacking}")
            pixels.append(CLS)
            continue
        if re.fullmatch(",".join([r"\d+"] * len(limits)), text) is None:
            raise ViewError(f"--pixels must be {form}, got {text!r}")
        pixels.append(tuple(map(int, text.split(","))))
        if any(n >= most for n, most in zip(pixels[-1], limits)):
            raise ViewError(f"--pixels must lie in the {where}, got {text!r}")
    return pixels


def of_clip(view: View, places: Sequence[Any]) -> Drawings:
    """Return a PNG for every step and query."""
    return [
        (
            f"{layer.name}_{place if place == CLS else '-'.join(map(str, place))}",
            partial(figures.draw_clip, view, layer, place),
        )
        for layer in view.maps
        for place in places
        if layer.cls or place != CLS
    ]


def of_pixels(view: View, pixels: Sequence[Any], with_parts: bool, cut: float) -> Drawings:
    """Return the PNGs of every layer whose queries are pixels."""
    places = [pixel for pixel in pixels if pixel != CLS]
    drawings: Drawings = []
    for layer in view.maps:
        if shown := pixels if layer.cls else places:
            drawings.append((layer.name, partial(figures.draw_heads, view, layer, shown)))
            if with_parts and (parts := layer.parts()):
                drawings.append((f"{layer.name}.parts", partial(figures.draw_parts, view, layer, parts, shown, cut)))
    sampled = view.points(objects=False) if places else []
    return drawings + [(n.name, partial(figures.draw_pixel_points, view, n, places)) for n in sampled]


def of_objects(view: View) -> Drawings:
    """Return the PNGs of every layer whose queries are objects, and of masks."""
    if view.objects is None or not len(view.objects):
        return []
    drawings: Drawings = [(n.name, partial(figures.draw_object_maps, view, n)) for n in view.object_maps]
    drawings += [(n.name, partial(figures.draw_object_points, view, n)) for n in view.points(objects=True)]
    return drawings + [("masks", partial(figures.draw_object_masks, view))] * (view.objects.masks is not None)


def draw(drawings: Drawings, output: Path) -> list[Path]:
    """Write PNGs; return their files and that of the page."""
    for name, drawing in drawings:
        drawing(output / f"{name}.png")
    return [*(output / f"{name}.png" for name, _ in drawings), output / "attention.html"]


def show_sentence(options: argparse.Namespace) -> list[Path]:
    """Run the command line with --fairseq; return the files written."""
    from tools.view.sentences import kind_of, layers_of, load, read

    reader = load(options.fairseq, options.data, options.sentencepiece_model)
    if options.list:
        print("\n".join(f"{name}  ({kind_of(name)})" for name in layers_of(reader.model)) or "no attention layer")
        return []
    sentence = read(reader, options.model, options.target, options.beam, options.parts)
    if sentence.unknown:
        hint = "" if options.sentencepiece_model is not None else "; is the corpus in pieces? see --sentencepiece-model"
        print(f"not in the dictionary, read as unknown: {', '.join(sentence.unknown)}{hint}")
    chosen = chosen_layers([layer.name for layer in sentence.maps], options.layers)
    sentence.maps = [layer for layer in sentence.maps if layer.name in chosen]
    if options.parts and not any(layer.parts for layer in sentence.maps):
        print(NO_PARTS)
    output = options.output
    if output is None:
        short = re.sub(r"\W+", "-", options.model).strip("-")[:40] or "sentence"
        facts = [options.model, *([] if options.target is None else [options.target]), f"beam {options.beam}"]
        output = own_folder("fairseq", facts, options.fairseq, Path(short))
    drawings: Drawings = []
    for layer in sentence.maps:
        drawings.append((layer.name, partial(figures.draw_words, sentence, layer)))
        if layer.parts:
            drawings.append((f"{layer.name}.parts", partial(figures.draw_words, sentence, layer, parts=True)))
    written = draw(drawings, output)
    write_sentence_page(sentence, f"Attention of {options.fairseq.name} on “{options.model}”", written[-1])
    return written


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("view", __doc__)
    for flag, words, more in OPTIONS:
        parser.add_argument(flag, help=words, **more)
    group = parser.add_argument_group("sentences, with a fairseq checkpoint")
    for flag, words, more in SENTENCE_OPTIONS:
        group.add_argument(flag, help=words, **more)
    options = parser.parse_args(arguments)
    try:
        check(options, parser.get_default)
        for file in show(options):
            print(file)
    except (BadPicture, ValueError) as error:
        print(f"view: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
