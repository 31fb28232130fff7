"""DynamicConv1d with padding, and step by step."""

from __future__ import annotations

import pytest
import torch

from attn_plugins.modules import DynamicConv1d, SequenceCache


@torch.no_grad()
@pytest.mark.parametrize("kernel_size", [1, 2, 5, 31])
def test_one_token_after_the_other(kernel_size):
    """Inputs may also come several at a time, and after reordered rows. The cache holds only what the kernel covers."""
    module = DynamicConv1d(16, kernel_size, 4, causal=True).double()
    x = torch.randn(3, 16, 12, dtype=torch.float64)
    expected, cache, found = module(x), SequenceCache(), []
    order = torch.tensor([2, 0, 0, 1])
    for step, stop in ((1, 5), (3, 8), (1, 12)):
        for start in range(cache.steps, stop, step):
            if start == 8:
                x, expected, found = x[order], expected[order], [f[order] for f in found]
                cache.reorder(order)
            found.append(module(x[:, :, start : start + step], cache=cache))
    torch.testing.assert_close(torch.cat(found, 2), expected)
    assert cache.value.shape[2] == min(12, kernel_size - 1)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_outside_the_sequence(causal):
    module = DynamicConv1d(16, 5, 4, causal=causal).double()
    torch.nn.init.normal_(module.input.bias)  # so that padding differs from 0
    x = torch.randn(2, 16, 9, dtype=torch.float64)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[0, :3] = True
    mask[1, 5:] = True
    output = module(x, key_padding_mask=mask)
    torch.testing.assert_close(output[:1, :, 3:], module(x[:1, :, 3:]))
    torch.testing.assert_close(output[1:, :, :5], module(x[1:, :, :5]))
    if causal:
        cache = SequenceCache()
        steps = [module(x[:, :, t : t + 1], key_padding_mask=mask[:, t : t + 1], cache=cache) for t in range(9)]
        torch.testing.assert_close(torch.cat(steps, 2), output)


def test_bad_input():
    module, x = DynamicConv1d(16, 3, 4), torch.randn(2, 16, 5)
    with pytest.raises(ValueError, match="cache needs causal=True"):
        module(x, cache=SequenceCache())
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(2, 5\)"):
        module(x, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with pytest.raises(TypeError, match="key_padding_mask must be a bool Tensor"):
        module(x, key_padding_mask=torch.zeros(2, 5))
