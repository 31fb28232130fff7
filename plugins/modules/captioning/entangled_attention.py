"""Entangled attention to two modalities, and the gate between them (Thesis, sections 2.4.3 and 2.4.4).

Shapes: B batch, C channels, T words, Sv regions, Ss attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..common.checks import check_fits, check_tensor, one_of, positive
from ..common.sequence_cache import SequenceCache
from ..sequences.multihead_attention import MultiheadAttention

Activation = Literal["identity", "relu", "sigmoid", "tanh"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Modality(NamedTuple):
    """Encoded features of one modality.

    Attributes:
        features: (B, S, C).
        padding_mask: (B, S) bool, True for padding; None without padding.
    """

    features: Tensor
    padding_mask: Tensor | None = None


class Entangled(NamedTuple):
    """Outputs of entangled attention, all (B, T, C).

    Attributes:
        visual: v_t, attention to the regions, guided by the attributes (Eq. 2.10).
        semantic: s_t, attention to the attributes, guided by the regions.
        semantic_guidance: g^(s), guidance of the attributes (Eq. 2.9).
        visual_guidance: g^(v), guidance of the regions.
    """

    visual: Tensor
    semantic: Tensor
    semantic_guidance: Tensor
    visual_guidance: Tensor


class GuidedAttention(nn.Module):
    """One attention of a pathway: LayerNorm(x + dropout(MultiHead(x, features, features))).

    Args:
        embed_dim: C.
        num_heads: Must divide C.
        dropout: Dropout probability of the weights and of the attention's output.
        causal: Whether to use causal self-attention.
    """

    def __init__(
        self, embed_dim: int, num_heads: int = 8, dropout: float = 0.0, causal: bool = False, **factory: Any
    ) -> None:
        super().__init__()
        self.attention = MultiheadAttention(embed_dim, num_heads, dropout, causal, **factory)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(embed_dim, **factory)

    def forward(
        self,
        x: Tensor,
        modality: Modality | None = None,
        cache: SequenceCache | None = None,
        *,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from x (B, T, C) to ``modality``, or without it to x itself, whose padding mask is (B, T)."""
        features, mask = (None, padding_mask) if modality is None else modality
        return self.norm(x + self.dropout(self.attention(x, features, key_padding_mask=mask, cache=cache)))


class EntangledAttention(nn.Module):
    """Two pathways that attend to one modality, guided by the other (Thesis, Eq. 2.9 and 2.10).

        g^(s) = LN(a + MultiHead(a, S, S))        v = LN(g^(s) + MultiHead(g^(s), V, V))
        g^(v) = LN(a + MultiHead(a, V, V))        s = LN(g^(v) + MultiHead(g^(v), S, S))

    All four attentions have separate weights. :class:`GatedBilateralController` combines their outputs.

    Args:
        embed_dim: C.
        num_heads: Must divide C.
        dropout: Dropout probability of the weights and of each attention's output.

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 8,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.semantic_injection, self.visual_attention, self.visual_injection, self.semantic_attention = (
            GuidedAttention(embed_dim, num_heads, dropout, device=device, dtype=dtype) for _ in range(4)
        )

    def forward(
        self, x: Tensor, visual: Modality, semantic: Modality, caches: dict[str, SequenceCache] | None = None
    ) -> Entangled:
        """Attend to both modalities.

        Args:
            x: a, (B, T, C), the words' self-attention.
            visual: V, (B, Sv, C).
            semantic: S, (B, Ss, C).
            caches: For step-by-step decoding: the same dict in every step, initially empty.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: A tensor does not have the module's dtype.
        """
        semantic_guidance = self.semantic_injection(x, semantic, cache_of(caches, "semantic_injection"))
        visual_guidance = self.visual_injection(x, visual, cache_of(caches, "visual_injection"))
        return Entangled(
            self.visual_attention(semantic_guidance, visual, cache_of(caches, "visual_attention")),
            self.semantic_attention(visual_guidance, semantic, cache_of(caches, "semantic_attention")),
            semantic_guidance,
            visual_guidance,
        )


class GatedBilateralController(nn.Module):
    """Gated sum e = c * f(v) + (1 - c) * f(s), c = σ(W_c [g^(s), g^(v), a]) per channel (Thesis, Eq. 2.11, 2.12).

    Args:
        embed_dim: C.
        activation: f: ``identity`` (used in the thesis), ``relu``, ``sigmoid`` or ``tanh`` (Table 2.6).

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        embed_dim: int,
        activation: Activation = "identity",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(embed_dim=embed_dim)
        one_of(Activation, activation=activation)
        self.embed_dim, self.activation = embed_dim, activation
        self.gate = nn.Linear(3 * embed_dim, embed_dim, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W_c by Glorot uniform initialization and zero its bias."""
        nn.init.xavier_uniform_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, pathways: Entangled, x: Tensor) -> Tensor:
        """Combine the pathways, (B, T, C) each, into (B, T, C); ``x`` is the words' self-attention, a.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: A tensor does not have the module's dtype.
        """
        if not isinstance(pathways, Entangled):
            raise TypeError(f"pathways must be an Entangled, got {type(pathways).__name__}")
        for name, tensor in (("x", x), *pathways._asdict().items()):
            check_tensor(name, tensor)
            if tensor.dim() != 3 or tensor.shape != x.shape or tensor.shape[2] != self.embed_dim:
                raise ValueError(
                    f"{name} must have shape (B, T, {self.embed_dim}), as x has, got {tuple(tensor.shape)}"
                )
            check_fits(name, tensor, self.gate)
        f, gate = ACTIVATIONS[self.activation], self.visual_share(pathways, x)
        return gate * f(pathways.visual) + (1 - gate) * f(pathways.semantic)

    def visual_share(self, pathways: Entangled, x: Tensor) -> Tensor:
        """Compute c, (B, T, C), the share of the visual pathway in each channel."""
        return torch.sigmoid(self.gate(torch.cat((pathways.semantic_guidance, pathways.visual_guidance, x), 2)))

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, activation={self.activation!r}"


def cache_of(caches: dict[str, SequenceCache] | None, name: str) -> SequenceCache | None:
    """Return the cache called ``name``, created if missing; None without caches."""
    return None if caches is None else caches.setdefault(name, SequenceCache())
