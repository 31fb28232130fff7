"""Rewards of self-critical training, against plain loops over their definitions and the standard package."""

from __future__ import annotations

import math
import os
from collections import Counter

import numpy as np
import pytest

from attn_plugins.captioning.caption_rewards import REWARDS, CiderD, DocumentFrequencies, reward
from tests.captioning.read_only import read_only


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
    got = reward("cider-d", sample[0])(*sample[1:])
    np.testing.assert_allclose(got, cider_d_in_loops(*sample), rtol=0, atol=1e-12)
    assert got[0] > 1  # a copied reference
    assert got[1] == 0  # an empty caption
    assert (got > 0).mean() > 0.5


def test_one_caption_alone_scores_as_in_a_batch(sample):
    references, images, captions = sample
    cider = reward("cider-d", references)
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


def test_the_end_counts_as_a_word(sample):
    references, images, captions = sample
    ended = {image: [f"{s} </s>" for s in own] for image, own in references.items()}
    want = cider_d_in_loops(ended, images, [f"{c} </s>" for c in captions])
    np.testing.assert_allclose(reward("cider-d", references, end="</s>")(images, captions), want, rtol=0, atol=1e-12)


def test_frequencies_are_counted_once_and_kept(sample, tmp_path, monkeypatch):
    references, images, captions = sample
    want = reward("cider-d", references, cache_dir=tmp_path)(images, captions)
    (file,) = tmp_path.iterdir()
    stamp = file.stat().st_mtime_ns
    with monkeypatch.context() as patched:
        patched.setattr(DocumentFrequencies, "of", None)  # counting again would fail
        np.testing.assert_array_equal(reward("cider-d", references, cache_dir=tmp_path)(images, captions), want)
    assert file.stat().st_mtime_ns == stamp

    file.write_bytes(file.read_bytes()[:100])  # a corrupt file is replaced
    np.testing.assert_array_equal(reward("cider-d", references, cache_dir=tmp_path)(images, captions), want)
    assert file.stat().st_size > 100

    changed = {**references, 7: ["w2"]}
    reward("cider-d", changed, cache_dir=tmp_path)
    reward("cider-d", references, cache_dir=tmp_path, end="</s>")
    assert len(os.listdir(tmp_path)) == 3  # one complete file per content


def bleu_4_in_loops(caption, references):
    words = caption.split()
    precision = 1.0
    for n in range(1, 5):
        grams = [g for g in counted(caption).elements() if len(g) == n]
        matched = sum(min(count, max(counted(r)[gram] for r in references)) for gram, count in Counter(grams).items())
        precision *= matched / max(len(grams), 1)
    closest = min((abs(len(r.split()) - len(words)), len(r.split())) for r in references)[1]
    return precision**0.25 * min(1.0, math.exp(1 - closest / max(len(words), 1e-9)))


def rouge_l_in_loops(caption, references):
    words = caption.split()
    precision = recall = 0.0
    for reference in references:
        others = reference.split()
        table = [[0] * (len(others) + 1) for _ in range(len(words) + 1)]
        for i, word in enumerate(words):
            for j, other in enumerate(others):
                table[i + 1][j + 1] = table[i][j] + 1 if word == other else max(table[i][j + 1], table[i + 1][j])
        precision = max(precision, table[-1][-1] / max(len(words), 1))
        recall = max(recall, table[-1][-1] / len(others))
    return (1 + 1.44) * precision * recall / (recall + 1.44 * precision) if precision else 0.0


@pytest.mark.parametrize("name, loops", [("bleu-4", bleu_4_in_loops), ("rouge-l", rouge_l_in_loops)])
def test_other_rewards_are_their_definitions(sample, name, loops):
    references, images, captions = sample
    got = reward(name, references)(images, captions)
    want = np.array([loops(caption, references[image]) for image, caption in zip(images, captions)])
    # The standard package's BLEU replaces 0 by 1e-15 and 1e-9, which shows if an order has no match.
    long = np.array([len(caption.split()) >= 4 for caption in captions])
    np.testing.assert_allclose(got[long], want[long], rtol=1e-6, atol=1e-3)
    assert got[1] == 0
    assert 0.3 < got.max() <= 1


def test_rewards_are_those_of_the_standard_package(sample):
    package = "pycocoevalcap, the standard evaluation of captions (pip install pycocoevalcap==1.2)"
    scorers = pytest.importorskip("pycocoevalcap.cider.cider_scorer", reason=f"needs {package}")
    from pycocoevalcap.bleu.bleu import Bleu
    from pycocoevalcap.rouge.rouge import Rouge

    references, images, captions = sample
    corpus = scorers.CiderScorer()
    for own in references.values():
        corpus += ("", own)
    corpus.compute_doc_freq()
    # Batches of 40, the size of the corpus, so that the standard package uses the corpus's weights.
    ours = reward("cider-d", references)(images, captions)
    for start in range(0, 120, 40):
        theirs = scorers.CiderScorer()
        for image, caption in zip(images[start : start + 40], captions[start : start + 40]):
            theirs += (caption, references[image])
        theirs.document_frequency = corpus.document_frequency
        np.testing.assert_allclose(ours[start : start + 40], theirs.compute_cider(), rtol=0, atol=1e-9)

    ours_of = {row: references[image] for row, image in enumerate(images)}
    hypotheses = {row: [caption] for row, caption in enumerate(captions)}
    _, bleu = Bleu(4).compute_score(ours_of, hypotheses, verbose=0)
    _, rouge = Rouge().compute_score(ours_of, hypotheses)
    np.testing.assert_allclose(reward("bleu-4", references)(images, captions), bleu[3], rtol=0, atol=1e-9)
    np.testing.assert_allclose(reward("rouge-l", references)(images, captions), rouge, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", REWARDS)
def test_wrong_input_is_named(name):
    with pytest.raises(ValueError, match="at least one image"):
        reward(name, {})
    with pytest.raises(ValueError, match=r"image 'a' must be a non-empty list of sentences, got \[\]"):
        reward(name, {"a": []})
    with pytest.raises(ValueError, match="image 'a' must be a non-empty list of sentences, got 'a cat'"):
        reward(name, {"a": "a cat"})
    scorer = reward(name, {"a": ["a cat"], 4: ["a dog"]})
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
def test_a_score_that_is_always_0_is_undefined(references, reason, tmp_path):
    for options in ({}, {"cache_dir": tmp_path}, {"end": "</s>"}):
        with pytest.raises(
            ValueError, match=f"CIDEr-D is undefined: {reason}, so that the weights of all n-grams are 0"
        ):
            reward("cider-d", references, **options)
    assert reward("cider-d", {1: ["a cat"], 2: ["cat a"]})([1], ["a cat"])[0] > 0  # the bigrams differ


def test_a_cache_that_cannot_be_written(sample, tmp_path, caplog):
    want = reward("cider-d", sample[0])(*sample[1:])
    with read_only(tmp_path):
        np.testing.assert_array_equal(reward("cider-d", sample[0], cache_dir=tmp_path)(*sample[1:]), want)
    [line] = [record.message for record in caplog.records]
    assert "n-gram frequencies are counted at every start" in line
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_and_wordless_references():
    with pytest.raises(ValueError, match="cider-d, bleu-4, rouge-l, got 'cider'"):
        reward("cider", {1: ["a cat"]})
    with pytest.raises(ValueError, match="references of 1 images contain no word"):
        reward("cider-d", {1: [" "]})
