"""The captioners' decoders: formulas in plain loops and step-by-step decoding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from attn_plugins.modules import AttendedLSTM, GatedConvBlock, Modality, ShowAttendTell
from attn_plugins.modules.captioning.show_attend_tell import doubly_stochastic_penalty
from attn_plugins.modules.common.sequence_cache import reordered
from tests.helpers.module_inputs import drawn
from tests.modules.loops import linear, sigmoid, softmax

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


# --- formulas, one number at a time -----------------------------------------------------------------------------------


def lstm(cell: nn.LSTMCell, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eq. 1 to 3 of Xu et al.; torch orders the gates as i, f, g, o."""
    w, u = (np.array(weight.tolist()) for weight in (cell.weight_ih, cell.weight_hh))
    i, f, g, o = np.split(w @ x + u @ h + np.array((cell.bias_ih + cell.bias_hh).tolist()), 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def additive(attention, state: np.ndarray, places: list[np.ndarray]) -> list[float]:
    score = attention.score
    both = torch.cat([score.query.weight, score.source.weight], 1).tolist()
    hidden = [np.tanh(np.array(both) @ [*state, *place] + score.query.bias.tolist()) for place in places]
    logits = [float(np.dot(score.vector.tolist(), h)) for h in hidden]
    return softmax(logits)


def seen(modality: Modality, b: int) -> tuple[list[int], list[np.ndarray]]:
    features, mask = modality
    kept = [i for i in range(features.shape[1]) if mask is None or not mask[b, i]]
    return kept, [np.array(features[b, i].tolist()) for i in kept]


def average(weights: list[float], places: list[np.ndarray]) -> np.ndarray:
    return sum(w * place for w, place in zip(weights, places))


def show_attend_tell_by_loops(module, words, sources, b):
    kept, places = seen(sources["visual"], b)
    mean = sum(places) / len(places)
    h, c = np.tanh(linear(module.first_hidden, mean)), np.tanh(linear(module.first_cell, mean))
    for word in words[b].numpy():
        weights = additive(module.attention, h, places)
        z = sigmoid(linear(module.gate, h)) * average(weights, places)
        h, c = lstm(module.cell, np.concatenate([word, z]), h, c)
        yield word + linear(module.hidden_output, h) + linear(module.context_output, z), {"visual": (kept, weights)}


def lstm_by_loops(module, words, sources, b):
    states, attended = [(np.zeros(C), np.zeros(C)) for _ in module.cells], np.zeros(C)
    for word in words[b].numpy():
        x, alignments = np.concatenate([word, attended]), {}
        for i, cell in enumerate(module.cells):
            states[i] = lstm(cell, x, *states[i])
            x = states[i][0]
        parts = [x]
        for name, attention in module.attentions.items():
            kept, places = seen(sources[name], b)
            weights = additive(attention, x, places)
            alignments[name] = kept, weights
            parts.append(average(weights, places))
        attended = np.tanh(linear(module.output, np.concatenate(parts)))
        yield attended, alignments


def normalised(layer) -> np.ndarray:
    v, g = (np.array(x.tolist()) for x in (layer.direction, layer.length))
    return np.stack([g[o, 0, 0] * v[o] / math.sqrt((v[o] ** 2).sum()) for o in range(len(v))])


def conv_by_loops(module, words, sources, b):
    x, weight, bias = words[b].flip(1).numpy(), normalised(module.conv), np.array(module.conv.bias.tolist())
    for t, word in enumerate(words[b].numpy()):
        taps = [x[t - 2 + j] if t - 2 + j >= 0 else np.zeros(C) for j in range(3)]
        out = sum(weight[:, :, j] @ taps[j] for j in range(3)) + bias
        h = out[:C] * sigmoid(out[C:])
        y, alignments = h, {}
        for name in module.names:
            kept, places = seen(sources[name], b)
            d = (normalised(module.queries[name])[:, :, 0] @ h + module.queries[name].bias.tolist() + word) * 0.5**0.5
            weights = softmax([float(d @ place) for place in places])
            alignments[name] = kept, weights
            mean = math.sqrt(len(places)) * average(weights, places)
            y = y + normalised(module.contexts[name])[:, :, 0] @ mean + module.contexts[name].bias.tolist()
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
        torch.testing.assert_close(features[b], torch.tensor(np.array([f for f, _ in steps])))
        for t, (_, alignments) in enumerate(steps):
            for source, (kept, expected) in alignments.items():
                torch.testing.assert_close(weights[source][b, t, kept], torch.tensor(expected, dtype=torch.float64))
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
    torch.testing.assert_close(torch.from_numpy(normalised(layer)).float(), layer.direction)
    assert layer(torch.randn(50, 40, 64)).var().item() == pytest.approx(4 * 0.5, rel=0.1)
    layer.direction *= 7
    torch.testing.assert_close(
        torch.tensor(np.linalg.norm(normalised(layer), axis=(1, 2))).float(), layer.length.flatten()
    )


def test_inputs_that_cannot_be():
    for name in ("lstm", "conv"):
        words, sources = Decoder(name).inputs()
        with pytest.raises(ValueError, match="sources must have visual, semantic, got visual"):
            Decoder(name).run(words, {"visual": sources["visual"]})
    with pytest.raises(ValueError, match=r"alignment must have shape \(B, T, S\), got \(3, 4\)"):
        doubly_stochastic_penalty(torch.rand(3, 4))
