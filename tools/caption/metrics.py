"""Standard caption scores, computed by the standard evaluation package (pycocoevalcap).

It needs Java for its tokeniser, METEOR and SPICE, and a separate download for SPICE. Scores that cannot be computed
here are left out with the reason; the others are returned.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
import string
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attn_plugins.captioning.caption_files import has_characters, words_of
from attn_plugins.captioning.caption_rewards import DocumentFrequencies

PACKAGE = "pycocoevalcap"
PTB, PLAIN = "PTBTokenizer", "plain"
CORENLP = "spice/lib/stanford-corenlp-3.6.0"
JAVA = {  # files that scores run by Java need
    "METEOR": ("meteor/meteor-1.5.jar", "meteor/data/paraphrase-en.gz"),
    "SPICE": ("spice/spice-1.0.jar", f"{CORENLP}.jar", f"{CORENLP}-models.jar"),
}
SCORES = {  # names, and the package's class
    ("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"): "Bleu",
    ("METEOR",): "Meteor",
    ("ROUGE-L",): "Rouge",
    ("CIDEr-D",): "Cider",
    ("SPICE",): "Spice",
}
Tokens = Mapping[int | str, list[str]]  # sentences of each image, with words separated by single spaces


@dataclass
class Report:
    """Result of :func:`evaluate`."""

    images: int  # number of scored images
    scores: dict[str, float] = field(default_factory=dict)  # by name, as fractions (CIDEr-D: 0 to 10)
    left_out: dict[str, str] = field(default_factory=dict)  # reasons by the name of scores that could not be computed
    tokenizer: str = PTB  # the standard one, or 'plain'
    tokenizer_note: str = ""  # why the plain one was used


def plain_words(sentence: str) -> str:
    """Return the words in lower case without punctuation at their ends, which approximates the PTB tokeniser.

    The PTB tokeniser also splits clitics ("dog's" into "dog 's") and words at some slashes and hyphens.
    """
    return " ".join(filter(None, (word.strip(string.punctuation) for word in sentence.lower().split())))


def _split(sentence: str) -> str:
    """Split Chinese and Japanese into characters, which neither tokeniser does."""
    return " ".join(words_of(sentence)) if has_characters(sentence) else sentence


def _undefined(name: str, references: Tokens, results: Tokens) -> str:
    """Return why a score, which the package returns as 0, is undefined, or an empty text."""
    if name == "CIDEr-D":
        return DocumentFrequencies.of(references).undefined
    longest = max(len(caption.split()) for [caption] in results.values())
    return f"no caption has {name[-1]} words" if name.startswith("BLEU") and longest < int(name[-1]) else ""


def _ptb(sets: Sequence[Tokens]) -> list[Tokens]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # One run of Java for all sentences, one per line. Java breaks lines at more characters than "\n".
    given = {
        (part, image): [dict(caption=" ".join(sentence.split())) for sentence in own]
        for part, sentences in enumerate(sets)
        for image, own in sentences.items()
    }
    tokens = PTBTokenizer().tokenize(given)
    if {key: len(own) for key, own in tokens.items()} != {key: len(own) for key, own in given.items()}:
        raise RuntimeError("it returned another number of sentences than it received")
    if not any(map(any, tokens.values())):
        raise RuntimeError("it returned no words")
    return [{image: tokens[part, image] for image in sentences} for part, sentences in enumerate(sets)]


def tokenize(*sets: Tokens) -> tuple[list[Tokens], str]:
    """Tokenise each set; return the sets and the reason for using the plain tokeniser, if any."""
    note = "there is no java on the PATH"
    if shutil.which("java") is not None:
        try:
            return _ptb(sets), ""
        except (OSError, RuntimeError, ValueError) as error:
            note = f"PTBTokenizer failed: {error}"
    return [{image: [plain_words(s) for s in own] for image, own in sentences.items()} for sentences in sets], note


def _meteor(meteor: Any, references: Tokens, results: Tokens) -> float:
    # Its own protocol separates sentences by "|||".
    free = ({i: [s.replace("|||", " ") for s in own] for i, own in part.items()} for part in (references, results))
    try:
        return meteor.compute_score(*free)[0]
    except (OSError, ValueError) as error:  # Java has ended: remove what the scorer's clean-up would wait for
        if meteor.lock.locked():
            meteor.lock.release()
        meteor.meteor_p.kill()
        said = meteor.meteor_p.stderr.read().decode(errors="replace").strip().splitlines()
        with contextlib.suppress(OSError):
            meteor.meteor_p.stdin.close()
        raise RuntimeError(said[-1] if said else str(error)) from error


def _values(name: str, references: Tokens, results: Tokens) -> list[float]:
    """Return the scores of one of the package's classes."""
    scorer = getattr(importlib.import_module(f"{PACKAGE}.{name.lower()}.{name.lower()}"), name)
    if name == "Meteor":
        return [_meteor(scorer(), references, results)]
    if name == "Bleu":
        return scorer(4).compute_score(references, results, verbose=0)[0]
    return [scorer().compute_score(references, results)[0]]


def _missing(name: str, folder: Path) -> str:
    """Return what a score lacks to run Java, or an empty text."""
    if shutil.which("java") is None:
        return "there is no java on the PATH"
    files = [folder / file for file in JAVA[name] if not (folder / file).is_file()]
    if not files:
        return ""
    download = f"; python -m {PACKAGE}.spice.get_stanford_models downloads Stanford's models"
    names = " and ".join(file.name for file in files)
    return f"{names} missing in {files[0].parent}{download if name == 'SPICE' else ''}"


def evaluate(results: Mapping[int | str, str], references: Mapping[int | str, Sequence[str]]) -> Report:
    """Score one caption for each image against the image's references.

    Raises:
        ValueError: the two have different images or none, or a sentence has no words.
        ModuleNotFoundError: the evaluation package is not installed.
    """
    if not references or results.keys() != references.keys():
        apart = sorted(results.keys() ^ references.keys(), key=str)[:5]
        raise ValueError(f"results and references must be of the same images, one at least; not in both: {apart}")
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        install = "pip install '.[captioning]'"
        raise ModuleNotFoundError(f"scores need {PACKAGE}, which is not installed: {install}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    (truth, captions), note = tokenize(
        {image: list(map(_split, own)) for image, own in references.items()},
        {image: [_split(results[image])] for image in references},
    )
    for what, sentences in (("caption", captions), ("reference", truth)):
        for image, own in sentences.items():
            if not all(own):
                given = results[image] if what == "caption" else references[image][own.index("")]
                raise ValueError(f"image {image}: the {what} {given!r} holds no word")
    report = Report(len(truth), tokenizer=PLAIN if note else PTB, tokenizer_note=note)
    for names, scorer in SCORES.items():
        reason = _missing(names[0], folder) if names[0] in JAVA else ""
        if not reason:
            try:
                values = _values(scorer, truth, captions)
            except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
                if names[0] not in JAVA:
                    raise
                reason = f"its Java part failed: {error}"
            else:
                if all(map(math.isfinite, values)):
                    for name, value in zip(names, values):
                        if reason := _undefined(name, truth, captions):
                            report.left_out[name] = f"it is undefined: {reason}"
                        else:
                            report.scores[name] = float(value)
                    continue
                reason = "its Java part returned no number"
        report.left_out[names[0]] = reason
    return report
