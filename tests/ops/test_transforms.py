"""``torch.func`` and batched gradients give what plain autograd gives, call by call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_plugins import ops
from tests.ops.contract_examples import EXAMPLES, OPERATORS

every_example = pytest.mark.parametrize("name", EXAMPLES)
every_operator = pytest.mark.parametrize("name", OPERATORS)


class Call:
    """An example in float64 as functions of its floating-point tensors."""

    def __init__(self, name: str, size="small"):
        some = EXAMPLES[name](size, None).to("cpu", torch.float64)
        names = list(some.floats())
        self.floats = tuple(some.floats().values())
        self.numbers = tuple(range(len(names)))
        self.output = lambda *floats: some.call(**{**some.tensors, **dict(zip(names, floats))})

    def loss(self, *floats: Tensor) -> Tensor:
        return self.output(*floats).square().sum()

    def gradients(self, *floats: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(self.loss, self.numbers)(*floats)

    def second(self, *floats: Tensor) -> tuple[Tensor, ...]:
        return torch.func.grad(lambda *t: sum(g.square().sum() for g in self.gradients(*t)), self.numbers)(*floats)

    def stacks(self) -> list[Tensor]:
        return [torch.stack((t, t / 2 + 0.01, t.flip(-1))) for t in self.floats]


def assert_equal(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def by_autograd(function, floats, **options) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in floats]
    return torch.autograd.grad(function(*leaves), leaves, **options)


@every_example
def test_grad_and_grad_of_grad(name):
    call = Call(name)
    assert_equal(call.gradients(*call.floats), by_autograd(call.loss, call.floats))

    def penalty(*leaves: Tensor) -> Tensor:
        grads = torch.autograd.grad(call.loss(*leaves), leaves, create_graph=True)
        return sum(g.square().sum() for g in grads)

    assert_equal(call.second(*call.floats), by_autograd(penalty, call.floats))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # as of every operator but torch's own
@every_example
def test_jacobians_and_hessians(name):
    call = Call(name, "tiny")
    jacobian = torch.autograd.functional.jacobian(call.output, call.floats)
    assert_equal(torch.func.jacrev(call.output, call.numbers)(*call.floats), jacobian)
    assert_equal(torch.autograd.functional.jacobian(call.output, call.floats, vectorize=True), jacobian)
    hessian = torch.autograd.functional.hessian(call.loss, call.floats)
    assert_equal(torch.autograd.functional.hessian(call.loss, call.floats, vectorize=True), hessian)
    with ops.backend("reference"):
        assert_equal(torch.func.hessian(call.loss, call.numbers)(*call.floats), hessian)


@pytest.mark.sampled(24)
@every_example
@pytest.mark.parametrize("order", ["output", "gradients", "second"])
@pytest.mark.parametrize("which", ["all", "first", "last", "all but last"])
def test_vmap_is_a_loop(name, which, order):
    call = Call(name)
    last = len(call.floats) - 1
    mapped = [dict(all=True, first=n == 0, last=n == last).get(which, n != last) for n in call.numbers]
    args = [stack if over else t for stack, t, over in zip(call.stacks(), call.floats, mapped)]
    dims = tuple(0 if over else None for over in mapped)
    function = getattr(call, order)
    loop = [function(*(arg[n] if over else arg for arg, over in zip(args, mapped))) for n in range(3)]
    expected = torch.stack(loop) if order == "output" else tuple(map(torch.stack, zip(*loop)))
    assert_equal(torch.vmap(function, dims)(*args), expected)
