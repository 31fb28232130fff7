"""The captioners' decoders: formulas word by word and step-by-step decoding.

Attention itself has a test in ``sequences/test_alignment_attention.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_plugins.modules import AttendedLSTM, GatedConvBlock, Modality, ShowAttendTell
from attn_plugins.modules.captioning.show_attend_tell import doubly_stochastic_penalty
from attn_plugins.modules.common.sequence_cache import reordered
from tests.helpers.module_inputs import drawn

B, T, S, C, D, N, A = 3, 5, 4, 6, 7, 5, 3
MASK = torch.tensor([[False] * 4, [False, True, False, True], [False, False, False, True]])
BOTH = ("visual", "semantic")


class Decoder:
    """A common interface to the three modules: ``run(words, sources, state)``."""

    def __init__(self, name: str, names=BOTH) -> None:
        self.name, self.names = name, ("visual",) if name == "show_attend_tell" else names
        build = {
            "show_attend_tell": lambda: ShowAttendTell(C, D, N, A),
            "lstm": lambda: AttendedLSTM(C, names, 2),
            "conv": lambda: GatedConvBlock(C, 3, names),
        }[name]
        self.module = drawn(build(), 0.4).double()

    def inputs(self):
        """Return words, a source of 4 positions with some padding, and a source of 3."""
        torch.manual_seed(1)
        width = D if self.name == "show_attend_tell" else C
        visual = Modality(torch.randn(B, S, width, dtype=torch.float64), MASK)
        semantic = Modality(torch.randn(B, 3, width, dtype=torch.float64))
        return torch.randn(B, T, C, dtype=torch.float64), {"visual": visual, "semantic": semantic}

    def run(self, words, sources, state=None):
        if self.name == "show_attend_tell":
            features, alignment, state = self.module(words, *sources["visual"], state)
            return features, {"visual": alignment}, state
        if self.name == "conv":
            return self.module(words.flip(2), words, sources, state)
        return self.module(words, sources, state)


every_decoder = pytest.mark.parametrize("name", ["show_attend_tell", "lstm", "conv"])


# --- formulas, one word at a time -------------------------------------------------------------------------------------


def seen(modality: Modality, b: int) -> tuple[Tensor, Tensor]:
    """Return the places of a sample that are not padding, and their vectors."""
    features, mask = modality
    kept = torch.ones(features.shape[1], dtype=torch.bool) if mask is None else ~mask[b]
    return kept, features[b, kept]


def attended(attention, state: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    context, weights = attention(state.expand(1, 1, -1), places.unsqueeze(0))
    return context[0, 0], weights[0, 0]


def show_attend_tell_by_loops(module, words, sources, b):
    kept, places = seen(sources["visual"], b)
    mean = places.mean(0)
    h, c = torch.tanh(module.first_hidden(mean)), torch.tanh(module.first_cell(mean))
    for word in words[b]:
        context, weights = attended(module.attention, h, places)
        z = torch.sigmoid(module.gate(h)) * context
        h, c = module.cell(torch.cat([word, z]), (h, c))
        yield word + module.hidden_output(h) + module.context_output(z), {"visual": (kept, weights)}


def lstm_by_loops(module, words, sources, b):
    zeros = words.new_zeros(C)
    states, output = [(zeros, zeros) for _ in module.cells], zeros
    for word in words[b]:
        x, alignments = torch.cat([word, output]), {}
        for i, cell in enumerate(module.cells):
            states[i] = cell(x, states[i])
            x = states[i][0]
        parts = [x]
        for name, attention in module.attentions.items():
            kept, places = seen(sources[name], b)
            context, weights = attended(attention, x, places)
            alignments[name] = kept, weights
            parts.append(context)
        output = torch.tanh(module.output(torch.cat(parts)))
        yield output, alignments


def normalised(layer) -> Tensor:
    return torch.stack([g * v / v.square().sum().sqrt() for v, g in zip(layer.direction, layer.length.flatten())])


def conv_by_loops(module, words, sources, b):
    def projected(layer, x: Tensor) -> Tensor:
        return normalised(layer)[:, :, 0] @ x + layer.bias

    x, weight = words[b].flip(1), normalised(module.conv)
    for t, word in enumerate(words[b]):
        taps = [x[t - 2 + j] if t - 2 + j >= 0 else torch.zeros_like(word) for j in range(3)]
        out = sum(weight[:, :, j] @ taps[j] for j in range(3)) + module.conv.bias
        h = out[:C] * torch.sigmoid(out[C:])
        y, alignments = h, {}
        for name in module.names:
            kept, places = seen(sources[name], b)
            weights = (places @ (projected(module.queries[name], h) + word) * 0.5**0.5).softmax(0)
            alignments[name] = kept, weights
            y = y + projected(module.contexts[name], math.sqrt(len(places)) * (weights @ places))
        yield (x[t] + y / math.sqrt(1 + len(module.names))) / math.sqrt(2), alignments


LOOPS = {"show_attend_tell": show_attend_tell_by_loops, "lstm": lstm_by_loops, "conv": conv_by_loops}


@torch.no_grad()
@every_decoder
@pytest.mark.parametrize("names", [BOTH, ("semantic",)], ids="-".join)
def test_equals_the_formulas(name, names):
    decoder = Decoder(name, names=names)
    words, sources = decoder.inputs()
    features, weights, _ = decoder.run(words, sources)
    assert set(weights) == set(decoder.names)
    for b in range(B):
        steps = list(LOOPS[name](decoder.module, words, sources, b))
        torch.testing.assert_close(features[b], torch.stack([f for f, _ in steps]))
        for t, (_, alignments) in enumerate(steps):
            for source, (kept, expected) in alignments.items():
                torch.testing.assert_close(weights[source][b, t, kept], expected)
                assert weights[source][b, t].sum() == pytest.approx(1)


def test_the_penalty_of_places_that_are_overlooked():
    """Eq. 14 over the words and positions that are not padding."""
    alignment = torch.rand(B, T, S, dtype=torch.float64).masked_fill(MASK.unsqueeze(1), 0)
    alignment /= alignment.sum(2, keepdim=True)
    ends = [5, 2, 3]
    words = torch.arange(T) >= torch.tensor(ends).unsqueeze(1)
    expected = [
        sum((1 - sum(float(alignment[b, t, i]) for t in range(ends[b]))) ** 2 for i in range(S) if not MASK[b, i])
        for b in range(B)
    ]
    penalty = doubly_stochastic_penalty(alignment, words, MASK)
    torch.testing.assert_close(penalty, torch.tensor(expected, dtype=torch.float64))
    even = torch.full((1, S, S), 1 / S)
    assert not doubly_stochastic_penalty(even).any()
    assert doubly_stochastic_penalty(even.half()).dtype == torch.float32


# --- decoding, padding, gradients -------------------------------------------------------------------------------------


@torch.no_grad()
@every_decoder
def test_steps_are_those_of_the_whole(name):
    """Start with two words, then decode one by one, with rows that a beam search has reordered."""
    decoder = Decoder(name)
    words, sources = decoder.inputs()
    whole, weights, _ = decoder.run(words, sources)
    first, _, state = decoder.run(words[:, :2], sources)
    torch.testing.assert_close(first, whole[:, :2])
    order = torch.tensor([2, 0, 0, 1])
    state = reordered(state, order)
    words, whole = words[order], whole[order]
    sources = {key: Modality(f[order], None if m is None else m[order]) for key, (f, m) in sources.items()}
    for t in range(2, T):
        features, step_weights, state = decoder.run(words[:, t : t + 1], sources, state)
        torch.testing.assert_close(features, whole[:, t : t + 1], rtol=1e-12, atol=1e-12)
        for key in decoder.names:
            torch.testing.assert_close(step_weights[key], weights[key][order, t : t + 1], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_weight_normalisation():
    """At first the weights are v, and the output has the requested variance. Later, |w| is g."""
    torch.manual_seed(0)
    layer = GatedConvBlock(64, 3, dropout=0.5).conv
    torch.testing.assert_close(normalised(layer), layer.direction)
    assert layer(torch.randn(50, 40, 64)).var().item() == pytest.approx(4 * 0.5, rel=0.1)
    layer.direction *= 7
    torch.testing.assert_close(normalised(layer).norm(dim=(1, 2)), layer.length.flatten())


def test_inputs_that_cannot_be():
    for name in ("lstm", "conv"):
        words, sources = Decoder(name).inputs()
        with pytest.raises(ValueError, match="sources must have visual, semantic, got visual"):
            Decoder(name).run(words, {"visual": sources["visual"]})
    with pytest.raises(ValueError, match=r"alignment must have shape \(B, T, S\), got \(3, 4\)"):
        doubly_stochastic_penalty(torch.rand(3, 4))
