"""Bilateral self-attention on sequences: the thesis' Eq. 3.9 to 3.12 and section 3.4.4 in plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from attn_plugins.modules import BilateralSelfAttention
from tests.helpers.module_inputs import OUTSIDE, drawn
from tests.modules.loops import attend, check_with_padding, predicted_logits

CHOICES = [*OUTSIDE, ("zero", "sqrt_embed_dim"), ("-inf", "sqrt_embed_dim")]
KERNELS = [(3, False), (21, False), (1, True), (4, True), (11, True)]
CASES = [(*choice, *KERNELS[(n + more) % 5]) for n, choice in enumerate(CHOICES) for more in (0, 3)]


def build(**options) -> BilateralSelfAttention:
    return drawn(BilateralSelfAttention(6, 3, dtype=torch.float64, **{"kernel_size": 3, **options}))


@torch.no_grad()
def by_loops(module: BilateralSelfAttention, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    (B, T, C), M, k = x.shape, module.num_heads, module.kernel_size
    q, key, v, f = (layer(x).numpy() for layer in (module.q_proj, module.k_proj, module.v_proj, module.position))
    width = C if module.smoothing == "sqrt_embed_dim" else C // M

    def logits(b, head, t, keys):
        places = [s - t + (k - 1 if module.causal else k // 2) for s in keys]
        taps = [place if 0 <= place < k else None for place in places]
        values = f[b, t].reshape(M, -1)[head.start * M // C]
        position = predicted_logits(values, taps, module.outside, module.smoothing, width)
        return [q[b, t, head] @ key[b, s, head] / math.sqrt(width) for s in keys] + position

    return attend(module, (B, T, T), logits, lambda b, head, t, s: v[b, s, head], hidden)


@pytest.mark.parametrize(("outside", "smoothing", "kernel_size", "causal"), CASES)
def test_equals_the_formula(outside, smoothing, kernel_size, causal):
    check_with_padding(build(kernel_size=kernel_size, causal=causal, outside=outside, smoothing=smoothing), by_loops)


def test_the_papers_kernel_sizes():
    assert BilateralSelfAttention(8).kernel_size == 21
    assert BilateralSelfAttention(8, causal=True).kernel_size == 11
    module = BilateralSelfAttention(16, 4, outside="learned")
    assert [tuple(layer.weight.shape) for layer in module.position] == [(16, 16), (4 * 22, 16)]
    layers = ("q_proj", "k_proj", "v_proj", "out_proj", "position.0", "position.1")
    assert set(module.state_dict()) == {f"{n}.{kind}" for n in layers for kind in ("weight", "bias")}
    without = {f"{n}.bias" for n in layers[:4]}
    assert set(module.state_dict()) - set(build(outside="learned", bias=False).state_dict()) == without
