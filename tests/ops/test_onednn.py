"""Products of float32 by oneDNN: what ``use_onednn`` changes, and what it leaves as it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attn_plugins.core import onednn
from attn_plugins.ops import use_onednn

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
SIZE = (300, 128, 200)  # enough work for oneDNN


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """Use oneDNN on any processor, and list the shapes of its products."""
    shapes = []
    product = onednn._product

    def listed(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append((*a.shape, b.shape[1]))
        return product(a, b, bias)

    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setattr(onednn, "_product", listed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's about kernels that are replaced
        assert use_onednn()
    yield shapes
    assert not use_onednn(False)


LAYOUTS = {
    "contiguous": lambda m, n: torch.randn(m, n),
    "transposed": lambda m, n: torch.randn(n, m).t(),
    "sliced": lambda m, n: torch.randn(m, n + 5)[:, 2 : n + 2],
    "stepped": lambda m, n: torch.randn(m, 2 * n)[:, ::2],
    "overlapping": lambda m, n: torch.randn(m + n - 1).unfold(0, n, 1),
    "one row": lambda m, n: torch.randn(1, n).expand(m, n),
    "one column": lambda m, n: torch.randn(m, 1).expand(m, n),
    "one value": lambda m, n: torch.randn(()).expand(m, n),
}


@pytest.mark.parametrize("left", LAYOUTS)
def test_equals_product_in_double(used, left):
    torch.manual_seed(0)
    M, K, N = SIZE
    a, row, matrix = LAYOUTS[left](M, K), torch.randn(N), torch.randn(M, N)
    stepped, number = torch.randn(N, 2)[:, 0], torch.randn(1).expand(N)
    for right, draw in LAYOUTS.items():
        b = draw(K, N)
        expected = a.double() @ b.double()
        for result, value in (
            (a @ b, expected),
            (torch.addmm(row, a, b), expected + row),
            (torch.addmm(stepped, a, b), expected + stepped),
            (torch.addmm(number, a, b), expected + number),
            (torch.addmm(matrix, a, b), expected + matrix),
            (torch.addmm(row, a, b, beta=0.5, alpha=2), 2 * expected + 0.5 * row),
        ):
            assert result.is_contiguous(), right
            torch.testing.assert_close(result.double(), value, atol=1e-3, rtol=1e-5, msg=right)
    assert bool(used) == (left in ("contiguous", "sliced", "transposed"))


def test_linear_layers_and_gradients(used):
    M, K, N = SIZE
    layer, x = nn.Linear(K, N), torch.randn(2, M // 2, K, requires_grad=True)
    grad = torch.randn(2, M // 2, N)
    gradients = torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)
    assert sorted(used) == sorted([(M, K, N), (M, N, K)])  # the weight has fewer rows and columns than oneDNN needs
    double = layer.double()
    x64 = x.detach().double().requires_grad_()
    expected = torch.autograd.grad(double(x64), (x64, *double.parameters()), grad.double())
    for result, value in zip(gradients, expected):
        torch.testing.assert_close(result.double(), value, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(("M", "N"), [(300, 40), (40, 300), (300, 300)])
def test_transposed_factors_of_any_shape(used, M, N):
    """As in the gradient of a weight."""
    torch.manual_seed(0)
    a, b, row = torch.randn(2000, M).t(), torch.randn(2000, N), torch.randn(N)
    expected = a.double() @ b.double()
    for result, value in ((a @ b, expected), (torch.addmm(row, a, b), expected + row)):
        assert result.is_contiguous()
        torch.testing.assert_close(result.double(), value, atol=1e-3, rtol=1e-5)
    assert used == [(M, 2000, N)] * 2


def test_small_products_other_dtypes_and_errors_are_pytorchs(used):
    x, y = torch.randn(8, 16), torch.randn(16, 4)
    big = [torch.randn(300, 300, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)]
    wrong = (
        lambda: torch.mm(x, x),
        lambda: torch.mm(x, y[0]),
        lambda: torch.addmm(x[0], x, y),
        lambda: torch.mm(x, y.double()),
    )

    def outcomes() -> tuple[list[Tensor], list[str]]:
        errors = []
        for call in wrong:
            with pytest.raises(RuntimeError) as info:
                call()
            errors.append(str(info.value))
        small = [x @ y, torch.addmm(y[0], x, y), torch.mm(x[:0], y), torch.mm(x[:, :0], y[:0])]
        return [*small, *(b @ b for b in big)], errors

    results, errors = outcomes()
    assert not used
    use_onednn(False)
    expected, messages = outcomes()
    assert all(map(torch.equal, results, expected))
    assert errors == messages


def test_counters_transforms_and_exporters_see_the_same_operators(used):
    M, K, N = SIZE
    layer, x = nn.Linear(K, N), torch.randn(M, K)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * M * K * N
    (y, tangent), batch = torch.func.jvp(layer, (x,), (x,)), torch.func.vmap(layer)(torch.stack((x, 2 * x)))
    torch.testing.assert_close(batch[0], y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tangent, y - layer.bias, atol=1e-4, rtol=1e-4)
    (node,) = [node for node in torch.export.export(layer, (x,)).graph.nodes if node.op == "call_function"]
    assert node.target is torch.ops.aten.linear.default
    assert torch.equal(layer(x), layer(x))


def test_the_environment_variable_and_the_argument_switch_onednn_off(monkeypatch):
    monkeypatch.setattr(onednn, "is_faster", lambda: True)
    monkeypatch.setenv(onednn.SWITCH, "0")
    assert not use_onednn()
    monkeypatch.delenv(onednn.SWITCH)
    assert use_onednn()
    assert use_onednn()
    assert not use_onednn(False)
    monkeypatch.setattr(onednn, "is_faster", lambda: False)
    assert not use_onednn()
