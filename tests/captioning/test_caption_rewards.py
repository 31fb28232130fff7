"""CIDEr-D, against plain loops over its definition and the standard package."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from attn_plugins.captioning.caption_rewards import CiderD, DocumentFrequencies


def sentences(rng: np.random.Generator, number: int, longest: int = 12) -> list[str]:
    """Return sentences of 1 to ``longest`` words, some frequent and some rare."""
    return [" ".join(f"w{int(rng.exponential(6))}" for _ in range(rng.integers(1, longest + 1))) for _ in range(number)]


@pytest.fixture(scope="module")
def sample() -> tuple[dict[int, list[str]], list[int], list[str]]:
    """Return references of 40 images, and images with captions: random, copied, empty, of unknown words, repeated."""
    rng = np.random.default_rng(0)
    references = {7 * i: sentences(rng, int(rng.integers(1, 6))) for i in range(40)}
    references[7] = ["w1"]
    images = [int(i) for i in rng.choice(list(references), 150)]
    captions = sentences(rng, 150, 15)
    for i in range(0, 150, 5):
        captions[i] = references[images[i]][0]
    images[1:5] = [7, 7, 14, 14]
    captions[1:5] = ["", "w1", "new newer new", "w1 w1 w1 w1 w1 w1"]
    return references, images, captions


def counted(sentence: str) -> Counter[tuple[str, ...]]:
    words = sentence.split()
    return Counter(tuple(words[i : i + n]) for n in range(1, 5) for i in range(len(words) - n + 1))


def cider_d_in_loops(references, images, captions):
    """Compute the definition: per sentence and order, a vector of count * log(images / document frequency)."""
    documents = Counter(ngram for own in references.values() for ngram in set().union(*map(counted, own)))

    def vector(sentence, n):
        return {
            ngram: count * math.log(len(references) / max(documents[ngram], 1))
            for ngram, count in counted(sentence).items()
            if len(ngram) == n
        }

    scores = []
    for image, caption in zip(images, captions):
        score = 0.0
        for n in range(1, 5):
            mine = vector(caption, n)
            for reference in references[image]:
                theirs = vector(reference, n)
                product = sum(min(mine[g], theirs[g]) * theirs[g] for g in mine.keys() & theirs.keys())
                norms = math.hypot(*mine.values()) * math.hypot(*theirs.values())
                apart = max(len(caption.split()) - 1, 0) - max(len(reference.split()) - 1, 0)
                if norms:
                    score += product / norms * math.exp(-(apart**2) / 72) / len(references[image])
        scores.append(10 * score / 4)
    return np.array(scores)


def test_cider_d_is_its_definition(sample):
    got = CiderD(sample[0])(*sample[1:])
    np.testing.assert_allclose(got, cider_d_in_loops(*sample), rtol=0, atol=1e-12)
    assert got[0] > 1  # a copied reference
    assert got[1] == 0  # an empty caption
    assert (got > 0).mean() > 0.5


def test_one_caption_alone_scores_as_in_a_batch(sample):
    references, images, captions = sample
    cider = CiderD(references)
    alone = [cider([image], [caption])[0] for image, caption in zip(images[:30], captions[:30])]
    np.testing.assert_allclose(alone, cider(images, captions)[:30], rtol=0, atol=1e-12)
    assert cider([], []).shape == (0,)


def test_frequencies_of_another_corpus(sample):
    """N-grams that the corpus lacks have the weight log(images), in references and in captions."""
    references, images, captions = sample
    half = dict(list(references.items())[:20])
    got = CiderD(references, DocumentFrequencies.of(half))(images, captions)
    inside = [i for i, image in enumerate(images) if image in half]
    want = cider_d_in_loops(half, [images[i] for i in inside], [captions[i] for i in inside])
    np.testing.assert_allclose(got[inside], want, rtol=0, atol=1e-12)
    assert np.isfinite(got).all()


def test_ngrams_are_looked_up_with_their_image_counts():
    frequencies = DocumentFrequencies.of({1: ["a cat", "a dog"], 2: ["a cat cat"]})
    a, cat, dog = (frequencies.vocabulary[word] for word in ("a", "cat", "dog"))
    first = np.zeros(4, np.int64)
    numbers, counts = frequencies.look_up(0, first, np.array([a, cat, dog, 3]))
    assert counts.tolist() == [2, 2, 1, 0]
    assert numbers[3] == -1
    last = np.array([cat, dog, a, cat])
    prefix = numbers[[0, 0, 1, 3]]  # of "a cat", "a dog", "cat a" and an unknown word
    numbers, counts = frequencies.look_up(1, prefix, last)
    assert counts.tolist() == [2, 1, 0, 0]
    assert (numbers >= 0).tolist() == [True, True, False, False]


def test_the_end_counts_as_a_word(sample):
    references, images, captions = sample
    ended = {image: [f"{s} </s>" for s in own] for image, own in references.items()}
    want = cider_d_in_loops(ended, images, [f"{c} </s>" for c in captions])
    np.testing.assert_allclose(CiderD(references, end="</s>")(images, captions), want, rtol=0, atol=1e-12)


def test_scores_are_those_of_the_standard_package(sample):
    package = "pycocoevalcap, the standard evaluation of captions (pip install pycocoevalcap==1.2)"
    scorers = pytest.importorskip("pycocoevalcap.cider.cider_scorer", reason=f"needs {package}")
    references, images, captions = sample
    corpus = scorers.CiderScorer()
    for own in references.values():
        corpus += ("", own)
    corpus.compute_doc_freq()
    # Batches of 40, the size of the corpus, so that the standard package uses the corpus's weights.
    ours = CiderD(references)(images, captions)
    for start in range(0, 120, 40):
        theirs = scorers.CiderScorer()
        for image, caption in zip(images[start : start + 40], captions[start : start + 40]):
            theirs += (caption, references[image])
        theirs.document_frequency = corpus.document_frequency
        np.testing.assert_allclose(ours[start : start + 40], theirs.compute_cider(), rtol=0, atol=1e-9)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="at least one image"):
        CiderD({})
    with pytest.raises(ValueError, match=r"image 'a' must be a non-empty list of sentences, got \[\]"):
        CiderD({"a": []})
    with pytest.raises(ValueError, match="image 'a' must be a non-empty list of sentences, got 'a cat'"):
        CiderD({"a": "a cat"})
    scorer = CiderD({"a": ["a cat"], 4: ["a dog"]})
    with pytest.raises(ValueError, match="image 5 has no references"):
        scorer([5], ["a cat"])
    with pytest.raises(ValueError, match="the same length, got 2 and 1"):
        scorer(["a", 4], ["a cat"])


@pytest.mark.parametrize(
    ("references", "reason"),
    [
        ({1: ["a cat", "a dog runs"]}, "there is only one image"),
        ({1: ["a cat", "a dog"], 2: ["a dog", "a cat"]}, "all 2 images have the same n-grams"),
    ],
)
def test_a_score_that_is_always_0_is_undefined(references, reason):
    for end in (None, "</s>"):
        with pytest.raises(
            ValueError, match=f"CIDEr-D is undefined: {reason}, so that the weights of all n-grams are 0"
        ):
            CiderD(references, end=end)
    assert CiderD({1: ["a cat"], 2: ["cat a"]})([1], ["a cat"])[0] > 0  # the bigrams differ


def test_references_without_a_word():
    with pytest.raises(ValueError, match="references of 1 images contain no word"):
        CiderD({1: [" "]})
