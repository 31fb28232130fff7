"""Drawings of upstream's transformers show what the layers used: weights, sampling points, boxes and masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.structures import DetDataSample
from mmengine.registry import init_default_scope
from mmseg.structures import SegDataSample
from torch import Tensor, nn
from torch.nn import functional as F

from attn_plugins.mmcv.attended import exchange
from attn_plugins.modules import capture_attention
from tests.mm.drop_in_helpers import drop_in, restore
from tests.mm.test_drop_in_transformers import build
from tools.view.models import capture
from tools.view.objects import Objects, fine_mask, objects_of, watch_head
from tools.view.points import Points
from tools.view.tokens import OBJECTS, PIXELS, SAMPLED_OBJECTS, SAMPLED_PIXELS, Tokens, tokens

SIZE, INSIDE = (96, 160), ((96, 160), (64, 96))  # of a batch, and of its two pictures
DETR, CONDITIONAL, DAB = (
    "detr/detr_r50_8xb2-150e_coco",
    "conditional_detr/conditional-detr_r50_8xb2-50e_coco",
    "dab_detr/dab-detr_r50_8xb2-50e_coco",
)
DEFORMABLE, TWO_STAGE, DINO = (
    "deformable_detr/deformable-detr_r50_16xb2-50e_coco",
    "deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco",
    "dino/dino-4scale_r50_8xb2-12e_coco",
)
MASKFORMER, MASK2FORMER = (
    "maskformer/maskformer_r50_ms-16xb1-75e_coco",
    "mask2former/mask2former_r50_8xb2-lsj-50e_coco",
)
SEGMENTORS = (
    "mask2former/mask2former_r50_8xb2-160k_ade20k-512x512",
    "maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512",
)
MODELS = [
    *(("mmdet", name) for name in (DETR, CONDITIONAL, DAB, DEFORMABLE, TWO_STAGE, DINO, MASKFORMER, MASK2FORMER)),
    *(("mmseg", name) for name in SEGMENTORS),
]


@pytest.fixture(autouse=True, params=["stock", "drop-in"])
def forwards(request) -> Iterator[str]:
    """Yield mmcv's own forwards, or ours in their place."""
    restore()
    if request.param == "drop-in":
        drop_in.replace()
    yield request.param
    restore()
    init_default_scope("mmdet")


def samples_of(package: str) -> list[Any]:
    """Return two pictures in a batch, of different sizes except for mmseg, which batches equal sizes."""
    samples = []
    for shape in INSIDE:
        shape = SIZE if package == "mmseg" else shape
        facts = dict(img_shape=shape, ori_shape=shape, pad_shape=SIZE, batch_input_shape=SIZE, scale_factor=(1.0, 1.0))
        samples.append((SegDataSample if package == "mmseg" else DetDataSample)(metainfo=facts))
    return samples


def look(model: nn.Module, package: str) -> tuple[Any, dict[str, Any], dict[str, Tokens | Points]]:
    """Return the model's predictions for the batch, the output of its head, and the inputs of all layers."""
    if hasattr(model, "bbox_head"):
        model.bbox_head.test_cfg["max_per_img"] = 40
    pictures = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watch_head(model) as head, capture(model) as captured:
        options = {} if package == "mmseg" else dict(rescale=False)
        result = model.eval().predict(pictures, samples_of(package), **options)
    assert sorted(captured) == sorted(tokens(model))
    return result, head, captured


class Outputs:
    """Records the outputs of attention layers before the residual, and the values they used, by inner layer."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[Any, tuple[Tensor, Tensor]] = {}
        self.stack = ExitStack()
        attend = ConditionalAttention.forward_attn

        def forward_attn(layer: Any, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Any:
            output = attend(layer, query, key, value, **masks)
            self.seen[layer] = value, output[0]
            return output

        monkeypatch.setattr(ConditionalAttention, "forward_attn", forward_attn)
        for module in model.modules():
            if hasattr(module, "sampling_offsets"):
                self._keep(module.output_proj, module)
            elif hasattr(module, "in_proj_weight"):
                self._keep(module, module)

    def _keep(self, watched: nn.Module, layer: nn.Module) -> None:
        def keep(_: Any, arguments: Any, keywords: Any, output: Any) -> None:
            value = arguments[2] if len(arguments) > 2 else keywords.get("value")
            self.seen[layer] = value, output if isinstance(output, Tensor) else output[0]

        self.stack.callback(watched.register_forward_hook(keep, with_kwargs=True).remove)


def from_weights(maps: Tokens, value: Tensor) -> Tensor:
    """Compute the output from the shown weights, in the layer's own layout."""
    layer, weights = maps.attention, maps.weights()
    if hasattr(layer, "in_proj_weight"):
        bias = None if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)[2]
        value = F.linear(value, layer.in_proj_weight.chunk(3)[2], bias).transpose(0, 1)
    heads = value.unflatten(2, (layer.num_heads, -1)).transpose(1, 2)
    output = layer.out_proj((weights @ heads).transpose(1, 2).flatten(2))
    return output.transpose(0, 1) if hasattr(layer, "in_proj_weight") else output


def from_points(points: Points) -> Tensor:
    """Compute the output from the shown points by mmcv's own definition."""
    layer, given = points.attention, points.arguments
    value = given["query"] if given.get("value") is None else given["value"]
    value = value if layer.batch_first else value.transpose(0, 1)
    value = layer.value_proj(value)
    if given.get("key_padding_mask") is not None:
        value = value.masked_fill(given["key_padding_mask"][..., None], 0.0)
    shapes = torch.as_tensor(given["spatial_shapes"])
    value = value.unflatten(2, (layer.num_heads, -1))
    return layer.output_proj(multi_scale_deformable_attn_pytorch(value, shapes, *points.points()))


@torch.no_grad()
def check_outputs(model: nn.Module, package: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tokens | Points]:
    """Check that each captured layer's output follows from what is shown of it; return what was captured."""
    outputs = Outputs(model, monkeypatch)
    with outputs.stack:
        _, _, captured = look(model, package)
    for name, layer in captured.items():
        value, expected = outputs.seen[layer.attention]
        result = from_points(layer) if isinstance(layer, Points) else from_weights(layer, value)
        torch.testing.assert_close(
            result, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )
    return captured


@pytest.mark.parametrize(("package", "name"), MODELS)
def test_outputs_follow_from_what_is_shown(package, name, monkeypatch):
    model = build(package, name)
    kinds = tokens(model)
    captured = check_outputs(model, package, monkeypatch)
    assert captured
    for path, layer in captured.items():
        if isinstance(layer, Points):
            assert kinds[path] == (SAMPLED_OBJECTS if "decoder.layers" in path else SAMPLED_PIXELS)
            assert layer.shapes[0][0] != layer.shapes[0][1]
        else:
            assert kinds[path] == (OBJECTS if "decoder.layers" in path else PIXELS)
            assert layer.keys[0] != layer.keys[1]
            assert layer.weights().shape[-1] == layer.keys[0] * layer.keys[1]


@pytest.mark.parametrize(
    "options",
    [
        dict(attention_type="1111"),
        dict(attention_type="0111"),
        dict(attention_type="0010"),
        dict(attention_type="1111", spatial_range=3),
        dict(attention_type="1000"),
        dict(attention_type="1000", kernel_size=5, outside="learned", smoothing="zscore"),
    ],
    ids=str,
)
def test_outputs_of_our_layers_follow_from_what_is_shown(options, monkeypatch):
    model = build("mmdet", DETR)
    exchange(model, {"encoder.layers.*.self_attn": dict(type="SpatialSelfAttention", **options)})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate"):
                nn.init.normal_(parameter, std=2.0)
    captured = check_outputs(model, "mmdet", monkeypatch)
    (encoder,) = (layer for layer in captured.values() if layer.size is not None)
    assert encoder.size == encoder.keys == (3, 5)
    weights = encoder.weights()
    padded = torch.ones(3, 5, dtype=torch.bool)
    padded[:2, :3] = False
    assert not weights[1][..., padded.flatten()].any()  # of the second picture
    sums = weights.sum(-1)
    torch.testing.assert_close(sums[0], torch.ones_like(sums[0]))
    torch.testing.assert_close(sums[1][:, ~padded.flatten()], torch.ones(8, 6))


def test_outputs_of_our_deformable_layers_follow_from_what_is_shown(monkeypatch):
    model = build("mmdet", DEFORMABLE)
    exchange(model, {"encoder.layers.*.self_attn": dict(type="MultiScaleDeformableAttention", key_saliency=True)})
    encoder = model.encoder.layers[0].self_attn
    nn.init.normal_(encoder.gate, std=3.0)
    check_outputs(model, "mmdet", monkeypatch)


def test_chosen_queries_are_those_of_all(forwards):
    model = build("mmdet", DETR)
    exchange(model, {"encoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1111")})
    *_, captured = look(model, "mmdet")
    for layer in captured.values():
        chosen = torch.tensor([4, 0, 11])
        torch.testing.assert_close(layer.weights(chosen), layer.weights()[:, :, chosen])
    encoder = captured["encoder.layers.0.self_attn"]
    pixels = encoder.look([(1, 3), (2, 0)]).maps
    torch.testing.assert_close(pixels, encoder.weights()[0, :, [8, 10]].unflatten(-1, (3, 5)))
    parts = encoder.parts()
    assert list(parts) == [f"ε{n}" + title for n, title in enumerate(
        (": query and key content", ": query content and position", ": key content", ": position"), 1
    )]  # fmt: skip
    product = torch.stack([part.weights() for part in parts.values()]).prod(0)
    torch.testing.assert_close((product / product.sum(-1, keepdim=True))[0], encoder.weights()[0])
    *_, captured = look(build("mmdet", DEFORMABLE), "mmdet")
    for layer in captured.values():
        for part, whole in zip(layer.points(torch.tensor([7, 2])), layer.points()):
            torch.testing.assert_close(part, whole[:, [7, 2]])


def test_the_uniform_weight_counts_keys_without_padding_and_mask():
    *_, captured = look(build("mmdet", MASK2FORMER), "mmdet")
    masked = captured["panoptic_head.transformer_decoder.layers.0.cross_attn"]
    there = ~masked.masks["attn_mask"].unflatten(0, (2, 8))[0, 0]
    torch.testing.assert_close(masked.look(range(100)).uniform, 1 / there.sum(-1))
    assert len(set(there.sum(-1).tolist())) > 1
    *_, captured = look(build("mmdet", DETR), "mmdet")
    for layer in captured.values():  # the first picture fills the batch
        queries = [0, 3] if layer.size is None else [(0, 0), (0, 3)]
        torch.testing.assert_close(layer.look(queries).uniform, torch.full((2,), 1 / 15))
        layer.masks["key_padding_mask"] = layer.masks["key_padding_mask"].flip(0)
        torch.testing.assert_close(layer.look(queries).uniform, torch.full((2,), 1 / 6))


@pytest.mark.parametrize("name", [DETR, CONDITIONAL, DAB, DEFORMABLE, TWO_STAGE, DINO])
def test_objects_are_the_models_predictions(name):
    result, head, _ = look(build("mmdet", name), "mmdet")
    objects = objects_of(head, SIZE, INSIDE[0], [f"name {n}" for n in range(80)])
    predicted = result[0].pred_instances
    least, checked = predicted.scores.min(), 0
    for n in range(len(objects)):
        if objects.scores[n] > least + 1e-4:
            same = (predicted.labels == objects.labels[n]) & ((predicted.scores - objects.scores[n]).abs() < 1e-6)
            same &= ((predicted.bboxes - objects.boxes[n]).abs() < 1e-3).all(1)
            assert same.any()
            assert objects.names[n] == f"name {objects.labels[n]}"
            checked += 1
    assert checked >= 2


def test_the_surest_objects():
    empty = torch.tensor([[0.0, 0, 0, 0]])
    boxes = torch.cat((torch.tensor([[1.0, 2, 30, 40]]), empty, torch.tensor([[5.0, 5, 9, 9]]).expand(3, 4)))
    scores = torch.tensor([0.9, 0.8, 0.7, 0.4, 0.1])
    objects = Objects(torch.tensor([7, 3, 5, 1, 0]), torch.arange(5), list("abcde"), scores, boxes)
    assert objects.surest(8, 0.3).queries.tolist() == [7, 5, 1]
    assert objects.surest(2, 0.3).names == ["a", "c"]
    assert objects.surest(8, 0.95).queries.tolist() == [7]
    assert objects.title(2) == "c 0.70 (query 5)"


@pytest.mark.parametrize("name", [MASKFORMER, pytest.param(MASK2FORMER, marks=pytest.mark.slow)])
def test_masks_are_the_models_predictions(name):
    model = build("mmdet", name)
    model.panoptic_fusion_head.test_cfg.update(panoptic_on=False, instance_on=True, max_per_image=100 * 80)
    model.panoptic_fusion_head.num_things_classes = 80
    result, head, _ = look(model, "mmdet")
    objects, predicted = objects_of(head, SIZE, INSIDE[0], ()), result[0].pred_instances
    some = [n for n in range(len(objects)) if (objects.boxes[n, 2:] > 0).all()][:5]
    assert some
    for n in some:
        mask = fine_mask(objects.masks[n], SIZE, INSIDE[0]) > 0
        same = (predicted.masks == mask).flatten(1).all(1) & (predicted.labels == objects.labels[n])
        assert same.any()
        probability = fine_mask(objects.masks[n], SIZE, INSIDE[0]).sigmoid()[mask].mean() * objects.scores[n]
        torch.testing.assert_close(predicted.scores[same].max(), probability, rtol=1e-3, atol=1e-5)
        rows, columns = (mask.any(axis).nonzero().flatten().tolist() for axis in (1, 0))
        assert objects.boxes[n].tolist() == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


@pytest.mark.parametrize("picture", [0, 1])
def test_reference_points_lie_where_the_model_has_them(picture):
    """Reference points are in pixels of the picture, whatever padding its batch adds."""
    model = build("mmdet", DEFORMABLE)
    given: dict[str, Tensor] = {}
    handle = model.bbox_head.register_forward_pre_hook(
        lambda _, arguments, keywords: given.update(references=(keywords.get("references") or arguments[1])[0]),
        with_kwargs=True,
    )
    *_, captured = look(model, "mmdet")
    handle.remove()
    decoder = captured["decoder.layers.0.cross_attn"]
    inside = INSIDE[picture]
    if picture == 1:  # the first of a batch is shown
        for key in ("valid_ratios", "key_padding_mask"):
            decoder.arguments[key] = decoder.arguments[key].flip(0)
        assert decoder.arguments["valid_ratios"][0].min() < 1
    pixels = decoder.in_pixels(decoder.references[picture].float(), SIZE, inside)
    expected = given["references"][picture] * torch.tensor([inside[1], inside[0]])
    for level in range(4):
        torch.testing.assert_close(pixels[:, level], expected, rtol=1e-4, atol=1e-2)
    encoder = captured["encoder.layers.0.self_attn"]
    (number,) = encoder.number(1, [(3, 5)]).tolist()
    (x, y) = encoder.in_pixels(encoder.references[0, [number]].float(), SIZE, INSIDE[0])[0, 1].tolist()
    rows, columns = encoder.shapes[1]
    assert (y, x) == pytest.approx((3.5 / rows * SIZE[0], 5.5 / columns * SIZE[1]), rel=1e-4)


@pytest.mark.parametrize("name", [DETR, CONDITIONAL, DEFORMABLE])
def test_nothing_stays_in_the_model(name):
    model = build("mmdet", name)
    keys = [sorted(module.__dict__) for module in model.modules()]
    expected = look(model, "mmdet")[0]
    assert [sorted(module.__dict__) for module in model.modules()] == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    pictures = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model.predict(pictures, samples_of("mmdet"), rescale=False)
    for a, b in zip(plain, expected):
        torch.testing.assert_close(a.pred_instances.bboxes, b.pred_instances.bboxes)


def test_our_own_modules_are_listed_apart():
    """capture_attention, which handles backbones with our modules, rejects a transformer's layers."""
    model = build("mmdet", DETR)
    with pytest.raises(ValueError, match="got DETR without any"), capture_attention(model):
        pass
