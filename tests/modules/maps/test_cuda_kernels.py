"""What layers on maps do on CUDA alone: copies and sums by a kernel that transposes, projections by one product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.modules import CrissCrossAttention2d
from attn_plugins.modules.maps import criss_cross
from attn_plugins.modules.maps.memory_format import add_scaled, in_format_of, to_channels_last
from attn_plugins.ops.common import transposition
from tests.helpers.module_inputs import drawn


@pytest.fixture(params=["definition", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    """Return a device whose maps a kernel transposes: a GPU, or the CPU with the kernel's definition."""
    if request.param == "cuda":
        return "cuda"

    def transposed(matrices, addend=None, scale=None):
        product = matrices.mT if scale is None else matrices.mT * scale
        return (product if addend is None else addend + product).contiguous()

    monkeypatch.setattr(transposition, "has_kernel", lambda tensor: True)
    monkeypatch.setattr(transposition, "transposed", transposed)
    return "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (3, 65, 61, 67), (0, 4, 5, 6), (2, 1, 52, 60), (2, 70, 1, 1)], ids=str)
def test_conversions(shape, dtype, device):
    x = torch.randn(shape).to(device, dtype)
    last = to_channels_last(x)
    assert torch.equal(last, x)
    assert last.is_contiguous(memory_format=torch.channels_last)
    back = in_format_of(x, last)
    assert torch.equal(back, x)
    assert back.is_contiguous()


@pytest.mark.parametrize("shape", [(2, 33, 5, 7), (1, 3, 1, 40), (0, 3, 4, 5), (2, 1, 4, 5)], ids=str)
def test_a_scaled_sum(shape, device):
    """Values and gradients of both orders are those of the plain sum, whose formats they have."""
    x, scale, output = (torch.randn(s, device=device, dtype=torch.float64) for s in (shape, (), shape))
    leaves = [x, scale, output.contiguous(memory_format=torch.channels_last)]
    ours, expected = [], []
    for results, function in ((ours, add_scaled), (expected, torch.addcmul)):
        terms = [t.clone().requires_grad_() for t in leaves]
        total = function(*terms)
        grads = torch.autograd.grad(total.square().sum(), terms, create_graph=True)
        results += [total, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), terms)]
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other)
    assert ours[0].is_contiguous()
    assert ours[1].is_contiguous()
    assert 0 in shape or ours[3].is_contiguous(memory_format=torch.channels_last)


def test_a_scaled_sum_of_other_dtypes_and_shapes(device):
    x, output = torch.randn(2, 3, 4, 5, device=device), torch.randn(2, 3, 1, 1, device=device)
    scale = torch.tensor(0.5, device=device)
    torch.testing.assert_close(add_scaled(x, scale, output), x + 0.5 * output)
    half = torch.randn(2, 4, 5, 3, device=device).half().permute(0, 3, 1, 2)
    torch.testing.assert_close(add_scaled(x, scale, half), x + scale * half)


class Negated(nn.Conv2d):
    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize("position", ["none", "relative"])
def test_one_product_projects(position, monkeypatch):
    """It gives what three layers give; a layer that somebody observes or replaces is still called."""
    module = CrissCrossAttention2d(6, 2, position, input_size=(4, 5), dtype=torch.float64)
    drawn(module)
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    expected = module(x)
    grads = torch.autograd.grad(expected.sum(), list(module.parameters()))
    monkeypatch.setattr(criss_cross, "joins_products", lambda x: True)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    calls = []
    for hooked in (False, True):
        if hooked:
            hook = module.key_conv.register_forward_hook(lambda *_: calls.append(1))
        output = module(x)
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(torch.autograd.grad(output.sum(), list(module.parameters())), grads)
        assert len(calls) == hooked
    hook.remove()
    key_conv, module.key_conv = module.key_conv, nn.Sequential(module.key_conv)  # without weight and bias
    torch.testing.assert_close(module(x), expected)
    key_conv.__class__ = Negated
    assert not torch.allclose(module(x), expected)
