r"""Caption pictures, and show which regions and attributes each word attends to.

::

    python -m tools.caption photo.jpg --path checkpoints/eta/checkpoint_best.pt \
        --detector work_dirs/attributes/best.safetensors --out work_dirs/captions

``--path`` names a checkpoint of fairseq's task ``captioning``, or several separated by colons, whose word probabilities
are averaged. Regions are extracted by the recipe stored in the data folder's ``regions.npz`` (or ``.h5``, ``.lmdb``),
attributes by ``--detector`` (trained by ``tools.captioning.train_attributes``). Models of regions alone
(``--fusion visual``, ``show_attend_tell``) need no detector. IMAGE may be a folder, for all pictures in it.

OUT gets ``captions.json``, ``[{"image_id": "photo", "file_name": "photo.jpg", "caption": "..."}]``, and for each
picture ``NAME.png``, which shows every word with its regions, the visual and semantic share of the gate, and its
attributes, and ``NAME.json`` with the numbers. The weights shown are those by which regions and attributes enter the
output (for entangled attention without those of its guidance), in the last block or layer of the decoder
(``--layer``), averaged over heads and models; ``show_attend_tell`` and ``lstm_captioner`` have one layer and one head.
The share of the gate is its mean over channels. ``--all-weights`` adds the weights of every block and head to
``NAME.json``.

The same command resumes an interrupted run; ``captions.json`` is written after the last picture. Several processes
share the pictures, each on its own GPU (``--device cuda``) or all on the CPU, and write the same files as one process::

    torchrun --nproc-per-node 8 -m tools.caption photos --path checkpoints/eta/checkpoint_best.pt ...

Process 0 returns the exit code below (torchrun returns 1 for any code but 0). A second run on the same OUT raises an
error. Processes on several machines need a shared file system with file locks for OUT.

Exit code: 0, all pictures have captions; 1, some could not be read or captioned, and are listed; 2, no picture was
processed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_plugins.captioning.files import complete_lines
from tools import files
from tools.captioning.attributes import load_detector
from tools.captioning.caption_picture import Explanation, page
from tools.captioning.image_list import listed_images
from tools.captioning.processes import Process, device_of, this_process
from tools.captioning.region_recipe import sha256_of
from tools.captioning.shared_run import RECORDS, SharedRun
from tools.captioning.word_attention import WordAttention, summary
from tools.pictures import BadPicture, open_picture

if TYPE_CHECKING:
    from tools.captioning.captioner import CaptionedPicture, Captioner


# Options that change the output files.
RESULT = ("path", "detector", "data", "beam", "max_len", "lenpen", "layer", "all_weights", "region_config")


class Uncaptioned(Exception):
    """Reason why a picture has no caption."""


def make_captioner(options: argparse.Namespace, device: str) -> Captioner:
    """Return the captioner that the command line describes."""
    from tools.captioning.captioner import Captioner, Search

    detector = None if options.detector is None else load_detector(options.detector, device)
    paths = [Path(path) for path in options.path.split(":")]
    search = Search(options.beam, options.max_len, options.lenpen)
    return Captioner(paths, options.data, detector, search, device, options.region_checkpoint, options.region_config)


def pictures_of(given: Sequence[Path]) -> dict[str, Path]:
    """Return the pictures, including those of folders, by unique names.

    Raises:
        BadFile: a folder has no pictures.
    """
    paths = [path for one in given for path in ([i.path for i in listed_images(one)] if one.is_dir() else [one])]
    found: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        name, number = path.stem, 1
        while name in found or name == "captions":  # captions.json is the file of all captions
            number += 1
            name = f"{path.stem}-{number}"
        found[name] = path
    return found


def numbers(found: CaptionedPicture, shown: dict[str, Tensor]) -> dict[str, Any]:
    """Return the numbers behind the drawing of a caption, for a JSON file."""
    words: list[dict[str, Any]] = []
    for t, (word, value) in enumerate(zip(found.words, found.log_probabilities)):
        words.append({"word": word, "log_probability": round(value, 5)})
        words[-1].update(
            {name: rounded(shown[name][t]) for name in ("visual_share", "regions", "attributes") if name in shown}
        )
    content: dict[str, Any] = {"caption": found.caption, "score": round(found.score, 5), "words": words}
    if found.regions is not None:
        content["regions"] = {name: rounded(torch.from_numpy(found.regions[name])) for name in ("boxes", "scores")}
    if found.attributes is not None:
        content["attributes"] = [list(pair) for pair in found.attributes]
        content["unknown_attributes"] = found.unknown
    return content


def all_weights(attention: WordAttention) -> dict[str, Any]:
    """Return one model's weights: lists over blocks, heads, words and regions or attributes, and ``visual_share``."""
    share = attention.visual_share
    weights = {name: rounded(weights) for name, weights in attention.weights.items()}
    return weights if share is None else {**weights, "visual_share": rounded(share)}


def rounded(x: Tensor) -> Any:
    """Return nested lists of numbers, rounded to five decimals."""
    values = x.double()
    return json.loads(json.dumps(((values * 1e5).round() / 1e5).tolist()))


def explanation(found: CaptionedPicture, shown: dict[str, Tensor], notes: Sequence[str]) -> Explanation:
    """Return the explanation that is drawn with a caption."""
    arrays = {
        name: shown[name].numpy() if name in shown else None for name in ("regions", "attributes", "visual_share")
    }
    return Explanation(
        caption=found.caption,
        words=found.words,
        boxes=None if found.regions is None else found.regions["boxes"],
        attribute_words=[word for word, _ in found.attributes or ()],
        notes=notes,
        **arrays,
    )


def notes_of(found: CaptionedPicture, layer: int | None) -> list[str]:
    """Return lines that say which attention is shown and which attributes were detected."""
    blocks, heads = next(iter(found.attention[0].weights.values())).shape[:2]
    shown = "mean of all blocks" if layer == 0 else f"block {layer or blocks} of {blocks}"
    parts = [f"Attention: {shown} of the decoder"] if blocks > 1 else ["Attention of the decoder"]
    if heads > 1:
        parts.append(f"mean of {heads} heads")
    if len(found.attention) > 1:
        parts.append(f"mean of {len(found.attention)} models")
    notes = [", ".join(parts) + "."]
    if found.attributes:
        notes.append("Attributes: " + ", ".join(f"{word} {p:.2f}" for word, p in found.attributes))
    return notes


def caption_picture(
    captioner: Captioner, name: str, path: Path, options: argparse.Namespace, folder: Path
) -> dict[str, str]:
    """Write ``NAME.json`` and ``NAME.png`` of a picture, first to ``folder``; return its item of ``captions.json``.

    Raises:
        Uncaptioned: the picture cannot be read or captioned.
        ValueError: the options do not fit the model.
    """
    try:
        if not path.is_file():
            raise BadPicture("no such file")
        picture = open_picture(path)
        found = captioner(picture)
    except (BadPicture, ValueError, RuntimeError, IndexError) as error:
        raise Uncaptioned(
            f"cannot be read as a picture: {error.__cause__}" if error.__cause__ else str(error)
        ) from error
    shown = summary(found.attention, options.layer)
    content = {"file_name": str(path), "checkpoints": options.path.split(":"), **numbers(found, shown)}
    if options.all_weights:
        content["models"] = [all_weights(attention) for attention in found.attention]
    drawn = page(picture, explanation(found, shown, notes_of(found, options.layer)))
    numbered = json.dumps(content) + "\n"
    files.write(options.out / f"{name}.json", lambda partial: partial.write_text(numbered), folder)
    files.write(options.out / f"{name}.png", drawn.save, folder)
    return {"image_id": name, "file_name": str(path), "caption": found.caption}


def settings_of(options: argparse.Namespace, pictures: dict[str, Path], captioner: Captioner) -> dict[str, Any]:
    """Return the settings that two runs must share for one to resume the other."""
    settings = {name: getattr(options, name) for name in RESULT}
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    named = {f"checkpoint {path}": Path(path) for path in options.path.split(":")}
    named.update(detector=options.detector, **{"regions' checkpoint": options.region_checkpoint})
    named["regions' config"] = options.region_config
    settings.update({f"content of the {name}": sha256_of(path) for name, path in named.items() if path is not None})
    if captioner.extractor is not None:
        settings["recipe of the regions"] = captioner.extractor.features.recipe
    names = json.dumps({name: str(path) for name, path in pictures.items()})
    return dict(settings, images=hashlib.sha256(names.encode()).hexdigest())


def caption(options: argparse.Namespace, process: Process) -> int:
    """Caption the pictures of the command line; return how many have no caption."""
    pictures = list(pictures_of(options.images).items())
    captioner = make_captioner(options, device_of(process, options.device))
    settings = settings_of(options, dict(pictures), captioner)
    is_new = not options.out.exists()

    def recorded(parts: list[Path]) -> dict[int, dict[str, str]]:
        rows = dict(json.loads(line) for part in parts for line in complete_lines(part / RECORDS))
        return dict(sorted(rows.items()))

    def left(parts: list[Path]) -> list[int]:
        done = recorded(parts)
        if done:
            print(f"resuming after {len(done)} of {len(pictures)} pictures", flush=True)
        return [number for number in range(len(pictures)) if number not in done]

    try:
        with SharedRun(options.out / ".captions.partial", process, settings, options.restart) as run:
            run.begin(left)
            for number in run.left:
                run.check()
                name, path = pictures[number]
                try:
                    row = caption_picture(captioner, name, path, options, run.part)
                except Uncaptioned as error:  # continue with the others
                    print(f"skipped {path}: {error}", file=sys.stderr, flush=True)
                    run.skip(number, str(error))
                    continue
                run.record([number, row])
                print(f"{path}: {row['caption']}", flush=True)
            if not run.finish():
                return 0
            rows = list(recorded(run.parts).values())
            if rows:
                listed = json.dumps(rows, indent=1) + "\n"
                run.make(options.out / "captions.json", lambda partial: partial.write_text(listed))
            skipped = len(run.skipped())
            run.remove()
    finally:
        if process.rank == 0 and is_new:
            with contextlib.suppress(OSError):  # it is not there, or has something
                options.out.rmdir()
    if process.number > 1:
        print(f"{options.out / 'captions.json'}: {len(rows)} captions, {skipped} pictures skipped", flush=True)
    return skipped


def layer(text: str) -> int:
    """Parse the number of a block, from 1, or ``all``, which becomes 0."""
    if text == "all":
        return 0
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1, or all, got {text!r}")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.caption", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE")
    parser.add_argument("--path", required=True, metavar="FILE[:FILE]", help="checkpoints of the captioner")
    parser.add_argument(
        "--detector", type=Path, metavar="FILE", help="attribute detector: best.safetensors of train_attributes"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder, with all its files; default: the one used for training"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("work_dirs/captions"), metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--beam", type=int, default=3, help="default %(default)s")
    parser.add_argument("--max-len", type=int, default=50, metavar="WORDS", help="default %(default)s")
    parser.add_argument("--lenpen", type=float, default=1.0, help="above 1: longer captions, default %(default)s")
    parser.add_argument(
        "--layer", type=layer, metavar="N", help="block of the decoder, from 1, or all; default: the last"
    )
    parser.add_argument("--all-weights", action="store_true", help="also write the weights of every block and head")
    parser.add_argument(
        "--region-checkpoint", type=Path, metavar="FILE", help="checkpoint that replaces the one of the regions' recipe"
    )
    parser.add_argument(
        "--region-config", type=Path, metavar="FILE", help="mmdet config that replaces the one of the regions' recipe"
    )
    parser.add_argument(
        "--device", help="default: cuda where there is one (of several processes each its own), else cpu"
    )
    parser.add_argument("--restart", action="store_true", help="discard the results of an interrupted run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    process = Process()
    try:
        process = this_process()
        return 1 if caption(options, process) else 0
    except ValueError as error:
        print(f"caption{process.note}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:  # such as h5py, for the data folder's regions
        print(f"caption{process.note}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    for noisy in ("fairseq", "attn_plugins.fairseq"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    sys.exit(main())
