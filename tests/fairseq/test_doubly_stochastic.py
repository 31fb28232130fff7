"""The criterion ``doubly_stochastic_cross_entropy`` with the captioners that return their weights."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

pytest.importorskip("fairseq")

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics

from tests.fairseq.captioning_helpers import captioner_of, model_of, task_of, write_images


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
