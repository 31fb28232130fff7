"""The AA-ResNet backbone: features of the timm model, through the toolkits' arguments."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import timm
import torch
from mmdet.registry import MODELS
from mmengine.hooks import EMAHook
from mmengine.runner import CheckpointLoader
from safetensors.torch import save_file
from torch import nn

import attn_plugins.mmcv
from attn_plugins.mmcv import AAResNet
from attn_plugins.modules import AAConv2d

SIZE = (64, 96)


def backbone(**options) -> AAResNet:
    torch.manual_seed(0)
    return MODELS.build(dict(type="AAResNet", depth=34, input_size=64, **options))


def test_it_gives_the_timm_models_features_from_its_checkpoint(tmp_path):
    torch.manual_seed(1)
    model = timm.create_model("aa_resnet34", num_classes=7, img_size=(64, 64)).eval()
    path = tmp_path / "best.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, path)
    ours = backbone(init_cfg=dict(type="Pretrained", checkpoint=str(path)))
    ours.init_weights()
    ours.eval()
    x = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        expected = model.forward_intermediates(x, indices=[1, 2, 3, 4], intermediates_only=True)
        maps = ours(x)
    assert [tuple(f.shape) for f in maps] == [(2, 64, 16, 24), (2, 128, 8, 12), (2, 256, 4, 6), (2, 512, 2, 3)]
    for f, e in zip(maps, expected):
        torch.testing.assert_close(f, e)


def test_a_moving_average_starts_from_safetensors_too(tmp_path):
    path = str(tmp_path / "ones.safetensors")
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, path)
    hook, runner = EMAHook(), SimpleNamespace(model=nn.Linear(3, 2), _resume=False)
    hook.before_run(runner)
    hook.after_load_checkpoint(runner, CheckpointLoader.load_checkpoint(path))
    assert all((p == 1).all() for p in hook.ema_model.module.parameters())


def test_stages_and_what_is_frozen():
    ours = backbone(num_stages=3, out_indices=(2,), frozen_stages=1, norm_eval=True).train()
    (output,) = ours(torch.randn(1, 3, *SIZE))
    assert output.shape == (1, 256, 4, 6)
    assert not hasattr(ours, "layer4")
    frozen = {name.split(".")[0] for name, p in ours.named_parameters() if not p.requires_grad}
    assert frozen == {"conv1", "bn1", "layer1"}
    assert not any(m.training for m in ours.modules() if isinstance(m, nn.BatchNorm2d))
    ours = backbone(num_stages=1, out_indices=(0,), frozen_stages=0).train()
    assert not ours.bn1.training
    assert ours.layer1[0].bn1.training
    assert all(p.requires_grad for p in ours.layer1.parameters())


def test_checkpointed_activations_give_the_same_gradients():
    x = torch.randn(1, 3, *SIZE)
    gradients = []
    for with_cp in (False, True):
        ours = backbone(with_cp=with_cp, norm_eval=True, num_stages=2, out_indices=(0, 1)).train()
        sum(f.square().mean() for f in ours(x)).backward()
        gradients.append([p.grad for p in ours.parameters()])
    assert all(g is not None for g in gradients[0])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def test_the_norm_is_that_of_norm_cfg():
    ours = backbone(norm_cfg=dict(type="GN", num_groups=8))
    assert isinstance(ours.layer2[0].bn1, nn.GroupNorm)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in ours.modules())


@pytest.mark.parametrize(
    "argument, message",
    [
        (dict(depth=18), "depth must be 34, 50, 101 or 152, got 18"),
        (dict(num_stages=5), "num_stages must be from 1 to 4, got 5"),
        (dict(num_stages=2, out_indices=(2,)), "out_indices must be from 0 to num_stages - 1 = 1"),
        (dict(frozen_stages=7), "frozen_stages must be from -1 to num_stages = 4, got 7"),
        (dict(style="caffe"), "style must be 'pytorch'"),
        (dict(position="absolute"), "position must be one of"),
    ],
)
def test_bad_arguments(argument, message):
    with pytest.raises(ValueError, match=message):
        AAResNet(**argument)


def test_the_convolution_layer_takes_ratios():
    from mmcv.cnn import ConvModule

    layer = ConvModule(
        32, 48, 3, padding=1, conv_cfg=dict(type="AAConv2d", kappa=0.25, nu=0.25, num_heads=4, input_size=8)
    )
    assert isinstance(layer.conv, AAConv2d)
    assert (layer.conv.dk, layer.conv.dv) == (80, 12)
    assert layer(torch.randn(2, 32, 8, 10)).shape == (2, 48, 8, 10)
    with pytest.raises(ValueError, match="give dk and dv, or kappa and nu"):
        attn_plugins.mmcv.AAConv2d(32, 48, 3, dk=8, dv=8, kappa=0.2, nu=0.1)
