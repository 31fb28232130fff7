r"""Score captions: BLEU-1 to 4, ROUGE-L and CIDEr-D, with the standard evaluation package.

::

    python -m tools.caption score results.json data/own/captions.json \
        --splits data/own/splits.json test --json scores.json

RESULTS is COCO's format of results, ``[{"image_id": 42, "caption": "a cat on grass"}, ...]``, one caption per image;
CAPTIONS is COCO's format of captions. With ``--splits`` (Karpathy's file) only the images of that part are scored, and
other results are ignored; without it all images of CAPTIONS are scored. Every scored image needs one result, unless
``--skip-invalid-samples`` is given, for results that ``fairseq-generate`` produced with this option.

The table shows hundredths, as papers do; the JSON file holds fractions (CIDEr-D: 0 to 10), what was left out and why,
and the tokeniser. Sentences are tokenised by the package's PTBTokenizer if Java is available; otherwise in lower case,
at white space, without punctuation at the ends of words, and the output says so: such scores differ slightly from
published ones. A score that is undefined is left out, with the reason. ``pycocoevalcap.eval.COCOEvalCap`` has METEOR
and SPICE, which run Java.
"""

from __future__ import annotations

import argparse
import json
import shutil
import string
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from attn_plugins.captioning.caption_files import ImageId, has_characters, read_items, words_of
from attn_plugins.captioning.caption_rewards import DocumentFrequencies
from tools import files
from tools.caption.lists import read_captions, read_splits, some

PTB = "PTBTokenizer"
BLEU = ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4")
Sentences = Mapping[ImageId, Sequence[str]]


@dataclass
class Report:
    """Result of :func:`evaluate`."""

    images: int  # number of scored images
    scores: dict[str, float]  # by name, as fractions (CIDEr-D: 0 to 10)
    left_out: dict[str, str]  # reasons by the name of undefined scores
    tokenizer: str  # the standard one, or 'plain'
    tokenizer_note: str  # why the plain one was used


def plain_words(sentence: str) -> str:
    """Return the words in lower case without punctuation at their ends, which approximates the PTB tokeniser."""
    return " ".join(filter(None, (word.strip(string.punctuation) for word in sentence.lower().split())))


def _ptb_words(sentences: Sentences) -> dict[ImageId, list[str]]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    given = {image: [dict(caption=sentence) for sentence in own] for image, own in sentences.items()}
    tokens = PTBTokenizer().tokenize(given)
    if not any(map(any, tokens.values())) or any(len(tokens[image]) != len(own) for image, own in given.items()):
        raise RuntimeError("it returned another number of sentences than it received, or no words")
    return tokens


def tokenize(*sets: Sentences) -> tuple[list[dict[ImageId, list[str]]], str]:
    """Tokenise each set; return the sets and the reason for using the plain tokeniser, if any."""
    # Neither tokeniser splits Chinese and Japanese into characters; Java breaks lines at more characters than "\n".
    lines = [
        {i: [" ".join(words_of(s) if has_characters(s) else s.split()) for s in own] for i, own in sentences.items()}
        for sentences in sets
    ]
    note = "there is no java on the PATH"
    if shutil.which("java") is not None:
        try:
            return [_ptb_words(sentences) for sentences in lines], ""
        except (OSError, RuntimeError, ValueError) as error:
            note = f"{PTB} failed: {error}"
    return [{image: list(map(plain_words, own)) for image, own in sentences.items()} for sentences in lines], note


def evaluate(results: Mapping[ImageId, str], references: Sentences) -> Report:
    """Score one caption for each image against the image's references.

    Raises:
        ValueError: a sentence has no words.
        ModuleNotFoundError: the evaluation package is not installed.
    """
    try:
        from pycocoevalcap.bleu.bleu import Bleu
        from pycocoevalcap.cider.cider import Cider
        from pycocoevalcap.rouge.rouge import Rouge
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "scores need pycocoevalcap, which is not installed: pip install '.[captioning]'"
        ) from error
    given = references, {i: [results[i]] for i in references}
    (truth, captions), note = tokenize(*given)
    for what, before, sentences in (("reference", given[0], truth), ("caption", given[1], captions)):
        for image, own in sentences.items():
            if not all(own):
                raise ValueError(f"image {image}: the {what} {before[image][own.index('')]!r} holds no word")
    values = dict(zip(BLEU, Bleu(4).compute_score(truth, captions, verbose=0)[0]))
    values["ROUGE-L"], values["CIDEr-D"] = (kind().compute_score(truth, captions)[0] for kind in (Rouge, Cider))
    # The package returns 0 for what is undefined.
    longest = max(len(caption.split()) for [caption] in captions.values())
    reasons = {name: f"no caption has {n} words" for n, name in enumerate(BLEU, 1) if longest < n}
    if reason := DocumentFrequencies.of(truth).undefined:
        reasons["CIDEr-D"] = reason
    scores = {name: float(value) for name, value in values.items() if name not in reasons}
    left_out = {name: f"it is undefined: {reason}" for name, reason in reasons.items()}
    return Report(len(truth), scores, left_out, "plain" if note else PTB, note)


def read_results(path: Path) -> dict[ImageId, str]:
    """Read one caption for each image of a COCO results file; an image must not have two, nor an empty one."""
    results: dict[ImageId, str] = {}
    for row in read_items(path, None, image_id=(int, str), caption=str):
        image = row["image_id"]
        if image in results:
            raise ValueError(f"{path}: image {image} has two results, {results[image]!r} and {row['caption']!r}")
        results[image] = _filled(path, image, row["caption"])
    return results


def _filled(path: Path, image: ImageId, caption: str) -> str:
    if not caption.strip():
        raise ValueError(f"{path}: image {image}: an empty caption")
    return caption


def match(
    results_file: Path, captions_file: Path, split: tuple[Path, str] | None = None, skip: bool = False
) -> tuple[dict[ImageId, str], dict[ImageId, list[str]], int]:
    """Return results and references of the images to score, and the number of results of other parts.

    Ids may be numbers in one file and text in another. ``skip`` leaves out images without a result, with a message.

    Raises:
        ValueError: an image is unknown, or has no result or no references, or the split has no images.
    """
    texts = read_captions(captions_file)
    references = {image: [_filled(captions_file, image, text) for text in own] for image, own in texts.items()}
    known = {str(image): image for image in references}
    results = {known.get(str(image), image): caption for image, caption in read_results(results_file).items()}
    wanted = list(references)
    if split is not None:
        rows = read_splits(split[0])
        wanted = [known.get(str(row["cocoid"]), row["cocoid"]) for row in rows if row["split"] == split[1]]
        if not wanted:
            parts = ", ".join(f"{name} ({n})" for name, n in Counter(row["split"] for row in rows).items())
            raise ValueError(f"{split[0]} has no images in {split[1]!r}; its parts: {parts or 'none'}")
    for file, images in ((results_file, list(results)), (split and split[0], wanted)):
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
