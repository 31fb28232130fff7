"""``cached``: when results are kept, and when PyTorch must see them being computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attn_plugins.terms.size_cache import ENTRIES, cached

CPU = torch.device("cpu")


def ramp(size: int, scale: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.arange(size, device=device) * scale).to(dtype)


def product(size: int, device: torch.device) -> Tensor:
    """A product, which autocast computes in half precision."""
    return torch.ones(size, size, device=device, dtype=torch.float32) @ torch.ones(size, size, device=device)


shared = cached(ramp)


@pytest.fixture
def kept():
    shared.kept.cache_clear()
    return shared


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_equal_arguments_share_a_result(kept):
    first = kept(5, 2.0, CPU, torch.float32)
    assert torch.equal(first, torch.arange(5) * 2.0)
    assert kept(5, 2.0, CPU, torch.float32) is first
    assert kept(5, scale=2.0, device=CPU, dtype=torch.float32) is kept(5, scale=2.0, device=CPU, dtype=torch.float32)
    sizes = cached(torch.ones)
    assert sizes((2, 3), device=CPU) is sizes((2, 3), device=CPU)


@pytest.mark.parametrize("other", [(6, 2.0, torch.float32), (5, 3.0, torch.float32), (5, 2.0, torch.float64)])
def test_other_arguments_do_not(kept, other):
    first = kept(5, 2.0, CPU, torch.float32)
    size, scale, dtype = other
    torch.testing.assert_close(kept(size, scale, CPU, dtype), ramp(size, scale, CPU, dtype))
    assert kept(5, 2.0, CPU, torch.float32) is first
    assert kept.kept.cache_info().misses == 2
    dtypes = cached(lambda number, device: torch.tensor(number, device=device))  # equal numbers of other types
    assert [dtypes(n, CPU).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.bool]


def test_the_oldest_is_dropped(kept):
    first, second = (kept(n, 1.0, CPU, torch.float32) for n in (1, 2))
    for n in range(3, ENTRIES + 1):
        kept(n, 1.0, CPU, torch.float32)
    assert kept(1, 1.0, CPU, torch.float32) is first  # now the newest
    kept(ENTRIES + 1, 1.0, CPU, torch.float32)
    assert kept(1, 1.0, CPU, torch.float32) is first
    assert kept(2, 1.0, CPU, torch.float32) is not second
    assert kept.kept.cache_info().currsize == ENTRIES


@pytest.mark.parametrize(
    "arguments",
    [(3, torch.device("meta")), (3, torch.device("cuda")), (3, "cpu"), (3, None)]
    + [(other, CPU) for other in ([2, 3], torch.Size((2, 3)), (2.0, 3), torch.ones(2), None, "2")],
    ids=str,
)
def test_other_devices_and_arguments_keep_nothing(arguments):
    """A device without an index is another one after ``torch.cuda.set_device``, and None after a default's change."""
    calls: list[object] = []
    record = cached(lambda argument, device: calls.append(argument))
    record(*arguments)
    record(*arguments)
    assert len(calls) == 2


def test_the_modes_of_the_first_caller_do_not_matter_to_the_next(kept):
    with torch.inference_mode(), torch.device("meta"):
        number = kept(3, 2.0, CPU, torch.float32)
        assert not number.is_inference()
        assert number.device == CPU
    weight = torch.ones(3, requires_grad=True)
    (kept(3, 2.0, CPU, torch.float32) * weight).sum().backward()
    assert torch.equal(weight.grad, number)
    assert not cached(lambda device: 2 * weight)(CPU).requires_grad
    products = cached(product)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(3, CPU).dtype == torch.bfloat16
        assert products(3, CPU).dtype == torch.float32


def test_threads_share_results(kept):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: (n % 40, kept(n % 40, 1.0, CPU, torch.float32)), range(1000)))
    for n, number in results:
        assert torch.equal(number, torch.arange(n, dtype=torch.float32))
    assert kept.kept.cache_info().currsize == ENTRIES


# --- PyTorch sees the computation -----------------------------------------------------------------------------------


def plus(x: Tensor) -> Tensor:
    return x + shared(x.shape[0], 2.0, x.device, x.dtype)


@pytest.fixture(params=[False, True], ids=["empty", "filled"])
def filled(kept, request):
    """Return a function that checks that results were neither kept nor used."""
    if request.param:
        for size in (3, 5):
            kept(size, 2.0, CPU, torch.float32)
    before = kept.kept.cache_info()

    def check() -> None:
        assert kept.kept.cache_info() == before

    return check


def test_modes_see_all_operations(filled):
    with Seen() as seen:
        plus(torch.ones(3))
    assert "arange" in seen.names
    filled()
    with BaseTorchFunctionMode():
        plus(torch.ones(3))
    filled()
    with FakeTensorMode():
        assert isinstance(plus(torch.ones(3)), torch._subclasses.FakeTensor)
    filled()


@pytest.mark.parametrize(("mode", "pre_dispatch"), [("real", False), ("fake", True), ("symbolic", False)])
def test_make_fx(filled, mode, pre_dispatch):
    graph = make_fx(plus, tracing_mode=mode, pre_dispatch=pre_dispatch)(torch.ones(3))
    assert any("arange" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(torch.ones(3)), torch.tensor([1.0, 3, 5]))
    filled()


class Plus(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plus(x)


def test_transforms_traces_and_graphs(filled):
    x, longer = torch.ones(2, 3), 1 + 2 * torch.arange(5)
    assert torch.equal(torch.func.vmap(plus)(x), torch.tensor([[1.0, 3, 5]] * 2))
    assert torch.equal(torch.func.grad(lambda y: plus(y).square().sum())(x[0]), torch.tensor([2.0, 6, 10]))
    traced = torch.jit.trace(plus, x[0], check_trace=False)  # the check calls ``plus`` itself
    assert torch.equal(traced(torch.ones(5)), longer)
    assert "arange" in str(traced.inlined_graph)
    torch._dynamo.reset()
    compiled = torch.compile(plus, fullgraph=True, backend="eager", dynamic=True)
    for size in (3, 5, 3):
        assert torch.equal(compiled(torch.ones(size)), 1 + 2 * torch.arange(size))
    sizes = ({0: torch.export.Dim("size", min=2, max=9)},)
    for strict in (False, True):
        program = torch.export.export(Plus(), (x[0],), dynamic_shapes=sizes, strict=strict)
        assert torch.equal(program.module()(torch.ones(5)), longer)
    filled()


# --- CUDA -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch):
    """Pretend that CUDA has streams, of which number 0 is current and none is captured."""

    class State:
        current, capturing = 0, False

        @property
        def cuda_stream(self) -> int:
            return self.current

    state = State()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    return state


@pytest.mark.filterwarnings("ignore:User provided device_type")
def test_streams_and_captured_graphs_share_nothing(streams):
    """A stream may read before another has written, and a graph after the tensor was dropped."""
    kept, gpu = cached(lambda device: torch.ones(1)), torch.device("cuda", 0)
    first = kept(gpu)
    assert kept(gpu) is first
    assert kept(torch.device("cuda", 1)) is not first
    streams.current = 1
    assert kept(gpu) is not first
    streams.current, streams.capturing = 0, True
    assert kept(gpu) is not first
    assert kept.kept.cache_info().misses == 3
    streams.capturing = False
    assert kept(gpu) is first


@pytest.mark.cuda
def test_a_captured_graph_computes_its_own():
    gpu = torch.device("cuda", torch.cuda.current_device())
    x, kept = torch.ones(3, device=gpu), cached(ramp)

    def run() -> Tensor:
        return x + kept(3, 2.0, gpu, torch.float32)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    before, graph = kept.kept.cache_info(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    assert kept.kept.cache_info() == before
    graph.replay()
    assert output.tolist() == [1.0, 3.0, 5.0]
