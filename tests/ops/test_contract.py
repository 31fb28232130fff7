"""What every operator promises on every device: gradients, dtypes, layouts, compilation, determinism, clear errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins import ops
from attn_plugins.core.operator import OPERATORS as operators
from tests.helpers.operator_checks import DEVICES, deterministic_mode, relative_error
from tests.ops.contract_examples import EXAMPLES, OPERATORS, Example

pytestmark = pytest.mark.usefixtures("full_float32")
every_example = pytest.mark.parametrize("name", EXAMPLES)
every_operator = pytest.mark.parametrize("name", OPERATORS)
every_device = pytest.mark.parametrize("device", DEVICES)
# Rounding errors by norm; sums of halves are accumulated in float32.
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NAMESPACE = "attn_plugins"
FIRST = None  # the backend that a call gets by itself


def forced(backend: str | None):
    return nullcontext() if backend is FIRST else ops.backend(backend)


def example(name: str, size="small", device="cpu", dtype=torch.float32, **extents) -> Example:
    return EXAMPLES[name](size, **extents).to(device, dtype)


def differentiate(call: Callable[..., Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the output, and the gradients for a fixed gradient of the output."""
    output = call(**leaves)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(output, list(wanted.values()), grad.to(output))
    return dict(zip(["output", *wanted], [output.detach(), *grads]))


def results(some: Example) -> dict[str, Tensor]:
    return differentiate(some.call, some.leaves())


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        assert actual[name].shape == wanted.shape, name
        assert relative_error(actual[name].cpu(), wanted.cpu()) <= bound, name


@every_device
@every_example
def test_gradients_of_both_orders(name, device):
    some = example(name, "tiny", device, torch.float64)
    names, leaves = list(some.floats()), some.leaves()

    def function(*floats: Tensor) -> Tensor:
        return some.call(**{**leaves, **dict(zip(names, floats))})

    floats = [leaves[n] for n in names]
    assert torch.autograd.gradcheck(function, floats, nondet_tol=1e-10)
    assert torch.autograd.gradgradcheck(function, floats, nondet_tol=1e-10, fast_mode=True)


@every_device
@every_operator
def test_second_gradients_of_a_part(name, device):
    """Only some arguments need gradients, as with frozen position logits."""
    some = example(name, "tiny", device, torch.float64)
    first, *_, last = some.floats()
    leaves = {n: t.detach().requires_grad_(n in (first, last)) for n, t in some.tensors.items()}
    function = lambda a, b: some.call(**{**leaves, first: a, last: b})  # noqa: E731
    assert torch.autograd.gradgradcheck(function, [leaves[first], leaves[last]], nondet_tol=1e-10, fast_mode=True)


class Calls(TorchDispatchMode):
    """Keeps our operators' calls with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}
        self.count = 0
        self.returned: tuple = ()  # by the last of them

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == NAMESPACE:
            self.calls[function] = args
            self.count += 1
            self.returned = function(*args, **(kwargs or {}))
            return self.returned
        return function(*args, **(kwargs or {}))


def opcheck(operator: Callable, arguments: tuple, grad: bool) -> None:
    copies = [
        a.detach().clone().requires_grad_(grad and a.is_floating_point()) if isinstance(a, Tensor) else a
        for a in arguments
    ]
    torch.library.opcheck(operator, copies, rtol=1e-4, atol=1e-4)


@every_device
@pytest.mark.parametrize(
    "name, dtype",
    [
        *((n, torch.float32) for n in OPERATORS if n != "deform_conv1d"),
        pytest.param("deform_conv1d", torch.float32, marks=pytest.mark.slow),
        *(
            pytest.param(n, torch.float32, marks=pytest.mark.slow)
            for n in EXAMPLES
            if n not in OPERATORS and ("se" in n or "inside" in n)
        ),
        pytest.param("deform_conv2d", torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_opcheck(name, dtype, device):
    with Calls() as recorded:
        results(example(name, "tiny", device, dtype))
    (forward, arguments), (backward, others) = recorded.calls.items()
    opcheck(forward, arguments, grad=True)
    opcheck(backward, others, grad=False)


@pytest.mark.slow
@every_operator
def test_opcheck_of_second_gradients(name):
    with Calls() as recorded:
        results(example(name, "tiny"))
    _, (backward, arguments) = recorded.calls.items()
    opcheck(backward, arguments, grad=True)


@every_device
@every_operator
def test_autocast(name, device):
    """Results are bfloat16, gradients float32; an argument may be bfloat16 already."""
    some = example(name, device=device)
    expected = results(some)
    with torch.autocast(device, torch.bfloat16):
        actual = results(some)
        first = next(iter(some.floats()))
        assert some.call(**{**some.tensors, first: some.tensors[first].bfloat16()}).dtype == torch.bfloat16
    assert actual.pop("output").dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in actual.values())
    expected.pop("output")
    assert_close(actual, expected, 3e-2)


@pytest.mark.slow
@every_device
@every_operator
def test_compiled_to_one_graph(name, device):
    """Outputs and gradients are those of eager mode, for any size."""
    torch._dynamo.reset()
    some = example(name, device=device)
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(some.call, fullgraph=True, backend=backend, dynamic=True)
    for size in ("small",) if name == "deformable_attention" else ("small", "large"):  # whose call holds sizes
        other = example(name, size, device)
        assert_close(differentiate(compiled, other.leaves()), results(other), 2e-6)


class Layer(torch.nn.Module):
    def __init__(self, some: Example) -> None:
        super().__init__()
        self.call, self.names = some.call, list(some.tensors)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call(**dict(zip(self.names, tensors)))


@pytest.mark.parametrize(
    "name", [*OPERATORS, pytest.param("global_attention, prefix", marks=pytest.mark.slow),
           "sequence_attention, range", "sequence_attention, segments", "window_attention, inside"]
)  # fmt: skip
def test_exports(name):
    """Attention exports for any size, but for the taps of a range."""
    fixed = "deform" in name or "range" in name
    some, other, sizes = example(name), example(name, "small" if fixed else "large"), None
    if not fixed:
        sizes = (tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in some.tensors.values()),)
    program = torch.export.export(Layer(some), tuple(some.tensors.values()), dynamic_shapes=sizes)
    assert any(getattr(node.target, "namespace", "") == NAMESPACE for node in program.graph.nodes)
    tensors = other.tensors.values()
    torch.testing.assert_close(program.module()(*tensors), Layer(some)(*tensors), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "sequence_attention, range",
        *(pytest.param(n, marks=pytest.mark.slow) for n in OPERATORS),
    ],
)  # fmt: skip
def test_onnx_runtime_gives_the_same(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    some = example(name)
    tensors, file = tuple(some.tensors.values()), tmp_path / "layer.onnx"
    torch.onnx.export(Layer(some).eval(), tensors, file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {node.name: t.numpy() for node, t in zip(session.get_inputs(), tensors)})
    torch.testing.assert_close(torch.from_numpy(output), Layer(some)(*tensors), rtol=1e-5, atol=1e-5)


@every_example
def test_floating_point_operations(name):
    some = example(name)
    if some.operations is None:
        pytest.skip("no short formula")
    leaves = some.leaves()
    with Calls() as recorded, FlopCounterMode(display=False) as forward:
        output = some.call(**leaves)
    with recorded, FlopCounterMode(display=False) as backward:
        output.sum().backward()
    assert (forward.get_total_flops(), backward.get_total_flops()) == some.operations
    # Counters of graphs call the formulas with shapes in place of tensors.
    shapes = [[a.shape if isinstance(a, Tensor) else a for a in args] for args in recorded.calls.values()]
    operator = operators[next(iter(recorded.calls))._opname]
    assert (operator.flops(*shapes[0]), operator.backward_flops(*shapes[1])) == some.operations


@every_device
@every_operator
def test_forward_mode_is_refused(name, device):
    """Without a rule of its own, an operator would drop tangents silently."""
    some = example(name, "tiny", device, torch.float64)
    leaves = some.leaves()
    first = next(iter(some.floats()))

    def function(x: Tensor) -> Tensor:
        return some.call(**{**leaves, first: x})

    x = leaves[first].detach()
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(function, (x,), (x,))
    with ops.backend("reference"):
        assert torch.func.jvp(function, (x,), (x,))[1].abs().sum() > 0
    with forward_ad.dual_level():  # without a tangent
        assert torch.equal(function(x), some.call(**leaves))


@every_operator
def test_threads_change_nothing(name):
    some = example(name, "large")
    before, by_threads = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            by_threads.append(results(some))
    finally:
        torch.set_num_threads(before)
    # Products of matrices are PyTorch's, which sums in another order with more threads.
    bound = 1e-6 if name.startswith(("criss_cross", "deform_conv")) else 0
    for other in by_threads[1:]:
        assert_close(other, by_threads[0], bound)


@every_device
@pytest.mark.parametrize(
    "name, dtype", [*((n, torch.float32) for n in EXAMPLES), *((n, torch.bfloat16) for n in OPERATORS)], ids=str
)
def test_deterministic_mode(name, dtype, device):
    """Two runs give identical bits, and nothing depends on uninitialized memory, which this mode fills with NaN."""
    some = example(name, "large", device, dtype)
    expected = results(some)
    with deterministic_mode():
        first, second = results(some), results(some)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert_close(first, expected, BOUNDS[dtype])


@pytest.mark.parametrize("name", [n for n in EXAMPLES if n.startswith(("sequence", "criss_cross"))])
def test_the_result_may_be_changed_in_place(name):
    """On CPUs the backward does not read the result, so that a residual added in place costs no memory."""
    some = example(name, dtype=torch.float64)

    def changed(**tensors: Tensor) -> Tensor:
        output = some.call(**tensors)
        output += 1
        return output - 1

    assert_close(differentiate(changed, some.leaves()), results(some), 1e-12)
