"""The captioners' decoders: formulas word by word and step-by-step decoding.

Attention itself has a test in ``sequences/test_alignment_attention.py``.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from attn_plugins.modules import AttendedLSTM, GatedConvBlock, ShowAttendTell
from attn_plugins.modules.common.sequence_cache import reordered
from tests.helpers.module_inputs import drawn

B, T, S, C, D, N, A = 3, 5, 4, 6, 7, 5, 3
MASK = torch.tensor([[False] * 4, [False, True, False, True], [False, False, False, True]])


class Decoder:
    """A common interface to the three modules: ``run(words, source, mask, state)``."""

    def __init__(self, name: str) -> None:
        self.name = name
        build = {
            "show_attend_tell": lambda: ShowAttendTell(C, D, N, A),
            "lstm": lambda: AttendedLSTM(C, 2),
            "conv": lambda: GatedConvBlock(C, 3),
        }[name]
        self.module = drawn(build(), 0.4).double()

    def inputs(self):
        """Return words, and a source of 4 positions."""
        torch.manual_seed(1)
        source = torch.randn(B, S, D if self.name == "show_attend_tell" else C, dtype=torch.float64)
        return torch.randn(B, T, C, dtype=torch.float64), source

    def run(self, words, source, mask=None, state=None):
        embedded = (words.flip(2), words) if self.name == "conv" else (words,)
        return self.module(*embedded, source, mask, state)


every_decoder = pytest.mark.parametrize("name", ["show_attend_tell", "lstm", "conv"])


# --- formulas, one word at a time -------------------------------------------------------------------------------------


def attended(attention, state: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    context, weights = attention(state.expand(1, 1, -1), places.unsqueeze(0))
    return context[0, 0], weights[0, 0]


def show_attend_tell_by_loops(module, words, places):
    mean = places.mean(0)
    h, c = torch.tanh(module.first_hidden(mean)), torch.tanh(module.first_cell(mean))
    for word in words:
        context, weights = attended(module.attention, h, places)
        z = torch.sigmoid(module.gate(h)) * context
        h, c = module.cell(torch.cat([word, z]), (h, c))
        yield word + module.hidden_output(h) + module.context_output(z), weights


def lstm_by_loops(module, words, places):
    zeros = words.new_zeros(C)
    states, output = [(zeros, zeros) for _ in module.cells], zeros
    for word in words:
        x = torch.cat([word, output])
        for i, cell in enumerate(module.cells):
            states[i] = cell(x, states[i])
            x = states[i][0]
        context, weights = attended(module.attention, x, places)
        output = torch.tanh(module.output(torch.cat([x, context])))
        yield output, weights


def normalized(layer) -> Tensor:
    return torch.stack([g * v / v.square().sum().sqrt() for v, g in zip(layer.direction, layer.length.flatten())])


def conv_by_loops(module, words, places):
    def projected(layer, x: Tensor) -> Tensor:
        return normalized(layer)[:, :, 0] @ x + layer.bias

    x, weight = words.flip(1), normalized(module.conv)
    for t, word in enumerate(words):
        taps = [x[t - 2 + j] if t - 2 + j >= 0 else torch.zeros_like(word) for j in range(3)]
        out = sum(weight[:, :, j] @ taps[j] for j in range(3)) + module.conv.bias
        h = out[:C] * torch.sigmoid(out[C:])
        weights = (places @ (projected(module.query, h) + word) * 0.5**0.5).softmax(0)
        y = h + projected(module.context, math.sqrt(len(places)) * (weights @ places))
        yield (x[t] + y / math.sqrt(2)) / math.sqrt(2), weights


LOOPS = {"show_attend_tell": show_attend_tell_by_loops, "lstm": lstm_by_loops, "conv": conv_by_loops}


@torch.no_grad()
@every_decoder
@pytest.mark.parametrize("mask", [MASK, None], ids=["padded", "full"])
def test_equals_the_formulas(name, mask):
    decoder = Decoder(name)
    words, source = decoder.inputs()
    features, weights, _ = decoder.run(words, source, mask)
    for b in range(B):
        kept = torch.ones(S, dtype=torch.bool) if mask is None else ~mask[b]
        steps = list(LOOPS[name](decoder.module, words[b], source[b, kept]))
        torch.testing.assert_close(features[b], torch.stack([f for f, _ in steps]))
        torch.testing.assert_close(weights[b][:, kept], torch.stack([w for _, w in steps]))
        assert not weights[b][:, ~kept].any()


# --- decoding, padding, gradients -------------------------------------------------------------------------------------


@torch.no_grad()
@every_decoder
def test_step_by_step_equals_the_full_pass_after_a_reorder(name):
    """Start with two words, then decode one by one, with rows that a beam search has reordered."""
    decoder = Decoder(name)
    words, source = decoder.inputs()
    whole, weights, _ = decoder.run(words, source, MASK)
    first, _, state = decoder.run(words[:, :2], source, MASK)
    torch.testing.assert_close(first, whole[:, :2])
    order = torch.tensor([2, 0, 0, 1])
    state = reordered(state, order)
    words, whole, source, mask = (x[order] for x in (words, whole, source, MASK))
    for t in range(2, T):
        features, step_weights, state = decoder.run(words[:, t : t + 1], source, mask, state)
        torch.testing.assert_close(features, whole[:, t : t + 1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(step_weights, weights[order, t : t + 1], rtol=1e-12, atol=1e-12)


@torch.no_grad()
def test_weights_start_at_their_direction_and_keep_the_length_g():
    """At first the weights are v, and the output has the requested variance. Later, |w| is g."""
    torch.manual_seed(0)
    layer = GatedConvBlock(64, 3, dropout=0.5).conv
    torch.testing.assert_close(normalized(layer), layer.direction)
    assert layer(torch.randn(50, 40, 64)).var().item() == pytest.approx(4 * 0.5, rel=0.1)
    layer.direction *= 7
    torch.testing.assert_close(normalized(layer).norm(dim=(1, 2)), layer.length.flatten())
