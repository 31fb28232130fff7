"""The blocks of the ETA-Transformer: the thesis' Eq. 2.4 to 2.12 word by word, and parameter counts.

Multi-head attention itself has a test in ``sequences/test_spatial_attention_1d.py``.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from attn_plugins.modules import (
    DualWayEncoder,
    EntangledAttention,
    GatedBilateralController,
    Modality,
    MultiheadAttention,
    MultimodalDecoderBlock,
)
from attn_plugins.modules.captioning.entangled_attention import ACTIVATIONS
from attn_plugins.modules.captioning.eta_transformer import FUSIONS, reorder_caches
from tests.helpers.module_inputs import drawn

C, HEADS, WIDTH = 6, 3, 8
F = {"identity": lambda x: x, "relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


def block(fusion="entangled", **options) -> MultimodalDecoderBlock:
    return drawn(MultimodalDecoderBlock(C, HEADS, WIDTH, fusion=fusion, **options), 0.5).double()


def modalities(B=2, dtype=torch.float64) -> tuple[Modality, Modality]:
    """Return regions, of which the last two of the second picture are padding, and attributes."""
    torch.manual_seed(1)
    mask = torch.zeros(B, 4, dtype=torch.bool)
    mask[1:, 2:] = True
    return Modality(torch.randn(B, 4, C, dtype=dtype), mask), Modality(torch.randn(B, 3, C, dtype=dtype))


def words(T=5, B=2, dtype=torch.float64) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(B, T, C, dtype=dtype)


# --- the thesis' equations, one word at a time ------------------------------------------------------------------------


def guided(layer, query: Tensor, keys: Tensor) -> Tensor:
    """Attend from one vector (C,) to others (S, C); causal attention is of the last of them."""
    given = (keys,) if layer.attention.causal else (query.unsqueeze(0), keys)
    return layer.norm(query + layer.attention(*(t.unsqueeze(0) for t in given))[0, -1])


def feed_forward(layer, x: Tensor) -> Tensor:
    return layer.norm(x + layer.output(layer.input(x).relu()))


def seen(modality: Modality, b: int) -> Tensor:
    features, hidden = modality
    return features[b] if hidden is None else features[b][~hidden[b]]


def gated(controller: GatedBilateralController, v, s, guide_s, guide_v, a) -> Tensor:
    c, f = torch.sigmoid(controller.gate(torch.cat([guide_s, guide_v, a]))), F[controller.activation]
    return f(v) * c + f(s) * (1 - c)


def by_loops(module: MultimodalDecoderBlock, x: Tensor, visual: Modality, semantic: Modality) -> Tensor:
    output = torch.zeros_like(x)
    for b, t in itertools.product(range(x.shape[0]), range(x.shape[1])):
        V, S = seen(visual, b), seen(semantic, b)
        a = guided(module.self_attention, x[b, t], x[b, : t + 1])
        if module.fusion == "entangled":
            eta = module.entangled
            guide_s, guide_v = guided(eta.semantic_injection, a, S), guided(eta.visual_injection, a, V)
            v, s = guided(eta.visual_attention, guide_s, V), guided(eta.semantic_attention, guide_v, S)
            e = gated(module.controller, v, s, guide_s, guide_v, a)
        elif module.fusion == "parallel":
            v, s = guided(module.attentions["visual"], a, V), guided(module.attentions["semantic"], a, S)
            e = gated(module.controller, v, s, s, v, a)
        else:
            e = a
            order = {"stacked-visual": "sv", "stacked-semantic": "vs", "visual": "v", "semantic": "s"}[module.fusion]
            for letter in order:
                name, keys = ("visual", V) if letter == "v" else ("semantic", S)
                e = guided(module.attentions[name], e, keys)
        output[b, t] = feed_forward(module.feed_forward, e)
    return output


@torch.no_grad()
@pytest.mark.parametrize("fusion", FUSIONS)
def test_decoder_equals_the_formulas(fusion):
    module, x = block(fusion), words()
    torch.testing.assert_close(module(x, *modalities()), by_loops(module, x, *modalities()))


@torch.no_grad()
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_the_gate(activation):
    module, x = block(activation=activation), words(T=2)
    torch.testing.assert_close(module(x, *modalities()), by_loops(module, x, *modalities()))


@torch.no_grad()
def test_encoder_equals_the_formulas():
    module = drawn(DualWayEncoder(5, C, 2, HEADS, WIDTH), 0.5).double()
    regions, attributes = torch.randn(2, 4, 5, dtype=torch.float64), modalities()[1].features
    mask = modalities()[0].padding_mask
    encoded = module(regions, attributes, mask)
    inputs = Modality(module.projection(regions), mask), Modality(attributes)
    for modality, given, stack in zip(encoded, inputs, (module.visual, module.semantic), strict=True):
        for b in range(2):
            tokens = seen(given, b)
            for attention, ffn in stack.layers:
                tokens = torch.stack([feed_forward(ffn, guided(attention, x, tokens)) for x in tokens])
            torch.testing.assert_close(seen(modality, b), tokens)
    without = drawn(DualWayEncoder(5, C, 0, HEADS, WIDTH), 0.5).double()
    projected, same = without(regions, attributes)
    torch.testing.assert_close(projected.features, without.projection(regions))
    assert same.features is attributes


def test_parameters_are_the_thesis():
    """Compare with counts derived from the thesis: d 512, d_ff 2048, visual features of 2048 channels, biases."""
    both_ways = 2 * 3_152_384
    counts = {
        "encoder layer": (both_ways, DualWayEncoder(num_layers=1), DualWayEncoder(num_layers=0)),
        "decoder layer": (8_145_920, MultimodalDecoderBlock()),
        "entangled attention": (4_206_592, EntangledAttention(512)),  # 4 attention layers with a norm each
        "gated bilateral controller": (786_944, GatedBilateralController(512)),
        "visual projection": (1_049_088, DualWayEncoder(num_layers=0)),
        "multi-head attention": (1_050_624, MultiheadAttention(512)),
    }
    for name, (expected, module, *without) in counts.items():
        number = sum(p.numel() for p in module.parameters())
        number -= sum(p.numel() for other in without for p in other.parameters())
        assert number == expected, name


# --- decoding, padding, gradients ------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("fusion", FUSIONS)
def test_step_by_step_equals_the_full_pass_after_a_reorder(fusion):
    module, x, (visual, semantic) = block(fusion), words(), modalities()
    caches: dict = {}
    first = torch.cat([module(x[:, t : t + 1], visual, semantic, caches=caches) for t in range(3)], 1)
    torch.testing.assert_close(first, module(x, visual, semantic)[:, :3])
    order, rest = torch.tensor([1, 0, 1]), torch.randn(3, 2, C, dtype=torch.float64)
    reorder_caches(caches, order)
    visual, semantic = (Modality(f[order], None if m is None else m[order]) for f, m in (visual, semantic))
    expected = module(torch.cat((x[order, :3], rest), 1), visual, semantic)[:, 3:]
    torch.testing.assert_close(module(rest, visual, semantic, caches=caches), expected)
    mask = torch.tensor([[True] * 2 + [False] * 5] * 3)  # of words
    padded = torch.cat((torch.randn(3, 2, C, dtype=torch.float64), x[order]), 1)
    torch.testing.assert_close(module(padded, visual, semantic, mask)[:, 2:], module(x[order], visual, semantic))
