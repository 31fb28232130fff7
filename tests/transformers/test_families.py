"""Every family of transformers that samples: outputs, gradients, dtypes, compilation and export are the stock ones."""

from __future__ import annotations

import copy
import math
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from attn_plugins.replacement import is_replaced
from attn_plugins.transformers import accelerate, sampling
from attn_plugins.transformers.places import DEFORMABLE, LAYER, place_of
from tests.helpers.slow_cases import slow_but
from tests.transformers.families import INSTALLED, build, inputs

PLACED = [place for place in DEFORMABLE if place.module.startswith("transformers.")]


class Calls(TorchDispatchMode):
    """Counter of the calls of our operators: of sampling layers, and of Swin's windows in backbones."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(operator in str(function) for operator in ("deformable_attention", "sequence_attention"))
        return function(*args, **(kwargs or {}))


def outputs(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the floating-point outputs of a model."""
    found = model(**given).items()
    return {name: out for name, out in found if isinstance(out, Tensor) and out.is_floating_point() and out.numel()}


def assert_same(ours: dict[str, Tensor], stock: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == stock.keys()
    scale = max([1.0, *(expected[expected.isfinite()].abs().max().item() for expected in stock.values())])
    for name, expected in stock.items():
        torch.testing.assert_close(
            ours[name], expected, rtol=0, atol=tolerance * scale, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_every_family_is_known():
    """Nothing that samples is left out, and every family that is known has a model here."""
    marks = re.compile(r"^(?:class MultiScaleDeformableAttention|def multi_scale_deformable_attention)", re.M)
    folder = Path(transformers.__file__).parent / "models"
    files = [file for file in folder.rglob("modeling_*.py") if marks.search(file.read_text())]
    there = {"transformers.models." + ".".join(file.relative_to(folder).with_suffix("").parts) for file in files}
    assert there == {place.module for place in PLACED if find_spec(place.module.rpartition(".")[0]) is not None}
    families = {module.split(".")[-2] for module in there} - {"deta"}
    assert families == set(INSTALLED)
    assert len(families) >= 8


def test_families_that_are_not_listed():
    """A class of that name and with those arguments has a place in every family of transformers, and only there."""
    from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention as Stock

    def placed(module: str, name: str, forward: Any) -> Any:
        return place_of(type(name, (nn.Module,), {"__module__": module, "forward": forward}))

    module = "transformers.models.new.modeling_new"
    place = placed(module, LAYER, Stock.forward)
    assert (place.module, place.layer, place.ours) == (module, LAYER, sampling.layer)
    assert placed(module, "OtherAttention", Stock.forward) is None
    assert placed("rfdetr.models.new", LAYER, Stock.forward) is None
    assert placed(module, LAYER, lambda self, value: value) is None


SINGLE = {"omdet_turbo"}  # stock mixes float32 and float64


@pytest.mark.parametrize("family", INSTALLED)
def test_outputs_and_gradients(family):
    model, given = build(family), inputs(family)
    keys = list(model.state_dict())
    with torch.no_grad():
        expected = outputs(model, given)
    dtype = torch.float32 if family in SINGLE else torch.float64
    double = copy.deepcopy(model).to(dtype)
    precise = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    gradients = []
    for accelerated in (False, True):
        if accelerated:
            assert accelerate(double)
        double.zero_grad()
        sum(out[out.isfinite()].square().sum() for out in outputs(double, precise).values()).backward()
        gradients.append({name: p.grad.clone() for name, p in double.named_parameters() if p.grad is not None})
    assert_same(gradients[1], gradients[0], 1e-4 if family in SINGLE else 1e-9)
    sampled = [grad for name, grad in gradients[0].items() if "sampling_offsets" in name]
    assert all(grad.abs().max() > 0 for grad in sampled)
    assert sampled
    replaced = accelerate(model)
    assert all(is_replaced(type(model.get_submodule(name))) for name in replaced)
    assert list(model.state_dict()) == keys
    with torch.no_grad(), Calls() as calls:
        found = outputs(model, given)
    assert calls.count == len(replaced)
    assert_same(found, expected, 1e-5)
    assert accelerate(model) == []


def recorded(model: nn.Module, given: dict[str, Tensor]) -> list[tuple[str, tuple[Any, ...], dict[str, Any], Any]]:
    """Return the name, arguments and output of every layer that samples."""
    samplers = {place.layer for place in DEFORMABLE}
    names = [name for name in accelerate(copy.deepcopy(model)) if type(model.get_submodule(name)).__name__ in samplers]
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
    handles = [
        model.get_submodule(name).register_forward_hook(
            lambda module, args, kwargs, output, name=name: calls.append((name, args, kwargs, output)), with_kwargs=True
        )
        for name in names
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    return calls


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("family", slow_but([*INSTALLED][::2], INSTALLED))
@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_half_precision(family, autocast):
    """Layers in bfloat16, and in a model under autocast, return the stock dtype and are as near to exact values."""
    model, given = build(family), inputs(family)
    dtype = torch.float32 if autocast else torch.bfloat16
    model = model.to(dtype)
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        if not works(lambda: model(**given)):  # stock casts its fusion to float32 there
            assert transformers.__version__ < "5"
            assert family in ("grounding_dino", "mm_grounding_dino")
            return
        calls = recorded(model, given)
        exact = copy.deepcopy(model).float()
        accelerate(model)
        for name, args, kwargs, expected in calls:
            with torch.no_grad():
                found = first(model.get_submodule(name)(*args, **kwargs))
                with torch.autocast("cpu", enabled=False):
                    wanted = first(exact.get_submodule(name)(*precise(args), **precise(kwargs)))
            assert found.dtype == first(expected).dtype
            assert (found - wanted).norm() <= 1.2 * (first(expected) - wanted).norm() + 1e-6 * wanted.norm()


def precise(value: Any) -> Any:
    """Return arguments with all half-precision tensors in float32."""
    if isinstance(value, tuple):
        return tuple(map(precise, value))
    if isinstance(value, dict):
        return {name: precise(x) for name, x in value.items()}
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


# Families of which stock does not compile or export some part, for a reason of its own.
CHECKED_BY_VALUES = {"rt_detr_v2", "d_fine", "deimv2", "oneformer"}
NOT_COMPILED: set[str] = set()
NOT_EXPORTED = {"omdet_turbo"}


@pytest.mark.parametrize("family", slow_but([*INSTALLED][::5], INSTALLED))
def test_layers_compile(family):
    """Layers compile in one graph where stock does, which checks shapes by values of tensors in some."""
    model, given = build(family), inputs(family)
    name, args, kwargs, expected = recorded(model, given)[0]
    stock = model.get_submodule(name)
    whole = works(lambda: torch.compile(stock, fullgraph=True, backend="aot_eager")(*args, **kwargs))
    assert whole or family in CHECKED_BY_VALUES
    accelerate(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.get_submodule(name), fullgraph=whole, backend="aot_eager")
    with torch.no_grad(), Calls() as calls:
        torch.testing.assert_close(first(compiled(*args, **kwargs)), first(expected), rtol=1e-4, atol=1e-4)
    assert calls.count == 1


def works(call: Callable[[], Any]) -> bool:
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            call()
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("family", INSTALLED)
def test_models_compile(family):
    """Models compile where stock does, with the same values."""
    model, given = build(family), inputs(family)
    stock = works(lambda: torch.compile(model, backend="aot_eager")(**given))
    assert stock or family in NOT_COMPILED
    if stock:
        with torch.no_grad():
            expected = outputs(model, given)
            accelerate(model)
            torch._dynamo.reset()
            assert_same(outputs(torch.compile(model, backend="aot_eager"), given), expected, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", INSTALLED)
def test_models_export(family):
    """Models export where stock does, with the same values."""
    model, given = build(family), inputs(family)
    stock = works(lambda: torch.export.export(model, (), given, strict=False))
    assert stock or family in NOT_EXPORTED
    if stock:
        with torch.no_grad():
            expected = outputs(model, given)
            accelerate(model)
            exported = torch.export.export(model, (), given, strict=False).module()
            assert_same(outputs(exported, given), expected, 1e-5)


DROP_IN = """
import sys, torch
from tests.transformers.families import INSTALLED, build, inputs
from tests.transformers.test_families import Calls, outputs
later = sys.argv[1] == "later"
models = {} if later else {family: build(family) for family in INSTALLED}
from attn_plugins.transformers import accelerate, drop_in
drop_in.replace()
for family in INSTALLED:
    model = models.get(family) or build(family)
    torch.manual_seed(0)
    with torch.no_grad(), Calls() as calls:
        found = outputs(model, inputs(family))
    total = sum(out[out.isfinite()].double().sum().item() for out in found.values())
    print("RESULT", family, calls.count, len(accelerate(model)), total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["later", "before"])
def test_drop_in(when):
    """All models sample by our operator, also those of modules that are imported later and those that exist."""
    done = subprocess.run(
        [sys.executable, "-c", DROP_IN, when], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert [family for family, *_ in found] == INSTALLED
    for family, calls, replaced, total in found:
        kept = when == "before" and family in ("d_fine", "deimv2")  # their layers keep the stock function
        assert (int(calls) == 0, int(replaced) > 0) == (kept, kept), family
        with torch.no_grad():
            stock = outputs(build(family), inputs(family))
        expected = sum(out[out.isfinite()].double().sum().item() for out in stock.values())
        assert math.isclose(float(total), expected, rel_tol=1e-4, abs_tol=1e-3), family
