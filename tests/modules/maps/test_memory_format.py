"""Conversions between memory formats, by kernels that transpose; projections by one product there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from attn_plugins.core import transposition
from attn_plugins.modules import CrissCrossAttention2d
from attn_plugins.modules.maps import criss_cross
from attn_plugins.modules.maps.parts.memory_format import add_scaled, in_format_of, to_channels_last
from tests.helpers.memory_format_checks import has_format
from tests.helpers.module_inputs import drawn


@pytest.fixture(params=["kernel", "plain", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request, monkeypatch):
    """Return a device: the CPU, the CPU without a kernel for transposition, or a GPU."""
    if request.param == "plain":
        monkeypatch.setattr(transposition, "has_kernel", lambda tensor: False)
    return "cuda" if request.param == "cuda" else "cpu"


# (B, C, H, W): fewer rows or columns than a vector, than a block, and more
@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 5), (3, 65, 11, 13), (1, 128, 8, 32), (0, 4, 5, 6), (2, 1, 52, 60), (2, 900, 1, 1)], ids=str
)
def test_conversions_equal_pytorchs(shape, device):
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        x = torch.randn(shape).to(device, dtype)
        last = to_channels_last(x)
        assert torch.equal(last, x)
        assert last.is_contiguous(memory_format=torch.channels_last)
        back = in_format_of(x, last)
        assert torch.equal(back, x)
        assert back.is_contiguous()
        if not transposition.has_kernel(x):
            assert last.stride() == x.contiguous(memory_format=torch.channels_last).stride()


def test_what_has_the_format_is_not_copied_and_a_strided_view_is():
    x = torch.randn(2, 8, 9, 10)
    last = x.contiguous(memory_format=torch.channels_last)
    assert to_channels_last(last) is last
    assert in_format_of(x, x) is x
    assert in_format_of(last, last) is last
    for ambiguous in (torch.randn(2, 1, 9, 10), torch.randn(2, 8, 1, 1)):  # both formats at once counts as contiguous
        assert to_channels_last(ambiguous) is ambiguous
        assert in_format_of(ambiguous, x) is x
        assert has_format(in_format_of(ambiguous, last), "contiguous")
    for view in (x[:, ::2], x[:, :, 1:], x[..., ::3], x.transpose(2, 3), x[:1].expand(3, -1, -1, -1)):
        assert torch.equal(to_channels_last(view), view)
        assert to_channels_last(view).is_contiguous(memory_format=torch.channels_last)
        assert in_format_of(x, view).is_contiguous()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_and_batched_gradients():
    """Under ``torch.func`` a map has no format, and no copy is made."""
    x, weight = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randn(3, 1, 1, dtype=torch.float64)

    def converted(x):
        return add_scaled(x, weight.sum(), in_format_of(x, to_channels_last(x.square() * weight)))

    jacobian = torch.autograd.functional.jacobian(converted, x)
    torch.testing.assert_close(torch.func.jacrev(converted)(x), jacobian)
    torch.testing.assert_close(torch.func.jacfwd(converted)(x), jacobian)
    torch.testing.assert_close(torch.autograd.functional.jacobian(converted, x, vectorize=True), jacobian)
    torch.testing.assert_close(torch.vmap(converted)(x[:, None]), converted(x)[:, None])


@pytest.mark.parametrize("shape", [(2, 33, 5, 7), (1, 3, 1, 40), (0, 3, 4, 5), (2, 1, 4, 5)], ids=str)
def test_add_scaled_equals_addcmul_up_to_second_gradients(shape, device):
    """Values and gradients of both orders are those of the plain sum, whose formats they have."""
    x, scale, output = (torch.randn(s, device=device, dtype=torch.float64) for s in (shape, (), shape))
    leaves = [x, scale, output.contiguous(memory_format=torch.channels_last)]
    ours, expected = [], []
    for results, function in ((ours, add_scaled), (expected, torch.addcmul)):
        terms = [t.clone().requires_grad_() for t in leaves]
        total = function(*terms)
        grads = torch.autograd.grad(total.square().sum(), terms, create_graph=True)
        results += [total, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), terms)]
    torch.testing.assert_close(ours, expected)
    assert ours[0].is_contiguous()
    assert ours[1].is_contiguous()
    assert 0 in shape or ours[3].is_contiguous(memory_format=torch.channels_last)


BF16, F32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtypes", [(F32, F32, BF16), (BF16, F32, BF16), (BF16, F32, F32)], ids=str)
@pytest.mark.parametrize("size", [(5, 3), (1, 1)], ids=str)
def test_a_scaled_sum_of_several_dtypes(dtypes, size, device):
    """The sum has the dtype and the format of x; the gradients are those of a sum in float32."""
    shapes = (2, 33, 5, 3), (1,), (2, 33, *size)
    x, scale, output = (torch.randn(s, device=device).to(d) for s, d in zip(shapes, dtypes))
    terms = [t.requires_grad_() for t in (x, scale, output.contiguous(memory_format=torch.channels_last))]
    leaves = [t.detach().float().requires_grad_() for t in terms]
    total, expected = add_scaled(*terms), leaves[0] + leaves[1] * leaves[2]
    assert total.dtype == x.dtype
    assert total.is_contiguous()
    torch.testing.assert_close(total.float(), expected, rtol=0.01, atol=0.03 if x.dtype == BF16 else 1e-5)
    grad = torch.randn(x.shape, device=device).to(x.dtype)
    grads = torch.autograd.grad(total, terms, grad)
    assert [g.dtype for g in grads] == [t.dtype for t in terms]
    wanted = torch.autograd.grad(expected, leaves, grad.float())
    for ours, theirs in zip(grads, wanted):
        atol = 0.01 * (theirs.abs().max().item() if theirs.dim() > 1 else grad.numel() ** 0.5)  # products are rounded
        torch.testing.assert_close(ours.float(), theirs, rtol=0.01, atol=atol)
    if output.dtype == F32 and output.shape != x.shape:  # summed in float32
        torch.testing.assert_close(grads[1:], wanted[1:])
    x, scale, output = (t.detach() for t in terms)
    mapped = torch.vmap(lambda x, output: add_scaled(x, scale, output))(x[:, None], output[:, None])
    assert mapped.dtype == x.dtype
    torch.testing.assert_close(mapped[:, 0], total, rtol=0.01, atol=0.03)
    (grad_x,) = torch.autograd.grad(add_scaled(x.requires_grad_(), scale, output), x, grad)
    assert torch.equal(grad_x, grad)


def test_a_kernels_scale_has_the_dtype_of_the_map(monkeypatch):
    scales = []
    monkeypatch.setattr(transposition, "has_kernel", lambda tensor: True)
    monkeypatch.setattr(
        transposition, "transposed", lambda maps, addend, scale: scales.append(scale) or addend + scale * maps.mT
    )
    x, scale = torch.randn(2, 33, 5, 3, dtype=BF16), torch.tensor([0.3])
    total = add_scaled(x, scale, x.contiguous(memory_format=torch.channels_last))
    assert [s.dtype for s in scales] == [BF16]
    torch.testing.assert_close(total, 1.3 * x, rtol=0.01, atol=0.01)


class Negated(nn.Conv2d):
    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize("position", ["none", "relative"])
def test_one_product_projects(position, monkeypatch):
    """It gives what three layers give; a layer that somebody observes or replaces is still called."""
    module = drawn(CrissCrossAttention2d(6, 2, position, input_size=(4, 5), dtype=torch.float64))
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    convolve, convolved = nn.Conv2d._conv_forward, []
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda *args: convolved.append(1) or convolve(*args))
    expected = module(x)
    assert len(convolved) == 3
    grads = torch.autograd.grad(expected.sum(), list(module.parameters()))
    monkeypatch.setattr(criss_cross, "joins_products", lambda x: True)
    module(x)
    assert len(convolved) == 3  # no layer is called again
    if position == "none":
        torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), expected)
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
