"""The standard scores of captions, as the standard evaluation package (pycocoevalcap) computes them.

It needs Java for its tokeniser, METEOR and SPICE, and a download of its own for SPICE. What cannot run here is left
out with the reason, and the rest is given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
import string
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.requires import install_command

PACKAGE = "pycocoevalcap"
PTB, PLAIN = "PTBTokenizer", "plain"
SPICE_MODELS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
Tokens = Mapping[int | str, list[str]]  # of each image: sentences, their words between single spaces


class MissingPackage(RuntimeError):
    """The standard evaluation package is not installed."""


@dataclass
class Report:
    """What :func:`evaluate` found.

    Attributes:
        images: how many were scored.
        scores: by name, as fractions (CIDEr-D: 0 to 10).
        left_out: by the name of a score that could not be computed: why.
        tokenizer: ``'PTBTokenizer'``, the standard one, or ``'plain'``.
        tokenizer_note: why it is the plain one; empty otherwise.
    """

    images: int
    scores: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    tokenizer: str = PTB
    tokenizer_note: str = ""


def package_folder() -> Path:
    """Where the evaluation package lies.

    Raises:
        MissingPackage: it is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(f"scores need {PACKAGE}, which is not installed: {install_command(PACKAGE)}")
    return Path(next(iter(spec.submodule_search_locations)))


def plain_words(sentence: str) -> str:
    """The words in lower case without punctuation at their ends: close to the PTB tokeniser, but not it.

    That one also parts clitics ("dog's" into "dog 's") and words at slashes and hyphens of some kinds.
    """
    words = (word.strip(string.punctuation) for word in sentence.lower().split())
    return " ".join(word for word in words if word)


def _ptb(sets: Sequence[Tokens]) -> list[Tokens]:
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    # All in one run of Java. It gets one line a sentence, and breaks lines at more characters than "\n".
    given = {
        (part, image): [dict(caption=" ".join(sentence.split())) for sentence in own]
        for part, sentences in enumerate(sets)
        for image, own in sentences.items()
    }
    tokens = PTBTokenizer().tokenize(given)
    if {key: len(own) for key, own in tokens.items()} != {key: len(own) for key, own in given.items()}:
        raise RuntimeError("it gave another number of sentences than it got")
    if not any(map(any, tokens.values())):
        raise RuntimeError("it gave no word")
    return [{image: tokens[part, image] for image in sentences} for part, sentences in enumerate(sets)]


def tokenize(*sets: Tokens) -> tuple[list[Tokens], str]:
    """Each set in words, and why the plain tokeniser was taken; empty: the standard one was."""
    if shutil.which("java") is None:
        note = "there is no java on the PATH"
    else:
        try:
            return _ptb(sets), ""
        except (OSError, RuntimeError, ValueError) as error:
            note = f"PTBTokenizer failed: {error}"
    return [{image: [plain_words(s) for s in own] for image, own in sentences.items()} for sentences in sets], note


def _bleu(references: Tokens, results: Tokens) -> list[float]:
    from pycocoevalcap.bleu.bleu import Bleu

    return Bleu(4).compute_score(references, results, verbose=0)[0]


def _meteor(references: Tokens, results: Tokens) -> list[float]:
    from pycocoevalcap.meteor.meteor import Meteor

    # Its own protocol parts sentences by "|||".
    free = ({i: [s.replace("|||", " ") for s in own] for i, own in part.items()} for part in (references, results))
    meteor = Meteor()
    try:
        return [meteor.compute_score(*free)[0]]
    except (OSError, ValueError) as error:  # Java has gone: leave nothing that the scorer's own clean-up waits for
        if meteor.lock.locked():
            meteor.lock.release()
        meteor.meteor_p.kill()
        said = meteor.meteor_p.stderr.read().decode(errors="replace").strip().splitlines()
        with contextlib.suppress(OSError):
            meteor.meteor_p.stdin.close()
        raise RuntimeError(said[-1] if said else str(error)) from error


def _rouge(references: Tokens, results: Tokens) -> list[float]:
    from pycocoevalcap.rouge.rouge import Rouge

    return [Rouge().compute_score(references, results)[0]]


def _cider(references: Tokens, results: Tokens) -> list[float]:
    from pycocoevalcap.cider.cider import Cider

    return [Cider().compute_score(references, results)[0]]


def _spice(references: Tokens, results: Tokens) -> list[float]:
    from pycocoevalcap.spice.spice import Spice

    return [Spice().compute_score(references, results)[0]]


def _missing(name: str, folder: Path) -> str:
    """What of Java's a score lacks; empty: nothing."""
    if shutil.which("java") is None:
        return "there is no java on the PATH"
    needed = {
        "METEOR": [folder / "meteor" / file for file in ("meteor-1.5.jar", "data/paraphrase-en.gz")],
        "SPICE": [folder / "spice/spice-1.0.jar", *(folder / "spice/lib" / file for file in SPICE_MODELS)],
    }[name]
    files = [file for file in needed if not file.is_file()]
    if not files:
        return ""
    reason = f"{' and '.join(file.name for file in files)} missing in {files[0].parent}"
    if name == "SPICE":
        reason += f"; python -m {PACKAGE}.spice.get_stanford_models downloads Stanford's models"
    return reason


SCORES: tuple[tuple[tuple[str, ...], Callable[[Tokens, Tokens], list[float]], bool], ...] = (
    (("BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"), _bleu, False),
    (("METEOR",), _meteor, True),
    (("ROUGE-L",), _rouge, False),
    (("CIDEr-D",), _cider, False),
    (("SPICE",), _spice, True),
)  # names, function, whether Java runs it


def evaluate(results: Mapping[int | str, str], references: Mapping[int | str, Sequence[str]]) -> Report:
    """Score one caption for each image against the image's references.

    Raises:
        ValueError: the two are not of the same images, there is none, or a sentence holds no word.
        MissingPackage: the evaluation package is not installed.
    """
    if not references or results.keys() != references.keys():
        apart = sorted(results.keys() ^ references.keys(), key=str)[:5]
        raise ValueError(f"results and references must be of the same images, one at least; not in both: {apart}")
    folder = package_folder()
    (truth, found), note = tokenize(
        {image: list(own) for image, own in references.items()}, {image: [results[image]] for image in references}
    )
    for what, sentences in (("caption", found), ("reference", truth)):
        for image, own in sentences.items():
            if not all(own):
                given = results[image] if what == "caption" else references[image][own.index("")]
                raise ValueError(f"image {image}: the {what} {given!r} holds no word")
    report = Report(len(truth), tokenizer=PLAIN if note else PTB, tokenizer_note=note)
    for names, function, java in SCORES:
        reason = _missing(names[0], folder) if java else ""
        if not reason:
            try:
                values = function(truth, found)
            except (OSError, RuntimeError, ValueError, subprocess.CalledProcessError) as error:
                if not java:
                    raise
                reason = f"its Java part failed: {error}"
            else:
                if all(map(math.isfinite, values)):
                    report.scores |= {name: float(value) for name, value in zip(names, values)}
                    continue
                reason = "its Java part gave no number"
        report.left_out[names[0]] = reason
    return report
