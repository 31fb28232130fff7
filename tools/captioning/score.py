r"""Score captions: BLEU-1 to 4, METEOR, ROUGE-L, CIDEr-D and SPICE, with the standard evaluation package.

::

    python -m tools.captioning.score results.json data/scenes/captions.json \
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

from tools import files
from tools.captioning.json_files import BadFile, ImageId, items, read_json, some
from tools.captioning.metrics import PTB, MissingPackage, Report, evaluate


def read_references(path: Path) -> dict[ImageId, list[str]]:
    """Read the captions of every image of a COCO caption file.

    Raises:
        BadFile: an annotation is empty, or its image is unknown.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise BadFile(f"{path} must hold 'images' and 'annotations', got {type(content).__name__}")
    images = items(path, content.get("images"), "'images'", {"id": (int, str)})
    rows = items(path, content.get("annotations"), "'annotations'", {"image_id": (int, str), "caption": str})
    references: dict[ImageId, list[str]] = {image["id"]: [] for image in images}
    for row in rows:
        name = f"annotation {row.get('id')} of image {row['image_id']}"
        if row["image_id"] not in references:
            raise BadFile(f"{path}: {name}: 'images' has no such image")
        if not row["caption"].strip():
            raise BadFile(f"{path}: {name}: an empty caption")
        references[row["image_id"]].append(row["caption"])
    return references


def read_split(path: Path, part: str) -> list[ImageId]:
    """Read the ids of the images of ``part`` in Karpathy's file.

    Raises:
        BadFile: the file has no such part, or an image has no id.
    """
    content = read_json(path)
    rows = content.get("images") if isinstance(content, dict) else None
    rows = items(path, rows, "'images'", {"split": str})
    rows = [{"cocoid": row.get("imgid"), **row} for row in rows]
    rows = items(path, rows, "'images'", {"cocoid": (int, str)})
    chosen = [row["cocoid"] for row in rows if row["split"] == part]
    if not chosen:
        counts = ", ".join(f"{name} ({count})" for name, count in Counter(row["split"] for row in rows).items())
        raise BadFile(f"{path} has no images in {part!r}; its parts: {counts or 'none'}")
    return chosen


def read_results(path: Path) -> dict[ImageId, str]:
    """Read one caption for each image of a COCO results file.

    Raises:
        BadFile: an image has two results, or a caption is empty.
    """
    results: dict[ImageId, str] = {}
    for row in items(path, read_json(path), "the results", {"image_id": (int, str), "caption": str}):
        image = row["image_id"]
        if image in results:
            raise BadFile(f"{path}: image {image} has two results, {results[image]!r} and {row['caption']!r}")
        if not row["caption"].strip():
            raise BadFile(f"{path}: image {image}: an empty caption")
        results[image] = row["caption"]
    return results


def match(
    results_file: Path, captions_file: Path, split: tuple[Path, str] | None = None, skip: bool = False
) -> tuple[dict[ImageId, str], dict[ImageId, list[str]], int]:
    """Return results and references of the images to score, and the number of results of other parts.

    Args:
        results_file: Results with the ids of ``captions_file``, as numbers or as text.
        captions_file: All references.
        split: Karpathy's file, and the part to score.
        skip: Whether to leave out images without a result, with a message.

    Raises:
        BadFile: an image is unknown, or has no result or no references.
    """
    references = read_references(captions_file)
    known = {str(image): image for image in references}
    results = {known.get(str(image), image): caption for image, caption in read_results(results_file).items()}
    if unknown := [image for image in results if image not in references]:
        raise BadFile(f"{results_file}: results for {some(unknown)} that {captions_file} does not know")
    wanted = [known.get(str(image), image) for image in read_split(*split)] if split else list(references)
    if unknown := [image for image in wanted if image not in references]:
        raise BadFile(f"{split[0] if split else ''}: {some(unknown)} that {captions_file} does not know")
    if bare := [image for image in wanted if not references[image]]:
        raise BadFile(f"{captions_file}: no caption for {some(bare)}")
    if lacking := [image for image in wanted if image not in results]:
        hint = "--skip-invalid-samples skips them" + ("" if split else ", --splits scores a part of the images")
        if not skip or len(lacking) == len(wanted):
            raise BadFile(f"{results_file}: no result for {some(lacking)} ({hint})")
        print(f"skipped: {results_file} has no result for {some(lacking)}", file=sys.stderr)
        wanted = [image for image in wanted if image in results]
    others = len(results.keys() - set(wanted))
    return {image: results[image] for image in wanted}, {image: references[image] for image in wanted}, others


def table(report: Report) -> str:
    """Format the scores in hundredths, then the scores left out and the tokeniser."""
    lines = [f"{name:8s} {100 * value:6.1f}" for name, value in report.scores.items()]
    lines += [f"{name:8s} left out: {reason}" for name, reason in report.left_out.items()]
    if report.tokenizer != PTB:
        lines.append(f"tokeniser: plain, since {report.tokenizer_note}; scores differ a little from published ones")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.captioning.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, metavar="RESULTS.json")
    parser.add_argument("captions", type=Path, metavar="CAPTIONS.json")
    parser.add_argument("--splits", nargs=2, metavar=("SPLITS.json", "PART"), help="score the images of one part")
    parser.add_argument("--skip-invalid-samples", action="store_true", help="leave out images without a result")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the scores there")
    options = parser.parse_args(arguments)
    split = (Path(options.splits[0]), options.splits[1]) if options.splits else None
    try:
        results, references, others = match(options.results, options.captions, split, options.skip_invalid_samples)
        report = evaluate(results, references)
    except (ValueError, MissingPackage) as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    print(f"{report.images} images" + (f"; {others} results of other images not read" if others else ""))
    print(table(report))
    if options.json:
        files.write_text(options.json, json.dumps(asdict(report), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
