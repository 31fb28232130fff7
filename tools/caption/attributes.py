"""Attribute detector: predicts words that describe a picture, by a backbone and the noisy-OR of its cells.

Chapter 2 of the thesis ("Visual & Semantic Features"), after Fang et al., From Captions to Visual Concepts and Back
(2015).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tools import files
from tools.caption.backbones import BadBackbone, TimmBackbone, VggFc7, make_backbone, read_weights
from tools.caption.noisy_or import NoisyOrHead, noisy_or

Attributes = list[list[Any]]  # [word, probability], by falling probability


class AttributeDetector(nn.Module):
    """Detector of K ``words`` in the cells of a picture, by the feature map of ``backbone``."""

    def __init__(self, backbone: TimmBackbone, words: Sequence[str]) -> None:
        super().__init__()
        self.backbone, self.words = backbone, list(words)
        self.head = NoisyOrHead(backbone.num_features, len(self.words))

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of every word in every cell, (Tensor[B, K, h, w]), of prepared images."""
        return self.head(self.backbone(images))

    @torch.inference_mode()
    def log_odds(self, images: Tensor) -> Tensor:
        """Return log p/(1 − p) of prepared images, (Tensor[B, K]), which also ranks words whose p rounds to 1."""
        log_p, log_not = noisy_or(self(images))
        return log_p - log_not

    def predict(self, pictures: Iterable[Image.Image], number: int = 20) -> list[Attributes]:
        """Return the most probable words of each picture, in evaluation mode."""
        self.eval()
        device = self.head.classifier.weight.device
        images = torch.stack([self.backbone.prepare(picture) for picture in pictures]).to(device)
        return [top(own, self.words, number) for own in self.log_odds(images).cpu()]

    def save(self, path: Path, **facts: Any) -> None:
        """Write ``.safetensors``, whose metadata hold ``facts`` and what :func:`load_detector` needs."""
        backbone = self.backbone
        facts |= dict(model=backbone.name, size=backbone.size, words=self.words)
        facts |= dict(output_stride=backbone.output_stride, fc7=isinstance(backbone, VggFc7))
        files.write_weights(path, self, facts)


def load_detector(path: Path, device: str | torch.device = "cpu") -> AttributeDetector:
    """Load a detector from a file that :meth:`AttributeDetector.save` wrote, in evaluation mode.

    Raises:
        ValueError: the file cannot be read, or holds something else.
        BadBackbone: the backbone cannot be built.
    """
    weights, metadata = read_weights(path)
    missing = [key for key in ("model", "size", "words", "output_stride") if key not in metadata]
    if missing:
        raise ValueError(f"{path} holds no attribute detector: its metadata lack {', '.join(missing)}")
    size = tuple(json.loads(metadata["size"]))
    fc7 = json.loads(metadata.get("fc7", "false"))
    backbone = make_backbone(metadata["model"], size, json.loads(metadata["output_stride"]), fc7)
    detector = AttributeDetector(backbone, json.loads(metadata["words"]))
    try:
        detector.load_state_dict(weights)
    except RuntimeError as error:
        raise BadBackbone(f"{path} does not fit {metadata['model']}: {error}"[:500]) from error
    return detector.to(device).eval()


def top(log_odds: Tensor, words: Sequence[str], number: int) -> Attributes:
    """Return the most probable words of one picture, given ``log_odds`` (Tensor[K])."""
    values, order = log_odds.sort(descending=True, stable=True)
    return [[words[k], round(p, 6)] for p, k in zip(values[:number].sigmoid().tolist(), order[:number].tolist())]


def frequent_words(
    captions: Iterable[Sequence[Sequence[str]]], number: int, least: int = 1, skip: Iterable[str] = ()
) -> list[str]:
    """Return at most ``number`` words that occur ``least`` times in each image's captions, without ``skip``.

    They are sorted by falling frequency, then by the alphabet.
    """
    counts = Counter(word for own in captions for caption in own for word in caption)
    for word in skip:
        counts.pop(word, None)
    kept = [word for word in counts if counts[word] >= least]
    return sorted(kept, key=lambda word: (-counts[word], word))[:number]


def labels(captions: Iterable[Sequence[Sequence[str]]], words: Sequence[str]) -> Tensor:
    """Return labels (N, K): 1 if one of an image's captions has the word, else 0."""
    index = {word: k for k, word in enumerate(words)}
    rows = [{index[word] for caption in own for word in caption if word in index} for own in captions]
    targets = torch.zeros(len(rows), len(words), dtype=torch.uint8)
    for i, row in enumerate(rows):
        targets[i, list(row)] = 1
    return targets


def average_precision(scores: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return each word's average precision (K,), NaN for a word that describes no image; both arguments are (N, K)."""
    from sklearn.metrics import average_precision_score

    described = targets.any(0)
    return np.array([average_precision_score(t, s) if d else np.nan for t, s, d in zip(targets.T, scores.T, described)])
