"""Implementation of ``python -m tools.show_attention --fairseq``."""

from __future__ import annotations

import argparse
import re
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from tools.files import write_text

from .folder import RECORD, own_folder
from .sentence import Reader, Sentence, kind_of, load, names_of, read
from .sentence_grid import draw_heads, draw_terms
from .sentence_page import write_sentence_page
from .view import ViewError

# Options for pictures only and for sentences only, with their defaults.
OF_PICTURES: dict[str, Any] = dict(
    checkpoint=None, model_args=[], pixels=[], rollout=False, input_size=None, slots=[], objects=8, least_score=0.3
)
OF_SENTENCES: dict[str, Any] = dict(data=None, sentencepiece_model=None, target=None, beam=4)


def add_sentence_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of sentences."""
    group = parser.add_argument_group("sentences, with a fairseq checkpoint")
    group.add_argument(
        "--fairseq", type=Path, metavar="CHECKPOINT",
        help="checkpoint of fairseq-train: show attention within the sentence MODEL, its translation, and between both",
    )  # fmt: skip
    group.add_argument(
        "--data", type=Path, metavar="DIR",
        help="fairseq-preprocess's folder, with the dictionaries; default: the folder of the training",
    )  # fmt: skip
    group.add_argument(
        "--sentencepiece-model", type=Path, metavar="FILE",
        help="splits the sentence into the corpus's pieces; default: words or pieces are separated by spaces",
    )  # fmt: skip
    group.add_argument("--target", metavar="TEXT", help="the translation to show; default: the model's own")
    group.add_argument(
        "--beam", type=int, default=4, metavar="N", help="beam size for the model's translation; default 4"
    )


def check_sentence_options(options: argparse.Namespace) -> None:
    """Check that options for pictures and for sentences are not mixed.

    Raises:
        ViewError: they are.
    """
    wrong = OF_SENTENCES if options.fairseq is None else OF_PICTURES
    given = [name for name, default in wrong.items() if getattr(options, name, default) != default]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        kind = "sentences: it needs --fairseq CHECKPOINT" if options.fairseq is None else "pictures, not for --fairseq"
        raise ViewError(f"{option} is for {kind}")
    if options.fairseq is not None and options.image is not None:
        raise ViewError(f"the sentence must be one argument, in quotes, got {options.model!r} and more")
    if options.beam < 1:
        raise ViewError(f"--beam must be at least 1, got {options.beam}")


def show_sentence(options: argparse.Namespace) -> list[Path]:
    """Run the command line; return the files written."""
    reader = load(options.fairseq, options.data, options.sentencepiece_model)
    if options.list:
        print("\n".join(f"{name}  ({kind_of(name)})" for name in names_of(reader.model)) or "no attention layer")
        return []
    sentence = read(reader, options.model, options.target, options.beam, options.parts)
    if sentence.unknown:
        hint = "" if options.sentencepiece_model is not None else "; is the corpus in pieces? see --sentencepiece-model"
        print(f"not in the dictionary, read as unknown: {', '.join(sentence.unknown)}{hint}")
    sentence.maps = _chosen(sentence, options.layers)
    if options.parts and not any(layer.parts for layer in sentence.maps):
        print("no layer has more than one term in its logits: there are no parts to show")
    return _write(sentence, reader, options)


def _chosen(sentence: Sentence, patterns: list[str]) -> list[Any]:
    names = [layer.name for layer in sentence.maps]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ViewError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(names)}")
    return [n for n in sentence.maps if not patterns or any(fnmatchcase(n.name, pattern) for pattern in patterns)]


def _write(sentence: Sentence, reader: Reader, options: argparse.Namespace) -> list[Path]:
    output = options.output
    if output is None:
        short = re.sub(r"\W+", "-", options.model).strip("-")[:40] or "sentence"
        facts = [options.model, *([] if options.target is None else [options.target]), f"beam {options.beam}"]
        output, record = own_folder(Path("work_dirs/attention"), "fairseq", facts, options.fairseq, Path(short))
        write_text(output / RECORD, record)
    drawn = []
    for layer in sentence.maps:
        drawn.append((layer.name, partial(draw_heads, sentence, layer)))
        if layer.parts:
            drawn.append((f"{layer.name}.parts", partial(draw_terms, sentence, layer)))
    written = []
    for name, draw_one in drawn:
        written.append(output / f"{name}.png")
        draw_one(written[-1])
    written.append(output / "attention.html")
    write_sentence_page(sentence, f"Attention of {options.fairseq.name} on “{options.model}”", written[-1])
    return written
