"""What the documents claim of structures, which no training need show: what a token sees, and how gradients flow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules import AAConv2d, GatedBilateralController, WindowSelfAttention
from attn_plugins.modules.captioning.entangled_attention import Entangled


def tokens_seen(layers: nn.Sequential, size: int) -> int:
    """Return of how many tokens of a (size, size) map the one in the middle depends on."""
    x = torch.randn(1, size, size, 8, requires_grad=True)
    [grad] = torch.autograd.grad(layers(x)[0, size // 2, size // 2].square().sum(), x)
    return int((grad.abs().sum(-1) > 0).sum())


@pytest.mark.parametrize(("shift", "seen"), [(0, 16), (2, 64)])
def test_windows_that_shift_see_beyond_their_borders(shift, seen):
    """Lecture, slide Swin Transformer: two layers of 4×4 windows on 8×8 tokens."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(WindowSelfAttention(8, 2, 4, shift_size=offset) for offset in (0, shift)))
    assert tokens_seen(layers, 8) == seen


@pytest.mark.parametrize("position", ["none", "relative"])
def test_order_of_pixels(position):
    """Bello et al., section 3.1.1: without positions, a permutation of pixels permutes the result."""
    torch.manual_seed(0)
    layer = AAConv2d(6, 8, 1, dk=8, dv=8, num_heads=2, position=position, input_size=(5, 7)).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, order = torch.randn(1, 6, 5, 7, dtype=torch.float64), torch.randperm(35)

    def permuted(y):
        return y.flatten(2)[..., order].view(y.shape)

    assert torch.allclose(layer(permuted(x)), permuted(layer(x))) == (position == "none")


def test_relative_positions_are_the_same_after_a_translation():
    """Bello et al., section 3.1.1: of equal contents, the odds of two keys depend on offsets alone."""
    torch.manual_seed(0)
    H, W = 4, 5
    layer = AAConv2d(6, 8, 1, dk=8, dv=8, num_heads=2, input_size=(H, W)).double().eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    logits = layer.attention_maps(torch.ones(1, 6, H, W, dtype=torch.float64))[0].log()
    odds = logits - logits.diagonal(dim1=1, dim2=3).diagonal(dim1=1, dim2=2)[..., None, None]
    torch.testing.assert_close(odds[:, :-1, :-1, :-1, :-1], odds[:, 1:, 1:, 1:, 1:])
    assert odds.std() > 0.1


def gradient_through(activation: str, layers: int = 6) -> float:
    """Return the norm of the gradient at the input of a stack of gates whose context gates are fixed."""
    torch.manual_seed(0)
    first = x = torch.randn(4, 6, 16, requires_grad=True)
    for _ in range(layers):
        guidance = torch.randn(2, *x.shape)
        x = GatedBilateralController(16, activation)(Entangled(x, x, *guidance), torch.randn(x.shape))
    [grad] = torch.autograd.grad(x.sum(), first)
    return float(grad.norm())


def test_saturating_gates_scale_gradients_down():
    """Thesis, Eq. 2.13 and section 2.4.4: f' scales gradients, by at most 0.25 for σ and 1 for tanh, by 1 for id."""
    passed = {name: gradient_through(name) for name in ("identity", "tanh", "sigmoid")}
    assert passed["identity"] == pytest.approx((4 * 6 * 16) ** 0.5)  # 1 for every number
    assert passed["tanh"] < passed["identity"] / 2
    assert passed["sigmoid"] < passed["identity"] * 0.25**6
