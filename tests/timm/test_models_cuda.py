"""Our timm models on a CUDA device, on small pictures, against the same models on the CPU in float64.

The checks also run on the CPU, which tests the checks themselves.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

import attn_plugins.timm  # noqa: E402
from tests.helpers.cuda_checks import check_module, no_tf32  # noqa: E402, F401 - a fixture
from tests.helpers.operator_checks import DEVICES  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_tf32")
NAMES = sorted(name for name in attn_plugins.timm.__all__ if timm.is_model(name))
FEW_BLOCKS = dict(layers=(1, 1, 2, 1))
TRANSFORMER = dict(img_size=(32, 48), embed_dim=32, depth=2, num_heads=2)
SWIN = dict(img_size=(48, 64), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0)
# Options that make a model small, and its input without the batch, by the longest matching prefix of its name.
SMALL = {
    "aa_mnasnet": ({}, (3, 64, 96)),
    "aa_resnet": (FEW_BLOCKS, (3, 64, 96)),
    "aa_wide_resnet": (dict(depth=10, width=5), (3, 24, 32)),
    "attn": (FEW_BLOCKS, (3, 64, 96)),
    "attn_swin": (SWIN, (3, 48, 64)),
    "attn_swinv2": (dict(SWIN, img_size=(64, 96)), (3, 64, 96)),  # whole windows, which timm before 1.0.31 needs
    "attn_vit": (TRANSFORMER, (3, 32, 48)),
    "dcn": (FEW_BLOCKS, (3, 64, 96)),
    "timesformer": (dict(TRANSFORMER, num_frames=4), (4, 3, 32, 48)),
}
# timm's own models with our attention: name, options, input, and whether `accelerate` adds it.
SAM = dict(img_size=(32, 48), embed_dim=32, depth=2, num_heads=2, global_attn_indexes=(1,))
CHANGED = {
    "vit, attn1111": ("vit_tiny_patch16_224", dict(TRANSFORMER, attn_layer="attn1111"), (3, 32, 48), False),
    "swin, accelerated": ("swin_tiny_patch4_window7_224", SWIN, (3, 48, 64), True),
    "SAM, accelerated": ("samvit_base_patch16_224", SAM, (3, 32, 48), True),
}


def small(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its input. Parameters that start at 0 (gates, offsets, gamma) are set to other values."""
    torch.manual_seed(0)
    options, shape = SMALL.get(max(filter(name.startswith, SMALL), key=len, default=""), ({}, ()))
    kind, options, shape, accelerated = CHANGED.get(name, (name, options, shape, False))
    model = timm.create_model(kind, num_classes=10, **options)
    if accelerated:
        attn_plugins.timm.accelerate(model)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model.eval(), torch.randn(2, *shape)


@pytest.mark.sampled(3, every_value=False)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*NAMES, *CHANGED])
def test_equals_float64_on_the_cpu(name, device):
    model, x = small(name)
    # Many values of a MnasNet are at a ReLU's kink, where the gradient jumps.
    factor = 200 if name.startswith("aa_mnasnet") else 2
    check_module(model, ((x,), {}), device, torch.float32, factor=factor)


@pytest.mark.sampled(3, every_value=False)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("autocast", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*NAMES, *CHANGED])
def test_autocast(name, autocast, device):
    model, x = small(name)
    expected = model.double()(x.double())
    model, x = model.to(device, torch.float32), x.to(device)
    with torch.autocast(device, autocast):
        output = model(x)
        output.float().square().mean().backward()
    error = (output.cpu().double() - expected).norm() / expected.norm()
    assert error < (0.02 if autocast == torch.float16 else 0.1)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.sampled(1, every_value=False)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["aa_resnet34", "attn0010_dcn_resnet50", "attn_swin_tiny_patch4_window7_224"])
def test_compiled(name, device):
    torch._dynamo.reset()
    model, x = small(name)
    compiled = partial(torch.compile, backend="inductor" if device == "cuda" else "aot_eager")
    check_module(model, ((x,), {}), device, torch.float32, factor=2, compiled=compiled)
