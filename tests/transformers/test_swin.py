"""``accelerate`` of windows in transformers' Swin, Swin V2 and relatives on our operator, layer by layer and in models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_plugins.transformers import accelerate, swin
from tests.helpers.replacement import COLUMNS, C, Called, Layer, Watch, drawn, printed, rand, verdict

transformers = pytest.importorskip("transformers")

FAMILIES = {place.layer.removesuffix("Layer"): place for place in swin.PLACES}
ROWS = {"Swin": "`accelerate`, transformers' Swin", "Swinv2": "`accelerate`, transformers' Swin V2"}
ALWAYS = {"Swin", "DonutSwin", "ClapAudio"}  # families whose layers can be asked never to shrink their windows
SIZES = [(8, 12), (7, 9), (4, 6)]  # whole windows, padding, and a map that one window covers along one axis


def configured(name: str, **options: Any) -> Any:
    given: dict[str, Any] = dict(window_size=4, num_heads=[2, 2], depths=[2, 2], qkv_bias=True, **options)
    if name == "ClapAudio":
        given = dict(given, num_attention_heads=given.pop("num_heads"))
    elif name != "Swin2SR":
        given["image_size"] = 32
    given |= {"patch_embeds_hidden_size" if name == "ClapAudio" else "embed_dim": C}
    config = getattr(transformers, f"{name}Config")(**given)
    config._attn_implementation = "sdpa" if name == "Swin" else "eager"
    return config


def layer(name: str, shift: int = 2, size: tuple[int, int] = (7, 9), **options: Any) -> nn.Module:
    """Return a layer with drawn parameters and what its model passes."""
    kind = getattr(importlib.import_module(FAMILIES[name].module), f"{name}Layer")
    given: dict[str, Any] = {"always_partition": True} if name in ALWAYS else {}
    module = kind(configured(name, **options), C, (32, 32), 2, shift_size=shift)
    return drawn(Called(module, input_dimensions=size, **given))


def ours(model: nn.Module) -> nn.Module:
    assert accelerate(model, onednn=False)
    return model


def tokens(size: tuple[int, int] = (7, 9), B: int = 2) -> Tensor:
    return rand(B, size[0] * size[1], C)


def computed(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    output = module(x)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return [output, *torch.autograd.grad((output * weights).sum(), [x, *module.parameters()])]


def runs_ours(module: Callable[..., Any], *args: Any, **options: Any) -> bool:
    with Watch("sequence_attention") as watch:
        module(*args, **options)
    return watch.seen


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("name", ROWS)
def test_a_cell(name, column):
    matrix = Layer(partial(layer, name), ours, lambda: (tokens(),), "sequence_attention")
    assert verdict(matrix, COLUMNS[column]) == printed(ROWS[name])[column]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_and_gradients_stay(name, shift, size):
    x = tokens(size, 3).double()
    stock, replaced = (layer(name, shift, size).double() for _ in range(2))
    # A weight behind stock's mask of -100 is at most e^(20 - 100), 0 to the last digit of the others.
    for found, expected in zip(computed(ours(replaced), x), computed(stock, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert runs_ours(replaced, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision(name, dtype):
    size = (8, 12)  # whole windows: stock's V2 makes NaN of padding in float16
    x = tokens(size)
    exact = layer(name, size=size).double()(x.double())
    expected = layer(name, size=size).to(dtype)(x.to(dtype))
    found = ours(layer(name, size=size).to(dtype))(x.to(dtype))
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= 2 * (expected - exact).abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_autocast(name):
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(layer(name))(tokens()), layer(name)(tokens())
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)
