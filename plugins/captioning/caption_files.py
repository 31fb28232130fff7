"""The files of a captioning task: captions in COCO format, Karpathy's splits, attributes; and their vocabulary.

No toolkit is needed to read them. Every error names the file and the item. An image's id is a number or a text, and
``7`` and ``"7"`` are the same image.
"""

from __future__ import annotations

import json
import logging
import math
import string
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ImageId = int | str
Words = list[str]
Captions = dict[ImageId, list[Words]]
SPLITS = {"train": ("train", "restval"), "valid": ("val",), "val": ("val",), "test": ("test",)}

logger = logging.getLogger(__name__)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Problems:
    """What to do about a bad sample: an error, or with ``skip`` one line of the log, and the sample is left out.

    Attributes:
        number: How many there were, of which the first ``LINES`` have a line.
    """

    LINES = 100  # a set may be bad throughout

    def __init__(self, skip: bool) -> None:
        self.skip, self.number = skip, 0

    def __call__(self, message: str) -> None:
        """Report one.

        Raises:
            ValueError: unless ``skip``.
        """
        if not self.skip:
            raise ValueError(f"{message} (--skip-invalid-samples leaves such samples out)")
        self.number += 1
        if self.number <= self.LINES:
            logger.warning("skipped: %s", message)
        if self.number == self.LINES:
            logger.warning("skipped: %d so far; more are only counted", self.number)


def words_of(caption: str) -> Words:
    """In lower case, without punctuation, split at white space: the tokens of Karpathy's files."""
    # One object a word: COCO has seven million.
    return [sys.intern(word) for word in caption.lower().translate(_NO_PUNCTUATION).split()]


def read_splits(captions: Sequence[Path], splits: Path, problems: Problems) -> dict[str, Captions]:
    """The captions of every image of every split, as words.

    An image has the id that the captions' files give it, which scores are computed by.

    Args:
        captions: Files in COCO format, ``{"images": [{"id"}], "annotations": [{"id", "image_id", "caption"}]}``;
            without any, the captions are the ``sentences`` (``raw``) of ``splits``.
        splits: ``{"images": [{"cocoid" or "imgid", "split", "sentences"}]}``, of which ``sentences`` may be absent
            where there are ``captions``.
        problems: Takes what is wrong with a sample.

    Raises:
        ValueError: a file is not such. Of a bad sample, what ``problems`` raises.
    """
    texts = _read_coco(captions, problems) if captions else None
    where = ", ".join(map(str, captions)) or str(splits)
    found: dict[str, Captions] = {}
    seen: dict[str, Any] = {}
    for entry in _entries(splits, "images"):
        image_id = _image_id(splits, entry, "cocoid", "imgid")
        if "split" not in entry:
            raise ValueError(f"{splits}: image {image_id} has no split")
        if str(image_id) in seen:
            problems(f"{splits}: image {image_id} is there twice, in {seen[str(image_id)]} and in {entry['split']}")
            continue
        seen[str(image_id)] = entry["split"]
        if texts is None:
            own = _sentences(splits, image_id, entry)
        elif str(image_id) in texts:
            image_id, own = texts[str(image_id)]
        else:
            problems(f"{splits}: image {image_id} is not in {where}")
            continue
        if not own:
            problems(f"{splits}: image {image_id} has no captions in {where}")
            continue
        words = []
        for name, text in own:
            if not isinstance(text, str) or not (caption := words_of(text)):
                problems(f"{where}: {name} of image {image_id} is empty, got {text!r}")
            else:
                words.append(caption)
        if words:
            found.setdefault(str(entry["split"]), {})[image_id] = words
    return found


def _sentences(path: Path, image_id: ImageId, entry: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and texts of the captions in Karpathy's file."""
    sentences = entry.get("sentences", [])
    if not isinstance(sentences, list) or not all(
        isinstance(s, dict) and ("raw" in s or "tokens" in s) for s in sentences
    ):
        raise ValueError(
            f"{path}: image {image_id} must have a list of sentences with raw or tokens, got {sentences!r:.120}"
        )
    texts = [s["raw"] if "raw" in s else " ".join(map(str, s["tokens"])) for s in sentences]
    return [(f"caption {i + 1}", text) for i, text in enumerate(texts)]


def _read_coco(paths: Sequence[Path], problems: Problems) -> dict[str, tuple[ImageId, list[tuple[str, Any]]]]:
    """By the text of its id, every image's id and the names and texts of its captions."""
    images: dict[str, tuple[ImageId, list[tuple[str, Any]]]] = {}
    for path in paths:
        for image in _entries(path, "images"):
            image_id = _image_id(path, image, "id")
            images.setdefault(str(image_id), (image_id, []))
    for path in paths:
        for annotation in _entries(path, "annotations"):
            name = f"caption {annotation.get('id')}"
            if "image_id" not in annotation or "caption" not in annotation:
                raise ValueError(f"{path}: {name} must have image_id and caption, got {', '.join(annotation)}")
            image_id = _image_id(path, annotation, "image_id")
            if str(image_id) not in images:
                problems(f"{path}: {name} is of image {image_id}, which is not among its images")
            else:
                images[str(image_id)][1].append((name, annotation["caption"]))
    return images


def _image_id(path: Path, entry: Mapping[str, Any], *names: str) -> ImageId:
    """What the first of ``names`` that is there gives."""
    image_id = next((entry[name] for name in names if name in entry), None)
    if isinstance(image_id, bool) or not isinstance(image_id, (int, str)):
        raise ValueError(f"{path}: {' or '.join(names)} of an image must be a number or a text, got {entry!r:.120}")
    return image_id


def read_attributes(path: Path) -> dict[str, list[tuple[str, float]]]:
    """The file ``{image id: [[word, probability], ...]}``, the most probable words first.

    Raises:
        ValueError: the file is not such, or an image is there twice.
    """
    found = {}
    for image_id, pairs in _read_json(path, dict, once=True).items():
        try:
            own = [(str(word).lower(), float(probability)) for word, probability in pairs]
        except (TypeError, ValueError):
            own = [("", math.nan)]
        if not all(math.isfinite(probability) for _, probability in own):
            raise ValueError(f"{path}: image {image_id} must have pairs of word and probability, got {pairs!r:.120}")
        found[image_id] = sorted(own, key=lambda pair: -pair[1])
    return found


def described_by(captions: Iterable[Words], vocabulary: Mapping[str, int], number: int) -> Words:
    """The words that most of an image's captions have, of ``vocabulary``; of as many captions, the rarer word first.

    Args:
        vocabulary: Words and how frequent they are.
        number: How many words at most.
    """
    counts = Counter(word for caption in captions for word in set(caption) if word in vocabulary)
    return sorted(counts, key=lambda word: (-counts[word], vocabulary[word], word))[:number]


def _entries(path: Path, name: str) -> list[dict[str, Any]]:
    content = _read_json(path, dict)
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path} must have a list of {name}; it has {', '.join(content) or 'nothing'}")
    return entries


def _read_json(path: Path, kind: type, once: bool = False) -> Any:
    """What a file holds; with ``once`` no key of an object may be there twice, of which JSON takes the last."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # with the mark that some editors put first, or without
            content = json.load(file, object_pairs_hook=_object if once else None)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON file, or cut off: {error}") from error
    except ValueError as error:  # of _object
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"image {twice} is there twice")
    return found
