"""Attention of an encoder-decoder RNN by one of five alignment scores (Lecture, "Attention for NMT").

Shapes: B batch, T decoder states s, S encoder states h.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...core.arguments import autocast_dtype
from ...terms import alignment as terms
from ..common.checks import check_padding_mask, check_tensor, one_of, positive

AlignmentScore = Literal["cosine", "additive", "general", "dot", "scaled-dot"]


class DotScore(nn.Module):
    """Dot-product score s_t · h_i, without parameters."""

    def __init__(self, query_channels: int, source_channels: int, **_: Any) -> None:
        super().__init__()
        if query_channels != source_channels:
            raise ValueError(
                "query_channels and source_channels must be equal for a cosine, dot or scaled-dot alignment, got "
                f"{query_channels} and {source_channels}; general and additive accept any"
            )

    def project_keys(self, source: Tensor) -> Tensor:
        """Return the part of the score that depends on the source alone."""
        return source

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return terms.dot_scores(query, keys)


class ScaledDotScore(DotScore):
    """Scaled dot-product score s_t · h_i / √d, without parameters."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return terms.scaled_dot_scores(query, keys)


class CosineScore(DotScore):
    """Cosine score cos(s_t, h_i), without parameters; attention weights differ by a factor of e² at most."""

    def project_keys(self, source: Tensor) -> Tensor:
        return terms.unit_vectors(source)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return terms.dot_scores(terms.unit_vectors(query), keys)


class GeneralScore(nn.Module):
    """General score s_tᵀ W h_i."""

    def __init__(self, query_channels: int, source_channels: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(query_channels, source_channels, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W by Glorot uniform initialization."""
        nn.init.xavier_uniform_(self.weight)

    def project_keys(self, source: Tensor) -> Tensor:
        return source  # W is applied to the query: a decoder has one at a time, but many encoder states

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return terms.general_scores(query, keys, self.weight)


class AdditiveScore(nn.Module):
    """Additive score w_1 · tanh(W_2 [s_t; h_i] + b_2), a network of two layers."""

    def __init__(
        self, query_channels: int, source_channels: int, hidden_channels: int | None = None, **factory: Any
    ) -> None:
        super().__init__()
        hidden_channels = query_channels if hidden_channels is None else hidden_channels
        self.query = nn.Linear(query_channels, hidden_channels, **factory)
        self.source = nn.Linear(source_channels, hidden_channels, bias=False, **factory)
        self.vector = nn.Parameter(torch.empty(hidden_channels, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both layers by Glorot uniform initialization, W_2 as a single matrix, and zero the bias."""
        hidden, channels = len(self.vector), self.query.in_features + self.source.in_features
        bound = math.sqrt(6 / (hidden + channels))
        nn.init.uniform_(self.query.weight, -bound, bound)
        nn.init.uniform_(self.source.weight, -bound, bound)
        nn.init.zeros_(self.query.bias)
        nn.init.xavier_uniform_(self.vector.unsqueeze(0))

    def project_keys(self, source: Tensor) -> Tensor:
        return self.source(source)

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return terms.additive_scores(self.query(query), keys, self.vector)


ALIGNMENT_SCORES: dict[str, type[DotScore] | type[GeneralScore] | type[AdditiveScore]] = {
    "cosine": CosineScore,
    "additive": AdditiveScore,
    "general": GeneralScore,
    "dot": DotScore,
    "scaled-dot": ScaledDotScore,
}


class AlignmentAttention(nn.Module):
    """Context vectors c_t = Σ_i α_{t,i} h_i, with α_t the softmax of the alignment scores of s_t and all h_i.

    The softmax runs in float32 for half inputs. Fully masked queries return zeros.

    Args:
        score: 'cosine', 'additive' (concatenation-based), 'general', 'dot' or 'scaled-dot'. Only 'additive' and
            'general' have parameters.
        query_channels: Width of s.
        source_channels: Width of h; must equal that of s for scores without parameters. Defaults to that of s.
        hidden_channels: A, width of the additive score's hidden layer. Defaults to ``query_channels``.

    Shapes:
        query (B, T, query_channels), source (B, S, source_channels)
        -> context (B, T, source_channels), alignment (B, T, S)

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        score: AlignmentScore,
        query_channels: int,
        source_channels: int | None = None,
        hidden_channels: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        one_of(AlignmentScore, score=score)
        if hidden_channels is not None and score != "additive":
            raise ValueError(
                f"hidden_channels must be None except for 'additive', got {hidden_channels!r} for {score!r}"
            )
        source_channels = query_channels if source_channels is None else source_channels
        widths = dict(query_channels=query_channels, source_channels=source_channels)
        if hidden_channels is not None:
            widths["hidden_channels"] = hidden_channels
        positive(**widths)
        self.score_name, self.query_channels, self.source_channels = score, query_channels, source_channels
        self.score = ALIGNMENT_SCORES[score](**widths, device=device, dtype=dtype)

    def project_keys(self, source: Tensor) -> Tensor:
        """Compute the part of the score that depends on the source alone, once for all steps of a decoder.

        Args:
            source: (B, S, source_channels).

        Returns:
            (B, S, ·), the ``keys`` of :meth:`forward`; ``source`` itself if the score does not project it.
        """
        return self.score.project_keys(source)

    def forward(
        self, query: Tensor, source: Tensor, key_padding_mask: Tensor | None = None, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend from every decoder state to all encoder states.

        Args:
            query: s, (B, T, query_channels).
            source: h, (B, S, source_channels).
            key_padding_mask: (B, S) bool, True for states to leave out.
            keys: ``project_keys(source)``, if already computed.

        Returns:
            c, (B, T, source_channels), and α, (B, T, S), whose rows sum to one.
        """
        self._check(query, source, key_padding_mask)
        scores = self.score(query, self.score.project_keys(source) if keys is None else keys)
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        if key_padding_mask is None:
            alignment = scores.softmax(-1)
        else:
            mask = key_padding_mask.unsqueeze(1)
            # The lowest finite value instead of -inf: fully masked queries must have zero output and zero gradient.
            alignment = scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(mask, 0)
        alignment = alignment.to(source.dtype)
        return alignment @ source, alignment

    def _check(self, query: Tensor, source: Tensor, key_padding_mask: Tensor | None) -> None:
        widths = dict(query=("T", self.query_channels), source=("S", self.source_channels))
        for (name, (axis, width)), x in zip(widths.items(), (query, source)):
            check_tensor(name, x)
            if x.dim() != 3 or x.shape[2] != width or x.shape[1] == 0:
                raise ValueError(f"{name} must have shape (B, {axis}, {width}) with {axis} > 0, got {tuple(x.shape)}")
        if source.shape[0] != query.shape[0]:
            raise ValueError(f"source must have query's batch {query.shape[0]}, got {source.shape[0]}")
        if source.device != query.device:
            raise ValueError(f"source must be on query's device {query.device}, got {source.device}")
        if source.dtype != query.dtype and autocast_dtype(query.device.type) is None:
            raise TypeError(f"source must have query's dtype {query.dtype}, got {source.dtype}")
        check_padding_mask(key_padding_mask, source.shape[0], source.shape[1], source.device)

    def extra_repr(self) -> str:
        return f"{self.score_name}, query_channels={self.query_channels}, source_channels={self.source_channels}"
