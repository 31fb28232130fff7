"""Every public module on a CUDA device, forward and backward, against the same module on the CPU in float64.

The checks also run on the CPU, which tests the checks themselves.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from attn_plugins import modules
from tests.helpers.cuda_checks import check_module, floating, moved, no_tf32, randomised  # noqa: F401 - a fixture
from tests.helpers.memory_format_checks import has_format
from tests.helpers.module_inputs import INPUTS, inputs
from tests.helpers.operator_checks import DEVICES
from tests.helpers.public_modules import VARIANTS, public_modules

pytestmark = pytest.mark.usefixtures("no_tf32")
# In half precision, a sample may move across a pixel border, where its gradient jumps.
SAMPLING = ("CausalDeformableConv1d", "DeformableConv1d", "DeformableConv2d", "MultiScaleDeformableAttention")
COMPILED = [
    "AAConv2d", "BilateralCrissCross2d", "BilateralNonLocal2d", "DeformableConv2d, modulated", "DynamicConv2d",
    "GeneralizedAttention2d", "LocalBilateralConv2d", "MultiheadSpatialAttention", "SpatialSelfAttention, bilateral",
    "WindowSelfAttention, relative",
]  # fmt: skip


def factor(name: str) -> float:
    return 2.0 if name.startswith(SAMPLING) else 1.0


def test_every_public_module_has_inputs():
    assert set(INPUTS) == set(public_modules())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_float64_on_the_cpu(name, dtype, device):
    check_module(randomised(VARIANTS[name]()), inputs(name), device, dtype, factor=factor(name))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_autocast(name, autocast, device):
    module = randomised(VARIANTS[name]())
    check_module(module, inputs(name), device, torch.float32, autocast=autocast, factor=2 * factor(name))


@pytest.mark.sampled(8, every_value=False)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VARIANTS)
def test_state_dict_of_the_cpu_loads_into_one_made_there(name, device):
    module = randomised(VARIANTS[name]()).eval()
    made = VARIANTS[name](device=device, dtype=torch.float32).eval()
    made.load_state_dict(module.state_dict())
    args, kwargs = moved(inputs(name), device, torch.float32)
    with torch.no_grad():
        found = floating(made(*args, **kwargs))
        expected = floating(copy.deepcopy(module).to(device)(*args, **kwargs))
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected):
            assert a.device.type == device
            torch.testing.assert_close(a, b)
        made.cpu().load_state_dict(made.state_dict())
        args, kwargs = moved((args, kwargs), "cpu", torch.float32)
        for a, b in zip(floating(made(*args, **kwargs)), expected):
            torch.testing.assert_close(a, b.cpu(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, device):
    """On CUDA, inductor compiles; on the CPU, graphs run as they are, which needs no compiler."""
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = partial(torch.compile, backend=backend)
    check_module(randomised(VARIANTS[name]()), inputs(name), device, torch.float32, compiled=compiled)


# Sizes at which kernels work on whole and partial tiles, for layers that have kernels.
LARGE = {
    "BilateralCrissCross2d": lambda: modules.BilateralCrissCross2d(64, kernel_size=9),
    "DeformableConv2d": lambda: modules.DeformableConv2d(64, 48, 3, padding=1, modulated=True, offset_groups=2),
    "DynamicConv2d": lambda: modules.DynamicConv2d(64, kernel_size=7),
    "GeneralizedAttention2d": lambda: modules.GeneralizedAttention2d(64, num_heads=4, kv_stride=2),
    "LocalBilateralConv2d": lambda: modules.LocalBilateralConv2d(64, 64, 7),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_larger_maps_in_both_memory_formats(name, dtype, layout, device):
    torch.manual_seed(0)
    x = torch.randn(2, 64, 33, 50)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    module = randomised(LARGE[name](), 0.05)
    check_module(module, ((x,), {}), device, dtype, factor=factor(name))
    args, _ = moved(((x,), {}), device, dtype)
    output = module.to(device, dtype)(*args)
    assert has_format(output, layout)
