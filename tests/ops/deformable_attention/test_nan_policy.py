"""Locations that are not finite: read as 0, or as NaN, in which every backend follows ``grid_sample`` on a CPU."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_plugins import ops
from tests.helpers.slow_cases import slow_but
from tests.ops.contract_examples import Example
from tests.ops.deform_conv.operands import same_where_finite
from tests.ops.deformable_attention.test_deformable_attention import by
from tests.ops.test_contract import example, forced

INF, NAN = math.inf, math.nan
LEVELS = ((5, 7), (3, 4), (1, 2))  # of the small example
# Query 1 of image 0 has one bad sample, of the second level; its others lie inside and outside the maps.
PLACES = {
    "x is NaN": (NAN, 0.4), "y is NaN": (0.4, NAN), "both are": (NAN, NAN), "x is infinite": (INF, 0.4),
    "y is -infinite": (0.4, -INF), "NaN beside the map": (5.0, NAN), "far away": (1e30, 0.4),
}  # fmt: skip


def cases() -> Iterator[Any]:
    """Every backend and place; those of Triton's interpreter, which takes some 15 seconds for each, are slow."""
    for case in by.args[1]:
        values, marks = (case.values, case.marks) if isinstance(case, type(pytest.param())) else (case, ())
        for place in PLACES:
            interpreted = values[1:] == ("triton", "cpu")
            yield pytest.param(*values, place, marks=[*marks, *([pytest.mark.slow] if interpreted else [])])


everywhere = pytest.mark.parametrize("name, backend, device, place", list(cases()))


def spoilt(some: Example, place: tuple[float, float]) -> Example:
    some.tensors["sampling_locations"][0, 1, 2, 1, 0] = torch.tensor(place)
    return some


def by_grid_sample(value: Tensor, sampling_locations: Tensor, attention_weights: Tensor) -> Tensor:
    """Compute deformable attention as the layers of transformers do."""
    B, _, M, d = value.shape
    Q = sampling_locations.shape[1]
    grid, samples = 2 * sampling_locations - 1, []
    for level, (part, (H, W)) in enumerate(zip(value.split([h * w for h, w in LEVELS], 1), LEVELS)):
        maps = part.flatten(2).transpose(1, 2).reshape(B * M, d, H, W)
        samples.append(F.grid_sample(maps, grid[:, :, :, level].transpose(1, 2).flatten(0, 1), align_corners=False))
    weights = attention_weights.transpose(1, 2).reshape(B * M, 1, Q, -1)
    output = (torch.stack(samples, -2).flatten(-2) * weights).sum(-1).view(B, M * d, Q)
    return output.transpose(1, 2)


def gradients(output: Tensor, leaves: dict[str, Tensor], grad_output: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(output, list(leaves.values()), grad_output.to(output))
    return [output.detach().cpu(), *(grad.cpu() for grad in found)]


def check(some: Example, backend: Any, device: str, grad_output: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Compare output and gradients with those of ``grid_sample`` in float64, finite numbers and where they are."""

    def leaves_on(device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: t.detach().to(device, dtype).requires_grad_() for name, t in some.tensors.items()}

    leaves = leaves_on("cpu", torch.float64)
    expected = gradients(by_grid_sample(**leaves), leaves, grad_output)
    leaves = leaves_on(device, dtype)
    with forced(backend):
        output = ops.deformable_attention(spatial_shapes=LEVELS, **leaves, nan_policy="propagate")
        actual = gradients(output, leaves, grad_output)
    for name, found, wanted in zip(("output", *leaves), actual, expected):
        assert same_where_finite(found, wanted, 1e-4), name


def small() -> tuple[Example, Tensor]:
    some = example("deformable_attention", "small", "cpu", torch.float32, far=1.5)
    return some, torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(0))


@everywhere
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow")
def test_propagated_as_by_grid_sample(name, backend, device, place):
    some, grad_output = small()
    check(spoilt(some, PLACES[place]), backend, device, grad_output)


@everywhere
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow")
def test_read_as_zero_unless_asked(name, backend, device, place):
    some, grad_output = small()
    leaves = {n: t.to(device).requires_grad_() for n, t in spoilt(some, PLACES[place]).tensors.items()}
    with forced(backend):
        results = gradients(ops.deformable_attention(spatial_shapes=LEVELS, **leaves), leaves, grad_output)
    assert all(result.isfinite().all() for result in results)


KINDS = [*itertools.product(["cpu", "eager", "reference"], [3, 32], [torch.float32, torch.float64])]
QUICK = [kind for kind in KINDS if kind[0] == "cpu" or kind[1:] in ((3, torch.float64), (32, torch.float32))]


@pytest.mark.parametrize("backend, d, dtype", slow_but(QUICK, KINDS))
@pytest.mark.parametrize("bad", [NAN, INF, pytest.param(-INF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["value", "sampling_locations", "attention_weights", "grad_output"])
def test_any_number_that_is_not_finite(backend, dtype, d, bad, where):
    """In one element of each tensor in turn; in a gradient, samples beside the map have NaN as well."""
    some = example("deformable_attention", "small", "cpu", torch.float32, far=1.5, d=d)
    grad_output = torch.randn(2, 6, 3 * d, generator=torch.Generator().manual_seed(0))
    target = grad_output if where == "grad_output" else some.tensors[where]
    for number in torch.randint(target.numel(), (8,), generator=torch.Generator().manual_seed(1)).tolist():
        kept = target.flatten()[number].item()
        target.view(-1)[number] = bad
        check(some, backend, "cpu", grad_output, dtype)
        target.view(-1)[number] = kept


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "far away"])
def test_halves_propagate_nan_as_grid_sample(dtype, place):
    """As in float32: in halves, the value's gradient of ``grid_sample`` is NaN in the first row or column as well."""
    some, grad_output = small()
    leaves = {n: t.to(dtype).requires_grad_() for n, t in spoilt(some, PLACES[place]).tensors.items()}
    expected = gradients(by_grid_sample(**leaves), leaves, grad_output)
    output = ops.deformable_attention(spatial_shapes=LEVELS, **leaves, nan_policy="propagate")
    actual = gradients(output, leaves, grad_output)
    for name, found, wanted in zip(("output", *leaves), actual, expected):
        assert found.isfinite().all() if name == "value" else torch.equal(found.isfinite(), wanted.isfinite()), name


@pytest.mark.parametrize("way", ["compile", "export"])
def test_graphs_keep_the_policy(way):
    some, _ = small()
    spoilt(some, PLACES["x is NaN"])

    class Module(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            value, places, weights = tensors
            return ops.deformable_attention(value, LEVELS, places, weights, nan_policy="propagate")

    tensors = tuple(some.tensors.values())
    if way == "compile":
        torch._dynamo.reset()
        graph: Any = torch.compile(Module(), backend="aot_eager", fullgraph=True)
    else:
        graph = torch.export.export(Module(), tensors).module()
    output = graph(*tensors)
    assert output[0, 1, 8:].isnan().all()
    assert torch.equal(output.isfinite(), by_grid_sample(*tensors).isfinite())


@pytest.mark.parametrize("policy", ["omit", None, True])
def test_unknown_policies_raise(policy):
    some, _ = small()
    with pytest.raises(ValueError, match=f"^nan_policy must be one of zero, propagate, got {policy!r}"):
        some.call(**some.tensors, nan_policy=policy)
