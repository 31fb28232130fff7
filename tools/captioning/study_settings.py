"""Rows of tools.captioning_study: the variants of the thesis' tables, and the baselines."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Settings of one row, or of two if there is a second stage.

    Attributes:
        what: Description in the table.
        model: Model options of fairseq-train.
        first: Further options for training with cross-entropy only.
        task: Options of training and generation.
        self_critical: Whether there is a self-critical second stage.
        fused: Settings whose checkpoints form an ensemble; then nothing is trained.
    """

    what: str
    model: str = ""
    first: str = ""
    task: str = ""
    self_critical: bool = False
    fused: tuple[str, ...] = ()


SETTINGS = {
    "eta": Setting("ETA-Transformer", self_critical=True),
    "visual": Setting("regions alone", "--fusion visual", self_critical=True),
    "semantic": Setting("attributes alone", "--fusion semantic", self_critical=True),
    "oracle": Setting("ETA, attributes of the true captions", task="--oracle-attributes"),
    "parallel": Setting("parallel attention", "--fusion parallel", self_critical=True),
    "stacked-visual": Setting("stacked attention, visual", "--fusion stacked-visual", self_critical=True),
    "stacked-semantic": Setting("stacked attention, semantic", "--fusion stacked-semantic", self_critical=True),
    "eta-no-encoder": Setting("ETA without encoders", "--no-encoder"),
    "visual-no-encoder": Setting("regions alone, without encoder", "--fusion visual --no-encoder"),
    "semantic-no-encoder": Setting("attributes alone, without encoder", "--fusion semantic --no-encoder"),
    "gate-sigmoid": Setting("ETA, gate with sigmoid", "--gate-activation sigmoid"),
    "gate-tanh": Setting("ETA, gate with tanh", "--gate-activation tanh"),
    "gate-relu": Setting("ETA, gate with ReLU", "--gate-activation relu"),
    "show-attend-tell": Setting(
        "Show, Attend and Tell",
        "--arch show_attend_tell_tiny",
        "--criterion doubly_stochastic_cross_entropy",
        self_critical=True,
    ),
    "show-attend-tell-plain": Setting("Show, Attend and Tell without its penalty", "--arch show_attend_tell_tiny"),
    "lstm": Setting("LSTM, regions alone", "--arch lstm_captioner_tiny", self_critical=True),
    "lstm-semantic": Setting("LSTM, attributes alone", "--arch lstm_captioner_tiny --fusion semantic"),
    "lstm-both": Setting("LSTM, both", "--arch lstm_captioner_tiny --fusion parallel", self_critical=True),
    "conv": Setting("ConvS2S, regions alone", "--arch conv_captioner_tiny", self_critical=True),
    "conv-semantic": Setting("ConvS2S, attributes alone", "--arch conv_captioner_tiny --fusion semantic"),
    "conv-both": Setting("ConvS2S, both", "--arch conv_captioner_tiny --fusion parallel", self_critical=True),
    "eta-fused": Setting("ETA of all seeds, fused", fused=("eta",)),
    "modalities-fused": Setting("regions alone and attributes alone, fused", fused=("visual", "semantic")),
    "models-fused": Setting("Transformer, LSTM and ConvS2S of regions, fused", fused=("visual", "lstm", "conv")),
}
BASELINES = {
    "grammar": "the grammar that wrote the captions: an image's first one against its others",
    "stranger": "the next image's caption",
}
