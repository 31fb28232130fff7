"""The captioning criteria with ``show_attend_tell``, ``lstm_captioner`` and ``conv_captioner``."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("fairseq")

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from fairseq.sequence_generator import SequenceGenerator

from attn_plugins.fairseq.self_critical import SelfCriticalConfig, SelfCriticalCriterion
from tests.fairseq.captioning_helpers import CAPTIONERS, captioner_of, model_of, task_of, write_images


@pytest.mark.parametrize("name", CAPTIONERS)
def test_self_critical_training(name, tmp_path):
    """Greedy captions equal those of a beam of one, all parameters get gradients, and rewards rise."""
    of = task_of(write_images(tmp_path), one_caption_per_image=True)
    of.load_dataset("train")
    dataset = of.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(len(dataset))])
    model = captioner_of(of, name, embed_dim=32, dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(12):
        logits = model(**sample["net_input"])[0]
        loss = F.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    criterion = SelfCriticalCriterion(SelfCriticalConfig(samples=6, baseline="mean"), of)
    captions = criterion.captions(model, sample["net_input"], 1, 2)[:, 0].tolist()
    generator = SequenceGenerator([model.eval()], of.dictionary, beam_size=1, max_len_b=20)
    right = [hypotheses[0]["tokens"].tolist() for hypotheses in generator.generate([model], sample)]
    assert [[word for word in words if word != 1] for words in captions] == [words[:20] for words in right]

    torch.manual_seed(0)
    rewards = []
    for step in range(30):
        loss, size, log = criterion(model.train(), sample)
        optimizer.zero_grad()
        (loss / size).backward()
        if step == 0:
            assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
        optimizer.step()
        rewards.append(log["reward"] / log["captions"])
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5


def criterion_of(of: Any, name: str, **options: Any) -> Any:
    kind = CRITERION_REGISTRY[name]
    values = dict(sentence_avg=False, label_smoothing=0.1, **options)
    return kind.build_criterion(argparse.Namespace(**values, ignore_prefix_size=0, report_accuracy=False), of)


@pytest.mark.parametrize(
    ("name", "weight"), [("show_attend_tell", 1.0), ("show_attend_tell", 0.3), ("conv_captioner", 2.0)]
)
def test_the_doubly_stochastic_loss(tmp_path, name, weight):
    """The loss is cross-entropy plus the penalty of Eq. 14, which loops over words and regions compute."""
    of = task_of(write_images(tmp_path))
    of.load_dataset("train")
    dataset = of.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(5)])
    assert sample["net_input"]["regions_padding_mask"] is not None
    model = captioner_of(of, name)
    criterion = criterion_of(of, "doubly_stochastic_cross_entropy", doubly_stochastic_weight=weight)
    loss, size, log = criterion(model, sample)
    plain, _, plain_log = LabelSmoothedCrossEntropyCriterion(of, False, 0.1)(model, sample)
    layers = model(**sample["net_input"])[1]["weights"]["regions"].detach()
    penalty = 0.0
    for b in range(5):
        for i in range(int(dataset.region_counts[b])):
            words = [t for t, word in enumerate(sample["target"][b].tolist()) if word != 1]
            penalty += (1 - sum(float(layers[:, b, t, i].mean()) for t in words)) ** 2
    torch.testing.assert_close(loss, plain + weight * penalty)
    assert (size, log["ntokens"], log["nll_loss"]) == (sample["ntokens"], sample["ntokens"], plain_log["nll_loss"])
    assert float(log["doubly_stochastic"]) == pytest.approx(penalty, rel=1e-5)
    losses = criterion(model, sample, reduce=False)[0]
    assert losses.shape == LabelSmoothedCrossEntropyCriterion(of, False, 0.1)(model, sample, reduce=False)[0].shape
    torch.testing.assert_close(losses.sum(), loss)
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    with metrics.aggregate(new_root=True) as aggregator:
        criterion.reduce_metrics([log, {**log, "doubly_stochastic": 0}])
    assert aggregator.get_smoothed_values()["doubly_stochastic"] == pytest.approx(penalty / 10, abs=1e-3)


def test_the_penalty_spreads_attention(tmp_path):
    """Training with the penalty brings the attention of each region closer to its share."""
    of = task_of(write_images(tmp_path))
    of.load_dataset("train")
    dataset = of.dataset("train")
    sample = dataset.collater([dataset[i] for i in range(12)])
    penalties = []
    for weight in (0.0, 1.0):
        model = captioner_of(of, "show_attend_tell")
        criterion = criterion_of(of, "doubly_stochastic_cross_entropy", doubly_stochastic_weight=weight)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(40):
            loss, size, log = criterion(model, sample)
            optimizer.zero_grad()
            (loss / size).backward()
            optimizer.step()
        penalties.append(float(log["doubly_stochastic"]))
    assert penalties[1] < penalties[0]


def test_a_model_that_returns_no_weights(tmp_path):
    of = task_of(write_images(tmp_path))
    of.load_dataset("train")
    dataset = of.dataset("train")
    sample = dataset.collater([dataset[0]])
    criterion = criterion_of(of, "doubly_stochastic_cross_entropy", doubly_stochastic_weight=1.0)
    for model in (model_of(of), captioner_of(of, "lstm_captioner", fusion="semantic")):
        with pytest.raises(
            ValueError, match=f"needs a model that returns its weights of .* got {type(model).__name__}"
        ):
            criterion(model, sample)
    with pytest.raises(ValueError, match="needs a model that returns its weights of"):  # as fairseq's LSTMs in training
        criterion.compute_loss(model, (model(**sample["net_input"])[0], None), sample)
    with pytest.raises(ValueError, match="--doubly-stochastic-weight must be at least 0, got -1"):
        criterion_of(of, "doubly_stochastic_cross_entropy", doubly_stochastic_weight=-1)
