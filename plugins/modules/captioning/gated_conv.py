"""Decoder block of the convolutional captioner: causal convolution, gate, attention (Gehring et al. 2017).

Shapes: B batch, T words, S entries of the source, C channels, k kernel size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.checks import check_padding_mask, check_sequence, check_source, positive
from ..sequences.alignment_attention import AlignmentAttention


class NormalizedConv1d(nn.Module):
    """Convolution over (B, T, C) with weight normalization: every output channel's weights are g v / |v|.

    With ``kernel_size`` 1 it is a linear layer on each word.

    Args:
        in_channels: C.
        out_channels: C'.
        kernel_size: k; (B, T, C) becomes (B, T - k + 1, C').
        gain: Initial variance of the outputs for inputs of variance 1.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int = 1, gain: float = 1.0, **factory: Any
    ) -> None:
        super().__init__()
        self.gain = gain
        self.direction = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size, **factory))
        self.length = nn.Parameter(torch.empty(out_channels, 1, 1, **factory))
        self.bias = nn.Parameter(torch.empty(out_channels, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw v from a normal distribution, set g to |v|, so that the weights equal v, and zero the bias."""
        nn.init.normal_(self.direction, std=math.sqrt(self.gain / self.direction[0].numel()))
        with torch.no_grad():
            self.length.copy_(self.direction.norm(dim=(1, 2), keepdim=True))
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, T, C) -> (B, T - k + 1, C')."""
        weight = self.length * self.direction / self.direction.norm(dim=(1, 2), keepdim=True)
        if weight.shape[2] == 1:
            return F.linear(x, weight.squeeze(2), self.bias)
        return F.conv1d(x.transpose(1, 2), weight, self.bias).transpose(1, 2)

    def extra_repr(self) -> str:
        out_channels, in_channels, kernel_size = self.direction.shape
        return f"{in_channels}, {out_channels}, kernel_size={kernel_size}"


class GatedConvBlock(nn.Module):
    """One layer of ConvS2S' decoder over words, with attention to a source.

        h = GLU(conv(x))                    causal: each word and the k - 1 words before it; zeros before the first
        c = √S W_out Σ_i α_i s_i,   α = softmax_i (W_in h + g) · s_i / √2
        y = (x + (h + c) / √2) / √2

    g are the word embeddings, √S compensates for the lower variance of a mean (Gehring et al. 2017, section 3; Aneja et
    al. 2018 for captions). All convolutions and projections have weight normalization.

    Args:
        embed_dim: C, of words, source, inputs and outputs.
        kernel_size: k.
        dropout: Dropout probability of x before the convolution.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        kernel_size: int = 5,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(embed_dim=embed_dim, kernel_size=kernel_size)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.embed_dim, self.kernel_size = embed_dim, kernel_size
        self.dropout = nn.Dropout(dropout)
        self.conv = NormalizedConv1d(embed_dim, 2 * embed_dim, kernel_size, 4 * (1 - dropout), **factory)
        self.query, self.context = (NormalizedConv1d(embed_dim, embed_dim, **factory) for _ in range(2))
        self.attention = AlignmentAttention("dot", embed_dim, **factory)

    def forward(
        self, x: Tensor, words: Tensor, source: Tensor, padding_mask: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply the layer.

        Args:
            x: (B, T, C), the words so far; with ``state`` the next ones.
            words: g, (B, T, C), their embeddings.
            source: s, (B, S, C).
            padding_mask: (B, S) bool, True for entries to leave out.
            state: State returned by the previous call; ``reordered`` permutes it for beam search.

        Returns:
            y (B, T, C), α (B, T, S) and the state (B, k - 1, C), the last inputs of the convolution.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: An argument is not a Tensor, or does not have the module's dtype.
        """
        conv = getattr(self.conv, "direction", self.conv)
        check_sequence("x", x, self.embed_dim, conv)
        check_sequence("words", words, self.embed_dim, conv)
        if words.shape != x.shape:
            raise ValueError(f"words must have x's shape {tuple(x.shape)}, got {tuple(words.shape)}")
        check_source("source", source, self.embed_dim, x.shape[0], conv)
        check_padding_mask(padding_mask, source.shape[0], source.shape[1], source.device)
        if state is None:
            state = x.new_zeros(x.shape[0], self.kernel_size - 1, self.embed_dim)
        inputs = torch.cat((state.to(x.dtype), self.dropout(x)), 1)
        h = F.glu(self.conv(inputs), 2)
        query = (self.query(h) + words) * math.sqrt(0.5)
        context, alignment = self.attention(query.to(source.dtype), source, padding_mask)
        if padding_mask is None:
            context = context * math.sqrt(source.shape[1])
        else:
            context = context * padding_mask.logical_not().sum(1).to(context.dtype).sqrt()[:, None, None]
        y = (x + (h + self.context(context)) * math.sqrt(0.5)) * math.sqrt(0.5)
        return y, alignment, inputs[:, inputs.shape[1] - (self.kernel_size - 1) :]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, kernel_size={self.kernel_size}"
