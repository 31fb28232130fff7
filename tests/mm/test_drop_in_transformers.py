"""The drop-in for transformers: upstream models compute the same with our forwards, in training and evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.registry import MODELS as MMDET_MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmengine.utils import get_installed_path
from mmseg.registry import MODELS as MMSEG_MODELS
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from attn_plugins.mmcv import transformer
from attn_plugins.modules import MultiScaleDeformableAttention as Ours
from tests.helpers.operator_checks import relative_error
from tests.mm.drop_in_helpers import STOCK, drop_in, restore
from tests.mm.mm_helpers import without_downloads

H, W = 96, 128
MMDET = [
    "detr/detr_r50_8xb2-150e_coco",
    "conditional_detr/conditional-detr_r50_8xb2-50e_coco",
    "dab_detr/dab-detr_r50_8xb2-50e_coco",
    "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
    "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
    "dino/dino-4scale_r50_8xb2-12e_coco",
    "ddq/ddq-detr-4scale_r50_8xb2-12e_coco",
    "maskformer/maskformer_r50_ms-16xb1-75e_coco",
]
MMSEG = [
    "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512",
    "maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512",
]


@pytest.fixture(autouse=True)
def _stock_layers():
    """Start and end every test with mmcv's own layers."""
    restore()
    yield
    restore()
    init_default_scope("mmdet")


def build(package: str, name: str) -> nn.Module:
    """Build an upstream model with one layer per stack, no dropout, and random instead of zero offsets and weights."""
    config = without_downloads(Config.fromfile(f"{get_installed_path(package)}/.mim/configs/{name}.py"))
    init_default_scope(package)

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if "layer_cfg" in node and "num_layers" in node:
                node["num_layers"] = 2 if "return_intermediate" in node else 1
            for value in node.values():
                visit(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                visit(value)

    visit({part: node for part, node in config.model.items() if part in ("encoder", "panoptic_head", "decode_head")})
    if "decoder" in config.model:
        config.model.encoder.num_layers = 1
        config.model.num_queries = 40  # two-stage models choose them among the cells of all levels
    torch.manual_seed(0)
    model = (MMDET_MODELS if package == "mmdet" else MMSEG_MODELS).build(config.model)
    model.init_weights()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
        if isinstance(module, MultiScaleDeformableAttention):
            nn.init.normal_(module.sampling_offsets.weight, std=0.05)
            nn.init.normal_(module.attention_weights.weight, std=0.2)
    return model


def batch(package: str) -> dict[str, list]:
    shapes = dict(img_shape=(H, W), ori_shape=(H, W), pad_shape=(H, W), batch_input_shape=(H, W))
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(0, 256, (3, H, W), generator=generator, dtype=torch.uint8)
    masks = torch.zeros(2, H, W, dtype=torch.bool)
    masks[0, 10:50, 20:70], masks[1, 40:90, 60:120] = True, True
    labels = torch.tensor([3, 7])
    segmented = PixelData(sem_seg=(labels[0] * masks[0] + labels[1] * (masks[1] & ~masks[0])).long()[None])
    if package == "mmseg":
        sample = SegDataSample(metainfo=shapes, gt_sem_seg=PixelData(data=segmented.sem_seg))
    else:
        sample = DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0), img_id=0))
        boxes = torch.tensor([[20.0, 10, 70, 50], [60, 40, 120, 90]])
        masks = BitmapMasks(masks.numpy().astype("uint8"), H, W)
        sample.gt_instances = InstanceData(bboxes=boxes, labels=labels, masks=masks)
        sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
        sample.gt_sem_seg = segmented
    return dict(inputs=[picture], data_samples=[sample])


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, dict) else result if isinstance(result, (list, tuple)) else ()
    return [t for value in values for t in flat(value)]


def run(model: nn.Module, package: str) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the model's output for an image, or losses and gradients of a training step, with fixed random numbers."""
    torch.manual_seed(1)
    data = model.eval().data_preprocessor(batch(package), False)
    with torch.no_grad():
        if package == "mmdet":
            output = flat(model(**data, mode="tensor"))
        else:  # mmseg's heads need the samples, which mode "tensor" does not pass on
            output = [sample.seg_logits.data for sample in model(**data, mode="predict")]
    torch.manual_seed(1)
    data = model.train().data_preprocessor(batch(package), True)
    losses = model(**data, mode="loss")
    model.zero_grad()
    sum(t.sum() for name, t in losses.items() if "loss" in name for t in flat(t)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output, losses, gradients


MASK2FORMER = [
    pytest.param("mmdet", f"mask2former/mask2former_r50_8xb2-lsj-50e_coco{kind}", marks=pytest.mark.slow)
    for kind in ("", "-panoptic")
]


@pytest.mark.parametrize(
    ("package", "name"), [*(("mmdet", n) for n in MMDET), *MASK2FORMER, *(("mmseg", n) for n in MMSEG)]
)
def test_upstream_models_compute_the_same(package, name):
    model = build(package, name)
    layers = [m for m in model.modules() if isinstance(m, (MultiScaleDeformableAttention, MultiheadAttention))]
    assert layers or "conditional" in name or "dab" in name
    counts = {name: buffer.clone() for name, buffer in model.named_buffers()}
    expected, losses, gradients = run(model, package)
    for name, buffer in model.named_buffers():  # buffers of batch norms
        buffer.copy_(counts[name])
    drop_in.replace()
    assert all("attn_plugins" in type(m).forward.__wrapped__.__module__ for m in layers)
    found, our_losses, our_gradients = run(model, package)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * max(1.0, b.abs().max().item()))
    assert our_losses.keys() == losses.keys()
    for key in losses:
        torch.testing.assert_close(our_losses[key], losses[key], rtol=1e-3, atol=1e-4, msg=key)
    assert our_gradients.keys() == gradients.keys()
    checked = [key for key in gradients if "attn" in key and gradients[key].abs().max() > 1e-5]
    assert checked
    for key in checked:
        assert relative_error(our_gradients[key], gradients[key]) < 2e-2, key


def layer_inputs(boxes: bool, dtype=torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = torch.tensor([[6, 8], [3, 4]])
    return dict(
        query=torch.randn(7, 2, 32, dtype=dtype),
        value=torch.randn(60, 2, 32, dtype=dtype),
        query_pos=torch.randn(7, 2, 32, dtype=dtype),
        key_padding_mask=torch.rand(2, 60) < 0.2,
        reference_points=torch.rand(2, 7, 2, 4 if boxes else 2, dtype=dtype),
        spatial_shapes=shapes,
        level_start_index=torch.tensor([0, 48]),
    )


@pytest.mark.parametrize("boxes", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_deformable_layer_equals_mmcvs(batch_first, boxes):
    stock = MultiScaleDeformableAttention(32, 4, 2, 3, dropout=0.0, batch_first=batch_first).double()
    ours = Ours(32, 4, 2, 3, dropout=0.0, batch_first=batch_first, dtype=torch.float64)
    start = {key: value for key, value in stock.state_dict().items() if "sampling" in key or "weights" in key}
    for key, value in start.items():  # the same initialisation, except for random draws
        torch.testing.assert_close(ours.state_dict()[key], value)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(stock.state_dict(), strict=True)
    given = layer_inputs(boxes, torch.float64)
    if batch_first:
        given |= {key: given[key].transpose(0, 1) for key in ("query", "value", "query_pos")}
    expected = stock(**given)
    torch.testing.assert_close(ours(**given), expected)
    drop_in.replace()
    torch.testing.assert_close(stock(**given), expected)
    with pytest.warns(DeprecationWarning, match="residual"):
        torch.testing.assert_close(stock(**given, residual=given["query"]), expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masks", ["none", "bool", "added", "per head", "padding"])
def test_multi_head_attention_equals_mmcvs(masks, batch_first):
    torch.manual_seed(0)
    # In evaluation: earlier models have changed the default dropout of mmcv's layer, which is a shared dict.
    layer = MultiheadAttention(32, 4, batch_first=batch_first).double().eval()
    query, key = torch.randn(5, 2, 32, dtype=torch.float64), torch.randn(9, 2, 32, dtype=torch.float64)
    positions = dict(query_pos=torch.randn_like(query), key_pos=torch.randn_like(key))
    if batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        positions = {name: t.transpose(0, 1) for name, t in positions.items()}
    mask = {
        "none": {},
        "bool": dict(attn_mask=torch.rand(5, 9) < 0.3),
        "added": dict(attn_mask=torch.randn(5, 9, dtype=torch.float64)),
        "per head": dict(attn_mask=torch.rand(8, 5, 9) < 0.3),
        "padding": dict(key_padding_mask=torch.tensor([[False] * 9, [False] * 6 + [True] * 3])),
    }[masks]
    results = {}
    for kind in ("stock", "ours"):
        layer.zero_grad()
        output = layer(query, key, **positions, **mask)
        output.square().sum().backward()
        alone = layer(query, query_pos=positions["query_pos"])
        results[kind] = [output, alone, *(p.grad.clone() for p in layer.parameters())]
        drop_in.replace()
    for a, b in zip(results["ours"], results["stock"]):
        torch.testing.assert_close(a, b)


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
    asked = []
    run_inner = layer.attn.forward
    layer.attn.forward = lambda *args, **options: (asked.append(options["need_weights"]), run_inner(*args, **options))[
        1
    ]
    layer(x)
    assert asked == [False]


def test_all_or_none(monkeypatch):
    monkeypatch.setattr(MultiheadAttention, "forward", lambda self, query: query)
    with pytest.raises(RuntimeError, match=r"replaces mmcv's MultiheadAttention\.forward, but .* nothing was replaced"):
        drop_in.replace()
    assert MultiScaleDeformableAttention.forward is not transformer.deformable_forward
    assert all(MODELS.module_dict[name] is layer for name, layer in STOCK.items())
