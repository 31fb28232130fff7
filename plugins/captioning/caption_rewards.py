"""The reward of self-critical training: CIDEr-D of a caption against the references of its image.

Its values equal those of the standard evaluation package (pycocoevalcap 1.2), which calls it "CIDEr". Sentences are
strings of words separated by spaces; the caller tokenizes them::

    cider = CiderD(references)                                      # {image: [sentence, ...]}
    cider([42, 42, 7], ["a cat on grass", "a cat", "two coins"])    # float64 array of 3, 0 to 10 each

It processes a whole batch in numpy because every training step calls it. Source:
Vedantam et al., CIDEr, 2015, Eq. 1-3 and section 5.2 (the "-D").
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

References = Mapping[Hashable, Sequence[str]]
SIGMA = 6.0  # standard deviation, in words, of the Gaussian over length differences
ORDERS = 4  # n-grams of 1 to 4 words


def _check_references(references: References) -> None:
    if not references:
        raise ValueError("references must hold at least one image, got none")
    for image, sentences in references.items():
        if isinstance(sentences, str) or not sentences:
            raise ValueError(f"references of image {image!r} must be a non-empty list of sentences, got {sentences!r}")


def _check_batch(references: References, images: Sequence[Hashable], captions: Sequence[str]) -> None:
    if len(images) != len(captions):
        raise ValueError(f"images and captions must have the same length, got {len(images)} and {len(captions)}")
    for image in images:
        if image not in references:
            raise ValueError(f"image {image!r} has no references")


def _number_ngrams(sentences: Sequence[Sequence[int]], words: int) -> list[tuple[np.ndarray, ...]]:
    """Count the n-grams of each order per sentence.

    An n-gram is encoded by the number of its first n - 1 words and its last word, so that codes fit 64 bits for any
    vocabulary.

    Args:
        sentences: Word numbers, each below ``words``.
        words: Size of the vocabulary.

    Returns:
        For each order, with D distinct n-grams and E sorted (sentence, n-gram) pairs: prefix (D,), last word (D,),
        sentence (E,), n-gram (E,), count (E,).
    """
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    flat = np.fromiter((word for sentence in sentences for word in sentence), np.int64, int(lengths.sum()))
    owner = np.repeat(np.arange(len(sentences)), lengths)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(flat))  # words up to the end of the sentence
    starts, prefix = np.arange(len(flat)), np.zeros(len(flat), np.int64)
    levels: list[tuple[np.ndarray, ...]] = []
    for n in range(1, ORDERS + 1):
        long_enough = left[starts] >= n
        starts, prefix = starts[long_enough], prefix[long_enough]
        code, number = np.unique(prefix * words + flat[starts + n - 1], return_inverse=True)
        pairs, count = np.unique(owner[starts] * max(len(code), 1) + number, return_counts=True)
        sentence, ngram = np.divmod(pairs, max(len(code), 1))
        levels.append((code // words, code % words, sentence, ngram, count))
        prefix = number
    return levels


class DocumentFrequencies:
    """Number of images whose references contain each n-gram (n = 1 to 4): the weights of CIDEr, Eq. 1.

    Attributes:
        images: Number of images.
        vocabulary: Words and their numbers.
    """

    def __init__(self, images: int, words: Sequence[str], codes: list[np.ndarray], counts: list[np.ndarray]) -> None:
        self.images = images
        self.vocabulary = {word: number for number, word in enumerate(words)}
        self._codes, self._counts = codes, counts

    @classmethod
    def of(cls, references: References) -> DocumentFrequencies:
        """Count the n-grams of ``references``.

        Raises:
            ValueError: There is no image, an image has no references, or there is no word at all.
        """
        _check_references(references)
        vocabulary: dict[str, int] = {}
        sentences, image_of = [], []
        for image, own in enumerate(references.values()):
            for text in own:
                sentences.append([vocabulary.setdefault(word, len(vocabulary)) for word in text.split()])
                image_of.append(image)
        if not vocabulary:
            raise ValueError(f"references of {len(references)} images contain no word")
        owner, codes, counts = np.asarray(image_of), [], []
        for prefix, last, sentence, ngram, _ in _number_ngrams(sentences, len(vocabulary)):
            codes.append(prefix * len(vocabulary) + last)
            once = np.unique(owner[sentence] * max(len(prefix), 1) + ngram) % max(len(prefix), 1)
            counts.append(np.bincount(once, minlength=len(prefix)).astype(np.int32))
        return cls(len(references), list(vocabulary), codes, counts)

    @property
    def undefined(self) -> str:
        """Why CIDEr-D is undefined, or an empty text: with weights that are all log 1 = 0, every score is 0."""
        if any((counts < self.images).any() for counts in self._counts):
            return ""
        which = "there is only one image" if self.images == 1 else f"all {self.images} images have the same n-grams"
        return f"{which}, so that the weights of all n-grams are 0"

    def look_up(self, level: int, prefix: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the n-grams of order ``level`` + 1 and their image counts; -1 and 0 if unknown.

        Args:
            level: Order of the n-grams minus 1.
            prefix: Numbers of the first words, as returned for ``level`` - 1; -1 if unknown.
            last: Numbers of the last words; unknown words have numbers beyond the vocabulary.
        """
        codes, words = self._codes[level], len(self.vocabulary)
        wanted = np.where((prefix >= 0) & (last < words), prefix * words + last, -1)
        place = np.minimum(np.searchsorted(codes, wanted), max(len(codes) - 1, 0))
        there = codes[place] == wanted if len(codes) else np.zeros(len(wanted), bool)
        return np.where(there, place, -1), np.where(there, self._counts[level][place] if len(codes) else 0, 0)


class CiderD:
    """CIDEr-D score, 0 to 10 per caption.

    If ``end`` is given, it counts as a word at the end of every sentence. Self-critical training without it learns
    truncated captions ("a seven above a"), because nothing rewards a complete sentence.

    Args:
        references: Sentences of every image that will be scored.
        frequencies: n-gram frequencies, usually those of the training set; None counts them over ``references``.
        end: Word appended to every sentence; given ``frequencies`` must have been counted with it.

    Raises:
        ValueError: There is no image, an image has no references, or the score is undefined, because every n-gram
            occurs in the references of all images.
    """

    def __init__(
        self, references: References, frequencies: DocumentFrequencies | None = None, end: str | None = None
    ) -> None:
        _check_references(references)
        self._end = [] if end is None else [end]
        self.references = references
        if frequencies is None:
            ended = {image: [" ".join([s, *self._end]) for s in own] for image, own in references.items()}
            frequencies = DocumentFrequencies.of(ended)
        if frequencies.undefined:
            raise ValueError(f"CIDEr-D is undefined: {frequencies.undefined}")
        self.frequencies = frequencies

    def __call__(self, images: Sequence[Hashable], captions: Sequence[str]) -> np.ndarray:
        """Score N ``captions``, caption i against the references of ``images[i]``; returns float64 (N,).

        Raises:
            ValueError: The lengths differ, or an image has no references.
        """
        _check_batch(self.references, images, captions)
        if not captions:
            return np.zeros(0)
        rows = {image: row for row, image in enumerate(dict.fromkeys(images))}
        references = [(row, sentence) for image, row in rows.items() for sentence in self.references[image]]
        sentences, words = self._numbers([*captions, *(sentence for _, sentence in references)])
        image_of = np.array([*(rows[image] for image in images), *(row for row, _ in references)])
        lengths = np.array([len(sentence) for sentence in sentences], float)

        total, known = np.zeros(len(captions)), np.zeros(1, np.int64)
        for level, (prefix, last, sentence, ngram, count) in enumerate(_number_ngrams(sentences, words)):
            known, documents = self.frequencies.look_up(level, known[prefix], last)
            rarity = math.log(self.frequencies.images) - np.log(np.maximum(documents, 1))
            weight = count * rarity[ngram]
            norm = np.sqrt(np.bincount(sentence, weight**2, minlength=len(sentences)))
            total += self._similarity(image_of, len(captions), lengths, norm, sentence, ngram, weight)
        return 10 / ORDERS * total / np.bincount(image_of[len(captions) :])[image_of[: len(captions)]]

    def _numbers(self, sentences: Iterable[str]) -> tuple[list[list[int]], int]:
        """Convert words to numbers and return their upper bound; unknown words get numbers beyond the vocabulary."""
        vocabulary, new = self.frequencies.vocabulary, dict[str, int]()
        numbers = [
            [
                number if (number := vocabulary.get(w)) is not None else new.setdefault(w, len(vocabulary) + len(new))
                for w in [*sentence.split(), *self._end]
            ]
            for sentence in sentences
        ]
        return numbers, len(vocabulary) + len(new)

    @staticmethod
    def _similarity(
        image_of: np.ndarray,
        captions: int,
        lengths: np.ndarray,
        norm: np.ndarray,
        sentence: np.ndarray,
        ngram: np.ndarray,
        weight: np.ndarray,
    ) -> np.ndarray:
        """Sum the clipped cosine times the Gaussian of the length difference over an image's references.

        The S sentences (lengths, norm, image_of: (S,)) are the N ``captions`` followed by the references. ``sentence``,
        ``ngram`` and ``weight`` (E,) are the entries of their n-gram vectors of one order, sorted by sentence.
        """
        border = int(np.searchsorted(sentence, captions))
        # Pair every entry of a caption with the entries of its image's references for the same n-gram.
        stride = int(ngram.max(initial=0)) + 1
        key = image_of[sentence] * stride + ngram
        order = border + np.argsort(key[border:], kind="stable")
        first = np.searchsorted(key[order], key[:border], "left")
        matches = np.searchsorted(key[order], key[:border], "right") - first
        candidate = np.repeat(np.arange(border), matches)
        within = np.arange(len(candidate)) - np.repeat(np.cumsum(matches) - matches, matches)
        matching = order[first[candidate] + within]

        caption, reference = sentence[candidate], sentence[matching]
        lengths_apart = lengths[caption] - lengths[reference]
        product = np.minimum(weight[candidate], weight[matching]) * weight[matching]
        scale = norm[caption] * norm[reference]  # if zero, the product is zero too
        cosine = np.divide(product, scale, out=np.zeros_like(product), where=scale > 0)
        return np.bincount(caption, cosine * np.exp(-(lengths_apart**2) / (2 * SIGMA**2)), minlength=captions)
