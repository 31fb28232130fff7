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
FEW_BLOCKS = dict(layers=(1, 1, 2, 1))
TRANSFORMER = dict(img_size=(32, 48), embed_dim=32, depth=2, num_heads=2)
SWIN = dict(img_size=(48, 64), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0)
SAM = dict(TRANSFORMER, global_attn_indexes=(1,))
RESNETS = ["aa_resnet34", "aa_resnet50", "attn0010_dcn_resnet50", "attn1111_resnet50", "attn_resnet50", "dcn_resnet50"]
# A model of each kind, or timm's own with our attention: its registered name, small options, the input without the
# batch, and whether `accelerate` changes it. Other registered models only have other sizes.
MODELS = {
    **{name: (name, FEW_BLOCKS, (3, 64, 96), False) for name in RESNETS},
    "aa_mnasnet_075": ("aa_mnasnet_075", {}, (3, 64, 96), False),
    "aa_wide_resnet28_10": ("aa_wide_resnet28_10", dict(depth=10, width=5), (3, 24, 32), False),
    "attn_swin": ("attn_swin_tiny_patch4_window7_224", SWIN, (3, 48, 64), False),
    # Whole windows, which timm before 1.0.31 needs.
    "attn_swinv2": ("attn_swinv2_tiny_window8_256", dict(SWIN, img_size=(64, 96)), (3, 64, 96), False),
    "attn_vit": ("attn_vit_tiny_patch16_224", TRANSFORMER, (3, 32, 48), False),
    "timesformer": ("timesformer_small_patch16_224", dict(TRANSFORMER, num_frames=4), (4, 3, 32, 48), False),
    "vit, attn1111": ("vit_tiny_patch16_224", dict(TRANSFORMER, attn_layer="attn1111"), (3, 32, 48), False),
    "swin, accelerated": ("swin_tiny_patch4_window7_224", SWIN, (3, 48, 64), True),
    "SAM, accelerated": ("samvit_base_patch16_224", SAM, (3, 32, 48), True),
}
CUDA = [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in MODELS]


def small(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a model and its input. Parameters that start at 0 (gates, offsets, gamma) are set to other values."""
    torch.manual_seed(0)
    registered, options, shape, accelerated = MODELS[name]
    model = timm.create_model(registered, num_classes=10, **options)
    if accelerated:
        attn_plugins.timm.accelerate(model)
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.05)
    return model.eval(), torch.randn(2, *shape)


@pytest.mark.parametrize("name, device", [("attn0010_dcn_resnet50", "cpu"), ("timesformer", "cpu"), *CUDA])
def test_equals_float64_on_the_cpu(name, device):
    model, x = small(name)
    # Many values of a MnasNet are at a ReLU's kink, where the gradient jumps.
    factor = 200 if name.startswith("aa_mnasnet") else 2
    check_module(model, ((x,), {}), device, torch.float32, factor=factor)


@pytest.mark.parametrize("autocast, limit", [(torch.float16, 0.02), (torch.bfloat16, 0.1)], ids=["half", "bfloat16"])
@pytest.mark.parametrize("name, device", [("attn_swin", "cpu"), *CUDA])
def test_autocast(name, device, autocast, limit):
    model, x = small(name)
    expected = model.double()(x.double())
    model, x = model.to(device, torch.float32), x.to(device)
    with torch.autocast(device, autocast):
        output = model(x)
        output.float().square().mean().backward()
    assert (output.cpu().double() - expected).norm() < limit * expected.norm()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["aa_resnet34", "attn0010_dcn_resnet50", "attn_swin"])
def test_compiled(name, device):
    torch._dynamo.reset()
    model, x = small(name)
    compiled = partial(torch.compile, backend="inductor" if device == "cuda" else "aot_eager")
    check_module(model, ((x,), {}), device, torch.float32, factor=2, compiled=compiled)
