"""What every operator promises on every device: gradients, dtypes, layouts, compilation, determinism, clear errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins import ops
from attn_plugins.ops.common.operator import OPERATORS as operators
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


def example(name: str, size="small", device="cpu", dtype=torch.float32, batch: int | None = None) -> Example:
    return EXAMPLES[name](size, batch).to(device, dtype)


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


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_results(some: Example, backend: str | None, bound: float) -> None:
    dtype = next(iter(some.floats().values())).dtype
    exact = Example(
        some.call, {n: t.cpu().double() if t.is_floating_point() else t.cpu() for n, t in some.tensors.items()}
    )
    with ops.backend("reference"):
        expected = results(exact)
    with forced(backend):
        actual = results(some)
    assert actual["output"].dtype == dtype
    assert all(actual[n].dtype == t.dtype for n, t in some.floats().items())
    assert_close(actual, expected, bound)


@pytest.mark.sampled(48)
@every_device
@every_example
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_results_are_the_references(name, size, dtype, device):
    """Outputs and gradients have the arguments' dtype and equal those of the definition in float64."""
    check_results(example(name, size, device, dtype), FIRST, BOUNDS[dtype])


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


@pytest.mark.sampled(12)
@every_device
@every_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(name, dtype, device):
    some = example(name, "tiny", device, dtype)
    with Calls() as recorded:
        results(some)
    forward, backward = recorded.calls.items()

    def detached(value, grad=False):
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(grad and value.is_floating_point())

    torch.library.opcheck(forward[0], [detached(a, grad=True) for a in forward[1]], rtol=1e-4, atol=1e-4)
    torch.library.opcheck(backward[0], [detached(a) for a in backward[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@every_operator
def test_opcheck_of_second_gradients(name):
    with Calls() as recorded:
        results(example(name, "tiny"))
    _, (backward, arguments) = recorded.calls.items()
    copies = [
        a.detach().clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in arguments
    ]
    torch.library.opcheck(backward, copies, rtol=1e-4, atol=1e-4)


@every_device
@every_example
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


@pytest.mark.sampled(5, every_value=False)
@every_device
@every_example
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


@every_example
def test_exports(name):
    some = example(name)
    tensors = tuple(some.tensors.values())
    program = torch.export.export(Layer(some), tensors)
    assert any(getattr(node.target, "namespace", "") == NAMESPACE for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*tensors), Layer(some)(*tensors))


@pytest.mark.parametrize("name", [name for name in OPERATORS if not name.startswith("deform")])
def test_exports_for_any_size(name):
    some, larger = example(name), tuple(example(name, "large").tensors.values())
    tensors = tuple(some.tensors.values())
    sizes = tuple(dict.fromkeys(range(t.dim()), torch.export.Dim.AUTO) for t in tensors)
    program = torch.export.export(Layer(some), tensors, dynamic_shapes=(sizes,))
    torch.testing.assert_close(program.module()(*larger), Layer(some)(*larger), rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(4, every_value=False)
@pytest.mark.parametrize("name", [*OPERATORS, "sequence_attention, range"])
def test_onnx_runtime_gives_the_same(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    some = example(name)
    tensors, file = tuple(some.tensors.values()), tmp_path / "layer.onnx"
    torch.onnx.export(Layer(some).eval(), tensors, file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {node.name: t.numpy() for node, t in zip(session.get_inputs(), tensors)})
    torch.testing.assert_close(torch.from_numpy(output), Layer(some)(*tensors), rtol=1e-5, atol=1e-5)


def _every_second(t: Tensor) -> Tensor:
    return torch.stack((t, -t), -1).flatten(-2)[..., ::2]


def _cropped(t: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(t, [1, 2] * t.dim(), value=torch.nan)
    for axis, size in enumerate(t.shape):
        padded = padded.narrow(axis, 1, size)
    return padded


def _turned(*axes: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t.transpose(*axes).contiguous().transpose(*axes)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": _every_second,
    "crop": _cropped,
    "last two axes exchanged": _turned(-1, -2),
    "heads innermost": _turned(1, -2),
    "channels second": _turned(1, -1),
    "batch innermost": _turned(0, -1),
    "one for all": lambda t: t[:1].expand_as(t),
    "misaligned": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
}


@pytest.mark.sampled(64)
@every_device
@every_example
@pytest.mark.parametrize("backend", [FIRST, "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_give_what_copies_give(name, layout, backend, device):
    check_views(example(name, device=device, dtype=torch.float64), layout, backend, 1e-12)


def check_views(some: Example, layout: str, backend: str | None, bound: float) -> None:
    views = {n: LAYOUTS[layout](t) if t.is_floating_point() and t.dim() > 1 else t for n, t in some.tensors.items()}
    copies = some._replace(tensors={n: t.contiguous() for n, t in views.items()})
    before = {n: t.clone() for n, t in views.items()}
    leaves = {n: t.detach().requires_grad_(t.is_floating_point()) for n, t in views.items()}
    with forced(backend):
        actual = differentiate(some.call, leaves)
    assert_close(actual, results(copies), bound)
    assert all(torch.equal(t, before[n]) for n, t in views.items())


@every_device
@pytest.mark.parametrize("name", [name for name in EXAMPLES if "attention" in name and "deformable" not in name])
def test_logits_broadcast(name, device):
    """Logits of size 1 in batch, heads or queries give what expanded ones give; their gradient is the sum."""
    check_broadcast(example(name, device=device, dtype=torch.float64), name, FIRST, 1e-12)


def check_broadcast(some: Example, name: str, backend: str | None, bound: float) -> None:
    B, M = some.tensors["value"].shape[:2]
    queries = dict(global_attention=(2, 3), sequence_attention=(2,)).get(name.split(",")[0], ())
    for axes in ((0,), (1,), (0, 1), *([queries] if queries and "query" in some.tensors else [])):
        shared, spread = dict(some.tensors), dict(some.tensors)
        for n, logits in some.tensors.items():
            if "logits" in n and not (axes == queries and n == "key_logits"):
                shared[n] = logits[tuple(slice(1) if axis in axes else slice(None) for axis in range(logits.dim()))]
                spread[n] = shared[n].expand(B, M, *logits.shape[2:])
        expected = results(some._replace(tensors=spread))
        shapes = {n: t.shape for n, t in shared.items()} | dict(output=expected["output"].shape)
        with forced(backend):
            actual = results(some._replace(tensors=shared))
        assert_close(actual, {n: t.sum_to_size(shapes[n]) for n, t in expected.items()}, bound)


@pytest.mark.parametrize("device", [*DEVICES, "meta"])
@pytest.mark.parametrize("batch", [0, 2])
@every_example
def test_empty_batches_and_shapes_without_data(name, batch, device):
    check_batch(example(name, device=device, batch=batch), name, batch, FIRST)


def check_batch(some: Example, name: str, batch: int, backend: str | None) -> None:
    leaves = some.leaves()
    with forced(backend):
        output = some.call(**leaves)
        grads = torch.autograd.grad(output.sum(), [leaves[n] for n in some.floats()])
    assert output.shape == example(name, batch=2).call(**example(name, batch=2).tensors)[:batch].shape
    assert [g.shape for g in grads] == [t.shape for t in some.floats().values()]
    if batch == 0 and not output.is_meta:
        assert not any(g.any() for g in grads)


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


@every_device
@every_example
@pytest.mark.parametrize("backend", [FIRST, "eager"])
def test_only_wanted_gradients(name, backend, device):
    check_wanted(example(name, device=device, dtype=torch.float64), backend, 1e-12)


def check_wanted(some: Example, backend: str | None, bound: float) -> None:
    expected = results(some)
    for wanted in some.floats():
        leaves = {n: t.detach().clone().requires_grad_(n == wanted) for n, t in some.tensors.items()}
        with forced(backend), Calls() as recorded:
            actual = differentiate(some.call, leaves)
        assert_close(actual, {n: expected[n] for n in ("output", wanted)}, bound)
        if "prefix_key" not in some.tensors:
            assert sum(g.numel() > 0 for g in recorded.returned) == 1
    with torch.no_grad():
        assert not some.call(**some.leaves()).requires_grad


@every_example
def test_threads_change_nothing(name):
    some = example(name, "large")
    by_threads = []
    for number in (1, 2, 3):
        with threads(number):
            by_threads.append(results(some))
    # Products of matrices are PyTorch's, which sums in another order with more threads.
    bound = 1e-6 if name.startswith(("criss_cross", "deform_conv")) else 0
    for other in by_threads[1:]:
        assert_close(other, by_threads[0], bound)


@every_device
@every_example
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_mode(name, dtype, device):
    """Two runs give identical bits, and nothing depends on uninitialised memory, which this mode fills with NaN."""
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


@every_operator
def test_a_wrong_argument_is_named(name):
    some = example(name)
    for argument, tensor in some.floats().items():
        if argument in ("value", "input", "offset", "weight", "sampling_locations", "attention_weights"):
            with pytest.raises(TypeError, match=f"^{argument} must be a Tensor, got NoneType"):
                some.call(**{**some.tensors, argument: None})
        for wrong, error, words in (
            ([1.0], TypeError, "must be a Tensor.*, got list"),
            (tensor.to_sparse(), TypeError, "must be a dense Tensor, got one of layout torch.sparse_coo"),
            (tensor.double() if argument not in ("value", "input") else tensor.long(), TypeError, "must (be|have) "),
            (tensor.to("meta"), ValueError, "device"),
            (tensor[None, None, None], ValueError, "must have .*shape"),
        ):
            with pytest.raises(error, match=words) as caught:
                some.call(**{**some.tensors, argument: wrong})
            if argument not in ("value", "input"):  # which say what the others must be
                assert argument in str(caught.value)
