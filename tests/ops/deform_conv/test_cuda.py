"""Deformable convolution on a CUDA device against its float64 reference in plain PyTorch, by relative norm."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from attn_plugins.ops import backend, deform_conv2d
from attn_plugins.ops.common import library
from tests.helpers.cuda_checks import DTYPES, exact, on_cuda
from tests.helpers.operator_checks import deterministic_mode, relative_error
from tests.ops.deform_conv.operands import GEOMETRIES, gradients, make, same_where_finite, through_reference

pytestmark = pytest.mark.usefixtures("full_float32")
cuda = pytest.mark.cuda
# name -> (B, C, H, W, C_out, kernel, stride, padding, dilation, groups, offset groups)
CASES = {
    **GEOMETRIES,
    "a block and more": (3, 256, 50, 68, 256, (3, 3), 1, 1, 1, 1, 1),
    "planes, several images a product": (9, 16, 8, 16, 12, (3, 3), 1, 1, 1, 1, 1),
    "planes of groups": (3, 16, 32, 32, 12, (3, 3), 1, 1, 1, 2, 2),
    "vectors": (2, 64, 17, 23, 48, (3, 3), 1, 1, 1, 2, 4),
    "three slices": (1, 520, 9, 7, 16, (3, 3), 1, 1, 1, 1, 1),
    "5 x 5": (2, 32, 12, 13, 24, (5, 5), 2, 2, 1, 1, 2),
}


@cuda
def test_the_binary_is_there():
    assert library.has_kernel("cuda"), library.failures()["cuda"]


@cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "plain"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, masked, dtype):
    operands = on_cuda(make(CASES[name], dtype=dtype, masked=masked))
    expected = gradients(through_reference, exact(operands))
    function = poisoned(deform_conv2d)
    for tensor, (result, wanted) in enumerate(zip(gradients(function, operands), expected)):
        assert result.dtype == dtype
        assert relative_error(result, wanted) < DTYPES[dtype], f"result {tensor}"


def poisoned(function):
    """Fill the memory that the allocator hands out next with NaN, so that elements that are never written show."""

    @functools.wraps(function)
    def run(**operands):
        junk = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 25, 2)]
        del junk
        return function(**operands)

    return run


@cuda
def test_the_output_has_the_memory_format_of_the_input():
    operands = on_cuda(make(CASES["vectors"], dtype=torch.float32))
    x = operands["input"]
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view(2, 17, 23, 64).permute(0, 3, 1, 2).copy_(x)
    for source in (x, x.mT.contiguous().mT, x.to(memory_format=torch.channels_last), shifted):
        last = source.is_contiguous(memory_format=torch.channels_last)
        output = deform_conv2d(**{**operands, "input": source})
        assert output.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@cuda
@pytest.mark.parametrize("pixels", ["64", "200", "1000000"])
@pytest.mark.parametrize("name", ["vectors", "planes of groups", "planes, several images a product"])
def test_any_block_size(name, pixels, monkeypatch):
    monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", pixels)
    operands = on_cuda(make(CASES[name], dtype=torch.float32))
    for result, wanted in zip(gradients(deform_conv2d, operands), gradients(through_reference, exact(operands))):
        assert relative_error(result, wanted) < 1e-5


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("name", ["a block and more", "three slices", "32 channels a group", "one row"])
def test_input_gradient_of_any_offsets(name, spread, dtype):
    cases = CASES | {
        "32 channels a group": (2, 128, 17, 23, 32, (3, 3), 2, 1, 1, 2, 4),
        "one row": (3, 64, 1, 300, 16, (1, 3), 1, (0, 1), 1, 1, 1),
    }
    operands = on_cuda(make(cases[name], dtype=dtype))
    operands["offset"] *= spread
    wanted = gradients(through_reference, exact(operands))[1]
    assert relative_error(gradients(poisoned(deform_conv2d), operands)[1], wanted) < DTYPES[dtype]


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pixels", [None, "200"])
@pytest.mark.parametrize("name", ["a block and more", "wide", "three slices", "planes of groups"])
def test_deterministic_mode(name, pixels, dtype, monkeypatch):
    """The kernels compute in it too, with the same bits in three runs, and the same numbers as in the other mode."""
    if pixels:
        monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", pixels)
    operands = on_cuda(make(CASES[name], dtype=dtype, spread=0.5))
    expected = gradients(through_reference, exact(operands))
    with deterministic_mode(), backend("cuda"):
        first, *others = (gradients(poisoned(deform_conv2d), operands) for _ in range(3))
    for tensor, (result, wanted) in enumerate(zip(first, expected)):
        assert relative_error(result, wanted) < DTYPES[dtype], f"result {tensor}"
        assert all(torch.equal(other[tensor], result) for other in others), f"result {tensor}"


@cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 6e4, -6e4, 1e9, -1e9])
def test_numbers_beyond_the_map_and_no_numbers(value, dtype):
    operands = on_cuda(make(GEOMETRIES["wide"], dtype=dtype, spread=0.7))
    operands["offset"][:, ::6] = value
    expected = gradients(through_reference, exact(operands))
    for result, wanted in zip(gradients(deform_conv2d, operands), expected):
        assert same_where_finite(result, wanted, DTYPES[dtype])


@cuda
def test_side_stream_and_graph():
    operands = on_cuda(make(CASES["vectors"], dtype=torch.float32))
    expected = deform_conv2d(**operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = deform_conv2d(**operands)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = deform_conv2d(**operands)
    operands["input"].mul_(2)
    graph.replay()
    assert relative_error(captured, deform_conv2d(**operands)) < 1e-6


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_runs_where_its_input_is():
    operands = {k: v.to("cuda:1") if isinstance(v, Tensor) else v for k, v in make(CASES["vectors"]).items()}
    results = gradients(deform_conv2d, operands)
    assert all(t.device.index == 1 for t in results)
    for a, b in zip(results, gradients(through_reference, exact(operands))):
        assert relative_error(a, b) < 1e-11


@cuda
def test_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    side, step, C = 16400, 100, 8  # 2.15e9 elements
    x = torch.empty(1, C, side, side, dtype=torch.float16, device="cuda")
    for c in range(C):
        x[0, c] = torch.randn(side, side, device="cuda")
    weight = torch.eye(C, dtype=x.dtype, device="cuda").view(C, C, 1, 1)
    offset = torch.zeros(1, 2, side // step, side // step, dtype=x.dtype, device="cuda")
    expected = x[:, :, ::step, ::step]
    for source in (x, x.to(memory_format=torch.channels_last)):
        assert torch.equal(deform_conv2d(source, offset, weight, stride=step), expected)


@cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(dtype):
    """Compare a call's working memory with the column buffer of the whole batch, C * 9 * N * H * W elements.

    In half precision the backward's float32 sums count double: 39 % instead of 36 %.
    """
    N, C, H, W = 16, 256, 64, 64
    operands = on_cuda(make((N, C, H, W, C, (3, 3), 1, 1, 1, 1, 1)), dtype)
    operands["bias"] = None
    gradients(deform_conv2d, operands)  # cuBLAS allocates its workspace
    buffer = C * 9 * N * H * W * dtype.itemsize
    leaves = {k: v.requires_grad_() if isinstance(v, Tensor) else v for k, v in operands.items()}

    def extra(run) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        sizes = sum(r.numel() * r.element_size() for r in results)
        return (torch.cuda.max_memory_allocated() - before - sizes) / buffer

    output = deform_conv2d(**leaves)
    grad = torch.randn_like(output)
    wanted = [v for v in leaves.values() if isinstance(v, Tensor)]
    with torch.no_grad():
        assert extra(lambda: [deform_conv2d(**leaves)]) <= 0.29
    assert extra(lambda: torch.autograd.grad(output, wanted, grad)) <= (0.36 if dtype == torch.float32 else 0.39)
