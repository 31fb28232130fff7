r"""Caption pictures, and show which regions and attributes each word attends to.

::

    python -m tools.caption caption photo.jpg --path checkpoints/eta/checkpoint_best.pt \
        --detector work_dirs/attributes/best.safetensors --out work_dirs/captions

``--path`` names a checkpoint of fairseq's task ``captioning``, or several separated by colons, whose word probabilities
are averaged. Regions are extracted by the recipe stored in the data folder's ``regions.npz``,
attributes by ``--detector`` (trained by ``tools.train attributes``). Models of regions alone
(``--fusion visual``, ``show_attend_tell``) need no detector. IMAGE may be a folder, for all pictures in it, or with
``--captions`` for those that COCO's file lists (``images``; captions are not read), under their ids there.

OUT gets ``captions.json``, ``[{"image_id": "photo", "file_name": "photo.jpg", "caption": "..."}]``, and for each
picture ``NAME.png``, which shows every word with its regions, the visual and semantic share of the gate, and its
attributes, and ``NAME.json`` with the numbers. The weights shown are those by which regions and attributes enter the
output (for entangled attention without those of its guidance), in the last block or layer of the decoder
(``--layer``), averaged over heads and models; ``show_attend_tell`` and ``lstm_captioner`` have one layer and one head.
The share of the gate is its mean over channels. ``--all-weights`` adds the weights of every block and head to
``NAME.json``.

The same command resumes an interrupted run; ``captions.json`` is written after the last picture. With ``--shard i/n`` a
process captions a share of the pictures, and ``python -m tools.caption merge OUT`` then writes ``captions.json``.

Exit code: 0, all pictures have captions; 1, some could not be read or captioned, and are listed; 2, no picture was
processed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_plugins.captioning.caption_files import ImageId
from attn_plugins.captioning.files import complete_lines
from tools import files
from tools.caption import shards
from tools.caption.attributes import load_detector
from tools.caption.lists import ListedImage, listed_images
from tools.caption.page import Explanation, page
from tools.caption.recipe import digest, sha256_of
from tools.pictures import BadPicture, open_picture

if TYPE_CHECKING:
    from tools.caption.captioner import CaptionedPicture, Captioner


# Options that change the output files.
RESULT = ("path", "detector", "data", "captions", "beam", "max_len", "lenpen", "layer", "all_weights", "region_config")


def pictures_of(given: Sequence[Path], captions: Path | None = None) -> dict[str, ListedImage]:
    """Return the pictures, including those of folders, by unique names, which are their ids without ``captions``.

    Raises:
        ValueError: a folder has no pictures, or ``captions``, COCO's list of a folder, goes with something else.
    """
    if captions is not None:
        if len(given) != 1:
            raise ValueError(f"--captions needs one folder of pictures, got {len(given)} arguments")
        listed = listed_images(given[0], captions)
    else:
        paths = [path for one in given for path in ([i.path for i in listed_images(one)] if one.is_dir() else [one])]
        listed = [ListedImage("", path) for path in dict.fromkeys(paths)]
    pictures: dict[str, ListedImage] = {}
    for image in listed:
        name, number = image.path.stem, 1
        while name in pictures or name == "captions":  # captions.json is the file of all captions
            number += 1
            name = f"{image.path.stem}-{number}"
        pictures[name] = image if captions is not None else ListedImage(name, image.path)
    return pictures


def rounded(x: Tensor) -> Any:
    """Return nested lists of numbers, rounded to five decimals."""
    return ((x.double() * 1e5).round() / 1e5).tolist()


def numbers(answer: CaptionedPicture, shown: dict[str, Tensor], all_weights: bool) -> dict[str, Any]:
    """Return the numbers behind the drawing of a caption, for a JSON file; optionally those of every block and head."""
    words = [
        {
            "word": word,
            "log_probability": round(value, 5),
            **{name: rounded(shown[name][t]) for name in ("visual_share", "regions", "attributes") if name in shown},
        }
        for t, (word, value) in enumerate(zip(answer.words, answer.log_probabilities))
    ]
    content: dict[str, Any] = {"caption": answer.caption, "score": round(answer.score, 5), "words": words}
    if answer.regions is not None:
        content["regions"] = {name: rounded(torch.from_numpy(answer.regions[name])) for name in ("boxes", "scores")}
    if answer.attributes is not None:
        content["attributes"] = [list(pair) for pair in answer.attributes]
        content["unknown_attributes"] = answer.unknown
    if all_weights:
        models = [{**attention.weights, "visual_share": attention.visual_share} for attention in answer.attention]
        content["models"] = [{name: rounded(x) for name, x in model.items() if x is not None} for model in models]
    return content


def explanation(answer: CaptionedPicture, shown: dict[str, Tensor], layer: int | None) -> Explanation:
    """Return what is drawn with a caption; its notes say which attention is shown, and which attributes were found."""
    blocks, heads = next(iter(answer.attention[0].weights.values())).shape[:2]
    which = "mean of all blocks" if layer == 0 else f"block {layer or blocks} of {blocks}"
    parts = [f"Attention: {which} of the decoder" if blocks > 1 else "Attention of the decoder"]
    parts += [f"mean of {heads} heads"] if heads > 1 else []
    parts += [f"mean of {len(answer.attention)} models"] if len(answer.attention) > 1 else []
    notes = [", ".join(parts) + "."]
    if answer.attributes:
        notes.append("Attributes: " + ", ".join(f"{word} {p:.2f}" for word, p in answer.attributes))
    return Explanation(
        caption=answer.caption,
        words=answer.words,
        boxes=None if answer.regions is None else answer.regions["boxes"],
        attribute_words=[word for word, _ in answer.attributes or ()],
        notes=notes,
        **{name: shown[name].numpy() for name in ("regions", "attributes", "visual_share") if name in shown},
    )


def caption_picture(
    captioner: Captioner, name: str, image: ListedImage, options: argparse.Namespace, folder: Path
) -> dict[str, ImageId]:
    """Write ``NAME.json`` and ``NAME.png`` of a picture, first to ``folder``; return its item of ``captions.json``.

    Raises:
        BadPicture: the picture cannot be read or captioned.
        ValueError: the options do not fit the model.
    """
    from tools.caption.word_attention import summary

    path = image.path
    if not path.is_file():
        raise BadPicture("no such file")
    try:
        picture = open_picture(path)
        answer = captioner(picture)
    except (RuntimeError, ValueError, IndexError) as error:  # BadPicture among them
        why = f"cannot be read as a picture: {error.__cause__}" if error.__cause__ else str(error)
        raise BadPicture(why) from error
    shown = summary(answer.attention, options.layer)
    paths = options.path.split(":")
    content = {"file_name": str(path), "checkpoints": paths, **numbers(answer, shown, options.all_weights)}
    drawn = page(picture, explanation(answer, shown, options.layer))
    text = json.dumps(content) + "\n"
    files.write(options.out / f"{name}.json", lambda partial: partial.write_text(text), folder)
    files.write(options.out / f"{name}.png", drawn.save, folder)
    return {"image_id": image.id, "file_name": str(path), "caption": answer.caption}


def settings_of(options: argparse.Namespace, pictures: dict[str, ListedImage], captioner: Captioner) -> dict[str, Any]:
    """Return the settings that two runs must share for one to resume the other."""
    settings = {name: getattr(options, name) for name in RESULT}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    named: dict[str, Path | None] = {f"checkpoint {path}": Path(path) for path in options.path.split(":")}
    named |= {"detector": options.detector, "regions' checkpoint": options.region_checkpoint}
    named["regions' config"] = options.region_config
    settings |= {f"content of the {name}": sha256_of(path) for name, path in named.items() if path is not None}
    if captioner.extractor is not None:
        settings["recipe of the regions"] = captioner.extractor.features.recipe
    return {**settings, "content of the list": digest({name: str(image.path) for name, image in pictures.items()})}


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    for noisy in ("fairseq", "attn_plugins.fairseq"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from tools.caption.captioner import Captioner

    pictures = pictures_of(options.images, options.captions)
    device = options.shard.device(options.device)
    detector = None if options.detector is None else load_detector(options.detector, device)
    paths = [Path(path) for path in options.path.split(":")]
    search = options.beam, options.max_len, options.lenpen
    given = options.region_checkpoint, options.region_config
    captioner = Captioner(paths, options.data, detector, *search, device, *given)
    plan = dict(settings=settings_of(options, pictures, captioner), images=list(pictures))
    try:
        with shards.Run(work_folder(options.out), options.shard, plan, options.restart) as work, work.records() as rows:
            for name in options.shard.of(list(pictures)):
                if name in work.done:
                    continue
                try:
                    row = caption_picture(captioner, name, pictures[name], options, work.part)
                except BadPicture as error:  # continue with the others
                    print(f"skipped {pictures[name].path}: {error}", file=sys.stderr, flush=True)
                    work.skip(name, str(error))
                else:
                    rows.write(json.dumps([name, row]) + "\n")
                    print(f"{pictures[name].path}: {row['caption']}", flush=True)
        return shards.end(work, options.out, lambda: merge(options.out))
    finally:
        with contextlib.suppress(OSError):  # it has something
            options.out.rmdir()


def work_folder(out: Path) -> Path:
    """Return the work folder of the runs that write to ``out``."""
    return out / ".captions.partial"


def merge(out: Path) -> int:
    """Write ``captions.json`` from the shards in the work folder; return the exit code.

    Raises:
        ValueError: there is nothing to write, or something is left to do.
    """

    def save(parts: list[Path], plan: dict[str, Any]) -> None:
        rows = dict(json.loads(line) for part in parts for line in complete_lines(part / shards.RECORDS))
        ordered = [rows[name] for name in plan["images"] if name in rows]
        if ordered:
            text = json.dumps(ordered, indent=1) + "\n"
            files.write(out / "captions.json", lambda partial: partial.write_text(text), work_folder(out))
        print(f"{out / 'captions.json'}: {len(ordered)} captions")

    return shards.merge(work_folder(out), save)


def layer(text: str) -> int:
    """Parse the number of a block, from 1, or ``all``, which becomes 0."""
    if text == "all":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, or all, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    option = parser.add_argument
    option("images", type=Path, nargs="+", metavar="IMAGE")
    option("--path", required=True, metavar="FILE[:FILE]", help="checkpoints of the captioner")
    text = "attribute detector: best.safetensors of tools.train attributes"
    option("--detector", type=Path, metavar="FILE", help=text)
    text = "COCO's list of the folder's pictures, such as image_info_test2014.json: their ids in captions.json"
    option("--captions", type=Path, metavar="JSON", help=text)
    option("--data", type=Path, metavar="DIR", help="data folder, with all its files; default: the one of the training")
    option("--out", type=Path, default=Path("work_dirs/captions"), metavar="DIR", help="default %(default)s")
    option("--beam", type=int, default=3, help="default %(default)s")
    option("--max-len", type=int, default=50, metavar="WORDS", help="default %(default)s")
    option("--lenpen", type=float, default=1.0, help="above 1: longer captions, default %(default)s")
    option("--layer", type=layer, metavar="N", help="block of the decoder, from 1, or all; default: the last")
    option("--all-weights", action="store_true", help="also write the weights of every block and head")
    option("--region-checkpoint", type=Path, metavar="FILE", help="replaces the checkpoint of the regions' recipe")
    option("--region-config", type=Path, metavar="FILE", help="replaces the mmdet config of the regions' recipe")
    shards.add_arguments(parser)
