"""The drop-in for transformers: upstream models compute the same with our forwards, in any order of imports."""

from __future__ import annotations

from typing import Any

import mmdet.models.backbones.swin
import mmseg.models.backbones.swin
import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmengine.config import Config
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.profiler import profile

from attn_plugins.replacement import stock_of
from tests.helpers.operator_checks import relative_error
from tests.mm.drop_in_helpers import drop_in, stock_layers  # noqa: F401 - a fixture
from tests.mm.mm_helpers import demo_batch, dictionaries, upstream

H, W = 96, 128
MMDET = [
    "detr/detr_r50_8xb2-150e_coco",
    "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
    "maskformer/maskformer_r50_ms-16xb1-75e_coco",
    "swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco",
]
SWIN = {"mmdet": mmdet.models.backbones.swin, "mmseg": mmseg.models.backbones.swin}


pytestmark = pytest.mark.usefixtures("stock_layers")


def narrow_swin(model: Config, package: str) -> None:
    """Give a model with Swin a sixth of its width, two blocks per stage and no drop path."""
    widths = [16, 32, 64, 128]
    model.backbone.update(embed_dims=16, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 4], drop_path_rate=0.0)
    if package == "mmdet":
        model.neck.update(in_channels=widths, out_channels=32)
        model.rpn_head.update(in_channels=32, feat_channels=32)
        model.roi_head.bbox_roi_extractor.out_channels = model.roi_head.mask_roi_extractor.out_channels = 32
        model.roi_head.bbox_head.update(in_channels=32, fc_out_channels=32)
        model.roi_head.mask_head.update(in_channels=32, conv_out_channels=16)
    else:
        model.decode_head.update(in_channels=widths, channels=16, pool_scales=(2, 3))  # 1 fails: one value to normalize
        model.auxiliary_head.update(in_channels=64, channels=16)


def build(package: str, name: str) -> nn.Module:
    """Build an upstream model with one layer per stack, no dropout, and random instead of zero offsets and weights."""
    config = upstream(f"{package}::{name}")
    for part in ("encoder", "panoptic_head", "decode_head"):
        for node in dictionaries(config.model.get(part)):
            if "layer_cfg" in node and "num_layers" in node:
                node["num_layers"] = 2 if "return_intermediate" in node else 1
    for augment in config.model.data_preprocessor.get("batch_augments") or ():
        augment.size = (H, W)
    for node in dictionaries(config.model):
        if "num_points" in node and "oversample_ratio" in node:  # at which masks are compared
            node["num_points"] = 500
    if "decoder" in config.model:
        config.model.encoder.num_layers = 1
        config.model.num_queries = 40  # two-stage models choose them among the cells of all levels
    if "swin" in name:
        narrow_swin(config.model, package)
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    model.init_weights()
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
        if hasattr(module, "relative_position_bias_table"):
            nn.init.normal_(module.relative_position_bias_table, std=0.5)
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        if isinstance(module, MultiScaleDeformableAttention):
            nn.init.normal_(module.sampling_offsets.weight, std=0.05)
            nn.init.normal_(module.attention_weights.weight, std=0.2)
    return model


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else ()
    return [t for value in values for t in flat(value)]


def run(model: nn.Module, package: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the model's output for an image, or losses and gradients of a training step, with fixed random numbers."""
    torch.manual_seed(1)
    data = model.eval().data_preprocessor(demo_batch(package, (H, W)), False)
    with torch.no_grad():
        if package == "mmdet":
            output = flat(model(**data, mode="tensor"))
        else:  # mmseg's heads need the samples, which mode "tensor" does not pass on
            output = [sample.seg_logits.data for sample in model(**data, mode="predict")]
    torch.manual_seed(1)
    data = model.train().data_preprocessor(demo_batch(package, (H, W)), True)
    losses = model(**data, mode="loss")
    model.zero_grad()
    sum(t.sum() for name, t in losses.items() if "loss" in name for t in flat(t)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output, losses, gradients


MORE = {  # of the kinds above
    "mmdet": [
        "dino/dino-4scale_r50_8xb2-12e_coco",
        "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
        "ddq/ddq-detr-4scale_r50_8xb2-12e_coco",
        "mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic",
    ],
    "mmseg": [
        "swin/swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512",
        "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512",
        "maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512",
    ],
}
CASES = [pytest.param("mmdet", name, marks=pytest.mark.slow if name.startswith("maskformer") else ()) for name in MMDET]
CASES += [pytest.param(package, name, marks=pytest.mark.slow) for package, names in MORE.items() for name in names]


@pytest.mark.parametrize(("package", "name"), CASES)
def test_upstream_models_compute_the_same(package, name):
    """The maps of Swin, of 24 × 32 and less, do not divide into windows of 7."""
    model = build(package, name)
    kinds = MultiScaleDeformableAttention, MultiheadAttention, SWIN[package].ShiftWindowMSA
    layers = [m for m in model.modules() if isinstance(m, kinds)]
    if "swin" in name:
        assert [m.shift_size for m in layers] == [0, 3] * 4
    assert layers
    counts = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected, losses, gradients = run(model, package)
    keys = list(model.state_dict())  # after the run, in which DDQ adds branches
    for name, buffer in model.named_buffers():  # buffers of batch norms
        buffer.copy_(counts[name])
    drop_in.replace()
    assert all(stock_of(type(m).forward) is not type(m).forward for m in layers)
    assert list(model.state_dict()) == keys
    our_output, our_losses, our_gradients = run(model, package)
    assert len(our_output) == len(expected) > 0
    for a, b in zip(our_output, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * max(1.0, b.abs().max().item()))
    assert our_losses.keys() == losses.keys()
    for key in losses:
        torch.testing.assert_close(our_losses[key], losses[key], rtol=1e-3, atol=1e-4, msg=key)
    assert our_gradients.keys() == gradients.keys()
    checked = [key for key in gradients if "attn" in key and gradients[key].abs().max() > 1e-5]
    assert checked
    for key in checked:
        assert relative_error(our_gradients[key], gradients[key]) < 2e-2, key


def test_weights_are_there_for_who_hooks_the_inner_layer():
    """Visualisations of DETR read weights by hooks; without a hook, the layer does not materialise them."""
    drop_in.replace()
    layer, x = MultiheadAttention(32, 4).eval(), torch.randn(5, 2, 32)
    seen = []
    handle = layer.attn.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs[1]))
    expected = layer(x)
    assert seen[0].shape == (2, 5, 5)
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, 5))
    handle.remove()
    torch.testing.assert_close(layer(x), expected)
    with profile() as calls:
        layer(x)
    names = {call.key for call in calls.key_averages()}
    assert "aten::scaled_dot_product_attention" in names
    assert not {"aten::bmm", "aten::baddbmm"} & names


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiScaleDeformableAttention(16, 2, num_levels=2, batch_first=True)

    def forward(self, query: Tensor, points: Tensor, shapes: Tensor) -> Tensor:
        return self.layer(query, reference_points=points, spatial_shapes=shapes, level_start_index=None)


def test_a_layer_is_exported_for_any_batch():
    """mmdet passes the levels' sizes as a Tensor, whose values an exporter does not know."""
    drop_in.replace()
    torch.manual_seed(0)
    layer, shapes, batch = Layer().eval(), torch.tensor(((5, 7), (3, 4))), {0: torch.export.Dim.AUTO}
    few, many = ((torch.randn(B, 47, 16), torch.rand(B, 47, 2, 2), shapes) for B in (2, 3))
    program = torch.export.export(layer, few, dynamic_shapes=(batch, batch, None))
    torch.testing.assert_close(program.module()(*many), layer(*many))


def test_code_compiled_before_is_discarded():
    torch._dynamo.reset()
    layer = MultiheadAttention(8, 2, attn_drop=0.0).eval()
    x = torch.rand(3, 1, 8)
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        compiled(x)
        drop_in.replace()
        with profile() as profiler:
            compiled(x)
    assert any("scaled_dot_product" in event.name for event in profiler.events())  # stock asks for the weights
