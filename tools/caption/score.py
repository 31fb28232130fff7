r"""Score captions: BLEU-1 to 4, METEOR, ROUGE-L, CIDEr-D and SPICE, with the standard evaluation package.

::

    python -m tools.caption score results.json data/scenes/captions.json \
        --splits data/scenes/splits.json test --json scores.json

RESULTS is COCO's format of results, ``[{"image_id": 42, "caption": "a cat on grass"}, ...]``, one caption per image;
CAPTIONS is COCO's format of captions. With ``--splits`` (Karpathy's file) only the images of that part are scored, and
other results are ignored; without it all images of CAPTIONS are scored. Every scored image needs one result, unless
``--skip-invalid-samples`` is given, for results that ``fairseq-generate`` produced with this option.

The table shows hundredths, as papers do; the JSON file holds fractions (CIDEr-D: 0 to 10), what was left out and why,
and the tokeniser. Sentences are tokenised by the package's PTBTokenizer if Java is available; otherwise in lower case,
at white space, without punctuation at the ends of words, and the output says so: such scores differ slightly from
published ones. A score whose Java part or model is missing is left out, with the reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from attn_plugins.captioning.caption_files import ImageId, read_items
from tools import files
from tools.caption.lists import read_captions, read_splits, some
from tools.caption.metrics import PTB, evaluate


def read_references(path: Path) -> dict[ImageId, list[str]]:
    """Read the captions of every image of a COCO caption file, none of which may be empty."""
    references = read_captions(path)
    for image, own in references.items():
        if not all(map(str.strip, own)):
            raise ValueError(f"{path}: image {image}: an empty caption")
    return references


def read_split(path: Path, part: str) -> list[ImageId]:
    """Read the ids of the images of ``part`` in Karpathy's file, which must have some."""
    rows = read_splits(path)
    chosen = [row["cocoid"] for row in rows if row["split"] == part]
    if not chosen:
        counts = ", ".join(f"{name} ({count})" for name, count in Counter(row["split"] for row in rows).items())
        raise ValueError(f"{path} has no images in {part!r}; its parts: {counts or 'none'}")
    return chosen


def read_results(path: Path) -> dict[ImageId, str]:
    """Read one caption for each image of a COCO results file; an image must not have two, nor an empty one."""
    results: dict[ImageId, str] = {}
    for row in read_items(path, None, image_id=(int, str), caption=str):
        image = row["image_id"]
        if image in results:
            raise ValueError(f"{path}: image {image} has two results, {results[image]!r} and {row['caption']!r}")
        if not row["caption"].strip():
            raise ValueError(f"{path}: image {image}: an empty caption")
        results[image] = row["caption"]
    return results


def match(
    results_file: Path, captions_file: Path, split: tuple[Path, str] | None = None, skip: bool = False
) -> tuple[dict[ImageId, str], dict[ImageId, list[str]], int]:
    """Return results and references of the images to score, and the number of results of other parts.

    Ids may be numbers in one file and text in another. ``skip`` leaves out images without a result, with a message.

    Raises:
        ValueError: an image is unknown, or has no result or no references.
    """
    references = read_references(captions_file)
    known = {str(image): image for image in references}
    results = {known.get(str(image), image): caption for image, caption in read_results(results_file).items()}
    wanted = [known.get(str(image), image) for image in read_split(*split)] if split else list(references)
    for file, images in ((results_file, list(results)), (split[0] if split else "", wanted)):
        if unknown := [image for image in images if image not in references]:
            raise ValueError(f"{file}: {some(unknown)} that {captions_file} does not know")
    if bare := [image for image in wanted if not references[image]]:
        raise ValueError(f"{captions_file}: no caption for {some(bare)}")
    if lacking := [image for image in wanted if image not in results]:
        hint = "--skip-invalid-samples skips them" + ("" if split else ", --splits scores a part of the images")
        if not skip or len(lacking) == len(wanted):
            raise ValueError(f"{results_file}: no result for {some(lacking)} ({hint})")
        print(f"skipped: {results_file} has no result for {some(lacking)}", file=sys.stderr)
        wanted = [image for image in wanted if image in results]
    others = len(results.keys() - set(wanted))
    return {image: results[image] for image in wanted}, {image: references[image] for image in wanted}, others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("captions", type=Path, metavar="CAPTIONS.json")
    parser.add_argument("--splits", nargs=2, metavar=("SPLITS.json", "PART"), help="score the images of one part")
    parser.add_argument("--skip-invalid-samples", action="store_true", help="leave out images without a result")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the scores there")


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    split = (Path(options.splits[0]), options.splits[1]) if options.splits else None
    results, references, others = match(options.results, options.captions, split, options.skip_invalid_samples)
    report = evaluate(results, references)
    print(f"{report.images} images" + (f"; {others} results of other images not read" if others else ""))
    for name, value in report.scores.items():
        print(f"{name:8s} {100 * value:6.1f}")
    for name, reason in report.left_out.items():
        print(f"{name:8s} left out: {reason}")
    if report.tokenizer != PTB:
        print(f"tokeniser: plain, since {report.tokenizer_note}; scores differ a little from published ones")
    if options.json:
        files.write_text(options.json, json.dumps(asdict(report), indent=1) + "\n")
    return 0
