"""``doubly_stochastic_cross_entropy``: cross-entropy with a penalty on regions that a caption overlooks.

Xu et al. 2015, Eq. 14: -log P(y|x) + λ Σ_i (1 - Σ_t α_{t,i})² of each caption. The attention weights α of every word
sum to 1 over the regions; the penalty makes the weights of every region sum to about 1 over the words. It works with
every captioner whose decoder returns its weights of regions: ``show_attend_tell``, ``lstm_captioner`` and
``conv_captioner``, whose weights are averaged over the layers. The logged ``loss`` includes the penalty; ``nll_loss``
and ``ppl`` do not.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.logging import metrics
from torch import Tensor

from ..modules.captioning.show_attend_tell import doubly_stochastic_penalty
from .registries import forget

forget(__name__)


@dataclass
class DoublyStochasticConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """Options of the criterion: those of ``label_smoothed_cross_entropy``, and λ."""

    doubly_stochastic_weight: float = field(
        default=1.0, metadata={"help": "weight λ of the penalty on regions that a caption overlooks"}
    )


@register_criterion("doubly_stochastic_cross_entropy", dataclass=DoublyStochasticConfig)
class DoublyStochasticCriterion(LabelSmoothedCrossEntropyCriterion):
    """``label_smoothed_cross_entropy`` of fairseq with the penalty, whose mean is logged as ``doubly_stochastic``.

    Raises:
        ValueError: λ is negative.
    """

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        doubly_stochastic_weight: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        if not 0 <= doubly_stochastic_weight < float("inf"):
            raise ValueError(f"--doubly-stochastic-weight must be at least 0, got {doubly_stochastic_weight}")
        self.weight = doubly_stochastic_weight

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the loss, the divisor that fairseq applies to it, and the values to log.

        Raises:
            ValueError: The model does not return its weights of regions.
        """
        penalty: list[Tensor] = []
        loss, size, log = super().forward(model, {**sample, "penalty": penalty}, reduce)
        [log["doubly_stochastic"]] = penalty
        return loss, size, log

    def compute_loss(
        self, model: Any, net_output: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the loss with the penalty and the negative log-likelihood without it.

        Without ``reduce``, both are per word, and a caption's penalty is divided equally among its words. The list
        ``sample["penalty"]``, if any, receives the sum of the penalties.
        """
        loss, nll_loss = super().compute_loss(model, net_output, sample, reduce)
        extra = net_output[1] if isinstance(net_output[1], dict) else {}
        weights = extra.get("weights", {}).get("regions")
        if weights is None:
            raise ValueError(
                "--criterion doubly_stochastic_cross_entropy needs a model that returns its weights of regions: "
                f"show_attend_tell, lstm_captioner or conv_captioner with regions, got {type(model).__name__}"
            )
        padding = sample["target"].eq(self.padding_idx)
        regions_padding = sample["net_input"].get("regions_padding_mask")
        penalty = doubly_stochastic_penalty(weights.mean(0), padding, regions_padding)
        sample.get("penalty", []).append(penalty.detach().sum())
        if reduce:
            return loss + self.weight * penalty.sum(), nll_loss
        shares = (penalty / padding.logical_not().sum(1)).unsqueeze(1).masked_fill(padding, 0)
        return loss + self.weight * shares.reshape(loss.shape), nll_loss

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Aggregate fairseq's metrics and the mean penalty per caption."""
        super().reduce_metrics(logging_outputs)
        penalty = sum(log.get("doubly_stochastic", 0) for log in logging_outputs)
        captions = sum(log.get("nsentences", 0) for log in logging_outputs)
        if captions:
            metrics.log_scalar("doubly_stochastic", penalty / captions, captions, round=3)
