"""Blocks of the ETA-Transformer: a dual-way encoder and a multimodal decoder (Thesis, sections 2.4.1 and 2.4.2).

Shapes: B batch, C channels, T words, Sv regions, Ss attributes.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..common.checks import check_source, check_tensor, one_of, positive
from ..common.sequence_cache import SequenceCache
from .entangled_attention import (
    Activation,
    Entangled,
    EntangledAttention,
    GatedBilateralController,
    GuidedAttention,
    Modality,
    cache_of,
)

Fusion = Literal["entangled", "parallel", "stacked-visual", "stacked-semantic", "visual", "semantic"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)
ATTENDED = {  # modalities that are attended to one after another, without entanglement
    "parallel": ("visual", "semantic"),
    "stacked-visual": ("semantic", "visual"),
    "stacked-semantic": ("visual", "semantic"),
    "visual": ("visual",),
    "semantic": ("semantic",),
}


class FeedForward(nn.Module):
    """Feed-forward layer LayerNorm(x + W_2 ReLU(W_1 x + b_1) + b_2), applied to each token (Thesis, Eq. 2.5)."""

    def __init__(self, embed_dim: int, ffn_dim: int, dropout: float = 0.0, **factory: Any) -> None:
        super().__init__()
        positive(ffn_dim=ffn_dim)
        self.input = nn.Linear(embed_dim, ffn_dim, **factory)
        self.output = nn.Linear(ffn_dim, embed_dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(embed_dim, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both layers by Glorot uniform initialization, and zero the biases."""
        for layer in (self.input, self.output):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer: (B, T, C) -> (B, T, C)."""
        return self.norm(x + self.dropout(self.output(self.dropout(torch.relu(self.input(x))))))


class SubEncoder(nn.Module):
    """A stack of self-attention and feed-forward layers over one modality, without positions (Thesis, Eq. 2.4, 2.5)."""

    def __init__(
        self, embed_dim: int, num_layers: int, num_heads: int, ffn_dim: int, dropout: float, **factory: Any
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(
                (
                    GuidedAttention(embed_dim, num_heads, dropout, **factory),
                    FeedForward(embed_dim, ffn_dim, dropout, **factory),
                )
            )
            for _ in range(num_layers)
        )

    def forward(self, modality: Modality) -> Modality:
        """Apply the layers: (B, S, C) -> (B, S, C)."""
        features, mask = modality
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            attention, feed_forward = layer
            features = feed_forward(attention(features, padding_mask=mask))
        return Modality(features, mask)


class DualWayEncoder(nn.Module):
    """Separate stacks of self-attention for regions and for attributes (Thesis, 2.4.1).

    Args:
        visual_dim: Channels of a region's features, which are projected to C.
        embed_dim: C.
        num_layers: Layers of each stack; 0 for the projection alone (Table 2.4's "without encoder").
        num_heads: Must divide C.
        ffn_dim: d_m, the feed-forward layers' width.
        dropout: Dropout probability of the weights, of each layer's output, and of the input.

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        visual_dim: int = 2048,
        embed_dim: int = 512,
        num_layers: int = 6,
        num_heads: int = 8,
        ffn_dim: int = 2048,
        dropout: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        positive(visual_dim=visual_dim, embed_dim=embed_dim)
        if not isinstance(num_layers, int) or num_layers < 0:
            raise ValueError(f"num_layers must be an int, at least 0, got {num_layers!r}")
        self.visual_dim, self.embed_dim = visual_dim, embed_dim
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.projection = nn.Linear(visual_dim, embed_dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.visual, self.semantic = (
            SubEncoder(embed_dim, num_layers, num_heads, ffn_dim, dropout, **factory) for _ in range(2)
        )

    def forward(
        self,
        regions: Tensor,
        attributes: Tensor,
        regions_padding_mask: Tensor | None = None,
        attributes_padding_mask: Tensor | None = None,
    ) -> tuple[Modality, Modality]:
        """Encode both modalities.

        Args:
            regions: (B, Sv, visual_dim).
            attributes: (B, Ss, C), word embeddings in any order.
            regions_padding_mask: (B, Sv) bool, True for padding.
            attributes_padding_mask: (B, Ss) bool, True for padding.

        Returns:
            V^N (B, Sv, C) and S^N (B, Ss, C), with their masks.

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: A tensor does not have the module's dtype.
        """
        check_tensor("regions", regions)
        for name, x, width in (("regions", regions, self.visual_dim), ("attributes", attributes, self.embed_dim)):
            check_source(name, x, width, regions.shape[0], self.projection)
        return (
            self.visual(Modality(self.dropout(self.projection(regions)), regions_padding_mask)),
            self.semantic(Modality(self.dropout(attributes), attributes_padding_mask)),
        )


class MultimodalDecoderBlock(nn.Module):
    """Causal self-attention, attention to both modalities, feed-forward (Thesis, 2.4.2, Eq. 2.7 to 2.12).

    Args:
        embed_dim: C.
        num_heads: Must divide C.
        ffn_dim: d_m, the feed-forward layer's width.
        dropout: Dropout probability of the weights and of each layer's output.
        fusion: ``entangled``, or an ablation (Table 2.5): ``parallel`` has no guidance, and its two attentions are both
            the outputs and the inputs of the gate; ``stacked-visual`` and ``stacked-semantic`` have one pathway and no
            gate; ``visual`` and ``semantic`` are a plain Transformer on one modality.
        activation: f of the gate.

    Raises:
        ValueError: An argument is out of range or inconsistent with the others.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        num_heads: int = 8,
        ffn_dim: int = 2048,
        dropout: float = 0.0,
        fusion: Fusion = "entangled",
        activation: Activation = "identity",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        one_of(Fusion, fusion=fusion)
        one_of(Activation, activation=activation)
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.fusion = fusion
        self.self_attention = GuidedAttention(embed_dim, num_heads, dropout, causal=True, **factory)
        self.entangled: EntangledAttention | None = None
        self.controller: GatedBilateralController | None = None
        self.attentions = nn.ModuleDict()
        if fusion == "entangled":
            self.entangled = EntangledAttention(embed_dim, num_heads, dropout, **factory)
        else:
            for name in ATTENDED[fusion]:
                self.attentions[name] = GuidedAttention(embed_dim, num_heads, dropout, **factory)
        if fusion in ("entangled", "parallel"):
            self.controller = GatedBilateralController(embed_dim, activation, **factory)
        self.feed_forward = FeedForward(embed_dim, ffn_dim, dropout, **factory)

    def forward(
        self,
        x: Tensor,
        visual: Modality,
        semantic: Modality,
        padding_mask: Tensor | None = None,
        caches: dict[str, SequenceCache] | None = None,
    ) -> Tensor:
        """Apply the block.

        Args:
            x: (B, T, C), the words so far; with ``caches`` the next ones.
            visual: V^N; not used by a fusion that attends to attributes alone.
            semantic: S^N; not used by a fusion that attends to regions alone.
            padding_mask: (B, T) bool, True for words that are padding.
            caches: For step-by-step decoding: the same dict in every step, initially empty. The
                first step's modalities are kept. ``reorder_caches`` permutes the caches for beam search.

        Returns:
            (B, T, C).

        Raises:
            ValueError: A shape or a device does not match.
            TypeError: A tensor does not have the module's dtype.
        """
        cache = cache_of(caches, "self_attention")
        a = self.self_attention(x, cache=cache, padding_mask=padding_mask)
        pathways = self.pathways(a, visual, semantic, caches)
        if isinstance(pathways, Tensor):
            return self.feed_forward(pathways)
        assert self.controller is not None
        return self.feed_forward(self.controller(pathways, a))

    def pathways(
        self, a: Tensor, visual: Modality, semantic: Modality, caches: dict[str, SequenceCache] | None = None
    ) -> Entangled | Tensor:
        """Compute the pathways that the gate combines, or without a gate the only pathway's output."""
        if self.entangled is not None:
            return self.entangled(a, visual, semantic, caches)
        modalities = {"visual": visual, "semantic": semantic}
        attended: dict[str, Tensor] = {}
        guided = a
        for name, attention in self.attentions.items():
            query = a if self.fusion == "parallel" else guided
            attended[name] = guided = attention(query, modalities[name], cache_of(caches, name))
        if self.fusion == "parallel":
            return Entangled(*(attended[name] for name in ("visual", "semantic", "semantic", "visual")))
        return guided


def reorder_caches(caches: dict[str, SequenceCache], order: Tensor) -> None:
    """Move row ``order[i]`` of the batch to row i, in all caches of a block."""
    for cache in caches.values():
        cache.reorder(order)
