"""Dynamic convolution: plain loops, fairseq's rule, and edge cases."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from attn_plugins.modules import DynamicConv1d, DynamicConv2d


def map_layer(*, dtype=torch.float64, **options) -> DynamicConv2d:
    torch.manual_seed(0)
    made = DynamicConv2d(**{"in_channels": 6, "kernel_size": 3, "num_groups": 3, **options}).to(dtype)
    for name, parameter in made.named_parameters():
        if name == "gamma" or name.endswith("bias"):
            nn.init.normal_(parameter)
    return made


def gated(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gate the vector of one position: half of a linear layer's output times the sigmoid of the other half."""
    weight, bias = layer.weight.flatten(1), layer.bias
    a, b = (weight @ x + bias).chunk(2)
    return a * torch.sigmoid(b)


@torch.no_grad()
def by_loops(module: DynamicConv2d, x: torch.Tensor) -> torch.Tensor:
    B, C, H, W = x.shape
    (ky, kx), (dy, dx), G = module.kernel_size, module.dilation, module.num_groups
    v = torch.stack([gated(module.input, x[b, :, y, z]) for b, y, z in itertools.product(range(B), range(H), range(W))])
    v = v.view(B, H, W, C)
    output = torch.zeros_like(x)
    for b, y, z in itertools.product(range(B), range(H), range(W)):
        kernels = (module.kernel.weight.flatten(1) @ v[b, y, z]).view(G, ky * kx).softmax(1)
        convolved = torch.zeros(C, dtype=x.dtype)
        for i, j, c in itertools.product(range(ky), range(kx), range(C)):
            r, s = y + (i - ky // 2) * dy, z + (j - kx // 2) * dx
            if 0 <= r < H and 0 <= s < W:
                convolved[c] += kernels[c // (C // G), i * kx + j] * v[b, r, s, c]
        f = module.output.weight.flatten(1) @ convolved + module.output.bias
        output[b, :, y, z] = f if module.gamma is None else x[b, :, y, z] + module.gamma * f
    return output


@pytest.mark.parametrize("options", [dict(), dict(kernel_size=(5, 1)), dict(dilation=(1, 2)), dict(residual=False)])
def test_equals_the_formula(options):
    module, x = map_layer(**options), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(module(x), by_loops(module, x))


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_is_convolved_as_in_fairseq(causal):
    """Weights follow the order of positions, softmax runs over all taps, and positions beyond the ends are zeros."""
    torch.manual_seed(0)
    B, C, T, K, G = 2, 8, 9, 5, 4
    module, mask = DynamicConv1d(C, K, G, causal=causal).double(), torch.zeros(B, T, dtype=torch.bool)
    nn.init.normal_(module.input.bias)  # so that padding differs from 0
    mask[0, :3] = mask[1, 5:] = True  # padding is beyond the ends
    x = torch.randn(B, C, T, dtype=torch.float64)
    v = nn.functional.glu(module.input(x.transpose(1, 2)), -1).masked_fill(mask.unsqueeze(2), 0)
    weights = module.kernel(v).view(B, T, G, K).softmax(-1)
    left = K - 1 if causal else K // 2
    padded = nn.functional.pad(v, (0, 0, left, K - 1 - left))
    expected = torch.zeros_like(v)
    for t, k, c in itertools.product(range(T), range(K), range(C)):
        expected[:, t, c] += weights[:, t, c // (C // G), k] * padded[:, t + k, c]
    output, kept = module(x, key_padding_mask=mask).transpose(1, 2), mask.logical_not()
    torch.testing.assert_close(output[kept], module.output(expected)[kept])
