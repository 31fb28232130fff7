"""Readers for the files of a captioning task: COCO captions, Karpathy's splits, attributes and the vocabulary.

They need no toolkit. Every error names the file and the item. An image id is a number or a string; ``7`` and ``"7"``
are the same image.
"""

from __future__ import annotations

import json
import math
import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ImageId = int | str
Words = list[str]
Captions = dict[ImageId, list[Words]]
SPLITS = {"train": ("train", "restval"), "valid": ("val",), "val": ("val",), "test": ("test",)}

# As in Karpathy's files, words lose ASCII punctuation, "a man's" -> "a mans"; other punctuation separates words.
_OTHERS = [chr(i) for i in range(0x80, 0x10000) if unicodedata.category(chr(i))[0] == "P"]
_PUNCTUATION = str.maketrans(dict.fromkeys(_OTHERS, " ") | dict.fromkeys(string.punctuation + "\u2018\u2019", ""))
# Ideographs and kana, whose scripts do not separate words.
_CHARACTER = re.compile("[\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")


def words_of(caption: str | Sequence[str]) -> Words:
    """Split a caption into lower-case words without punctuation, at white space, as in Karpathy's files.

    Every Chinese or Japanese character of a text is a word of its own; tokens that are given are not split.
    """
    text = _CHARACTER.sub(r" \g<0> ", caption) if isinstance(caption, str) else " ".join(caption)
    # Interning keeps one object per distinct word: COCO has seven million words.
    return [sys.intern(word) for word in text.lower().translate(_PUNCTUATION).split()]


def read_splits(captions: Sequence[Path], splits: Path, bare: Collection[str] = ()) -> dict[str, Captions]:
    """Return the tokenized captions of every image, grouped by split.

    Images have the ids of the caption files, because the metrics use these ids.

    Args:
        captions: Files in COCO format, ``{"images": [{"id"}], "annotations": [{"id", "image_id", "caption"}]}``;
            ``annotations`` may be missing. If there is no file, the captions are the ``sentences`` (``raw``, else
            ``tokens``) of ``splits``.
        splits: ``{"images": [{"cocoid" or "imgid", "split", "sentences"}]}``; ``sentences`` is optional if
            ``captions`` are given.
        bare: Splits whose images may have no captions.

    Raises:
        ValueError: A file has another format, or a sample is invalid.
    """
    texts = _read_coco(captions) if captions else None
    where = ", ".join(map(str, captions)) or str(splits)
    by_split: dict[str, Captions] = {}
    seen: dict[str, Any] = {}
    for entry in read_items(splits, "images"):
        image_id = image_id_of(splits, entry, "cocoid", "imgid")
        if "split" not in entry:
            raise ValueError(f"{splits}: image {image_id} has no split")
        if str(image_id) in seen:
            raise ValueError(
                f"{splits}: image {image_id} appears twice, in {seen[str(image_id)]} and in {entry['split']}"
            )
        seen[str(image_id)] = entry["split"]
        if texts is None:
            own = _sentences(splits, image_id, entry)
        elif str(image_id) in texts or entry["split"] in bare:
            image_id, own = texts.get(str(image_id), (image_id, []))
        else:
            raise ValueError(f"{splits}: image {image_id} is not in {where}")
        if not own and entry["split"] not in bare:
            raise ValueError(f"{splits}: image {image_id} has no captions in {where}")
        words = []
        for name, text in own:
            if not isinstance(text, (str, tuple)) or not (caption := words_of(text)):
                raise ValueError(f"{where}: {name} of image {image_id} is empty, got {text!r}")
            words.append(caption)
        by_split.setdefault(str(entry["split"]), {})[image_id] = words
    return by_split


def _sentences(path: Path, image_id: ImageId, entry: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and texts of an image's captions in Karpathy's file."""
    sentences = entry.get("sentences", [])
    if not isinstance(sentences, list) or not all(
        isinstance(s, dict) and ("raw" in s or isinstance(s.get("tokens"), list)) for s in sentences
    ):
        raise ValueError(
            f"{path}: image {image_id} must have a list of sentences with raw or a list of tokens, "
            f"got {sentences!r:.120}"
        )
    texts = [s["raw"] if "raw" in s else tuple(map(str, s["tokens"])) for s in sentences]
    return [(f"caption {i + 1}", text) for i, text in enumerate(texts)]


def _read_coco(paths: Sequence[Path]) -> dict[str, tuple[ImageId, list[tuple[str, Any]]]]:
    """Return each image's id and the names and texts of its captions, keyed by the id as a string."""
    images: dict[str, tuple[ImageId, list[tuple[str, Any]]]] = {}
    for path in paths:
        for image in read_items(path, "images"):
            image_id = image_id_of(path, image, "id")
            images.setdefault(str(image_id), (image_id, []))
    for path in paths:
        for annotation in read_items(path, "annotations", needed=False):
            name = f"caption {annotation.get('id')}"
            if "image_id" not in annotation or "caption" not in annotation:
                raise ValueError(f"{path}: {name} must have image_id and caption, got {', '.join(annotation)}")
            image_id = image_id_of(path, annotation, "image_id")
            if str(image_id) not in images:
                raise ValueError(f"{path}: {name} belongs to image {image_id}, which is not in its list of images")
            images[str(image_id)][1].append((name, annotation["caption"]))
    return images


def image_id_of(path: Path, entry: Mapping[str, Any], *names: str) -> ImageId:
    """Return the value of the first of ``names`` that ``entry`` contains."""
    image_id = next((entry[name] for name in names if name in entry), None)
    if isinstance(image_id, bool) or not isinstance(image_id, (int, str)):
        raise ValueError(f"{path}: {' or '.join(names)} of an image must be a number or a string, got {entry!r:.120}")
    return image_id


def read_attributes(path: Path) -> dict[str, list[tuple[str, float]]]:
    """Read the file ``{image id: [[word, probability], ...]}``; the most probable words come first.

    Raises:
        ValueError: The file has another format, or an image appears twice.
    """
    attributes = {}
    for image_id, pairs in _read_json(path, once=True).items():
        try:
            own = [(str(word).lower(), float(probability)) for word, probability in pairs]
        except (TypeError, ValueError):
            own = [("", math.nan)]
        if not all(math.isfinite(probability) for _, probability in own):
            raise ValueError(f"{path}: image {image_id} must have pairs of word and probability, got {pairs!r:.120}")
        attributes[image_id] = sorted(own, key=lambda pair: -pair[1])
    return attributes


def described_by(captions: Iterable[Words], vocabulary: Mapping[str, int], number: int) -> Words:
    """Return the words of ``vocabulary`` that occur in most of an image's captions; ties prefer the rarer word.

    Args:
        captions: Tokenized captions of one image.
        vocabulary: Words and their frequencies.
        number: Maximum number of words.
    """
    counts = Counter(word for caption in captions for word in set(caption) if word in vocabulary)
    return sorted(counts, key=lambda word: (-counts[word], vocabulary[word], word))[:number]


def read_items(path: Path, where: str, needed: bool = True) -> list[dict[str, Any]]:
    """Return the list ``where`` of a JSON object; without ``needed``, a missing list is empty.

    Raises:
        ValueError: The file cannot be read or has another format.
    """
    content = _read_json(path)
    rows = content.get(where, None if needed else [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must have a list of {where}; it has {', '.join(content) or 'nothing'}")
    return rows


def _read_json(path: Path, once: bool = False) -> dict[str, Any]:
    """Read a JSON object; with ``once``, reject duplicate keys, of which JSON would keep the last."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # accepts a byte order mark
            content = json.load(file, object_pairs_hook=_object if once else None)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not a JSON file or is truncated: {error}") from error
    except ValueError as error:  # raised by _object
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        twice = next(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        raise ValueError(f"image {twice} appears twice")
    return mapping
