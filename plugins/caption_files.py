"""The files of a captioning task: captions in COCO format, Karpathy's splits, attributes; and their vocabulary.

No toolkit is needed to read them. Every error names the file and the item.
"""

from __future__ import annotations

import json
import logging
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
        number: How many there were.
    """

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
        logger.warning("skipped: %s", message)


def words_of(caption: str) -> Words:
    """In lower case, without punctuation, split at white space: the tokens of Karpathy's files."""
    # One object a word: COCO has seven million.
    return [sys.intern(word) for word in caption.lower().translate(_NO_PUNCTUATION).split()]


def read_splits(captions: Sequence[Path], splits: Path, problems: Problems) -> dict[str, Captions]:
    """The captions of every image of every split, as words.

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
    seen = set()
    for entry in _entries(splits, "images"):
        image_id = _image_id(entry, splits)
        if "split" not in entry:
            raise ValueError(f"{splits}: image {image_id} has no split")
        if image_id in seen:
            problems(f"{splits}: image {image_id} is there twice")
            continue
        seen.add(image_id)
        if texts is None:
            sentences = [s.get("raw", " ".join(s.get("tokens", ()))) for s in entry.get("sentences", ())]
            own = [(f"caption {i + 1}", sentence) for i, sentence in enumerate(sentences)]
        else:
            own = texts.get(image_id, [])
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


def _read_coco(paths: Sequence[Path], problems: Problems) -> dict[ImageId, list[tuple[str, Any]]]:
    """Names and texts of the captions of every image."""
    images: dict[ImageId, list[tuple[str, Any]]] = {}
    for path in paths:
        for image in _entries(path, "images"):
            if "id" not in image:
                raise ValueError(f"{path}: an image has no id, got {image!r}")
            images.setdefault(image["id"], [])
    for path in paths:
        for annotation in _entries(path, "annotations"):
            name = f"caption {annotation.get('id')}"
            if "image_id" not in annotation or "caption" not in annotation:
                raise ValueError(f"{path}: {name} must have image_id and caption, got {', '.join(annotation)}")
            image_id = annotation["image_id"]
            if image_id not in images:
                problems(f"{path}: {name} is of image {image_id}, which is not among its images")
            else:
                images[image_id].append((name, annotation["caption"]))
    return images


def _image_id(entry: Mapping[str, Any], path: Path) -> ImageId:
    image_id = entry.get("cocoid", entry.get("imgid"))
    if image_id is None:
        raise ValueError(f"{path}: an image has neither cocoid nor imgid, got {', '.join(entry)}")
    return image_id


def read_attributes(path: Path) -> dict[str, list[tuple[str, float]]]:
    """The file ``{image id: [[word, probability], ...]}``, the most probable words first.

    Raises:
        ValueError: the file is not such.
    """
    found = {}
    for image_id, pairs in _read_json(path, dict).items():
        try:
            own = [(str(word).lower(), float(probability)) for word, probability in pairs]
        except (TypeError, ValueError):
            raise ValueError(
                f"{path}: image {image_id} must have pairs of word and probability, got {pairs!r}"
            ) from None
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


def _read_json(path: Path, kind: type) -> Any:
    try:
        with path.open(encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:  # of JSON, and of UTF-8
        raise ValueError(f"{path} is no JSON file, or cut off: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content
