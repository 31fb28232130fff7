"""Decoder block of the convolutional captioner: causal convolution, gate, attention (Gehring et al. 2017).

Shapes: B batch, T words, S entries of a source (regions, attributes), C channels, k kernel size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..common.checks import check_sequence, positive
from ..sequences.alignment_attention import AlignmentAttention
from ..sequences.attended_lstm import check_source_names, check_sources
from .entangled_attention import Modality


class NormalisedConv1d(nn.Module):
    """Convolution over (B, T, C) with weight normalisation: every output channel's weights are g v / |v|.

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
    """One layer of ConvS2S' decoder over words, with attention to one or more sources.

        h = GLU(conv(x))                    causal: each word and the k - 1 words before it; zeros before the first
        c^m = √S W_out^m Σ_i α^m_i s^m_i,   α^m = softmax_i (W_in^m h + g) · s^m_i / √2
        y = (x + (h + Σ_m c^m) / √(1 + M)) / √2

    g are the word embeddings, √S compensates for the lower variance of a mean, M is the number of sources (Gehring et
    al. 2017, section 3; Aneja et al. 2018 for captions). All convolutions and projections have weight normalisation.

    Args:
        embed_dim: C, of words, sources, inputs and outputs.
        kernel_size: k.
        sources: Names of the sources, such as ``("visual", "semantic")``.
        dropout: Dropout probability of x before the convolution.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        kernel_size: int = 5,
        sources: Sequence[str] = ("visual",),
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(embed_dim=embed_dim, kernel_size=kernel_size)
        check_source_names(sources)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.embed_dim, self.kernel_size, self.names = embed_dim, kernel_size, tuple(sources)
        self.dropout = nn.Dropout(dropout)
        self.conv = NormalisedConv1d(embed_dim, 2 * embed_dim, kernel_size, 4 * (1 - dropout), **factory)
        self.queries = nn.ModuleDict({name: NormalisedConv1d(embed_dim, embed_dim, **factory) for name in sources})
        self.contexts = nn.ModuleDict({name: NormalisedConv1d(embed_dim, embed_dim, **factory) for name in sources})
        self.attention = AlignmentAttention("dot", embed_dim, **factory)

    def forward(
        self, x: Tensor, words: Tensor, sources: Mapping[str, Modality], state: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Apply the layer.

        Args:
            x: (B, T, C), the words so far; with ``state`` the next ones.
            words: g, (B, T, C), their embeddings.
            sources: Sources (B, S, C) by name, with padding masks; names that the block does not have are ignored.
            state: State returned by the previous call; ``reordered`` permutes it for beam search.

        Returns:
            y (B, T, C), α of each source (B, T, S) and the state (B, k - 1, C), the last inputs of the convolution.

        Raises:
            ValueError: a source is missing, or a shape or a device does not match.
            TypeError: an argument is not a Tensor, or does not have the module's dtype.
        """
        conv = getattr(self.conv, "direction", self.conv)
        check_sequence("x", x, self.embed_dim, conv)
        check_sequence("words", words, self.embed_dim, conv)
        if words.shape != x.shape:
            raise ValueError(f"words must have x's shape {tuple(x.shape)}, got {tuple(words.shape)}")
        check_sources(sources, self.names, self.embed_dim, x.shape[0], conv)
        if state is None:
            state = x.new_zeros(x.shape[0], self.kernel_size - 1, self.embed_dim)
        inputs = torch.cat((state.to(x.dtype), self.dropout(x)), 1)
        h = F.glu(self.conv(inputs), 2)
        y, weights = h, {}
        for name in self.names:
            context, weights[name] = self._context(name, h, words, *sources[name])
            y = y + context
        y = (x + y / math.sqrt(1 + len(self.names))) * math.sqrt(0.5)
        return y, weights, inputs[:, inputs.shape[1] - (self.kernel_size - 1) :]

    def _context(
        self, name: str, h: Tensor, words: Tensor, features: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query = (self.queries[name](h) + words) * math.sqrt(0.5)
        context, alignment = self.attention(query.to(features.dtype), features, mask)
        if mask is None:
            return self.contexts[name](context * math.sqrt(features.shape[1])), alignment
        number = mask.logical_not().sum(1).to(context.dtype).sqrt()
        return self.contexts[name](context * number[:, None, None]), alignment

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, kernel_size={self.kernel_size}"
