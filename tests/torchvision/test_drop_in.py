"""The drop-in serves callers of the function ``torchvision.ops.deform_conv2d``, imported before as BiRefNet does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import DeformConv2d, deform_conv2d

from attn_plugins import ops
from attn_plugins.torchvision import drop_in
from tests.helpers.verdicts import Watch

drop_in.restore()  # the import has replaced the kernels of all tests


@pytest.fixture(autouse=True)
def _stock_kernels() -> Iterator[None]:
    drop_in.restore()
    yield
    drop_in.restore()


class Calls(nn.Module):
    """A model that calls the function with weights of an ordinary convolution."""

    def __init__(self, groups: int, bias: bool, modulated: bool, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 6, 3, stride, padding=2, dilation=2, groups=groups, bias=bias)
        self.offset = nn.Conv2d(8, 2 * 2 * 9, 3, stride, padding=1)
        self.mask = nn.Conv2d(8, 2 * 9, 3, stride, padding=1) if modulated else None

    def forward(self, x: Tensor) -> Tensor:
        mask = None if self.mask is None else self.mask(x).sigmoid()
        conv = self.conv
        return deform_conv2d(
            x, self.offset(x), conv.weight, conv.bias, conv.stride, conv.padding, conv.dilation, mask=mask
        )


def build(groups: int = 2, bias: bool = True, modulated: bool = True, stride: int = 1) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Calls(groups, bias, modulated, stride).double(), torch.randn(2, 8, 7, 9, dtype=torch.double)


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    output = model(x)
    return [output, *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])]


@pytest.mark.parametrize(
    "groups, bias, modulated, stride", [(1, True, True, 1), (2, False, False, 2), (2, True, False, 1)]
)
def test_outputs_and_gradients(groups, bias, modulated, stride):
    model, x = build(groups, bias, modulated, stride)
    with Watch("attn_plugins") as stock:
        expected = results(model, x)
    assert drop_in.replace()
    with Watch("attn_plugins"):
        found = results(model, x)
    assert not stock.seen
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert not torch.equal(found[0], expected[0])  # another order of sums
    drop_in.restore()
    assert torch.equal(model(x), expected[0])


def test_what_sees_the_operator_sees_torchvisions():
    model, x = build()
    expected = model(x)
    names = "torchvision.deform_conv2d", "torchvision::deform_conv2d"
    drop_in.replace()
    exported = torch.export.export(model, (x,))
    assert names[0] in str(exported.graph)
    assert "attn_plugins" not in str(exported.graph)
    traced = torch.jit.trace(model, x)
    assert names[1] in str(traced.graph)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for function in (exported.module(), traced, compiled):
        torch.testing.assert_close(function(x), expected)
    with FlopCounterMode(display=False) as counter:
        model(x)
    flops = counter.get_total_flops()
    drop_in.restore()
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert flops == counter.get_total_flops()


def test_autocast_and_layers():
    layer = DeformConv2d(4, 6, 3)
    x, offset = torch.rand(2, 4, 6, 8), torch.rand(2, 18, 4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, offset)
        drop_in.replace()
        output = layer(x, offset)
    assert output.dtype == expected.dtype
    torch.testing.assert_close(output, expected)


def test_no_images_and_halves():
    drop_in.replace()
    model, x = build()
    assert results(model, x[:0])[0].shape == (0, 6, 7, 9)
    half = deform_conv2d(torch.rand(1, 2, 4, 5).half(), torch.zeros(1, 18, 2, 3).half(), torch.ones(3, 2, 3, 3).half())
    assert half.dtype == torch.float16


def test_our_backend_of_torchvisions_kernels_does_not_call_itself():
    model, x = build()
    expected = model(x)
    drop_in.replace()
    operands = x, model.offset(x), model.conv.weight, model.conv.bias, 1, 2, 2, model.mask(x).sigmoid()
    with ops.backend("torchvision"):
        torch.testing.assert_close(ops.deform_conv2d(*operands), expected)
