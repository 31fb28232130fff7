"""Attention of a captioner to regions and attributes for each word, and the gate's share of both.

Shapes: L blocks or layers of the decoder, M heads (1 if it is not a Transformer), T words, Sv regions, Ss attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.fairseq.captioner import CaptionerModel
from attn_plugins.fairseq.plain_captioner import CaptionerDecoder
from attn_plugins.modules import GatedBilateralController, MultimodalDecoderBlock, capture_attention

# Names of a block's attentions: the inputs of the gate (or the only attention without a gate), and the guidance of the
# pathways (Thesis, Eq. 2.9 and 2.10).
PLACES = {
    "entangled.visual_attention": "regions",
    "entangled.semantic_attention": "attributes",
    "entangled.visual_injection": "regions_injection",
    "entangled.semantic_injection": "attributes_injection",
    "attentions.visual": "regions",
    "attentions.semantic": "attributes",
}


@dataclass(frozen=True)
class WordAttention:
    """Attention of one model for one caption.

    ``weights`` are ``regions`` and ``regions_injection`` (L, M, T, Sv), ``attributes`` and ``attributes_injection``
    (L, M, T, Ss), as far as the model has them.
    """

    weights: Mapping[str, Tensor]
    visual_share: Tensor | None  # (L, T), the gate's mean over channels; None without a gate


@torch.inference_mode()
def word_attention(model: Any, net_input: Mapping[str, Any]) -> WordAttention:
    """Run ``model`` on one image and its caption, and record every block or layer of its decoder.

    Args:
        model: An ``eta_transformer``, or a captioner whose decoder returns its weights, in evaluation mode.
        net_input: A batch of one; ``prev_output_tokens`` are the caption's words (1, T + 1), with the end symbol in
            front. The prediction of the end itself is left out.

    Raises:
        ValueError: the model is not a captioner.
    """
    if not isinstance(model, CaptionerModel):
        raise ValueError(f"model must be a captioner, got {type(model).__name__}")
    if isinstance(model.decoder, CaptionerDecoder):
        returned = model(**net_input)[1]["weights"]
        return WordAttention({name: weights[:, :, :-1].float().cpu() for name, weights in returned.items()}, None)
    blocks = [m for m in model.decoder.blocks if isinstance(m, MultimodalDecoderBlock)]
    with capture_attention(model.decoder, "blocks.*") as captured, visual_shares(blocks) as shares:
        model(**net_input)
    weights = {}
    for place, name in PLACES.items():
        calls = [captured.get(f"blocks.{i}.{place}.attention") for i in range(len(blocks))]
        if maps := [call.maps()[0, :, :-1] for call in calls if call is not None]:
            weights[name] = torch.stack(maps).float().cpu()
    return WordAttention(weights, torch.stack([share[0, :-1] for share in shares]).float().cpu() if shares else None)


@contextmanager
def visual_shares(blocks: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Record the gates' mean over channels, (B, T) for each block that has one, in a forward pass."""
    shares: list[Tensor] = []
    handles = [
        module.register_forward_pre_hook(lambda gate, inputs: shares.append(gate.visual_share(*inputs).mean(2)))
        for block in blocks
        for module in block.modules()
        if isinstance(module, GatedBilateralController)
    ]
    try:
        yield shares
    finally:
        for handle in handles:
            handle.remove()


def summary(attentions: Sequence[WordAttention], layer: int | None = None) -> dict[str, Tensor]:
    """Average one block over heads and over the models of an ensemble, as far as they have such weights.

    Args:
        attentions: Attention of each model.
        layer: Number of the block, from 1; None: each model's last; 0: the mean of all.

    Returns:
        ``regions`` (T, Sv), ``attributes`` (T, Ss) and ``visual_share`` (T,), as far as they exist.

    Raises:
        ValueError: a model does not have this block.
    """
    own = {
        name: [a.weights[name].mean(1) for a in attentions if name in a.weights] for name in ("regions", "attributes")
    }
    own["visual_share"] = [a.visual_share for a in attentions if a.visual_share is not None]
    return {name: torch.stack([_of_layer(x, layer) for x in values]).mean(0) for name, values in own.items() if values}


def _of_layer(x: Tensor, layer: int | None) -> Tensor:
    if layer == 0:
        return x.mean(0)
    if layer is not None and not 1 <= layer <= len(x):
        raise ValueError(f"--layer must be from 1 to {len(x)}, the model's blocks, or all, got {layer}")
    return x[-1 if layer is None else layer - 1]
