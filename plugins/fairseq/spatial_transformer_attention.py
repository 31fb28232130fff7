"""Adapters of this package's attention to the interface of fairseq's ``MultiheadAttention``.

Shapes: B sentences, T queries, S keys, C channels, M heads; fairseq stores states as (T, B, C).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules import (
    BilateralSelfAttention,
    CausalDeformableConv1d,
    DeformableConv1d,
    DynamicConv1d,
    MultiheadSpatialAttention,
    RelativeSelfAttention,
    SequenceCache,
)

IncrementalState = dict[str, dict[str, Any]]


class _CachedAttention(FairseqIncrementalState, nn.Module):
    """Base of both attentions, with one decoding cache per unit."""

    get_incremental_state: Any  # defined by fairseq
    set_incremental_state: Any

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads  # fairseq's layer reads them

    def caches(self, state: IncrementalState | None) -> dict[str, SequenceCache]:
        """Return the caches in ``state``, created in the first step; empty without a state."""
        if state is None:
            return {}
        caches = self.get_incremental_state(state, "caches")
        if caches is None:
            caches = {"attention": SequenceCache(), "deformable": SequenceCache()}
            self.set_incremental_state(state, "caches", caches)
        return caches

    def reorder_incremental_state(self, state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Reorder the caches to follow the beam."""
        for cache in (self.get_incremental_state(state, "caches") or {}).values():
            cache.reorder(new_order)
        return state

    def make_generation_fast_(
        self, name: str = "", retain_dropout: bool = False, retain_dropout_modules: Any = None, **kwargs: Any
    ) -> None:
        """Refuse ``--retain-dropout`` for all modules: this package's attention drops weights in training only."""
        if retain_dropout and retain_dropout_modules is None and getattr(self.attention, "dropout", 0.0) > 0:
            raise ValueError(
                f"--retain-dropout cannot retain the --attention-dropout of {name}: choose modules with "
                "--retain-dropout-modules"
            )

    def _get_input_buffer(self, state: IncrementalState | None) -> dict[str, Tensor]:
        """Return an empty buffer: fairseq's decoder layer reads it only with cross+self-attention."""
        return {}

    def _set_input_buffer(self, state: IncrementalState, buffer: Any) -> None:
        raise ValueError("prev_self_attn_state and prev_attn_state must be None: states are kept in incremental_state")


class SpatialSelfAttention(_CachedAttention):
    """Self-attention of one layer, preceded by a deformable convolution if ``cfg.deformable`` is set.

    Args:
        cfg: Configuration of fairseq with this package's options, as returned by :func:`checked`.
        side: ``'encoder'`` or ``'decoder'``, which is causal.
        kernel_size: Kernel size of dynamic and bilateral.
    """

    def __init__(self, cfg: TransformerConfig, side: str, kernel_size: int | None) -> None:
        part = getattr(cfg, side)
        super().__init__(part.embed_dim, part.attention_heads)
        self.causal = side == "decoder"
        self.deformable = _deformable(cfg, part.embed_dim, self.causal) if cfg.deformable else None
        with _named(f"--{side}-attention {part.attention}"):
            self.attention = _self_attention(cfg, part, kernel_size, self.causal)
        _add_noise(self, cfg)

    @property
    def empty(self) -> bool:
        """Whether the layer has neither attention nor convolution: the paper's "w/o"."""
        return self.attention is None and self.deformable is None

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Compute self-attention, (T, B, C) -> (T, B, C); ``key`` and ``value`` equal ``query``.

        ``attn_mask`` is fairseq's causal mask, which the causal modules apply themselves. A decoder's pass without it
        and an encoder's pass with a mask raise an error.
        """
        if self.causal and attn_mask is None and incremental_state is None:
            raise ValueError("full_context_alignment must be False: the decoder's self-attention is causal")
        if not self.causal and attn_mask is not None:
            raise ValueError("attn_mask must be None: the encoder's self-attention has no other mask than padding")
        if self.empty:
            return torch.zeros_like(query), None
        caches = self.caches(incremental_state)
        x = query.transpose(0, 1).contiguous()
        if self.deformable is not None:
            if key_padding_mask is not None:
                x = x.masked_fill(key_padding_mask.unsqueeze(2), 0)
            step = {"cache": caches.get("deformable")} if self.causal else {}
            x = self.deformable(x.transpose(1, 2), **step).transpose(1, 2)
        if self.attention is not None:
            options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "cache": caches.get("attention")}
            if isinstance(self.attention, DynamicConv1d):
                x = self.attention(x.transpose(1, 2), **options).transpose(1, 2)
            else:
                x = self.attention(x.contiguous(), **options)
        return x.transpose(0, 1), None


class SpatialEncoderAttention(_CachedAttention):
    """Cross-attention of a decoder layer to the encoder's output.

    Args:
        cfg: Configuration of fairseq with this package's options, as returned by :func:`checked`.
    """

    def __init__(self, cfg: TransformerConfig) -> None:
        part = cfg.decoder
        super().__init__(part.embed_dim, part.attention_heads)
        with _named(f"--cross-attention {cfg.cross_attention}"):
            self.attention = MultiheadSpatialAttention(
                part.embed_dim,
                part.attention_heads,
                cfg.cross_attention,
                dropout=cfg.attention_dropout,
                scale=self.head_dim**-0.5,
                query_key_bias=cfg.query_key_bias and cfg.cross_terms.content,
                kdim=cfg.encoder.embed_dim,
            )
        _add_noise(self, cfg)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        static_kv: bool = True,
        need_weights: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` (T, B, C) to the encoder's output ``key`` (S, B, C').

        Returns:
            Output (T, B, C), and weights (B, T, S), or (M, B, T, S) per head, or None unless requested. Weights have no
            gradient.
        """
        cache = self.caches(incremental_state).get("attention")
        key = key.transpose(0, 1)
        if cache is None or cache.value is None:  # later steps read only its shape
            key = key.contiguous()
            if cache is not None and key.device.type == "cpu":  # elsewhere the check is slower than the copy
                same = (key[1:] == key[:-1]).flatten(1).all(1)
                sentence = F.pad((~same).cumsum(0), (1, 0))
                self.set_incremental_state(incremental_state, "sentences", {"sentence": sentence})
        x = query.transpose(0, 1).contiguous()
        options: dict[str, Any] = {"key_padding_mask": key_padding_mask, "cache": cache}
        weights = None
        if need_weights or need_head_weights:
            weights = self.attention.attention_maps(x, key, **options).transpose(0, 1)
            if not need_head_weights:
                weights = weights.mean(0)
        return self.attention(x, key, **options).transpose(0, 1), weights

    def reorder_incremental_state(self, state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Reorder to follow the beam; on the CPU, skip the copy of keys and values if no row changes its sentence."""
        sentences = self.get_incremental_state(state, "sentences")
        if sentences is not None:
            sentence = sentences["sentence"]
            sentences["sentence"] = sentence[new_order]
            if torch.equal(sentences["sentence"], sentence):
                return state
        return super().reorder_incremental_state(state, new_order)


@contextmanager
def _named(option: str) -> Iterator[None]:
    """Put the option before the error of a module, which names its own arguments."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _self_attention(cfg: TransformerConfig, part: Any, kernel_size: int | None, causal: bool) -> nn.Module | None:
    if part.attention == "none":
        return None
    if part.attention == "dynamic":
        assert kernel_size is not None
        return DynamicConv1d(part.embed_dim, kernel_size, causal=causal)
    if part.attention == "bilateral":
        return BilateralSelfAttention(
            part.embed_dim,
            part.attention_heads,
            kernel_size,
            cfg.bilateral_outside,
            cfg.bilateral_smoothing,
            causal,
            cfg.attention_dropout,
        )
    if part.attention == "shaw":
        return RelativeSelfAttention(
            part.embed_dim,
            part.attention_heads,
            cfg.shaw_distance,
            cfg.shaw_vectors == "keys_and_values",
            cfg.shaw_per_head,
            causal,
            cfg.attention_dropout,
        )
    return MultiheadSpatialAttention(
        part.embed_dim,
        part.attention_heads,
        part.attention,
        cfg.attention_range,
        causal,
        cfg.attention_dropout,
        scale=(part.embed_dim // part.attention_heads) ** -0.5,
        query_key_bias=cfg.query_key_bias and part.terms.content,
    )


def _deformable(cfg: TransformerConfig, channels: int, causal: bool) -> nn.Module:
    scale = cfg.offset_lr_scale
    if causal:
        unit: Any = CausalDeformableConv1d(channels, channels, 3, offset_scale=scale)
    else:
        unit = DeformableConv1d(channels, channels, 3, padding=1, offset_scale=scale)
    nn.init.xavier_uniform_(unit.weight)  # like all projections of fairseq's Transformer
    return unit


def _add_noise(attention: nn.Module, cfg: TransformerConfig) -> None:
    """Apply --quant-noise-pq to every projection, as in fairseq's attention."""
    for layer in attention.modules():
        if isinstance(layer, nn.Linear):
            quant_noise(layer, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)
