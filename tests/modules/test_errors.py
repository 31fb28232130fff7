"""A wrong argument of any constructor and a wrong first input of any module give one error that names it."""

from __future__ import annotations

import inspect
import re
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

from attn_plugins import modules
from tests.helpers.module_inputs import inputs
from tests.helpers.public_modules import MODULES, OPTIONS, VARIANTS

UNCHECKED = ("device", "dtype", "return", "norm_layer", "sources")
MAY_BE_0 = ("padding", "shift_size", "dv", "num_layers of DualWayEncoder")


def wrong_values(argument: str, hint: Any, owner: str) -> list[Any]:
    """Return values that no argument of this type may have: of an int, a choice and a probability."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if int in kinds:
        return [-2, 1.5, *([] if argument in MAY_BE_0 or f"{argument} of {owner}" in MAY_BE_0 else [0])]
    if any(get_origin(kind) is Literal for kind in kinds):
        return ["other"]
    if argument == "attention_type":
        return ["012", "0120", "01012", 110]
    return [-0.1] if argument == "dropout" else []


@pytest.mark.parametrize("name", MODULES)
def test_a_wrong_argument_is_named(name):
    kind = getattr(modules, name)
    hints = get_type_hints(kind.__init__)
    checked = [argument for argument in hints if argument not in UNCHECKED]
    assert checked
    for argument in checked:
        for value in wrong_values(argument, hints[argument], name):
            with pytest.raises(ValueError, match=rf"{argument} .*got {re.escape(repr(value))}"):
                kind(**{**OPTIONS[name], argument: value})


# Arguments that do not go together, or that are of no use to this module, by variant.
CENTRE = "kernel_size must be odd, got 4"
EQUAL = "query_channels and source_channels must be equal .* got 8 and 6"
INFINITE = "smoothing 'zscore' needs another outside than '-inf'"
ODD = "kernel_size must be a positive odd int, or any with causal, got 4"
SIZE = r"'relative' needs input_size=\(H, W\)"
SIDES = r"input_size must be an int or two ints, each at least 1, got"
BILATERAL = ("BilateralCrissCross2d", "BilateralNonLocal2d")
HEADS = ("BilateralSelfAttention", "EntangledAttention", "MultiheadAttention", "MultiheadSpatialAttention",
         "RelativeSelfAttention", "SpaceTimeSelfAttention", "SpatialSelfAttention", "WindowSelfAttention")  # fmt: skip
UNFIT: list[tuple[str, dict[str, Any], str]] = [
    *((name, dict(embed_dim=7), "num_heads must divide embed_dim = 7, got 2") for name in HEADS),
    ("MultiScaleDeformableAttention", dict(embed_dims=7), "num_heads must divide embed_dim = 7, got 2"),
    *((name, dict(kernel_size=4), CENTRE) for name in (*BILATERAL, "DynamicConv2d", "LocalBilateralConv2d")),
    *((name, dict(kernel_size=4), ODD) for name in ("BilateralSelfAttention", "DynamicConv1d")),
    *((name, dict(outside="-inf"), INFINITE) for name in BILATERAL),
    *((name, dict(position="relative"), SIZE) for name in ("CrissCrossAttention2d", "NonLocal2d")),
    *(("AlignmentAttention, dot", dict(score=s, source_channels=6), EQUAL) for s in ("dot", "scaled-dot", "cosine")),
    ("AAConv2d", dict(dk=5), "dk must be a positive multiple of num_heads = 2, got 5"),
    ("AAConv2d", dict(dk=0), "dk must be a positive multiple of num_heads = 2, got 0"),
    ("AAConv2d", dict(dv=3), "dv must be a multiple of num_heads = 2 from 0 to out_channels = 8, got 3"),
    ("AAConv2d", dict(dv=10), "dv must be a multiple of num_heads = 2 from 0 to out_channels = 8, got 10"),
    ("AAConv2d", dict(position="sine"), "'sine' needs in_channels in multiples of 4, got 6"),
    ("AAConv2d", dict(input_size=None), SIZE),
    ("AAConv2d", dict(input_size=(5, 0)), SIDES),
    ("AAConv2d", dict(padding=0), r"padding must be None or \(1, 1\)"),
    ("AAConv2d", dict(kernel_size=4), "kernel_size must be odd"),
    ("AlignmentAttention, dot", dict(hidden_channels=8), "must be None except for 'additive', got 8 for 'dot'"),
    ("AttendedLSTM", dict(num_layers=0), "num_layers must be a positive int, got 0"),
    ("BilateralSelfAttention", dict(outside="-inf", smoothing="zscore"), INFINITE),
    ("CausalDeformableConv1d", dict(offset_scale=0.0), "offset_scale must be positive, got 0"),
    ("CrissCrossAttention2d", dict(position="relative", input_size=(3, 0)), SIDES),
    ("DeformableConv2d", dict(kernel_size=(3, 0)), "kernel_size must be"),
    ("DeformableConv2d", dict(groups=3), "groups must divide in_channels 4"),
    ("DeformableConv2d", dict(offset_groups=3), "offset_groups must divide in_channels 4"),
    ("DeformableConv2d", dict(out_channels=5, groups=2), "out_channels must be a multiple of groups 2"),
    ("DynamicConv2d", dict(in_channels=20), "in_channels must be a multiple of num_groups = 16, got 20"),
    ("GatedConvBlock", dict(kernel_size=0), "kernel_size must be a positive int, got 0"),
    ("GeneralizedAttention2d", dict(num_heads=3), "num_heads must divide in_channels = 16"),
    ("GeneralizedAttention2d", dict(num_heads=32), "in_channels must be an int of at least num_heads"),
    ("GeneralizedAttention2d", dict(spatial_range=4), "spatial_range must be -1"),
    ("GeneralizedAttention2d", dict(spatial_range=0), "spatial_range must be -1"),
    ("GeneralizedAttention2d", dict(position_embedding_dim=7), "position_embedding_dim must be even"),
    ("GeneralizedAttention2d, as mmcv's", dict(spatial_range=-2), "half-range of at least 0"),
    ("GeneralizedAttention2d, as mmcv's", dict(position_embedding_dim=6), "multiple of 4"),
    ("GeneralizedAttention2d, as mmcv's", dict(attention_type="11"), "four bits"),
    ("LocalBilateralConv2d", dict(num_heads=3), "out_channels must be a multiple of num_heads = 3, got 16"),
    ("LocalBilateralConv2d", dict(iterations=2, content=False), "iterations must be 1 without content"),
    ("LocalBilateralConv2d", dict(content=False, geometric=False), "content or geometric must be True"),
    ("LocalBilateralConv2d", dict(padding=2), r"padding must be at most \(1, 1\)"),
    ("LocalBilateralConv2d", dict(dilation=(1, 2, 3)), "dilation must be an int or two ints"),
    ("LocalBilateralConv2d", dict(groups=2), "groups must be 1"),
    (
        "MultiScaleDeformableAttention",
        dict(embed_dims=12, num_heads=3, value_proj_ratio=0.4),
        r"value_proj_ratio must give a width .* 3 divides, got 0\.4 of 12",
    ),
    (
        "MultiheadSpatialAttention",
        dict(attention_type="0111", query_key_bias=True),
        "query_key_bias needs the first bit of attention_type, got '0111'",
    ),
    ("MultiheadSpatialAttention", dict(attention_range=4), "attention_range must be -1 .* or a positive odd int"),
    ("MultiheadSpatialAttention", dict(attention_range=0), "attention_range must be"),
    ("MultiheadSpatialAttention", dict(embed_dim=9, num_heads=3), "embed_dim must be even for relative positions"),
    ("MultiheadSpatialAttention", dict(causal=True, kdim=5), "and embed_dim = 16 with causal, got 5"),
    (
        "NonLocal2d, dot product",
        dict(position="relative", input_size=4),
        "needs mode 'gaussian' or 'embedded_gaussian'",
    ),
    ("SpatialSelfAttention", dict(spatial_range=4), r"spatial_range must be -1 \(all keys\) or a positive odd int"),
    ("SpatialSelfAttention", dict(kernel_size=4), r"kernel_size must be a positive odd int \(k\), or None, got 4"),
    ("SpatialSelfAttention", dict(kernel_size=3, outside="-inf"), INFINITE),
    ("SpatialSelfAttention", dict(embed_dim=9, num_heads=3), "embed_dim must be even"),
    ("ViTAdapter", dict(deform_num_heads=3), "deform_num_heads must divide the width of vit, 8, got 3"),
    ("ViTAdapter", dict(cffn_ratio=0.1), "cffn_ratio must be 0 or give a width of at least 1, got 0.1 of 8"),
    ("ViTAdapter", dict(vit_features="each"), "vit_features='each' needs 4 interactions, got 1"),
    ("ViTAdapter", dict(drop_path_rate=1.0), "drop_path_rate must be at least 0 and below 1, got 1.0"),
    ("ViTAdapter", dict(out_indices=(0, 4)), r"out_indices must be from 0 to 3, got \(0, 4\)"),
    (
        "ViTAdapter",
        dict(interaction_indexes=[[0, 1]]),
        r"consecutive blocks, all 1 of vit, such as .*, got \[\[0, 1\]\]",
    ),
    ("ViTAdapter", dict(interaction_indexes=[[0, 0], [0, 0]]), "interaction_indexes must be the first and last"),
    ("WindowSelfAttention", dict(shift_size=3), r"shift_size must be less than window_size \(3, 3\)"),
    ("WindowSelfAttention", dict(pretrained_window_size=7), "pretrained_window_size must be None"),
    ("WindowSelfAttention", dict(window="centred", window_size=(7, 8)), r"must be odd for .*, got \(7, 8\)"),
    ("WindowSelfAttention", dict(window="centred", shift_size=2), "shift_size must be 0 for window='centred', got 2"),
    ("WindowSelfAttention", dict(kernel_size=3), "kernel_size must be None except for bilateral logits, got 3"),
    ("WindowSelfAttention", dict(position="bilateral", kernel_size=4), "kernel_size must be a positive odd int"),
    ("WindowSelfAttention", dict(position="bilateral", outside="-inf"), "smoothing 'zscore' needs another outside"),
]


def test_arguments_that_do_not_fit_are_named():
    for name, change, message in UNFIT:
        with pytest.raises(ValueError, match=message):
            VARIANTS[name](**change)


# The input's axis of channels, where it is not the last one.
SECOND = ("1d", "2d", "3d", "ViTAdapter", "ViTPyramid")


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.startswith("GatedBilateralController")])
def test_a_wrong_input_is_named(name):
    """No Tensor, no batch, too few channels, no positions, another dtype, another device."""
    module, ((x, *rest), kwargs) = VARIANTS[name]().eval(), inputs(name)
    argument = f"({next(iter(inspect.signature(module.forward).parameters))}|input|query)"  # or the name inside
    channels = 1 if name.split(",")[0].endswith(SECOND) else x.dim() - 1
    nowhere = x[..., :0] if channels == 1 else x[:, :0]
    wrong = {
        "a list": ([1.0], TypeError, f"{argument} must be a Tensor, got list"),
        "no batch": (x[0], ValueError, f"{argument} must have shape"),
        "channels": (x.narrow(channels, 1, x.shape[channels] - 1), ValueError, f"{argument} must have shape"),
        "no positions": (nowhere, ValueError, f"{argument} (must have shape|is too small)"),
        "dtype": (x.double(), TypeError, r"must have the (module|weight)'s dtype torch\.float32, got torch\.float64"),
        "integers": (x.long(), TypeError, f"{argument} must (be floating-point|have the module's dtype)"),
        "device": (x.to("meta"), ValueError, f"{argument} must be on the (module|weight)'s device cpu, got meta"),
    }
    if name.startswith("AlignmentAttention"):  # of which some scores have no weights
        for other in ("dtype", "integers", "device"):
            wrong[other] = (wrong[other][0], (TypeError, ValueError), "source must .* query's (dtype|device)")
    if name.startswith("MultiScaleDeformableAttention"):  # which may have no queries
        del wrong["no positions"]
    for value, error, message in wrong.values():
        with pytest.raises(error, match=message):
            module(value, *rest, **kwargs)


# Beside the first, these take further Tensors; a sampling's points may have a batch of one and another dtype.
FURTHER = [name for name in VARIANTS if len([t for t in pytree.tree_leaves(inputs(name)) if isinstance(t, Tensor)]) > 1
           and not name.startswith("MultiScaleDeformableAttention")]  # fmt: skip
ARGUMENTS = r"(source|attributes|key|words|x|visual|semantic|visual_guidance|semantic_guidance)"


@pytest.mark.parametrize("name", FURTHER)
def test_a_wrong_further_input_is_named(name):
    """No Tensor, another batch, too few channels or keys, none at all, another dtype."""
    module, (leaves, structure) = VARIANTS[name]().eval(), pytree.tree_flatten(inputs(name))
    for place in [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)][1:]:
        tensor, shape, kind = leaves[place], f"{ARGUMENTS} must have ", rf"{ARGUMENTS} must have .* torch\.float32, got"
        other = tensor.double()
        if not tensor.is_floating_point():
            shape = rf"key_padding_mask must have shape \(2, {tensor.shape[1]}\)"
            other, kind = tensor.float(), r"key_padding_mask must be a bool Tensor, .* got torch\.float32"
        wrong = [(t, ValueError, shape) for t in (tensor[:1], tensor[..., 1:], tensor[:, :0])]
        wrong += [([1.0], TypeError, r"\S+ must be a (bool )?Tensor, .*got list"), (other, TypeError, kind)]
        for value, error, message in wrong:
            args, kwargs = pytree.tree_unflatten([*leaves[:place], value, *leaves[place + 1 :]], structure)
            with pytest.raises(error, match=f"^{message}"):
                module(*args, **kwargs)
