"""The record of what an attention adds up: every kind of keys is written out as its operator computes it."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.modules.common.attention import Attention, Geometry

B, M, H, W, D, K = 2, 3, 4, 5, 6, 3
S = H * W


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def on_map() -> tuple[torch.Tensor, ...]:
    return drawn(B, M, H, W, D), drawn(B, M, H, W, D), drawn(B, M, H, W, D)


def in_a_row(T: int = 7) -> tuple[torch.Tensor, ...]:
    return drawn(B, M, T, D), drawn(B, M, S, D), drawn(B, M, S, D)


AROUND = Geometry.around((K, K))
STRIDED = Geometry((K, K), (2, 1), (1, 1), (1, 2), zero_border=True)
KINDS = {
    "all keys": lambda: Attention(*on_map(), row=drawn(B, M, H, W, H), column=drawn(1, M, 1, W, W), scale=0.5),
    "prefix": lambda: Attention(
        *on_map(), row=drawn(B, M, H, W, H), prefix_key=drawn(B, M, 2, D), prefix_value=drawn(B, M, 2, D), scale=0.5
    ),
    "prefix of the mean": lambda: Attention(
        None, None, drawn(B, M, H, W, D), row=drawn(1, M, H, 1, H), prefix_value=drawn(B, M, 2, D)
    ),
    "keys alone": lambda: Attention(None, None, drawn(B, M, H, W, D), by_key=drawn(B, M, H, W)),
    "the mean": lambda: Attention(None, None, drawn(B, M, H, W, D)),
    "window": lambda: Attention(*on_map(), taps=drawn(1, M, H, W, K * K), window=AROUND, scale=0.5),
    "keys alone in a window": lambda: Attention(
        None, None, drawn(B, M, H, W, D), by_key=drawn(B, M, H, W), window=AROUND
    ),
    "the mean of a window": lambda: Attention(None, None, drawn(B, M, H, W, D), window=AROUND),
    "zeros outside": lambda: Attention(
        None, None, drawn(B, M, H, W, D), taps=drawn(B, M, 2, W - 2, K * K), window=STRIDED
    ),
    "band": lambda: Attention(*in_a_row(), band=drawn(B, 1, 7, K), outside=-0.5, start=2, causal=True, scale=0.5),
    "pairs": lambda: Attention(
        *in_a_row(), pair=drawn(1, M, 7, S), by_key=drawn(B, M, S), key_padding_mask=torch.arange(S).expand(B, S) > 15
    ),
    "segments": lambda: Attention(*in_a_row(S), segment_ids=(torch.arange(S) % 3).int()[None]),
    "the mean of a sequence": lambda: Attention(None, None, drawn(B, M, S, D)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_dropout_are_of_what_the_operator_computes(kind):
    torch.manual_seed(0)
    attention = KINDS[kind]()
    output, weights = attention.attend(), attention.weights()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(attention.mixed(weights).expand_as(output), output)
    torch.testing.assert_close(attention.attend(dropout=1e-12).expand_as(output), output)
    draws = torch.stack([attention.attend(dropout=0.5) for _ in range(200)])
    error = draws.std(0) / math.sqrt(200)
    assert ((draws.mean(0) - output).abs() < 6 * error + 1e-9).all()
    assert draws.std(0).max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_add_up(kind):
    attention = KINDS[kind]()
    parts = attention.parts()
    if parts:
        total = torch.stack([part.logits().expand_as(attention.logits()) for part in parts.values()]).sum(0)
        torch.testing.assert_close(total, attention.logits())


@pytest.mark.parametrize("kind", ["all keys", "keys alone", "window", "zeros outside"])
def test_maps_of_some_queries_are_those_of_all(kind):
    attention = KINDS[kind]()
    size = (2, W - 2) if kind == "zeros outside" else (H, W)
    queries = torch.tensor([[1, 2], [0, 0]])
    for write, beyond in ((attention.map_weights, 0.0), (attention.map_logits, -math.inf)):
        maps = write(size)
        assert maps.shape == (B, M, *size, H, W)
        torch.testing.assert_close(write(size, queries), maps[:, :, [1, 0], [2, 0]])
        assert bool((maps[:, :, 0, 0, -1, -1] == beyond).all()) == (attention.window is not None)
    if kind != "zeros outside":
        torch.testing.assert_close(attention.map_weights(size).sum((-2, -1)), torch.ones(B, M, *size).double())
    with pytest.raises(ValueError, match="queries must lie on the map"):
        attention.map_weights(size, torch.tensor([[H, 0]]))


def test_keys_that_were_moved_are_shown_in_their_own_order():
    attention = KINDS["pairs"]()
    shift = torch.tensor([0, 3])
    shown = attention._replace(shift=shift).sequence_weights(7, torch.tensor([1, 6]))
    weights = attention.sequence_weights(7)[:, :, [1, 6]]
    torch.testing.assert_close(shown, torch.stack([w.roll(int(n), -1) for w, n in zip(weights, shift)]))
