"""Whoever hooks, replaces or activates ``attn_drop`` in our layers sees what timm shows without fused attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.utils import AttentionExtract
from torch import Tensor, nn

from tests.helpers.small_vits import build, layers_of, open_gates, picture

SWIN = dict(img_size=(48, 64), window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5)
SPACE = dict(attn_layer=None, name="timesformer_small_patch16_224", pattern="space", drop_path_rate=0.0)


def stock_and_ours(name: str) -> tuple[Callable[[], nn.Module], ...]:
    return lambda: timm.create_model(name, **SWIN), lambda: timm.create_model(f"attn_{name}", **SWIN)


MODELS: dict[str, tuple[Callable[[], nn.Module], ...]] = {  # timm's model and ours that equals it
    "vit": (lambda: build(None), lambda: build("attn1000")),
    "vit of all terms, gates closed": (lambda: build(None), lambda: build("attn1111")),
    "swin": stock_and_ours("swin_tiny_patch4_window7_224"),
    "swinv2": stock_and_ours("swinv2_tiny_window8_256"),
    "timesformer": (lambda: build(None), lambda: build(**SPACE)),
}


def drops_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if name.endswith("attn_drop")}


@pytest.fixture(params=MODELS)
def pair(request) -> tuple[nn.Module, nn.Module]:
    """timm's model without fused attention, and ours with its weights."""
    stock, ours = (create().double().eval() for create in MODELS[request.param])
    for module in stock.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours.load_state_dict(stock.state_dict())
    assert list(drops_of(ours)) == list(drops_of(stock))
    return stock, ours


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-7)


@torch.no_grad()
def test_extracted_attention(pair):
    expected, found = (AttentionExtract(model, method="hook")(picture().double()) for model in pair)
    assert len(found) == len(drops_of(pair[0]))
    close(dict(found), dict(expected))


def test_hooks_are_called(pair):
    """One kind of hook at a time, on all."""
    for hook in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        records: list[list[str]] = []
        for model in pair:
            record: list[str] = []
            handles = [
                getattr(module, f"register_{hook}")(lambda *call, name=name, record=record: record.append(name))
                for name, module in drops_of(model).items()
            ]
            model(picture().double()).sum().backward()
            records.append(record)
            for handle in handles:
                handle.remove()
        assert records[0] == records[1]
        assert len(records[0]) == len(drops_of(pair[0]))


class Halved(nn.Module):
    def forward(self, weights: Tensor) -> Tensor:
        return weights / 2


def replaced(model: nn.Module) -> None:
    for name in drops_of(model):
        model.set_submodule(name, Halved())


def forward_replaced(model: nn.Module) -> None:
    for module in drops_of(model).values():
        module.forward = lambda weights: weights / 2


def dropped_in_evaluation(model: nn.Module) -> None:
    for module in drops_of(model).values():
        module.p = 0.5
        module.train()


@pytest.mark.parametrize("change", [replaced, forward_replaced, dropped_in_evaluation])
@torch.no_grad()
def test_it_is_used(pair, change):
    x, outputs = picture().double(), []
    for model in pair:
        before = model(x)
        change(model)
        torch.manual_seed(2)
        outputs.append(model(x))
        assert not torch.allclose(outputs[-1], before, rtol=1e-3)
    if change is dropped_in_evaluation and "TimeSformer" in type(pair[1]).__name__:
        return  # its fused attention draws other numbers
    close(outputs[1], outputs[0])


@pytest.mark.parametrize("name", ["attn0010", "attn1111", "attn_bilateral", "attn_range7"])
@torch.no_grad()
def test_weights_of_all_terms(name):
    model, x, inputs = open_gates(build(name)), picture(), []
    expected = model(x)
    for layer in layers_of(model):
        layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    weights = AttentionExtract(model, method="hook")(x)
    for layer, tokens, found in zip(layers_of(model), inputs, weights.values()):
        close(found, layer.token_weights(tokens))
        assert found.shape == (2, 2, 13, 13)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
