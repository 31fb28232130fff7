"""pytest plug-in for timm's ``tests/test_models.py``: keeps the tests of our models, or of stock ones with our layers.

``UPSTREAM_TESTS=names`` keeps the tests of the names that we register. ``UPSTREAM_TESTS=layers`` keeps those of
``STOCK`` and lets ``timm.create_model`` replace their attention by ours; ``UPSTREAM_TESTS=stock`` keeps these and
replaces nothing.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import timm

import attn_plugins.timm

ACCELERATED = {  # timm's layers on our operators
    "swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224", "swin_s3_tiny_224", "swinv2_tiny_window8_256",
    "swinv2_tiny_window16_256", "swinv2_small_window8_256", "samvit_base_patch16_224", "mvitv2_tiny", "mvitv2_small",
}  # fmt: skip
ATTENDED = {  # vision transformers that take our layers by their name
    "vit_tiny_patch16_224", "vit_small_patch32_224", "vit_base_patch32_clip_224", "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2", "deit_tiny_patch16_224", "deit_small_distilled_patch16_224",
    "flexivit_small", "naflexvit_base_patch16_gap",
}  # fmt: skip
STOCK = ACCELERATED | ATTENDED
OURS = set(attn_plugins.timm.__all__)
CHOICE = os.environ["UPSTREAM_TESTS"]

if CHOICE == "layers":
    stock = timm.create_model

    @functools.wraps(stock)
    def create_model(model_name: str, *arguments: Any, **options: Any) -> Any:
        """Create the model with our layers."""
        base = model_name.split(".")[0]
        if base in ATTENDED:
            return stock(model_name, *arguments, attn_layer="attn1111", **options)
        model = stock(model_name, *arguments, **options)
        if base in ACCELERATED:
            attn_plugins.timm.accelerate(model)
        return model

    timm.create_model = create_model


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the chosen models that download no weights."""
    names = OURS if CHOICE == "names" else STOCK
    chosen, others = [], []
    for item in items:
        model = item.callspec.params.get("model_name", "") if hasattr(item, "callspec") else ""
        known = model.split(".")[0] in names and "pretrained" not in item.name
        (chosen if known else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = chosen
