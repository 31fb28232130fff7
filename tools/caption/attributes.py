"""Attribute detector: predicts words that describe a picture, by a backbone and the noisy-OR of its cells.

Chapter 2 of the thesis ("Visual & Semantic Features"), after Fang et al., From Captions to Visual Concepts and Back
(2015), Sec. 3. A word is in a picture if any of its cells shows it: p = 1 − Π(1 − p_cell). With logits z of the cells,
log(1 − p) = −s and log p = log(1 − exp(−s)), s = Σ softplus(z): no product, and no logarithm of what rounded to 0 or 1.

B pictures, K words, h·w cells.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from tools import files
from tools.caption.backbones import TimmBackbone, read_weights

_LINEAR = -15.0  # below it log softplus(z) is z − exp(z)/2 to float32's precision, and softplus(z) may underflow
_SMALL = -7.0  # of log s; below it log(1 − exp(−s)) is log s − s/2 + s²/24 to float32's precision


def noisy_or(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log p and log(1 − p) of each word, (Tensor[B, K]), from the logits of the cells, (Tensor[B, K, h, w]).

    They are in float32 or better, and their gradients are finite.
    """
    z = logits.flatten(2)
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    # Both branches of a where() receive a gradient: clamp each input to the range where it is finite.
    low, high = z.clamp(max=_LINEAR), z.clamp(min=_LINEAR)
    log_s = torch.where(z < _LINEAR, z - low.exp() / 2, functional.softplus(high).log()).logsumexp(2)
    s = log_s.exp()
    series = log_s - s / 2 + s * s.clamp(max=1) / 24
    exact = (-torch.expm1(-s.clamp(min=torch.tensor(_SMALL).exp().item()))).log()
    return torch.where(log_s < _SMALL, series, exact), -s


def noisy_or_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the binary cross-entropy of the pictures' probabilities, averaged over pictures and words.

    ``targets`` (Tensor[B, K]) are 1 where the word describes the picture, else 0.
    """
    log_p, log_not = noisy_or(logits)
    targets = targets.to(log_p.dtype)
    return -(targets * log_p + (1 - targets) * log_not).mean()


class AttributeDetector(nn.Module):
    """Detector of K ``words`` in the cells of a picture, by a linear layer on the feature map of ``backbone``."""

    def __init__(self, backbone: TimmBackbone, words: Sequence[str]) -> None:
        super().__init__()
        self.backbone, self.words = backbone, list(words)
        self.head = nn.Sequential(OrderedDict(classifier=nn.Conv2d(backbone.num_features, len(self.words), 1)))
        nn.init.normal_(self.head[0].weight, std=0.01)

    @torch.no_grad()
    def start_at(self, frequencies: Tensor, cells: int) -> None:
        """Initialise the biases so that pictures of ``cells`` cells have the probabilities ``frequencies``, (K,)."""
        miss = torch.log1p(-frequencies.double().clamp(1e-4, 1 - 1e-4)) / cells  # log(1 − p_cell)
        self.head[0].bias.copy_((-torch.expm1(miss)).log() - miss)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of every word in every cell, (Tensor[B, K, h, w]), of prepared pictures."""
        return self.head(self.backbone(images))

    @torch.inference_mode()
    def log_odds(self, images: Tensor) -> Tensor:
        """Return log p/(1 − p) of prepared pictures, (Tensor[B, K]), which also ranks words whose p rounds to 1."""
        log_p, log_not = noisy_or(self(images))
        return log_p - log_not

    def predict(self, picture: Image.Image, number: int = 20) -> list[list[Any]]:
        """Return the most probable words of a picture as pairs of word and probability, in evaluation mode."""
        self.eval()
        image = self.backbone.prepare(picture)[None].to(self.head[0].weight.device)
        return top(self.log_odds(image)[0].cpu(), self.words, number)

    def save(self, path: Path, **facts: Any) -> None:
        """Write ``.safetensors``, whose metadata hold ``facts`` and what :func:`load_detector` needs."""
        facts |= dict(model=self.backbone.name, size=self.backbone.size, words=self.words)
        files.write_weights(path, self, facts)


def load_detector(path: Path, device: str | torch.device = "cpu") -> AttributeDetector:
    """Load a detector from a file that :meth:`AttributeDetector.save` wrote, in evaluation mode.

    Raises:
        ValueError: the file cannot be read or holds something else, or the backbone cannot be built.
    """
    weights, metadata = read_weights(path)
    missing = [key for key in ("model", "size", "words") if key not in metadata]
    if missing:
        raise ValueError(f"{path} holds no attribute detector: its metadata lack {', '.join(missing)}")
    backbone = TimmBackbone(metadata["model"], tuple(json.loads(metadata["size"])))
    detector = AttributeDetector(backbone, json.loads(metadata["words"]))
    try:
        detector.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {metadata['model']}: {error}"[:500]) from error
    return detector.to(device).eval()


def top(log_odds: Tensor, words: Iterable[str], number: int) -> list[list[Any]]:
    """Return the most probable words of one picture, given ``log_odds`` (Tensor[K])."""
    values, order = log_odds.sort(descending=True, stable=True)
    names = list(words)
    return [[names[k], round(p, 6)] for p, k in zip(values[:number].sigmoid().tolist(), order[:number].tolist())]
