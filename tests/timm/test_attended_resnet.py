"""The attended ResNets in timm's registry."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from timm.models._features_fx import create_feature_extractor  # noqa: E402
from timm.optim import create_optimizer_v2, param_groups_weight_decay  # noqa: E402
from timm.scheduler import create_scheduler_v2  # noqa: E402

from attn_plugins.modules.maps.deformable_conv import DeformableConv1d, DeformableConv2d  # noqa: E402
from attn_plugins.modules.maps.dynamic_conv import DynamicConv2d  # noqa: E402
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d  # noqa: E402
from attn_plugins.timm import param_groups  # noqa: E402
from attn_plugins.timm.attended_resnet import CRISS_CROSS  # noqa: E402

MODELS = timm.list_models(module="attended_resnet")
SHALLOW = dict(layers=(1, 1, 2, 1), zero_init_last=False)
BI_CC = dict(attention_type="bi-cc", attention_args={"outside": "zero", "kernel_size": 5})
NEW_LAYERS = (".attention.", ".conv2.conv_offset.")


def trained(name: str, **options) -> nn.Module:
    """Build a shallow model in which every layer has an effect, as if it were trained."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **options, **SHALLOW)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.0)
    return model.eval()


@pytest.mark.parametrize("name, options", [*((name, {}) for name in MODELS), ("attn_resnet50", BI_CC)], ids=str)
def test_stock_weights_load_give_the_same_logits_and_learn(name, options):
    stock, model = trained("resnet50"), trained(name, **options)
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected
    assert missing
    assert all(any(part in key for part in NEW_LAYERS) for key in missing)
    assert all(key.startswith(("layer3.", "layer4.")) for key in missing)
    x = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-4)
    for module in model.modules():
        if isinstance(module, GeneralizedAttention2d):
            nn.init.ones_(module.gamma)  # at 0, only the gate itself has a gradient other than 0
        elif isinstance(module, CRISS_CROSS["bi-cc"]):
            nn.init.ones_(module.gamma.scale)
    model.train()(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        if key.endswith("attention.key_conv.bias"):  # alike for all keys
            continue
        assert parameter.grad is not None, f"{key} has no gradient"
        assert parameter.grad.isfinite().all(), f"{key} has a gradient that is not finite"
        assert parameter.grad.any(), f"{key} has gradient 0"


@pytest.mark.parametrize("zero_init_last", [True, False])
def test_initialization_leaves_the_start_an_identity(zero_init_last):
    model = timm.create_model("attn0010_dcn_resnet50", zero_init_last=zero_init_last)
    deformable = [m for m in model.modules() if isinstance(m, DeformableConv2d)]
    attention = [m for m in model.modules() if isinstance(m, GeneralizedAttention2d)]
    assert len(deformable) == len(attention) == 9
    for module in deformable:
        assert not any(parameter.any() for parameter in module.conv_offset.parameters())
        fan_out = module.weight[:, 0].numel()
        assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    assert not any(module.gamma.any() for module in attention)
    for module in attention:  # by the module's own rule, which timm's loop over every convolution overwrites
        drawn = GeneralizedAttention2d(module.in_channels, 8, "0010").state_dict()
        for key, weight in module.state_dict().items():
            if weight.dim() > 1:
                assert weight.std().item() == pytest.approx(drawn[key].std().item(), rel=0.1), key


def test_options_reach_the_blocks():
    options = dict(attention_type="0110", deformable=True, output_stride=8, in_chans=4, **SHALLOW)
    model = timm.create_model("attn_resnet50", **options)
    model.set_grad_checkpointing()
    model.train()(torch.randn(2, 4, 33, 47)).square().sum().backward()
    assert model.layer4[0].conv2.weight.grad.any()
    assert model.layer3[1].conv2.dilation == (2, 2)
    assert timm.create_model("dcn_resnet50").layer4[0].attention is None


@pytest.mark.parametrize(
    "attention_type, deformable",
    [("none", False), ("none", True), ("0100", False), ("dynamic", False), ("cc", False), ("bi-cc", False)],
)
def test_layers_of_the_attention_type(attention_type, deformable):
    options = dict(attention_type=attention_type, deformable=deformable, spatial_range=5)
    block = timm.create_model("attn_resnet50", layers=[1, 1, 1, 1], **options).layer3[0]
    kinds = {"none": type(None), "0100": GeneralizedAttention2d, "dynamic": DynamicConv2d, **CRISS_CROSS}
    assert type(block.attention) is kinds[attention_type]
    assert isinstance(block.conv2, DeformableConv2d) == deformable
    if attention_type == "0100":
        assert block.attention.spatial_range == 5
    if attention_type == "bi-cc":  # keeps its own initialization
        layer = timm.create_model("attn_resnet50", **BI_CC, **SHALLOW).layer3[0].attention
        assert (layer.outside, layer.kernel_size) == ("zero", (5, 5))
        assert layer.value_conv.weight.abs().max() <= layer.in_channels**-0.5
    if attention_type == "dynamic":
        assert block.attention.kernel_size == (5, 5)


@pytest.mark.parametrize("attention_type", ["0100", "dynamic", "cc", "bi-cc"])
def test_features_by_fx(attention_type):
    options = dict(attention_type=attention_type, spatial_range=5, **SHALLOW)
    model = timm.create_model("attn_resnet50", **options).eval()
    x = torch.randn(1, 3, 64, 96)
    features = create_feature_extractor(model, ["layer3", "layer4"])(x)
    expected = model.forward_intermediates(x, indices=(3, 4), intermediates_only=True)
    torch.testing.assert_close(list(features.values()), expected)


@pytest.mark.parametrize(
    "attention_type, message",
    [
        ("dynamic", "spatial_range must be n_k of attention_type 'dynamic', odd, got -1"),
        *((bits, "attention_type") for bits in ("011", "01a0", "")),
    ],
)
def test_bad_attention_type(attention_type, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("attn_resnet50", attention_type=attention_type)


def test_offsets_learn_more_slowly():
    """Schedules keep the ratio, and weight decay follows timm's rule."""
    model = timm.create_model("dcn_resnet50", layers=[1, 1, 1, 1])
    groups = param_groups(model, lr=0.1)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    assert [g["lr"] for g in groups] == [0.1, pytest.approx(0.01)]
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1, param_group_fn=partial(param_groups, lr=0.1))
    scheduler, _ = create_scheduler_v2(optimizer, num_epochs=10, warmup_epochs=0)
    scheduler.step(5)
    fast, slow = (g["lr"] for g in optimizer.param_groups)
    assert 0 < fast < 0.1
    assert slow == pytest.approx(fast * 0.1)
    assert len(param_groups(timm.create_model("attn1111_resnet50", layers=[1, 1, 1, 1]), lr=0.1)) == 1
    groups = param_groups(model, lr=0.1, weight_decay=0.3)
    assert {(round(g["lr"], 6), g["weight_decay"]) for g in groups} == {
        (0.1, 0.0), (0.1, 0.3), (0.01, 0.0), (0.01, 0.3)
    }  # fmt: skip
    ours = {id(p) for g in groups if g["weight_decay"] == 0 for p in g["params"]}
    theirs = {id(p) for g in param_groups_weight_decay(model, 0.3) if g["weight_decay"] == 0 for p in g["params"]}
    assert ours == theirs


def test_groups_of_other_models():
    """mmcv's and our one-dimensional predictors are slow as well, and timm's names without decay may be patterns."""
    model = nn.ModuleDict({"first": DeformableConv1d(4, 4, 3), "second": nn.Linear(4, 4)})
    fast, slow = param_groups(model, lr=0.1)
    assert {id(p) for p in slow["params"]} == {id(p) for p in model["first"].conv_offset.parameters()}
    assert (fast["lr"], slow["lr"]) == (0.1, pytest.approx(0.01))
    model = timm.create_model("xcit_nano_12_p16_224")
    _, free = sorted(param_groups(model, 0.1, weight_decay=0.3), key=lambda group: -group["weight_decay"])
    assert any(p is model.pos_embed.token_projection.weight for p in free["params"])
