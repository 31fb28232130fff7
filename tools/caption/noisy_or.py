"""Noisy-OR multiple-instance detection of words: Fang et al., From Captions to Visual Concepts and Back (2015), Sec. 3.

A word is in an image if any of its cells shows it: p = 1 − Π(1 − p_cell). With logits z of the cells,
log(1 − p) = −s and log p = log(1 − exp(−s)), s = Σ softplus(z): no product, and no logarithm of what rounded to 0 or 1.

B images, C channels, H·W cells, K words.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

_LINEAR = -15.0  # below it log softplus(z) is z − exp(z)/2 to float32's precision, and softplus(z) may underflow
_SMALL = -7.0  # of log s; below it log(1 − exp(−s)) is log s − s/2 + s²/24 to float32's precision


def noisy_or(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log p and log(1 − p) of each word, (Tensor[B, K]), from the logits of the cells, (Tensor[B, K, H, W]).

    They are in float32 or better, and their gradients are finite.
    """
    z = logits.flatten(2)
    z = z.float() if z.dtype in (torch.float16, torch.bfloat16) else z
    # Both branches of a where() receive a gradient: clamp each input to the range where it is finite.
    log_softplus = torch.where(
        z < _LINEAR, z - z.clamp(max=_LINEAR).exp() / 2, functional.softplus(z.clamp(min=_LINEAR)).log()
    )
    log_s = log_softplus.logsumexp(2)
    s = log_s.exp()
    small = log_s < _SMALL
    log_p = torch.where(
        small,
        log_s - s / 2 + s * s.clamp(max=1) / 24,
        (-torch.expm1(-s.clamp(min=torch.tensor(_SMALL).exp().item()))).log(),
    )
    return log_p, -s


def noisy_or_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the binary cross-entropy of the images' probabilities, averaged over images and words.

    ``targets`` (Tensor[B, K]) are 1 where the word describes the image, else 0.
    """
    log_p, log_not = noisy_or(logits)
    targets = targets.to(log_p.dtype)
    return -(targets * log_p + (1 - targets) * log_not).mean()


class NoisyOrHead(nn.Module):
    """Linear head: logits of K words in every cell of a feature map of C channels."""

    def __init__(self, in_channels: int, words: int) -> None:
        super().__init__()
        self.classifier = nn.Conv2d(in_channels, words, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)

    @torch.no_grad()
    def start_at(self, frequencies: Tensor, cells: int) -> None:
        """Initialise the biases so that images of ``cells`` cells have the probabilities ``frequencies``, (K,)."""
        miss = torch.log1p(-frequencies.double().clamp(1e-4, 1 - 1e-4)) / cells  # log(1 − p_cell)
        assert self.classifier.bias is not None
        self.classifier.bias.copy_((-torch.expm1(miss)).log() - miss)

    def forward(self, features: Tensor) -> Tensor:
        """Compute the logits of the cells, (Tensor[B, K, H, W]), of a map, (Tensor[B, C, H, W])."""
        return self.classifier(features)
