"""``capture_attention`` returns the attention that the model computes."""

from __future__ import annotations

import pytest
import torch

timm = pytest.importorskip("timm")

from attn_plugins.modules import attention_layers, capture_attention  # noqa: E402


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return timm.create_model("aa_resnet34", img_size=64).eval()


def test_what_is_captured_is_what_the_layer_computes():
    model, x = small(), torch.randn(2, 3, 64, 96)
    inputs = {}
    handle = model.layer3[1].conv1.register_forward_pre_hook(lambda _, given: inputs.update(x=given[0]))
    expected = model(x)
    handle.remove()
    with capture_attention(model, ["layer3.*", "layer4.2.conv1"]) as captured, torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
        inside = sum(len(m._forward_pre_hooks) for m in model.modules())
    assert inside == len(captured) == 7
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert next(iter(captured)) == "layer3.0.conv1"
    layer = captured["layer3.1.conv1"]
    maps = layer.maps()
    assert layer.size == (4, 6)
    assert maps.shape == (2, 8, 4, 6, 4, 6)
    torch.testing.assert_close(maps, model.layer3[1].conv1.attention_maps(inputs["x"]))
    torch.testing.assert_close(maps.sum((-2, -1)), torch.ones(2, 8, 4, 6))
    some = layer.maps(torch.tensor([[0, 5], [3, 1]]))
    torch.testing.assert_close(some, torch.stack([maps[:, :, 0, 5], maps[:, :, 3, 1]], 2))


def test_hooks_go_where_the_forward_fails():
    model = small()
    with pytest.raises(RuntimeError), capture_attention(model):
        model(torch.randn(1, 5, 64, 64))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_bad_capturing():
    with pytest.raises(ValueError, match="got ResNet without any"), capture_attention(timm.create_model("resnet18")):
        pass
    with pytest.raises(ValueError, match=r"none is called 'stage\*': layer2.0.conv1, "):  # noqa: SIM117
        with capture_attention(small(), "stage*"):
            pass
    assert not attention_layers(timm.create_model("aa_resnet34", nu=0.0))
