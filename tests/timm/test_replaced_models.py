"""Our models and timm's with our attention: whoever hooks, replaces, wraps or quantizes a part gets what timm's do."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import timm
from torch import nn

from tests.helpers import replacement
from tests.helpers.replacement import Layer, Scenario, all_parts_called, drawn, rand
from tests.helpers.slow_cases import slow_but
from tests.helpers.small_vits import SMALL, build
from tests.helpers.verdicts import verdict

SWIN = dict(img_size=(32, 64), window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=5)


def pair(stock: Callable[[], nn.Module], ours: Callable[[], nn.Module], size: tuple[int, int], marks: str) -> Layer:
    def with_weights(model: nn.Module) -> nn.Module:
        made = all_parts_called(ours())
        made.load_state_dict(model.state_dict(), strict="resnet" not in type(model).__name__.lower())
        return made.eval()

    return Layer(lambda: drawn(all_parts_called(stock())), with_weights, lambda: (rand(2, 3, *size),), marks)


def our(name: str, options: dict, ours: str | None = None, marks: str = "attention") -> Layer:
    create = partial(timm.create_model, **options)
    return pair(lambda: create(name), lambda: create(ours or f"attn_{name}"), (32, 64), marks)


def vit(layer: str | None, **options) -> Layer:
    return pair(lambda: build(None, depth=1), lambda: build(layer, depth=1, **options), SMALL["img_size"], "attention")


MODELS = {
    "attn1000": vit("attn1000"),
    "attn1111": vit("attn1111"),
    "attn_bilateral": vit("attn_bilateral"),
    "TimeSformer": vit(None, name="timesformer_small_patch16_224", drop_path_rate=0.0),
    "Swin": our("swin_tiny_patch4_window7_224", SWIN),
    "Swin V2": our("swinv2_tiny_window8_256", SWIN),
    "ResNet": our("resnet50", dict(num_classes=5, layers=(1, 1, 1, 1)), "attn0010_dcn_resnet50", "deform_conv2d"),
}
# Of timm's models, ours may leave out what is not attention, such as dropout of patches.
OF_ATTENTION = {
    name: partial(getattr(replacement, name), within="attn")
    for name in ("forward_hooks", "backward_hooks", "replaced_children", "wrapped_children", "replaced_forward")
}
SCENARIOS: dict[str, Scenario] = OF_ATTENTION | {
    name: getattr(replacement, name) for name in ("dropout_in_eval", "quantize_dynamic", "offload")
}
CASES = [(model, scenario) for model in MODELS for scenario in SCENARIOS if model != "ResNet" or scenario == "offload"]


# Hooks of models whose attention has them in another one.
HOOKED = [("Swin V2", "attn1000", "attn_bilateral", "TimeSformer"), ("forward_hooks", "backward_hooks")]
QUICK = [case for case in CASES if case not in itertools.product(*HOOKED)]


@pytest.mark.parametrize("model, scenario", slow_but(QUICK, CASES))
def test_as_timms(model, scenario):
    works = (model, scenario) == ("Swin V2", "quantize_dynamic")  # timm reads the weight of its projection
    assert verdict(MODELS[model], SCENARIOS[scenario]) == ("works" if works else "as stock")
