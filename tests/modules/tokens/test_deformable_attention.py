"""Multi-scale deformable attention with its projections: Zhu et al. (2021) in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.modules import MultiScaleDeformableAttention
from tests.helpers.module_inputs import drawn
from tests.ops.deformable_attention.test_deformable_attention import pixel

SHAPES = ((4, 6), (2, 3))
S = 30


def module(**options) -> MultiScaleDeformableAttention:
    made = MultiScaleDeformableAttention(
        12, 3, 2, 2, **{"dropout": 0.0, "batch_first": True, "dtype": torch.float64, **options}
    )
    return drawn(made, 0.3)


def inputs(boxes=False, dtype=torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(
        query=torch.randn(2, 5, 12, dtype=dtype),
        value=torch.randn(2, S, 12, dtype=dtype),
        query_pos=torch.randn(2, 5, 12, dtype=dtype),
        key_padding_mask=torch.rand(2, S) < 0.3,
        reference_points=torch.rand(2, 5, 2, 4 if boxes else 2, dtype=dtype),
        spatial_shapes=torch.tensor(SHAPES),
    )


def by_loops(layer, query, value, query_pos, key_padding_mask, reference_points, spatial_shapes) -> Tensor:
    """Compute Eq. 3 one query, head and sample at a time, and appendix A.4 for boxes."""
    output = torch.empty_like(query)
    for b in range(len(query)):
        values = value[b] @ layer.value_proj.weight.T + layer.value_proj.bias
        saliency = torch.zeros(S, 3, dtype=query.dtype)
        if layer.key_saliency is not None:
            saliency = layer.gate * (value[b] @ layer.key_saliency.weight.T)
        pixels = torch.cat((values.view(S, 3, 4), saliency.unsqueeze(-1)), -1)
        pixels[key_padding_mask[b]] = 0
        for q in range(query.shape[1]):
            z = query[b, q] + query_pos[b, q]
            offsets = (layer.sampling_offsets.weight @ z + layer.sampling_offsets.bias).view(3, 2, 2, 2)
            logits = (layer.attention_weights.weight @ z + layer.attention_weights.bias).view(3, 4)
            heads = []
            for m in range(3):
                sampled, chosen, first = [], [], 0
                for level, (H, W) in enumerate(SHAPES):
                    for k in range(2):
                        x, y, *size = reference_points[b, q, level].tolist()
                        dx, dy = offsets[m, level, k].tolist()
                        if size:
                            x, y = x + dx / 2 * size[0] / 2, y + dy / 2 * size[1] / 2
                        else:
                            x, y = x + dx / W, y + dy / H
                        x, y = x * W - 0.5, y * H - 0.5
                        point = torch.zeros(5, dtype=query.dtype)  # the head's value, and the saliency of the key
                        for row in (math.floor(y), math.floor(y) + 1):
                            for column in (math.floor(x), math.floor(x) + 1):
                                share = (1 - abs(y - row)) * (1 - abs(x - column))
                                point += share * pixel(pixels[:, m], first, H, W, row, column)
                        sampled.append(point[:4])
                        chosen.append(math.exp(logits[m, 2 * level + k] + point[4]))
                    first += H * W
                heads.append(sum(share * point for share, point in zip(chosen, sampled)) / sum(chosen))
            output[b, q] = layer.output_proj.weight @ torch.cat(heads) + layer.output_proj.bias + query[b, q]
    return output


@pytest.mark.parametrize(("boxes", "key_saliency"), [(False, True), (True, False)])
def test_equals_loops(boxes, key_saliency):
    layer, given = module(key_saliency=key_saliency), inputs(boxes)
    with torch.no_grad():
        torch.testing.assert_close(layer(**given), by_loops(layer, **given))


def test_weights_start_uniform_and_each_head_in_its_direction():
    """Weights start uniform. Each head looks in its own direction, with points at distances of 1, 2, ... pixels."""
    layer = MultiScaleDeformableAttention(num_levels=2)
    offsets = layer.sampling_offsets.bias.view(8, 2, 4, 2)
    assert not layer.sampling_offsets.weight.any()
    assert not layer.attention_weights.weight.any()
    names = ("sampling_offsets", "attention_weights", "value_proj", "output_proj")  # those of Deformable DETR
    assert set(layer.state_dict()) == {f"{name}.{kind}" for name in names for kind in ("weight", "bias")}
    for m, direction in enumerate([(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]):
        for k in range(4):
            expected = torch.tensor(direction, dtype=torch.float32).expand(2, 2) * (k + 1)
            torch.testing.assert_close(offsets[m, :, k], expected)


def test_batch_second_identity_and_defaults():
    layer, given = module(), inputs()
    expected = layer(**given)
    second = module(batch_first=False)
    second.load_state_dict(layer.state_dict(), strict=True)
    swapped = {k: v.transpose(0, 1) if k in ("query", "value", "query_pos") else v for k, v in given.items()}
    torch.testing.assert_close(second(**swapped).transpose(0, 1), expected)
    identity = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(layer(**given, identity=identity) - identity, expected - given["query"])
    alone = dict(query=given["value"], reference_points=torch.rand(2, S, 2, 2).double(), spatial_shapes=SHAPES)
    torch.testing.assert_close(layer(**alone), layer(**alone, value=given["value"], identity=given["value"]))
    wide = module(value_proj_ratio=0.5)
    assert wide.value_proj.out_features == wide.output_proj.in_features == 6
    assert wide(**given).shape == (2, 5, 12)


class Attend(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = drawn(MultiScaleDeformableAttention(8, 2, num_levels=2, batch_first=True, **options)).eval()

    def forward(self, query: Tensor, value: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
        given = dict(value=value, reference_points=reference_points, spatial_shapes=spatial_shapes)
        return self.attention(query, **given)


def test_exported_for_other_shapes_in_a_tensor():
    arguments = [
        (torch.randn(B, 5, 8), torch.randn(B, 16, 8), torch.rand(B, 5, 2, 2), torch.tensor(shapes))
        for B, shapes in ((2, ((3, 4), (2, 2))), (3, ((4, 3), (1, 4))))
    ]
    layer, batch = Attend(key_saliency=True), {0: torch.export.Dim.AUTO}
    program = torch.export.export(layer, arguments[0], dynamic_shapes=(batch, batch, batch, None)).module()
    for given in arguments:
        torch.testing.assert_close(program(*given), layer(*given))


def test_shapes_are_copied_to_the_host_once_and_again_when_they_change(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)  # as on a GPU
    layer, given = module(), inputs()
    shapes = given["spatial_shapes"]
    expected = layer(**given)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", None)
        torch.testing.assert_close(layer(**given), expected)
    shapes.copy_(torch.tensor(((2, 3), (4, 6))))
    assert not torch.equal(layer(**given), expected)
    with torch.inference_mode():
        given["spatial_shapes"] = torch.tensor(SHAPES)
        torch.testing.assert_close(layer(**given), expected)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(value=torch.rand(2, S, 10)), r"value must have shape \(B, ·, 12\), got \(2, 30, 10\)"),
        (dict(value=torch.rand(2, S, 12)), "value must have the module's dtype torch.float64, got torch.float32"),
        (dict(key_padding_mask=torch.ones(2, 7, dtype=torch.bool)), r"key_padding_mask must have shape \(2, 30\)"),
        (dict(reference_points=None), "reference_points must be a Tensor, got NoneType"),
        (dict(spatial_shapes=None), r"spatial_shapes must be a Tensor or a sequence of \(H, W\), got NoneType"),
        (
            dict(spatial_shapes=((4, 6), (2,))),
            r"spatial_shapes must hold \(H, W\), two ints of at least 1, for each level, got",
        ),
        (dict(spatial_shapes=torch.tensor([4, 6])), r"spatial_shapes must be an integer Tensor \(L, 2\)"),
        (dict(spatial_shapes=((5, 6),)), "spatial_shapes must have num_levels = 2 levels, got 1"),
        (dict(spatial_shapes=((4, 6), (2, 4))), "spatial_shapes must have as many pixels as value has keys, 30"),
        (dict(reference_points=torch.rand(2, 4, 2, 2)), r"must have shape \(2, 5, 2\) \+ \(2,\) for points or \(4,\)"),
        (dict(reference_points=torch.rand(2, 5, 2, 3)), r"or \(4,\) for boxes, got \(2, 5, 2, 3\)"),
    ],
)
def test_bad_input_is_one_clear_error(change, words):
    with pytest.raises((ValueError, TypeError), match=words):
        module()(**{**inputs(), **change})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_places_that_are_not_finite_show(bad):
    """On CPUs, as in mmcv's layer, which computes by ``grid_sample`` there."""
    layer, given = module(), inputs()
    given["reference_points"][1, 3, 0, 0] = bad
    output = layer(**given)
    assert output[1, 3].isnan().all()
    assert output.isfinite().sum() == output.numel() - 12
