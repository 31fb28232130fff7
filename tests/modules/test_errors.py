"""A wrong argument of any constructor and a wrong first input of any module give one error that names it."""

from __future__ import annotations

import inspect
import re
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from attn_plugins import modules
from attn_plugins.modules.common.checks import check_heads, one_of, pair, positive
from attn_plugins.modules.maps.non_local_block import Mode
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


# The input's axis of channels, where it is not the last one.
SECOND = ("1d", "2d", "3d")


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


def test_checks_that_constructors_share():
    positive(a=1)
    pair("size", 2)
    check_heads(8, 2, 0.0)
    for mode in get_args(Mode):
        one_of(Mode, mode=mode)
    for check, message in (
        (lambda: positive(a=0), "a must be a positive int, got 0"),
        (lambda: pair("size", 0), "size must be an int or two ints, each at least 1, got 0"),
        (lambda: pair("size", (1, 2, 3)), r"two ints, each at least 1, got \(1, 2, 3\)"),
        (lambda: check_heads(6, 4, 0.0), "num_heads must divide embed_dim = 6, got 4"),
        (lambda: check_heads(6, 3, 1.0), "dropout must be at least 0 and below 1, got 1.0"),
        (lambda: one_of(Mode, mode="softmax"), "^mode must be one of gaussian, embedded_gaussian, dot_product, conc"),
    ):
        with pytest.raises(ValueError, match=message):
            check()


@pytest.mark.parametrize(
    "build",
    [modules.BilateralSelfAttention, modules.MultiheadAttention, modules.MultiheadSpatialAttention,
     modules.RelativeSelfAttention, modules.SpaceTimeSelfAttention, modules.SpatialSelfAttention,
     modules.WindowSelfAttention, modules.EntangledAttention, modules.MultiScaleDeformableAttention],
)  # fmt: skip
def test_heads_divide_the_width(build):
    with pytest.raises(ValueError, match="num_heads must divide embed_dim = 7, got 2"):
        build(7, 2)
