"""``attn_plugins.torchvision.accelerate``: windows of torchvision's Swin and Swin V2 on our operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import swin_transformer as stock_file
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2, SwinTransformer

from attn_plugins.torchvision import accelerate
from tests.helpers.replacement import COLUMNS, C, Layer, cells, drawn, rand
from tests.helpers.verdicts import Watch, printed, verdict

KINDS = {"v1": ShiftedWindowAttention, "v2": ShiftedWindowAttentionV2}
ROWS = {"v1": "`accelerate`, torchvision's Swin", "v2": "`accelerate`, torchvision's Swin V2"}
# The window, the shift and the map: whole windows, padding, and axes that one window covers, whose shift is dropped.
GEOMETRIES = [((4, 4), (0, 0), (8, 12)), ((4, 4), (2, 2), (8, 12)), ((4, 4), (2, 2), (7, 9)), ((2, 4), (1, 2), (6, 3))]


def layer(version: str, **options: object) -> Callable[[], nn.Module]:
    arguments = dict(window_size=[4, 4], shift_size=[2, 2], num_heads=2, **options)
    return lambda: drawn(KINDS[version](C, **arguments))


def ours(model: nn.Module) -> nn.Module:
    assert accelerate(model, onednn=False)
    return model


def computed(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), [x, *module.parameters()])]


def runs_ours(module: nn.Module, x: Tensor) -> bool:
    with Watch("sequence_attention") as watch:
        module(x)
    return watch.seen


@pytest.mark.parametrize("version, column", cells(KINDS, quick={"non-finite inputs": ["v1"]}))
def test_each_cell_of_the_table_is_what_happens(version, column):
    matrix = Layer(layer(version), ours, lambda: (rand(2, 7, 9, C),), "sequence_attention")
    assert verdict(matrix, COLUMNS[column]) == printed(ROWS[version])[column]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("window, shift, size", GEOMETRIES)
@pytest.mark.parametrize("version", KINDS)
def test_outputs_and_gradients_stay(version, window, shift, size, bias):
    def build() -> nn.Module:
        return drawn(KINDS[version](C, [*window], [*shift], 2, qkv_bias=bias, proj_bias=bias)).double()

    x = rand(3, *size, C).double()
    # A weight behind stock's mask of -100 is at most e^(20 - 100), 0 to the last digit of the others.
    for found, expected in zip(computed(ours(build()), x), computed(build(), x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert runs_ours(ours(build()), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", KINDS)
def test_half_precision(version, dtype):
    build, x = layer(version), rand(2, 8, 12, C)  # whole windows: torchvision's V2 makes NaN of padding in float16
    exact = build().double()(x.double())
    found, expected = ours(build().to(dtype))(x.to(dtype)), build().to(dtype)(x.to(dtype))
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()


@pytest.mark.parametrize("version", KINDS)
def test_autocast(version):
    build, x = layer(version), rand(2, 7, 9, C)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(build())(x), build()(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("dropped", ["attention_dropout", "dropout"])
@pytest.mark.parametrize("version", KINDS)
def test_dropout(version, dropped):
    """Weights are dropped by torchvision's code, and dropout of the output draws the same numbers as torchvision's."""
    build, x = layer(version, **{dropped: 0.5}), rand(2, 7, 9, C)
    results = []
    for module in (build().train(), ours(build()).train()):
        torch.manual_seed(3)
        results.append(module(x))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert runs_ours(module, x) == (dropped == "dropout")


@pytest.mark.parametrize("version", KINDS)
def test_a_whole_model(version):
    block, merging = (
        ("SwinTransformerBlock", "PatchMerging") if version == "v1" else ("SwinTransformerBlockV2", "PatchMergingV2")
    )

    def build() -> nn.Module:
        torch.manual_seed(0)
        return SwinTransformer(
            [4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=3, block=getattr(stock_file, block),
            downsample_layer=getattr(stock_file, merging), stochastic_depth_prob=0.0,
        ).double()  # fmt: skip

    model, x = build(), rand(2, 3, 52, 36).double()
    assert accelerate(model, onednn=False) == [f"features.{stage}.{n}.attn" for stage in (1, 3) for n in (0, 1)]
    for found, expected in zip(computed(model, x), computed(build(), x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
