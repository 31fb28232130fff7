"""Modules that keep indices, masks and encodings from call to call: results stay as if they computed them again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.module_inputs import drawn, inputs
from tests.helpers.public_modules import VARIANTS

MAKES_POSITIONS = {"aten::arange", "aten::linspace", "aten::scatter_", "aten::sin", "aten::roll", "aten::log2"}
LAYERS: dict[str, dict] = {
    "AAConv2d, no convolution": {},
    "AAConv2d, sine": {},
    "GeneralizedAttention2d, as mmcv's": dict(spatial_range=2),
    "GeneralizedAttention2d, range": dict(kv_stride=2),
    "GeneralizedAttention2d, strides": dict(q_stride=1),
    "GeneralizedAttention2d, 0110": dict(spatial_range=3),
    "WindowSelfAttention": dict(window_size=4),
    "WindowSelfAttention, V2": dict(window_size=4, shift_size=2),
    "WindowSelfAttention, relative": dict(window_size=4),
}


class Computed(TorchDispatchMode):
    """A mode in which nothing is kept."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=LAYERS)
def call(request):
    """Return a layer, and its input's shape for a map of any size."""
    width = inputs(request.param)[0][0].shape[-1 if request.param.startswith("Window") else 1]
    shape = (lambda H, W: (2, H, W, width)) if request.param.startswith("Window") else lambda H, W: (2, width, H, W)
    return drawn(VARIANTS[request.param](**LAYERS[request.param]), 0.5), shape


def results(layer: nn.Module, x: Tensor) -> list[Tensor]:
    output = layer(x)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(output.float().square().sum(), parameters, allow_unused=True)
    return [output, *(gradient for gradient in gradients if gradient is not None)]


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


@pytest.mark.parametrize(("size", "dtype"), [((8, 12), torch.float64), ((7, 9), torch.float32)], ids=str)
def test_results_stay(call, size, dtype):
    layer, x = call[0].to(dtype), torch.randn(call[1](*size), dtype=dtype)
    with Computed():
        expected = results(layer, x)
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            assert torch.equal(layer(x), expected[0])
    same(results(layer, x), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with Computed():
            in_halves = results(layer, x)
        for _ in range(2):
            same(results(layer, x), in_halves)
    same(results(layer, x), expected)


def test_the_second_call_makes_no_positions(call):
    layer, x = call[0], torch.randn(call[1](8, 12))
    keys, attributes = list(layer.state_dict()), [set(vars(module)) for module in layer.modules()]
    layer(x)
    assert list(layer.state_dict()) == keys
    assert [set(vars(module)) for module in layer.modules()] == attributes  # layers keep nothing themselves
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        layer(x)
    assert not MAKES_POSITIONS & {event.name for event in seen.events()}
