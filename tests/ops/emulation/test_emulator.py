"""The emulator finds the faults planted in the kernels of ``faults.cu`` and passes the correct kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ops.emulation.kernels import NEEDS, fills_variables, load

pytestmark = [*NEEDS, pytest.mark.slow]
SEEDS = ["0", "1", "2"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    load(Path(__file__).with_name("faults.cu"), tmp_path_factory.mktemp("faults"))
    return torch.ops.attn_plugins_faults


@pytest.fixture(params=SEEDS, ids="seed {}".format)
def seed(request, monkeypatch):
    monkeypatch.setenv("EMULATOR_SEED", request.param)


def numbers(count=1024):
    return torch.arange(1.0, count + 1)


def neighbours(x):
    return x.view(-1, 2).flip(1).flatten()


# The result of each correct kernel, and the error of its fault.
KERNELS = {
    "block_barrier": (lambda x: x.view(-1, 256).flip(1).flatten(), r"race: .* no __syncthreads orders"),
    "second_barrier": (lambda x: x.view(-1, 256).flip(1).flatten(), r"race: .* no __syncthreads orders"),
    "warp_barrier": (lambda x: x.view(-1, 32).flip(1).flatten(), r"race: .* no __syncwarp orders"),
    "read_beyond": (lambda x: x + torch.cat((x[1:], x.new_zeros(1))), r"reads 4 bytes at byte 4096 of a tensor"),
    "write_before": (lambda x: x, r"writes 4 bytes at byte -4 of a tensor"),
    "shared_beyond": (lambda x: x, r"writes 4 bytes of shared memory at byte 1024 of tile, which has 1024"),
    "misaligned": (lambda x: x, r"not aligned|misaligned"),
    "constant_read": (lambda x: x, r"reads .* by __ldg, which .* writes in the same launch"),
    "early_return": (lambda x: x, r"__syncthreads"),
    "barrier_in_branch": (lambda x: x, r"__syncthreads waits for .* returned|returned while .* wait at __syncthreads"),
    "two_barriers": (lambda x: x, r"wait for each other for ever: .*__syncwarp.*__syncthreads"),
    "asynchronous_copy": (lambda x: x, r"race: "),
    "index_of_array": (lambda x: x, r"an index is outside its array"),
    "divergent_shuffle": (neighbours, r"__shfl_xor_sync .*which have returned|which has returned"),
    "foreign_mask": (neighbours, r"lane 3 is not in the mask ffff0000"),
    "outside_mask": (neighbours, r"shuffles from lane \d+, which is not in the mask"),
    "other_intrinsic": (neighbours, r"comes to __shfl(_xor)?_sync .* wait at __shfl(_xor)?_sync"),
    "overlapping_masks": (neighbours, r"with mask 0000ffff|with mask ffffffff"),
    "unknown_assembly": (torch.exp2, r"sin\.approx\.f32 .*is not emulated"),
    "predicated_load": (lambda x: x * (torch.arange(1024) % 8 < 4), r"reads by __ldg 16 bytes"),
    "partial_product": (lambda x: x, r"mma\.sync.*which ha(s|ve) returned"),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_finds_the_fault(faults, seed, name):
    compute, message = KERNELS[name]
    x = numbers() / 512 if name == "unknown_assembly" else numbers()
    out = torch.full_like(x, torch.nan)
    getattr(faults, name)(out, x, True)
    torch.testing.assert_close(out, compute(x), rtol=1e-6, atol=0)
    with pytest.raises(RuntimeError, match=message):
        getattr(faults, name)(out, x, False)
    getattr(faults, name)(out, x, True)  # the emulator continues to work
    torch.testing.assert_close(out, compute(x), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["block_barrier", "second_barrier", "warp_barrier"])
def test_a_missing_barrier_gives_a_wrong_result(faults, seed, monkeypatch, name):
    """Without the race detection, the order of threads alone makes the result wrong."""
    monkeypatch.setenv("EMULATOR_RACES", "0")
    x = numbers()
    right, wrong = torch.zeros_like(x), torch.zeros_like(x)
    getattr(faults, name)(right, x, True)
    assert torch.equal(right, KERNELS[name][0](x))
    getattr(faults, name)(wrong, x, False)
    assert not torch.equal(wrong, right)


def test_sums_that_are_not_atomic(faults, seed, monkeypatch):
    x, out = numbers(), torch.zeros(1)
    faults.atomic_sum(out, x, True)
    assert out.item() == x.sum().item()
    with pytest.raises(RuntimeError, match="race"):
        faults.atomic_sum(out, x, False)
    monkeypatch.setenv("EMULATOR_RACES", "0")
    faults.atomic_sum(out.zero_(), x, False)
    assert out.item() < x.sum().item()


@pytest.mark.parametrize("name", ["shared_uninitialised", "incomplete", "asynchronous_copy"])
def test_what_nobody_wrote_is_nan(faults, seed, monkeypatch, name):
    """This covers shared memory, new_empty, and the targets of cp.async that no thread has waited for."""
    monkeypatch.setenv("EMULATOR_RACES", "0")
    x, out = numbers(), torch.empty(1024)
    getattr(faults, name)(out, x, True)
    assert torch.equal(out, x + 1 if name == "incomplete" else x)
    getattr(faults, name)(out, x, False)
    assert out.isnan().any()


@pytest.mark.skipif(not fills_variables(), reason="the compiler does not fill variables")
def test_an_uninitialised_register_holds_no_sense(faults):
    x, out = numbers(), torch.empty(1024)
    faults.uninitialised_register(out, x, True)
    assert torch.equal(out, x)
    faults.uninitialised_register(out, x, False)
    assert not -1e30 < out[7] < 1e30


def test_vector_atomics(faults, seed):
    x, out = numbers(), torch.zeros(8)
    faults.vector_atomics(out, x, True)
    assert torch.equal(out, x.view(-1, 8).sum(0))
    with pytest.raises(RuntimeError, match=r"adds to 16 bytes at .* not aligned"):
        faults.vector_atomics(out, x, False)


@pytest.mark.parametrize("type, dtype, K", [(0, torch.float16, 16), (1, torch.bfloat16, 16), (2, torch.float32, 8)])
def test_products_of_tensor_cores(faults, type, dtype, K):
    torch.manual_seed(0)
    a, b = torch.randn(16, K).to(dtype), torch.randn(K, 8).to(dtype)
    if dtype == torch.float32:  # tf32 has a mantissa of ten bits
        a, b = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (a, b))
    out = torch.full((16, 8), torch.nan)
    faults.product(out, torch.cat((a.float().flatten(), b.float().flatten())), type)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-6, atol=1e-6)


def test_transposed_matrix(faults):
    x, out = numbers(64).view(8, 8), torch.full((8, 8), torch.nan)
    faults.transposed(out, x)
    assert torch.equal(out, x.T)


def test_halves_are_rounded_as_torch_does(faults):
    """The kernels' own tests check every value of ``pack`` and the conversions; this test checks boundary values."""
    values = [0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2**-24, 2**-25, 3 * 2**-25, -6e-5, 6.1035156e-05]
    for dtype, type in ((torch.float16, 0), (torch.bfloat16, 1)):
        a, b = torch.zeros(16, 16), torch.zeros(16, 8)
        a[0, : len(values)] = torch.tensor(values)
        for k in range(len(values)):
            b.zero_()[k, 0] = 1
            out = torch.full((16, 8), torch.nan)
            safe = torch.zeros_like(a)
            safe[0, k] = a[0, k]
            faults.product(out, torch.cat((safe.flatten(), b.flatten())), type)
            expected = torch.tensor(values[k]).to(dtype).float()
            assert out[0, 0] == expected or (expected.isinf() and not out[0, 0].isfinite())


def test_shared_memory_of_a_block_is_limited(faults):
    x, out = numbers(1), torch.zeros(1)
    faults.dynamic(out, x, 48 << 10)
    assert out.item() == 1
    with pytest.raises(RuntimeError, match="102400 bytes of dynamic shared memory, where the kernel may have 49152"):
        faults.dynamic(out, x, 100 << 10)


def test_launch_has_cudas_limits(faults):
    out = torch.zeros(1000)
    faults.launch(out, 1000)
    assert torch.equal(out, torch.ones(1000))
    faults.launch(out, 0)
    assert torch.equal(out, torch.ones(1000))
    with pytest.raises(RuntimeError, match="a grid of 2147483648 blocks is too large"):
        faults.launch(out, 2**31)
