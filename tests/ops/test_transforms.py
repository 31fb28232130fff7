"""``torch.func`` and batched gradients give what plain autograd gives, call by call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_plugins import ops
from tests.helpers.operator_checks import relative_error
from tests.ops.contract_examples import EXAMPLES, OPERATORS
from tests.ops.test_contract import Calls, example

every_example = pytest.mark.parametrize("name", EXAMPLES)
every_operator = pytest.mark.parametrize("name", OPERATORS)


class Call:
    """An example in float64 as functions of its floating-point tensors."""

    def __init__(self, name: str, size="small"):
        some = example(name, size, dtype=torch.float64)
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
def test_second_gradients_with_a_graph(name):
    """The gradient of the output is a function of the arguments then, and one argument of the other."""
    call = Call(name, "tiny")

    def third(*floats: Tensor) -> tuple[Tensor, ...]:
        first, *rest = leaves = [t.detach().requires_grad_() for t in floats]
        terms = first, *[t + first.sum() / 100 for t in rest]
        total = call.loss(*terms)
        for _ in range(2):
            total = sum(g.square().sum() for g in torch.autograd.grad(total, terms, create_graph=True))
        return torch.autograd.grad(total, leaves)

    ours = third(*call.floats)
    with ops.backend("reference"):
        expected = third(*call.floats)
    for found, wanted in zip(ours, expected):
        assert relative_error(found, wanted) < 1e-9


@every_example
def test_grad_and_grad_of_grad(name):
    call = Call(name)
    assert_equal(call.gradients(*call.floats), by_autograd(call.loss, call.floats))

    def penalty(*leaves: Tensor) -> Tensor:
        grads = torch.autograd.grad(call.loss(*leaves), leaves, create_graph=True)
        return sum(g.square().sum() for g in grads)

    assert_equal(call.second(*call.floats), by_autograd(penalty, call.floats))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # as of every operator but torch's own
@every_operator
def test_jacobians_and_hessians(name):
    call = Call(name, "tiny")
    *given, last = call.floats
    output, loss = (lambda t, function=function: function(*given, t) for function in (call.output, call.loss))
    jacobian = torch.autograd.functional.jacobian(output, last)
    assert_equal(torch.func.jacrev(output)(last), jacobian)
    assert_equal(torch.autograd.functional.jacobian(output, last, vectorize=True), jacobian)
    hessian = torch.autograd.functional.hessian(loss, last)
    assert_equal(torch.autograd.functional.hessian(loss, last, vectorize=True), hessian)
    assert_equal(torch.func.jacrev(torch.func.jacrev(loss))(last), hessian)
    with ops.backend("reference"):
        assert_equal(torch.func.hessian(loss)(last), hessian)


@pytest.mark.parametrize(
    "name, which, order",
    [
        *((name, which, "gradients") for name in OPERATORS for which in ("all", "first", "last", "all but last")),
        *((name, ("all", "last")[n % 2], ("output", "second")[n // 2 % 2]) for n, name in enumerate(EXAMPLES)),
    ],
)
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


@every_example
def test_gradients_through_a_map_over_nothing(name):
    call = Call(name, "tiny")
    leaves = [stack[:0].requires_grad_() for stack in call.stacks()]
    output = torch.vmap(call.output)(*leaves)
    assert output.shape == (0, *call.output(*call.floats).shape)
    grads = torch.autograd.grad(output.sum(), leaves)
    assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


@pytest.mark.parametrize(
    "name",
    [
        "global_attention, content", "sequence_attention, causal band", "window_attention",
        "criss_cross_attention, content", "deform_conv2d", "deform_conv1d", "deformable_attention",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [0, 3])
def test_images_of_all_indices_are_one_call(name, size):
    """Where each tensor with an axis of images is mapped; weights are everyone's, and not differentiated."""
    call = Call(name)
    shared = range(2, 4) if name == "deform_conv2d" else range(2, 3) if name == "deform_conv1d" else ()
    dims = tuple(None if n in shared else 1 for n in call.numbers)
    wanted = tuple(n for n in call.numbers if n not in shared)
    args = [t if over is None else torch.stack([t] * 3, 1)[:, :size] for t, over in zip(call.floats, dims)]
    with Calls() as recorded:
        grads = torch.vmap(torch.func.grad(call.loss, wanted), dims)(*args)
    assert len(recorded.calls) == recorded.count == 2
    for grad, expected in zip(grads, torch.func.grad(call.loss, wanted)(*call.floats)):
        assert_equal(grad, expected.expand(size, *expected.shape))


@every_operator
def test_levels_of_vmap(name):
    """Each pair of an index of the first argument and one of the last, by a random choice of levels and axes."""
    call = Call(name)
    first, *others = call.stacks()
    *same, last = others
    inner = torch.vmap(call.gradients, (None,) * len(call.numbers[:-1]) + (1,), out_dims=1)
    outer = torch.vmap(inner, (0,) + (None,) * len(others))
    grads = outer(first, *call.floats[1:-1], last.movedim(0, 1))
    for n in range(3):
        for k in range(3):
            expected = call.gradients(first[n], *call.floats[1:-1], last[k])
            assert_equal(tuple(g[n].select(1, k) for g in grads), expected)


@every_operator
def test_vjp_after_its_level(name):
    """Without the dispatcher, the backward would get the tensors of a level that has ended."""
    call = Call(name)
    output, vjp = torch.func.vjp(call.output, *call.floats)
    with torch.no_grad():
        grads = vjp(output)
    leaves = [t.detach().requires_grad_() for t in call.floats]
    assert_equal(grads, torch.autograd.grad(call.output(*leaves), leaves, output))


@every_operator
def test_autocast(name):
    call = Call(name)
    floats = [t.float() for t in call.floats]
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.stack([call.output(*floats), call.output(floats[0] / 2, *floats[1:])])
        outer = torch.vmap(call.output, (0,) + (None,) * len(floats[1:]))
        actual = outer(torch.stack([floats[0], floats[0] / 2]), *floats[1:])
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", ["deform_conv2d", pytest.param("sequence_attention", marks=pytest.mark.slow)])
def test_compiled(name):
    torch._dynamo.reset()
    call = Call(name)
    function = torch.vmap(call.gradients)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert_equal(compiled(*call.stacks()), function(*call.stacks()))
