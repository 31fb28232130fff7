"""The criterion ``self_critical``, its samples and its gradient."""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("fairseq")

from fairseq.logging import metrics
from fairseq.sequence_generator import SequenceGenerator

from attn_plugins.captioning.caption_rewards import CiderD
from attn_plugins.fairseq.self_critical import SelfCriticalConfig, SelfCriticalCriterion
from tests.fairseq.captioning_helpers import CAPTIONERS, captioner_of, change, model_of, task_of, write_images
from tests.fairseq.fairseq_helpers import without_gradient

PAD, EOS, ETA = 1, 2, "eta_transformer"


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Any:
    task = task_of(write_images(tmp_path_factory.mktemp("images")), one_caption_per_image=True)
    for split in ("train", "valid"):
        task.load_dataset(split)
    return task


def batch(task: Any, number: int = 5, split: str = "train") -> dict[str, Any]:
    """Collate the first images of a split."""
    dataset = task.dataset(split)
    return dataset.collater([dataset[i] for i in range(min(number, len(dataset)))])


def criterion_of(task: Any, **options: Any) -> SelfCriticalCriterion:
    return SelfCriticalCriterion(SelfCriticalConfig(**options), task)


def fitted(
    task: Any, updates: int = 25, dropout: float = 0.0, until: float = 0.0, name: str = "eta_transformer"
) -> Any:
    """Train a model with cross-entropy for ``updates`` steps, or until the loss is below ``until``."""
    model = captioner_of(task, name, dropout=dropout)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    sample = batch(task, 99)
    for _ in range(updates):
        logits = model(**sample["net_input"])[0]
        loss = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=1)
        if loss < until:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def gradients(model: Any) -> list[torch.Tensor]:
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return grads


def next_word(model: Any, inputs: dict[str, Any], i: int, words: list[int]) -> torch.Tensor:
    """Return log-probabilities of the word after ``words`` in image i's caption, by the definition."""
    one = {name: x if x is None else x[i : i + 1] for name, x in inputs.items()}
    logits = model(**{**one, "prev_output_tokens": torch.tensor([[2, *words]])})[0][0, -1]
    never = [0, 1] if words else [0, 1, 2]  # never generated: beginning, padding, and the end of an empty caption
    allowed = torch.tensor([word not in never for word in range(len(logits))])
    return logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)


def text(task: Any, words: list[int]) -> str:
    return " ".join(task.dictionary[word] for word in words if word not in (1, 2))


def set_dropout(model: Any, p: float) -> None:
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = p
        elif isinstance(module, torch.nn.Dropout):
            module.p = p


@pytest.fixture(scope="module")
def model(task) -> Any:
    return fitted(task, until=0.9)  # leaves much room for improvement


def test_a_reward_that_is_undefined(tmp_path):
    """CIDEr-D is 0 for every caption if there is one image, or if the captions of all are the same."""
    folder = write_images(tmp_path / "one")
    change(folder / "captions.json", lambda c: [own.update(caption="A red dog.") for own in c["annotations"]])
    with pytest.raises(ValueError, match="CIDEr-D is undefined: all 16 images have the same n-grams"):
        criterion_of(task_of(folder))


@pytest.mark.parametrize("samples, baseline", [(1, "greedy"), (3, "mean")])
def test_the_gradient_is_that_of_reinforce(task, model, samples, baseline):
    """The expected gradient is computed caption by caption and word by word, without cache or batching."""
    criterion = criterion_of(task, samples=samples, baseline=baseline, max_caption_length=5)
    model, sample = copy.deepcopy(model).train(), batch(task)
    set_dropout(model, 0.5)
    torch.manual_seed(3)
    loss, size, log = criterion(model, sample)
    loss.backward()
    grads = gradients(model)
    assert model.training
    model.eval()

    torch.manual_seed(3)
    captions = criterion.captions(model, sample["net_input"], int(baseline == "greedy"), samples).tolist()
    training = {image_id: [" ".join(c) for c in captions] for image_id, captions in task.captions_of("train").items()}
    score = CiderD(training, end="</s>")
    expected, advantages, lengths, entropy = torch.zeros(()), [], [], 0.0
    for i, (image_id, made) in enumerate(zip(sample["image_ids"], captions)):
        rewards = [score([image_id], [text(task, words)])[0] for words in made]
        drawn = range(len(made))[1:] if baseline == "greedy" else range(len(made))
        for k in drawn:
            b = rewards[0] if baseline == "greedy" else sum(rewards[j] for j in drawn if j != k) / (samples - 1)
            words = [word for word in made[k] if word != PAD]
            for t, word in enumerate(words):
                log_p = next_word(model, sample["net_input"], i, words[:t])
                expected = expected - (rewards[k] - b) * log_p[word]
                entropy -= sum(math.exp(p) * p for p in log_p.tolist() if p > -math.inf)
            advantages.append(rewards[k] - b)
            lengths.append(len(words) - (words[-1] == EOS))
    assert max(map(abs, advantages)) > 0.02
    assert size == log["sample_size"] == log["captions"] == len(advantages) == 5 * samples
    assert log["advantage"] == pytest.approx(sum(advantages))
    assert log["reward"] - log["baseline"] == pytest.approx(sum(advantages))
    assert (log["length"], float(log["entropy"])) == (sum(lengths), pytest.approx(entropy, rel=1e-4))
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    expected.backward()
    for mine, right in zip(grads, gradients(model)):
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name, updates, longest", [(ETA, 0, 6), *((name, 15, 3) for name in (ETA, *CAPTIONERS))])
def test_greedy_captions_are_those_of_a_beam_of_one(task, name, updates, longest):
    """This includes an untrained model, whose captions do not end. Sampled captions share the call."""
    model = fitted(task, updates, dropout=0.5, name=name).eval()
    sample = batch(task, 99)
    criterion = criterion_of(task, max_caption_length=longest)
    captions = criterion.captions(model, sample["net_input"], 1, 2)[:, 0].tolist()
    generator = SequenceGenerator([model], task.dictionary, beam_size=1, max_len_b=longest)
    with torch.no_grad():  # no caption contains this word, and it is never generated
        model.decoder.output_projection.bias[task.dictionary.bos()] = -1e4
    right = [hypotheses[0]["tokens"].tolist() for hypotheses in generator.generate([model], sample)]
    assert [[word for word in words if word != PAD] for words in captions] == [words[:longest] for words in right]
    assert len({len(words) for words in right}) > (updates and name == ETA)
    model.zero_grad()
    criterion(model.train(), sample)[0].backward()
    assert without_gradient(model) == []


def test_captions_are_drawn_as_often_as_they_are_probable(task):
    """Compare the counts of all captions of at most two words by Pearson's chi-squared statistic."""
    model, sample, draws = model_of(task).train(), batch(task, 1), 20_000
    criterion = criterion_of(task, max_caption_length=2)
    torch.manual_seed(0)
    counts = Counter(map(tuple, criterion.captions(model, sample["net_input"], 0, draws)[0].tolist()))
    assert model.training
    expected = {}
    for first, p in enumerate(next_word(model, sample["net_input"], 0, []).exp().tolist()):
        if p:
            then = next_word(model, sample["net_input"], 0, [first]).exp().tolist()
            expected.update({(first, second): draws * p * q for second, q in enumerate(then) if q})
    words = len(task.dictionary)
    assert len(expected) == (words - 3) * (words - 2)
    assert counts.keys() <= expected.keys()
    statistic = sum((counts[caption] - n) ** 2 / n for caption, n in expected.items())
    freedom = len(expected) - 1
    assert abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


def test_captions_end_with_padding_alone(task, model):
    captions = criterion_of(task).captions(model, batch(task, 99)["net_input"], 1, 3)
    ended = captions.eq(EOS).cumsum(-1).gt(0)
    assert ended[..., -1].any()
    torch.testing.assert_close(captions.eq(PAD), ended & captions.ne(EOS))
    assert captions.eq(EOS).sum(-1).max() == 1
    assert captions.ne(PAD).any((0, 1)).all()  # no column is only padding
    short = model_of(task, max_target_positions=4)
    assert criterion_of(task).captions(short, batch(task)["net_input"], 1, 9).shape[-1] == 3


def test_validation_scores_greedy_captions(task, model):
    """Validation images are not training images, but the n-gram frequencies are those of the training set."""
    criterion, sample = criterion_of(task, samples=2), batch(task, 99, "valid")
    with torch.no_grad():
        loss, size, log = criterion(model.eval(), sample)
        losses = criterion(model, sample, reduce=False)[0]
    captions = criterion.captions(model, sample["net_input"], 1, 0)[:, 0].tolist()
    references = {name: [" ".join(c) for c in own] for name, own in task.captions_of("valid").items()}
    training = [[" ".join(c) for c in own] for own in task.captions_of("train").values()]
    score = CiderD({**dict(enumerate(training)), **references}, end="</s>")
    score.frequencies = CiderD(dict(enumerate(training)), end="</s>").frequencies
    expected = score(sample["image_ids"], [text(task, words) for words in captions])
    np.testing.assert_allclose(losses, -expected, rtol=1e-5)
    assert 0 < log["reward"] == pytest.approx(expected.sum()) == pytest.approx(-loss.item())
    assert size == log["captions"] == len(sample["id"]) == 4


def test_metrics_of_workers_are_weighted_by_captions_and_words(task, model):
    """Means over workers or batches are weighted by captions, and the entropy by words."""
    criterion = criterion_of(task)
    logs = [criterion(copy.deepcopy(model).train(), batch(task, number))[2] for number in (2, 5)]
    summed = {name: sum(log[name] for log in logs) for name in logs[0]}
    assert criterion.logging_outputs_can_be_summed()
    for outputs in logs, [summed]:
        with metrics.aggregate(new_root=True) as aggregator:
            criterion.reduce_metrics(outputs)
        values = aggregator.get_smoothed_values()
        assert values["reward"] - values["baseline"] == pytest.approx(values["advantage"], abs=2e-3)
        assert values["reward"] == pytest.approx(summed["reward"] / 7, abs=1e-3)
        assert values["length"] == pytest.approx(summed["length"] / 7, abs=1e-3)
        assert values["entropy"] == pytest.approx(float(summed["entropy"]) / summed["ntokens"], abs=1e-3)


def test_low_precision_and_logits_that_are_no_numbers(task, model):
    """Under autocast every parameter gets a gradient, although weights were first cast without grad mode.

    NaN logits give a NaN loss, which fairseq rejects, rather than a device-side crash.
    """
    model = copy.deepcopy(model).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = criterion_of(task, samples=2)(model, batch(task))[0]
    loss.backward()
    assert loss.dtype == torch.float
    assert all(gradient.isfinite().all() for gradient in gradients(model))
    with torch.no_grad():
        model.decoder.output_projection.bias[5] = torch.nan
    assert criterion_of(task)(model, batch(task))[0].isnan()


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(samples=0), "--samples must be at least 1, got 0"),
        (dict(max_caption_length=0), "--max-caption-length must be at least 1, got 0"),
        (dict(baseline="median"), "--baseline must be one of greedy, mean, got 'median'"),
        (dict(baseline="mean"), "--samples must be at least 2, got 1"),
    ],
)
def test_options_out_of_range(task, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        criterion_of(task, **options)


def test_another_task_or_other_batches(task, model):
    with pytest.raises(ValueError, match="needs --task captioning, got SimpleNamespace"):
        criterion_of(SimpleNamespace(target_dictionary=task.dictionary))
    sample = batch(task)
    del sample["references"]
    with pytest.raises(ValueError, match="must have the references"):
        criterion_of(task)(model, sample)
    sample = batch(task)
    sample["references"][1] = []
    with pytest.raises(ValueError, match=f"references of image {sample['image_ids'][1]} must be a non-empty list"):
        criterion_of(task)(model, sample)
