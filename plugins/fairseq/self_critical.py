r"""Criterion ``self_critical``: the second stage of captioning, which rewards the captions that the model samples.

The policy samples captions word by word. The loss is -(r(sample) - b) sum_t log p(w_t | w_<t), whose gradient is that
of the negative expected reward -E[r]. The baseline b is the reward of the greedy caption, or the mean reward of the
image's other sampled captions (Rennie et al., Self-critical sequence training for image captioning, 2017; Luo, A better
variant of self-critical sequence training, 2020). The loss is summed over words, and fairseq divides the sum by the
number of sampled captions over all workers and all batches of an update.

Captions are sampled without dropout, as at inference, and the pass with a gradient omits dropout too. Otherwise the
gradient of the baseline term would not be zero on average, and since a greedy caption mostly beats a sampled one,
training would drive the model away from what it has learned.

The policy has the search space of ``fairseq-generate``: no padding, at least one word, and an end after at most
``--max-caption-length`` words. It also excludes the begin-of-sentence symbol, which no caption contains.

To start from a model trained by cross-entropy::

    fairseq-train DATA --user-dir ... --task captioning --arch eta_transformer --criterion self_critical \
        --finetune-from-model CE/checkpoint_best.pt \
        --one-caption-per-image --best-checkpoint-metric reward --maximize-best-checkpoint-metric ...

Shapes: B images, K captions per image (the greedy one, if any, comes first), T words of the longest caption including
its end, V words of the dictionary.
"""

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor

from ..captioning.caption_rewards import CiderD
from .registries import forget

forget(__name__)

logger = logging.getLogger(__name__)
BASELINES = ("greedy", "mean")
END = "</s>"  # the end as a word for CIDEr-D, without which captions become truncated; no reference contains it
# Logged values, each with the count that divides its sum over all workers.
LOGGED = {"reward": "captions", "baseline": "captions", "advantage": "captions", "length": "captions"}
LOGGED |= {"entropy": "ntokens"}


@contextmanager
def _inference(model: Any) -> Iterator[None]:
    """Switch the model to evaluation mode, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@dataclass
class SelfCriticalConfig(FairseqDataclass):
    """Options of the criterion ``self_critical``."""

    samples: int = field(default=1, metadata={"help": "sampled captions per image"})
    baseline: ChoiceEnum(BASELINES) = field(  # type: ignore[valid-type]
        default="greedy",
        metadata={"help": "reward to beat: that of the greedy caption, or the mean of the other sampled captions"},
    )
    max_caption_length: int = field(default=20, metadata={"help": "maximum words of a caption, without its end"})


@register_criterion("self_critical", dataclass=SelfCriticalConfig)
class SelfCriticalCriterion(FairseqCriterion):
    """Self-critical sequence training for the task ``captioning``.

    It logs the mean ``reward`` of sampled captions (in validation of greedy ones, whose negative is ``loss``), the mean
    ``baseline`` and ``advantage``, the words per caption (``length``) and the policy's ``entropy`` per word, in nats.

    Raises:
        ValueError: The task is another one, an option is out of range, or the reward is undefined.
    """

    def __init__(self, cfg: SelfCriticalConfig, task: Any) -> None:
        super().__init__(task)
        if not hasattr(task, "captions_of"):  # its class may have been reloaded
            raise ValueError(f"--criterion self_critical needs --task captioning, got {type(task).__name__}")
        for name in ("samples", "max_caption_length"):
            if getattr(cfg, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(cfg, name)}")
        self.baseline = str(cfg.baseline)
        if self.baseline not in BASELINES:
            raise ValueError(f"--baseline must be one of {', '.join(BASELINES)}, got {self.baseline!r}")
        if self.baseline == "mean" and cfg.samples < 2:
            raise ValueError("--baseline mean compares with other samples: --samples must be at least 2, got 1")
        self.samples, self.max_length = cfg.samples, cfg.max_caption_length
        self.dictionary = task.target_dictionary
        training = task.captions_of("train")
        references: dict[Hashable, list[str]] = {
            image_id: [" ".join(words) for words in captions] for image_id, captions in training.items()
        }
        self.frequencies = CiderD(references, end=END).frequencies
        logger.info("CIDEr-D weights n-grams by the captions of %d images", self.frequencies.images)

    def forward(self, model: Any, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
        """Compute the loss in training, and the negative reward of greedy captions in validation.

        Args:
            model: Encoder and decoder whose ``prev_output_tokens`` may hold several rows per image.
            sample: A batch of the task.
            reduce: Sum the loss over captions; otherwise return it per caption.

        Returns:
            The loss, the number of captions, and the values to log.

        Raises:
            ValueError: The batch has no references.
        """
        if "references" not in sample:
            raise ValueError(
                "sample must have the references of its images: the dataset does not belong to the task captioning"
            )
        if not model.training:
            return self._validation(model, sample, reduce)
        greedy = int(self.baseline == "greedy")
        captions = self.captions(model, sample["net_input"], greedy, self.samples)
        rewards = self.rewards(sample, captions)
        drawn = rewards[:, greedy:]
        baseline = rewards[:, :1] if greedy else (drawn.sum(1, keepdims=True) - drawn) / (self.samples - 1)
        advantage = drawn - baseline

        target = captions[:, greedy:].flatten(0, 1)
        with _inference(model):
            log_p, entropy = self.log_probabilities(model, sample["net_input"], target)
        loss = -torch.from_numpy(advantage).flatten().to(log_p) * log_p
        log = {
            "baseline": float(np.broadcast_to(baseline, drawn.shape).sum()),
            "advantage": float(advantage.sum()),
            "entropy": entropy,
        }
        return self._result(loss, reduce, target, drawn, log)

    def _validation(self, model: Any, sample: dict[str, Any], reduce: bool) -> tuple[Tensor, int, dict[str, Any]]:
        captions = self.captions(model, sample["net_input"], 1, 0)
        rewards = self.rewards(sample, captions)
        loss = -torch.from_numpy(rewards).flatten().to(captions.device, torch.float)
        return self._result(loss, reduce, captions, rewards, {})

    def _result(
        self, loss: Tensor, reduce: bool, captions: Tensor, rewards: np.ndarray, log: dict[str, Any]
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return what :meth:`forward` does: the loss of captions (N, ...) whose rewards are (B, N / B)."""
        log |= {
            "loss": loss.detach().sum(),
            "reward": float(rewards.sum()),
            "length": self._words(captions),
            "captions": len(captions),
            "sample_size": len(captions),
            "nsentences": len(rewards),
            "ntokens": int(captions.ne(self.padding_idx).sum()),
        }
        return (loss.sum() if reduce else loss), len(captions), log

    def _words(self, captions: Tensor) -> int:
        """Count the words of all captions, without their ends."""
        return int((captions.ne(self.padding_idx) & captions.ne(self.dictionary.eos())).sum())

    def _policy(self, logits: Tensor, first: Tensor) -> Tensor:
        """Return the policy's logits (N, V) in float32, -inf for excluded words; ``first`` (N,) marks first words."""
        logits = logits.to(torch.float, copy=True)
        logits[:, [self.padding_idx, self.dictionary.bos()]] = -torch.inf
        logits[:, self.dictionary.eos()].masked_fill_(first, -torch.inf)
        return logits

    @torch.no_grad()
    def captions(self, model: Any, net_input: Mapping[str, Any], greedy: int, samples: int) -> Tensor:
        """Generate captions for a batch, without dropout.

        Args:
            model: The model; its mode is restored afterwards.
            net_input: The batch's ``net_input``.
            greedy: 1 to generate the greedy caption of each image first, else 0.
            samples: Number of sampled captions per image.

        Returns:
            (B, K, T): words, the end unless the caption has the maximum length, then padding.
        """
        pad, eos = self.padding_idx, self.dictionary.eos()
        with _inference(model):
            encoder_out = model.encoder(**{k: v for k, v in net_input.items() if k != "prev_output_tokens"})
            B, K, device = len(net_input["src_tokens"]), greedy + samples, net_input["src_tokens"].device
            rows = torch.arange(B, device=device).repeat_interleave(K)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, rows)
            longest = min(self.max_length, model.decoder.max_positions() - 1)
            tokens = torch.full((B * K, longest + 1), pad, device=device)
            tokens[:, 0] = eos
            ended = torch.zeros(B * K, dtype=torch.bool, device=device)
            state: dict[str, Any] = {}
            for t in range(longest):
                logits = model.decoder(tokens[:, : t + 1], encoder_out, incremental_state=state)[0][:, -1]
                logits = self._policy(logits, torch.full_like(ended, t == 0)).view(B, K, -1)
                if samples:  # Gumbel-max sampling, which raises no device-side assertion on NaN
                    noise = torch.empty_like(logits[:, greedy:]).exponential_()
                    logits[:, greedy:] -= noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_()
                tokens[:, t + 1] = logits.argmax(-1).flatten().masked_fill_(ended, pad)
                ended |= tokens[:, t + 1].eq(eos)
                if ended.all():
                    break
        torch.clear_autocast_cache()  # older torch would reuse cached weights without a gradient in the next pass
        return tokens[:, 1 : t + 2].view(B, K, -1)

    def rewards(self, sample: Mapping[str, Any], captions: Tensor) -> np.ndarray:
        """Compute rewards, (B, K, T) -> float64 (B, K)."""
        references = dict(zip(sample["image_ids"], sample["references"]))
        score = CiderD(references, self.frequencies, end=END)
        B, K, _ = captions.shape
        eos, symbols = self.dictionary.eos(), self.dictionary.symbols
        texts = []
        for row in captions.flatten(0, 1).tolist():
            texts.append(" ".join(symbols[word] for word in row if word not in (eos, self.padding_idx)))
        return score([image_id for image_id in sample["image_ids"] for _ in range(K)], texts).reshape(B, K)

    def log_probabilities(self, model: Any, net_input: Mapping[str, Any], target: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the differentiable log-probability of every caption and the summed entropy of all their words.

        Args:
            model: The model.
            net_input: The batch's ``net_input``, of B images.
            target: (N, T) captions, N / B consecutive ones per image.

        Returns:
            Log-probabilities (N,) and the entropy, a scalar, both float32.
        """
        start = target.new_full((len(target), 1), self.dictionary.eos())
        previous = torch.cat([start, target[:, :-1]], 1)
        logits = model(**{**net_input, "prev_output_tokens": previous})[0]
        caption, place = target.ne(self.padding_idx).nonzero(as_tuple=True)
        log_p = self._policy(logits[caption, place], place.eq(0)).log_softmax(-1)
        with torch.no_grad():
            entropy = torch.special.entr(log_p.exp()).sum()
        words = log_p.gather(1, target[caption, place].unsqueeze(1)).squeeze(1)
        return words.new_zeros(len(target)).index_add(0, caption, words), entropy

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Average the logged values over workers and batches."""
        total: dict[str, Any] = {}
        for output in logging_outputs:
            for name, value in output.items():
                total[name] = total.get(name, 0) + value
        if total.get("sample_size", 0):
            metrics.log_scalar("loss", total["loss"] / total["sample_size"], total["sample_size"], round=3)
            for name, divisor in LOGGED.items():
                if name in total:
                    metrics.log_scalar(name, total[name] / total[divisor], total[divisor], round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """Return True: workers' outputs may be summed."""
        return True
