"""Deformable convolution on a CUDA device against its float64 reference in plain PyTorch, by relative norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from attn_plugins.core import library
from attn_plugins.ops import backend, deform_conv2d
from tests.helpers.operator_checks import deterministic_mode, relative_error
from tests.ops.contract_examples import Example
from tests.ops.deform_conv import operands
from tests.ops.deform_conv.operands import ALL, GEOMETRIES, same_where_finite
from tests.ops.test_contract import assert_close, results

pytestmark = [pytest.mark.usefixtures("full_float32"), pytest.mark.cuda]
DTYPES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CASES = {
    **GEOMETRIES,
    "a block and more": dict(B=3, C=256, map=(50, 68), out=256, groups=1, D=1),
    "planes, several images a product": dict(B=9, C=16, map=(8, 16), out=12, groups=1, D=1),
    "planes of groups": dict(B=3, C=16, map=(32, 32), out=12),
    "vectors": dict(C=64, map=(17, 23), out=48, D=4),
    "three slices": dict(B=1, C=520, map=(9, 7), out=16, groups=1, D=1),
    "5 x 5": dict(C=32, map=(12, 13), out=24, kernel=(5, 5), stride=(2, 2), padding=(2, 2), groups=1),
    "32 channels a group": dict(C=128, map=(17, 23), out=32, stride=(2, 2), D=4),
    "one long row": dict(B=3, C=64, map=(1, 300), out=16, kernel=(1, 3), padding=(0, 1), groups=1, D=1),
}


def drawn(name: str, dtype=torch.float32, device="cuda", **extents) -> Example:
    return operands.drawn(name, dtype, device, **CASES.get(name, {}), **extents)


def by_definition(some: Example) -> dict[str, Tensor]:
    """Return results in float64, where the tensors are."""
    with backend("reference"):
        return results(some._replace(tensors={n: t.double() for n, t in some.tensors.items()}))


def poisoned(some: Example) -> Example:
    """Fill the memory that the allocator hands out next with NaN, so that elements that are never written show."""

    def call(**tensors: Tensor) -> Tensor:
        junk = [torch.full((1 << n,), float("nan"), device="cuda") for n in range(8, 25, 2)]
        del junk
        return some.call(**tensors)

    return some._replace(call=call)


def test_the_binary_is_there():
    assert library.has_kernel("cuda"), library.failures()["cuda"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("names", [ALL, ALL.removesuffix(" mask")])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name, names, dtype):
    some = drawn(name, dtype, names=names)
    actual = results(poisoned(some))
    assert all(result.dtype == dtype for result in actual.values())
    assert_close(actual, by_definition(some), DTYPES[dtype])


def test_the_output_has_the_memory_format_of_the_input():
    some = drawn("vectors")
    x = some.tensors["input"]
    shifted = torch.empty(x.numel() + 1, device="cuda")[1:].view(2, 17, 23, 64).permute(0, 3, 1, 2).copy_(x)
    for source in (x, x.mT.contiguous().mT, x.to(memory_format=torch.channels_last), shifted):
        last = source.is_contiguous(memory_format=torch.channels_last)
        output = some.call(**{**some.tensors, "input": source})
        assert output.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.parametrize("pixels", ["64", "200", "1000000"])
@pytest.mark.parametrize("name", ["vectors", "planes of groups", "planes, several images a product"])
def test_any_block_size(name, pixels, monkeypatch):
    monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", pixels)
    some = drawn(name)
    assert_close(results(some), by_definition(some), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("name", ["a block and more", "three slices", "32 channels a group", "one long row"])
def test_input_gradient_of_any_offsets(name, spread, dtype):
    some = drawn(name, dtype)
    some.tensors["offset"] *= spread
    wanted = by_definition(some)["input"]
    assert relative_error(results(poisoned(some))["input"], wanted) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pixels", [None, "200"])
@pytest.mark.parametrize("name", ["a block and more", "wide", "three slices", "planes of groups"])
def test_deterministic_mode(name, pixels, dtype, monkeypatch):
    """The kernels compute in it too, with the same bits in three runs, and the same numbers as in the other mode."""
    if pixels:
        monkeypatch.setenv("ATTN_PLUGINS_BLOCK_PIXELS", pixels)
    some = drawn(name, dtype, far=0.5)
    expected = by_definition(some)
    with deterministic_mode(), backend("cuda"):
        first, *others = (results(poisoned(some)) for _ in range(3))
    assert_close(first, expected, DTYPES[dtype])
    assert all(torch.equal(other[n], result) for other in others for n, result in first.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 6e4, -6e4, 1e9, -1e9])
def test_numbers_beyond_the_map_and_no_numbers(value, dtype):
    some = drawn("wide", dtype, far=0.7)
    some.tensors["offset"][:, ::6] = value
    expected = by_definition(some)
    assert all(same_where_finite(result, expected[n], DTYPES[dtype]) for n, result in results(some).items())


def test_side_stream_and_graph():
    some = drawn("vectors")
    expected = some.call(**some.tensors)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = some.call(**some.tensors)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(on_stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = some.call(**some.tensors)
    some.tensors["input"].mul_(2)
    graph.replay()
    assert relative_error(captured, some.call(**some.tensors)) < 1e-6


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_runs_where_its_input_is():
    some = drawn("vectors", torch.float64, "cuda:1")
    actual = results(some)
    assert all(t.device.index == 1 for t in actual.values())
    assert_close(actual, by_definition(some), 1e-11)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_working_memory_is_a_fraction_of_the_column_buffer(dtype):
    """Compare a call's working memory with the column buffer of the whole batch, C * 9 * N * H * W elements.

    In half precision the backward's float32 sums count double: 39 % instead of 36 %.
    """
    N, C, H, W = 16, 256, 64, 64
    some = operands.drawn(
        "", dtype, "cuda", names="input offset weight mask", B=N, C=C, map=(H, W), out=C, groups=1, D=1
    )
    results(some)  # cuBLAS allocates its workspace
    buffer = C * 9 * N * H * W * dtype.itemsize
    leaves = {n: t.requires_grad_() for n, t in some.tensors.items()}

    def extra(run) -> float:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        sizes = sum(r.numel() * r.element_size() for r in results)
        return (torch.cuda.max_memory_allocated() - before - sizes) / buffer

    output = some.call(**leaves)
    grad = torch.randn_like(output)
    with torch.no_grad():
        assert extra(lambda: [some.call(**leaves)]) <= 0.29
    assert extra(lambda: torch.autograd.grad(output, list(leaves.values()), grad)) <= (
        0.36 if dtype == torch.float32 else 0.39
    )
