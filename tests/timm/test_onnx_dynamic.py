"""Models exported to ONNX by TorchScript (``dynamo=False``) with a dynamic batch and, where they allow it, size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from torch import nn

from attn_plugins.timm import accelerate
from tests.helpers.small_vits import SMALL, build
from tests.timm import test_accelerate

onnxruntime = pytest.importorskip("onnxruntime")


def accelerated(name: str) -> nn.Module:
    model = test_accelerate.build(name).float()
    assert accelerate(model)
    return model


def resnet(name: str) -> nn.Module:
    return timm.create_model(name, layers=(1, 1, 1, 1), num_classes=5)


# With the size at which the model is exported, and that at which it runs.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int], tuple[int, int]]] = {
    "attn1111": (lambda: build("attn1111"), (48, 64), (48, 64)),
    "attn_range7": (lambda: build("attn_range7"), (48, 64), (48, 64)),
    "attn_bilateral": (lambda: build("attn_bilateral"), (48, 64), (48, 64)),
    "groups of unequal size": (
        lambda: timm.create_model("timesformer_small_patch16_224", pattern="local_global", **{**SMALL, "depth": 1}),
        (48, 64),
        (48, 64),
    ),
    "attn1111_resnet50": (lambda: resnet("attn1111_resnet50"), (48, 64), (64, 96)),
    "dcn_resnet50": (lambda: resnet("dcn_resnet50"), (48, 64), (64, 96)),
    "aa_resnet34": (lambda: resnet("aa_resnet34"), (48, 64), (48, 64)),
    "SAM": (lambda: accelerated("samvit_base_patch16"), (64, 64), (64, 64)),
    "Swin": (lambda: accelerated("swin_tiny_patch4_window7_224"), (40, 64), (40, 64)),
    "MViTv2": (lambda: accelerated("mvit"), (64, 64), (64, 64)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "dcn_resnet50"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["dcn_resnet50", *SLOW])
def test_onnx_from_torchscript_runs_with_another_batch(name, tmp_path):
    create, before, after = MODELS[name]
    torch.manual_seed(0)
    model = create().eval().requires_grad_(False)
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
