"""Models exported to ONNX by TorchScript (``dynamo=False``) with a dynamic batch and, where they allow it, size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from timm.models.mvitv2 import MultiScaleVit, MultiScaleVitCfg
from torch import nn

from attn_plugins.timm import accelerate

onnxruntime = pytest.importorskip("onnxruntime")


def vit(layer: str) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, num_classes=5, attn_layer=layer)


def accelerated(model: nn.Module) -> nn.Module:
    assert accelerate(model)
    return model


def resnet(name: str) -> nn.Module:
    return timm.create_model(name, layers=(1, 1, 1, 1), num_classes=5)


SAM = dict(img_size=48, patch_size=8, embed_dim=16, depth=2, num_heads=2, window_size=3, global_attn_indexes=(1,))
MVIT = MultiScaleVitCfg(depths=(1, 1), embed_dim=16, num_heads=1)
SWIN = dict(img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4))
# With the size at which the model is exported, and that at which it runs.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], tuple[int, int]]] = {
    "attn1111": (lambda: vit("attn1111"), (48, 48), (48, 48)),
    "attn_range7": (lambda: vit("attn_range7"), (48, 48), (48, 48)),
    "attn_bilateral": (lambda: vit("attn_bilateral"), (48, 48), (48, 48)),
    "attn1111_resnet50": (lambda: resnet("attn1111_resnet50"), (48, 64), (64, 96)),
    "dcn_resnet50": (lambda: resnet("dcn_resnet50"), (48, 64), (64, 96)),
    "aa_resnet34": (lambda: resnet("aa_resnet34"), (48, 64), (48, 64)),
    "SAM": (lambda: accelerated(timm.create_model("samvit_base_patch16", **SAM)), (48, 48), (48, 48)),
    "Swin": (lambda: accelerated(timm.create_model("swin_tiny_patch4_window7_224", **SWIN)), (32, 32), (32, 32)),
    "MViTv2": (lambda: accelerated(MultiScaleVit(MVIT, img_size=32)), (32, 32), (32, 32)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in ("attn1111", "dcn_resnet50")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["attn1111", "dcn_resnet50", *SLOW])
def test_onnx_from_torchscript_runs_with_another_batch(name, tmp_path):
    build, before, after = MODELS[name]
    torch.manual_seed(0)
    model = build().eval().requires_grad_(False)
    for parameter in model.parameters():
        if not parameter.any():  # gates and the like, which hide their branches
            nn.init.normal_(parameter, std=0.1)
    file, axes = tmp_path / "model.onnx", {0: "batch"} | ({} if before == after else {2: "height", 3: "width"})
    torch.onnx.export(
        model, (torch.randn(2, 3, *before),), file, dynamo=False, input_names=["x"], dynamic_axes={"x": axes}
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    x = torch.randn(3, 3, *after)
    (output,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), model(x), rtol=1e-3, atol=1e-4)
