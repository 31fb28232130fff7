"""Records of logits: every kind of keys is written out as its operator computes it."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.modules.common.attention import attend
from attn_plugins.modules.common.logits import MapLogits, SequenceLogits, WindowLogits, as_content
from attn_plugins.modules.common.weights import (
    map_logits,
    map_weights,
    mixed,
    parts,
    sequence_weights,
    summed,
    weights_of,
)

B, M, H, W, D, K = 2, 3, 4, 5, 6, 3
S = H * W


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def on_map() -> tuple[torch.Tensor, ...]:
    return drawn(B, M, H, W, D), drawn(B, M, H, W, D), drawn(B, M, H, W, D)


def in_a_row(T: int = 7) -> tuple[torch.Tensor, ...]:
    return drawn(B, M, T, D), drawn(B, M, S, D), drawn(B, M, S, D)


STRIDED = dict(kernel_size=(K, K), stride=(2, 1), padding=(1, 1), dilation=(1, 2), border="zero")
KINDS = {
    "all keys": lambda: MapLogits(*on_map(), drawn(B, M, H, W, H), drawn(1, M, 1, W, W), scale=0.5),
    "prefix": lambda: MapLogits(
        *on_map(), drawn(B, M, H, W, H), prefix_key=drawn(B, M, 2, D), prefix_value=drawn(B, M, 2, D), scale=0.5
    ),
    "prefix of the mean": lambda: MapLogits(
        None, None, drawn(B, M, H, W, D), drawn(1, M, H, 1, H), prefix_value=drawn(B, M, 2, D)
    ),
    "keys alone": lambda: MapLogits(None, None, drawn(B, M, H, W, D), key_logits=drawn(B, M, H, W)),
    "the mean": lambda: MapLogits(None, None, drawn(B, M, H, W, D)),
    "window": lambda: WindowLogits(*on_map(), drawn(1, M, H, W, K * K), (K, K), scale=0.5),
    "keys alone in a window": lambda: WindowLogits(*as_content(drawn(B, M, H, W)), drawn(B, M, H, W, D), None, (K, K)),
    "the mean of a window": lambda: WindowLogits(None, None, drawn(B, M, H, W, D), None, (K, K)),
    "zeros outside": lambda: WindowLogits(None, None, drawn(B, M, H, W, D), drawn(B, M, 2, W - 2, K * K), **STRIDED),
    "band": lambda: SequenceLogits(*in_a_row(), drawn(B, 1, 7, K), -0.5, causal=True, start=2, scale=0.5),
    "pairs": lambda: SequenceLogits(
        *in_a_row(), position_logits=drawn(B, M, 7, S), key_padding_mask=torch.arange(S).expand(B, S) > 15
    ),
    "segments": lambda: SequenceLogits(*in_a_row(S), segment_ids=(torch.arange(S) % 3).int()[None]),
    "the mean of a sequence": lambda: SequenceLogits(None, None, drawn(B, M, S, D)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_dropout_are_of_what_the_operator_computes(kind):
    torch.manual_seed(0)
    logits = KINDS[kind]()
    output, weights = attend(logits), weights_of(logits)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(mixed(logits, weights).expand_as(output), output)
    torch.testing.assert_close(attend(logits, dropout=1e-12).expand_as(output), output)
    draws = torch.stack([attend(logits, dropout=0.5) for _ in range(100)])
    assert ((draws.mean(0) - output).abs() < 0.6 * draws.std(0) + 1e-9).all()  # six standard errors of the mean
    assert draws.std(0).max() > 0
    if found := parts(logits):
        total = torch.stack([summed(part).expand_as(summed(logits)) for part in found.values()]).sum(0)
        torch.testing.assert_close(total, summed(logits))


@pytest.mark.parametrize("kind", ["all keys", "keys alone", "window", "zeros outside"])
def test_maps_of_some_queries_are_those_of_all(kind):
    logits = KINDS[kind]()
    size = (2, W - 2) if kind == "zeros outside" else (H, W)
    queries = torch.tensor([[1, 2], [0, 0]])
    for write, beyond in ((map_weights, 0.0), (map_logits, -math.inf)):
        maps = write(logits, size)
        assert maps.shape == (B, M, *size, H, W)
        torch.testing.assert_close(write(logits, size, queries), maps[:, :, [1, 0], [2, 0]])
        assert bool((maps[:, :, 0, 0, -1, -1] == beyond).all()) == isinstance(logits, WindowLogits)
    if kind != "zeros outside":
        torch.testing.assert_close(map_weights(logits, size).sum((-2, -1)), torch.ones(B, M, *size).double())
    with pytest.raises(ValueError, match="queries must lie on the map"):
        map_weights(logits, size, torch.tensor([[H, 0]]))


def test_keys_that_were_moved_are_shown_in_their_own_order():
    logits = KINDS["pairs"]()
    shift = torch.tensor([0, 3])
    shown = sequence_weights(logits._replace(shift=shift), 7, torch.tensor([1, 6]))
    weights = sequence_weights(logits, 7)[:, :, [1, 6]]
    torch.testing.assert_close(shown, torch.stack([w.roll(int(n), -1) for w, n in zip(weights, shift)]))
