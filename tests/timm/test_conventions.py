"""timm's conventions for every model that we register; timm's own test suite runs over the same models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

timm = pytest.importorskip("timm")

from timm.optim import create_optimizer_v2  # noqa: E402

import attn_plugins.timm  # noqa: E402
from attn_plugins.modules.maps.augmented_conv import AAConv2d  # noqa: E402
from attn_plugins.modules.maps.deformable_conv import DeformableConv2d  # noqa: E402
from attn_plugins.modules.maps.generalized_attention import GeneralizedAttention2d  # noqa: E402
from tests.helpers.memory_format_checks import FORMATS, check_memory_format, has_format  # noqa: E402
from tests.helpers.slow_cases import slow_but  # noqa: E402

ROOMS = ("aa_resnet", "aa_mnasnet", "aa_wide_resnet", "attended_resnet")
MODELS = sorted(name for room in ROOMS for name in timm.list_models(module=room))
ENTRIES = sorted(name for name in attn_plugins.timm.__all__ if timm.is_model(name))  # vision transformers as well
# One small model of each kind. A stage of two blocks has the first block of a stage and one that follows.
KINDS = ["aa_resnet34", "aa_resnet50", "aa_mnasnet_075", "aa_wide_resnet28_10", "attn0010_dcn_resnet50"]
FEW_BLOCKS = dict(layers=(1, 1, 2, 1))
SMALL = {
    "aa_resnet34": FEW_BLOCKS,
    "aa_resnet50": FEW_BLOCKS,
    "aa_wide_resnet28_10": dict(depth=10, width=2, num_heads=2),
    "attn0010_dcn_resnet50": FEW_BLOCKS,
}
SIZE = (32, 64)
# Larger models of a kind differ in numbers alone, and some others have the parts of two that stay.
MORE = [
    name for name in ENTRIES if any(size in name for size in ("_base", "_small", "_100", "101", "152", "125", "140"))
]
MORE += ["aa_resnet34", "attn_resnet50", "dcn_resnet50"]


def pictures(name: str) -> torch.Tensor:
    """Return two pictures, smaller ones for wide ResNets, whose first stage attends at their whole size."""
    return torch.randn(2, 3, *((16, 24) if "wide" in name else SIZE))


def small(name: str, **options) -> nn.Module:
    """Build the model for small images with no parameter at 0, as if it were trained."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10, **SMALL.get(name, {}), **options)
    for module in model.modules():
        if isinstance(module, GeneralizedAttention2d):
            nn.init.ones_(module.gamma)
        elif isinstance(module, DeformableConv2d):
            nn.init.normal_(module.conv_offset.weight, std=0.05)
    return model.eval()


@pytest.fixture(params=KINDS)
def name(request) -> str:
    return request.param


def test_the_names_are_registered():
    assert {
        "aa_mnasnet_075", "aa_mnasnet_100", "aa_mnasnet_125", "aa_mnasnet_140", "aa_resnet34", "aa_resnet50",
        "aa_resnet101", "aa_resnet152", "aa_wide_resnet28_10", "attn0010_dcn_resnet50", "attn1111_resnet50",
        "attn_resnet50", "dcn_resnet50",
    } == set(MODELS)  # fmt: skip
    assert set(MODELS) <= set(attn_plugins.timm.__all__)


@pytest.mark.parametrize("name", slow_but([name for name in ENTRIES if name not in MORE], ENTRIES))
def test_default_configuration(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    cfg = timm.get_pretrained_cfg(name)
    config = timm.data.resolve_model_data_config(model)
    assert config["input_size"] == cfg.input_size
    assert config["mean"] == cfg.mean
    classifier = model.get_submodule(cfg.classifier)
    assert model.get_submodule(cfg.first_conv).in_channels == 3
    assert classifier.out_features == cfg.num_classes == model.num_classes
    assert model.get_classifier() is classifier
    if name in MODELS:
        features = model.forward_features(torch.empty(1, *cfg.input_size, device="meta"))
        assert features.shape[-2:] == cfg.pool_size
        assert features.shape[1] == model.num_features
    assert not timm.is_model_pretrained(name)
    with pytest.raises(RuntimeError, match="No pretrained weights exist"), torch.device("meta"):
        timm.create_model(name, pretrained=True)


def test_tables_of_mnasnets_fit_the_maps():
    """With timm's ``aa_layer`` a layer of its own has the stride."""
    tables = []
    for aa_layer in (None, "blurpc"):
        model = timm.create_model("aa_mnasnet_075", aa_layer=aa_layer)
        layers = [module for module in model.modules() if isinstance(module, AAConv2d)]
        tables.append([(layer.height_rel.shape, layer.width_rel.shape, layer.pool) for layer in layers])
    assert tables[0] == tables[1]
    assert model(torch.randn(2, 3, 64, 96)).isfinite().all()


@torch.no_grad()
def test_features_and_head(name):
    model, x = small(name), pictures(name)
    backbone = timm.create_model(name, features_only=True, out_indices=(1, 2), **SMALL.get(name, {})).eval()
    getattr(backbone, "model", backbone).load_state_dict(model.state_dict(), strict=False)
    last, intermediates = model.forward_intermediates(x, indices=[1, 2])
    info = backbone.feature_info
    for feature, expected, channels, reduction in zip(backbone(x), intermediates, info.channels(), info.reduction()):
        assert feature.shape == (2, channels, *(n // reduction for n in x.shape[2:]))
        torch.testing.assert_close(feature, expected)
    torch.testing.assert_close(last, model.forward_features(x))
    logits, pooled = model(x), model.forward_head(last, pre_logits=True)
    torch.testing.assert_close(model.forward_head(last), logits)
    assert pooled.shape == (2, model.head_hidden_size)
    torch.testing.assert_close(model.get_classifier()(pooled), logits)
    model.reset_classifier(7, "max")
    assert model(x).shape == (2, 7)
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    torch.testing.assert_close(model(x), last.amax((2, 3)))
    before = sum(p.numel() for p in model.parameters())
    assert model.prune_intermediate_layers([1, 2]) == [1, 2]
    assert sum(p.numel() for p in model.parameters()) < before
    pruned = model.forward_intermediates(x, indices=[1, 2], intermediates_only=True, stop_early=True)
    torch.testing.assert_close(pruned, intermediates)


def test_parameter_groups(name):
    """By depth for layer decay; the tables of relative positions have no weight decay."""
    model = small(name)
    groups = timm.models.group_parameters(model, model.group_matcher())
    assert sorted(key for keys in groups.values() for key in keys) == sorted(k for k, _ in model.named_parameters())
    coarse = timm.models.group_parameters(model, model.group_matcher(coarse=True))
    assert 3 <= len(coarse) <= len(groups)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1, layer_decay=0.5, weight_decay=0.1)
    scales = [group["lr_scale"] for group in optimizer.param_groups]
    assert min(scales) < 0.3
    assert max(scales) == 1
    tables = {k for k, _ in model.named_parameters() if k.endswith(("height_rel", "width_rel"))}
    free = {id(p) for g in optimizer.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    assert all(id(model.get_parameter(key)) in free for key in tables)
    assert bool(tables) == name.startswith("aa_")


def test_gradient_checkpointing_changes_no_gradient(name):
    model, x, gradients = small(name), pictures(name), []  # evaluation mode keeps running statistics fixed
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_half_precision_on_the_cpu(name):
    model, x = small(name), pictures(name)
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(x).float(), expected, rtol=0.1, atol=0.1 * expected.abs().max())
        halved = model.bfloat16()(x.bfloat16())
    assert halved.dtype == torch.bfloat16
    torch.testing.assert_close(halved.float(), expected, rtol=0.1, atol=0.1 * expected.abs().max())


@pytest.mark.slow
def test_exported(name):
    model, x = small(name), torch.randn(2, 3, *SIZE)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    more = torch.randn(3, 3, *SIZE)
    with torch.no_grad():
        torch.testing.assert_close(exported(more), model(more), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["aa_resnet34", "attn0010_dcn_resnet50"])
def test_onnx_runtime_gives_the_same(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = small(name), torch.randn(2, 3, 32, 48)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(output), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["aa_resnet34", "aa_mnasnet_075", "aa_wide_resnet28_10"])
def test_a_bad_argument_is_one_clear_error(name):
    for options, words in (
        (dict(position="rotary"), "position must be one of relative, none, sine, coordconv, got 'rotary'"),
        (dict(nu=1.5), "nu must be from 0 to 1, got 1.5"),
        (dict(kappa=-0.1), "kappa must be at least 0, got -0.1"),
        (dict(num_heads=0), "num_heads must be a positive int, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            timm.create_model(name, **{**SMALL.get(name, {}), **options})
    with pytest.raises(TypeError, match="kapa"):
        timm.create_model(name, kapa=0.2)
    if name != "aa_mnasnet_075":  # the MnasNets round up to one channel
        with pytest.raises(ValueError, match=r"nu = 0.0001 of .* less than one value channel of [28] heads"):
            timm.create_model(name, **SMALL.get(name, {}), nu=0.0001)


@torch.no_grad()
def test_any_image_size_works(name):
    model = small(name)
    for size in ((1, 1), (7, 300), (33, 47)):
        assert model(torch.randn(1, 3, *size)).isfinite().all()


AUGMENTATION = dict(kappa=0.25, nu=0.5, num_heads=2, min_key_dim_per_head=4)
BLOCKS = {
    "AABasicBlock": dict(inplanes=16, planes=16, output_size=(6, 9), augmentation=AUGMENTATION),
    "AABottleneck": dict(inplanes=16, planes=4, output_size=(6, 9), augmentation=AUGMENTATION),
    "AAWideBlock": dict(inplanes=16, planes=24, stride=2, augmentation=dict(AUGMENTATION, input_size=(6, 9))),
    "AttendedBottleneck": dict(inplanes=16, planes=4, num_heads=2),
    "AttendedBottleneck, deformable": dict(inplanes=16, planes=4, num_heads=2, deformable=True),
}


def test_every_block_is_here():
    named = {name for name in attn_plugins.timm.__all__ if "Block" in name or "Bottleneck" in name}
    assert named == {name.split(",")[0] for name in BLOCKS}


@pytest.mark.parametrize("size, autocast", [((6, 9), False), ((9, 6), True)])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_answers_in_the_format_of_its_input(block, size, autocast):
    torch.manual_seed(0)
    layer = getattr(attn_plugins.timm, block.split(",")[0])(**BLOCKS[block])
    check_memory_format(layer, (2, 16, *size), autocast)


@torch.no_grad()
def test_features_have_the_format_of_the_images(name):
    model, x = small(name), pictures(name)
    for kind, layout in FORMATS.items():
        assert has_format(model.forward_features(x.contiguous(memory_format=layout)), kind)


def test_generalized_attention_through_timms_own_hook():
    stock = timm.create_model("resnet50", num_classes=10, zero_init_last=False, **FEW_BLOCKS).eval()
    hook = partial(GeneralizedAttention2d, num_heads=8, spatial_range=3, kv_stride=2)
    model = timm.create_model("resnet50", num_classes=10, block_args=dict(attn_layer=hook), **FEW_BLOCKS).eval()
    assert sum(isinstance(m, GeneralizedAttention2d) for m in model.modules()) == 5
    missing, unexpected = model.load_state_dict(stock.state_dict(), strict=False)
    assert not unexpected
    assert all(".se." in key for key in missing)  # the name that timm uses
    x = torch.randn(1, 3, *SIZE)
    with torch.no_grad():
        torch.testing.assert_close(model(x), stock(x), rtol=1e-4, atol=1e-4)
    model.train()(torch.randn(2, 3, *SIZE)).square().sum().backward()
    assert all(m.gamma.grad.any() for m in model.modules() if isinstance(m, GeneralizedAttention2d))


@pytest.mark.parametrize("zero_init_last", [True, False])
def test_an_aa_resnet_starts_by_timms_rules(zero_init_last):
    model = timm.create_model("aa_resnet50", zero_init_last=zero_init_last, **FEW_BLOCKS)
    assert bool(model.layer1[0].bn3.weight.any()) != zero_init_last
    weight = model.layer4[0].conv3.weight
    assert weight.std().item() == pytest.approx((2 / weight[:, 0].numel()) ** 0.5, rel=0.05)


def test_one_checkpoint_serves_other_image_sizes():
    """Interpolating tables on loading for another image size equals interpolating them in the forward pass."""
    model = small("aa_resnet34", img_size=64)
    other = timm.create_model("aa_resnet34", num_classes=10, img_size=(64, 96), **FEW_BLOCKS).eval()
    other.load_state_dict(model.state_dict())
    assert other.layer2[0].conv1.width_rel.shape != model.layer2[0].conv1.width_rel.shape
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-4)


# --- the Wide-ResNet with timm's attention layers: the baselines of Bello et al. (2019), Table 1 ----------------------


def baseline(**options) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("aa_wide_resnet28_10", depth=10, width=1, num_classes=5, img_size=16, nu=0, **options)


@pytest.mark.parametrize(
    "layer, options, kind",
    [("se", dict(rd_divisor=1), "SEModule"), ("ge", dict(use_mlp=False), "GatherExcite"), ("cbam", {}, "CbamModule")],
)
def test_every_block_of_a_baseline_ends_with_the_layer(layer, options, kind):
    model = baseline(attn_layer=layer, attn_args=options).eval()
    blocks = [block for i in (1, 2, 3) for block in getattr(model, f"layer{i}")]
    assert [type(block.attn).__name__ for block in blocks] == [kind] * 3
    seen = {}
    blocks[0].conv2.register_forward_hook(lambda *call: seen.update(branch=call[2]))
    blocks[0].register_forward_hook(lambda *call: seen.update(input=call[1][0], output=call[2]))
    model(torch.randn(2, 3, 16, 12)).sum().backward()
    torch.testing.assert_close(seen["output"], seen["input"] + blocks[0].attn(seen["branch"]))
    assert all(p.grad is not None for p in model.parameters())


def test_a_baseline_without_or_with_an_unknown_layer():
    assert not any(".attn." in name for name in baseline().state_dict())
    with pytest.raises(ValueError, match=r"attn_layer must be one of timm's attention layers, .* got 'senet'"):
        baseline(attn_layer="senet")
