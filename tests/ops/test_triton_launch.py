"""Where Triton serves, what it says where it does not, and what its shared functions compute."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from attn_plugins.core import backends, triton_launch
from attn_plugins.ops.window_attention import triton as triton_window
from attn_plugins.ops.window_attention.operands import Options, Terms
from tests.helpers.triton_checks import DEVICE, DTYPES, TOLERANCES, needs_triton, randn


def test_tensors_of_the_cpu_are_refused_in_words(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    reason = triton_launch.refusal(torch.zeros(1))
    assert reason == "its kernels are for GPUs of NVIDIA, AMD and Intel, and the tensors are on cpu"


def test_no_plans_are_made_of_calls_that_launch_nothing_or_are_recorded():
    assert triton_launch.state(torch.zeros(1)) is None
    with backends.backend("triton"):
        assert triton_launch.state(torch.zeros(1)) is not None
        with triton_launch.recorded():
            assert triton_launch.state(torch.zeros(1)) is None


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are compiled here, not interpreted")
def test_the_interpreter_takes_tensors_of_the_cpu():
    """If that is forced; a model would wait for it otherwise."""
    assert triton_launch.refusal(torch.zeros(1)) is None
    assert "are on meta" in triton_launch.refusal(torch.zeros(1, device="meta"))
    with triton_launch.recorded():
        assert triton_launch.refusal(torch.zeros(1, device="meta")) is None
    maps = torch.zeros(1, 1, 2, 2, 4)
    terms, options = Terms(maps, maps, maps, None), Options((1, 1), (1, 1), (0, 0), (1, 1), "exclude", 1.0)
    assert triton_window.BACKEND.refusal(terms, options, forced=True) is None
    preference = triton_window.BACKEND.refusal(terms, options)
    assert preference == "on cpu, its kernels are only interpreted or recorded, for tests"


def test_launches_are_recorded_in_one_thread():
    with triton_launch.recorded(), ThreadPoolExecutor(1) as pool:
        assert triton_launch.recording()
        assert not pool.submit(triton_launch.recording).result()


def test_without_triton(monkeypatch):
    monkeypatch.setattr(triton_launch, "_missing", lambda: "Triton is not installed")
    with triton_launch.recorded():
        assert triton_launch.refusal(torch.zeros(1)) == "Triton is not installed"


@pytest.mark.slow
@needs_triton
def test_another_triton(monkeypatch, python):
    """Before 3.3, some kernels do not compile; one for another Python does not load."""
    import triton

    assert triton_launch._missing.__wrapped__() is None
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    reason = triton_launch._missing.__wrapped__()
    assert reason == "Triton 3.2.0 is older than 3.3, the first that compiles its kernels"
    code = "from attn_plugins.core import triton_launch; print(triton_launch._missing())"
    broken = {"triton/__init__.py": "raise ImportError('no libtriton')"}
    assert python(code, packages=broken).stdout == "Triton does not load: no libtriton\n"


def test_reasons(monkeypatch, tmp_path):
    """No compiler, or no headers of Python."""
    monkeypatch.setattr(triton_launch, "interpreted", lambda: False)
    monkeypatch.setenv("CC", "gcc")
    assert triton_launch._no_compiler.__wrapped__() is None
    monkeypatch.setattr(triton_launch.sysconfig, "get_default_scheme", lambda: "posix_local")  # Debian's
    assert triton_launch._no_compiler.__wrapped__() is None
    monkeypatch.setattr(triton_launch.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    reason = triton_launch._no_compiler.__wrapped__()
    assert reason == f"Triton needs Python's C headers at run time, and {tmp_path / 'Python.h'} is not there"
    monkeypatch.setattr(triton_launch.shutil, "which", lambda name: None)
    monkeypatch.delenv("CC")
    assert "needs a C compiler" in triton_launch._no_compiler.__wrapped__()
    monkeypatch.setattr(triton_launch, "_builds_itself", lambda: True)
    assert triton_launch._no_compiler.__wrapped__() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "switch, expected",
    [
        ("pass", "tf32x3"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "tf32"),
        ("torch.set_float32_matmul_precision('high')", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.fp32_precision = 'tf32'", "tf32"),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", "tf32x3"),
    ],
)
def test_the_precision_of_float32_follows_each_switch_of_torch(switch, expected):
    """Each switch in a process of its own: torch refuses to read the old one after a new one was set."""
    if "fp32_precision" in switch and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    load = "import torch; from attn_plugins.core.triton_launch import precision"
    code = f"{load}; {switch}; print(precision(torch.zeros(1)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == [expected]


def test_an_old_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    reason = triton_launch._unfit.__wrapped__("cuda", 0)
    assert reason == "Triton needs compute capability 8.0, and the device has 7.5"


@pytest.mark.parametrize(
    "name, lanes, fits", [("gfx942:sramecc+", 64, True), ("gfx1100", 32, True), ("gfx906", 64, False)]
)
def test_a_device_of_amd(name, lanes, fits, monkeypatch):
    """It has no capability of NVIDIA's, whatever number it reports, and float32 is multiplied as such."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName=name, warp_size=lanes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    reason = triton_launch._unfit.__wrapped__("cuda", 0)
    assert reason is None if fits else reason.endswith("and the device is gfx906")
    target = triton_launch._device.__wrapped__("cuda", 0)
    assert target == triton_launch.Target("hip", lanes=lanes)
    single = torch.zeros(1)
    with triton_launch.recorded(target):
        assert triton_launch.precision(single) == "ieee"
        assert not triton_launch.hopper(single)
        assert not triton_launch.factors_in_shared_memory(single)
        assert triton_launch.rdna(single) is (lanes == 32)


def test_a_device_of_intel(monkeypatch):
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert triton_launch._unfit.__wrapped__("xpu", 0) is None
    with triton_launch.recorded(triton_launch._device.__wrapped__("xpu", 0)):
        assert triton_launch.precision(torch.zeros(1)) == "ieee"
        assert not triton_launch.hopper(torch.zeros(1))
        assert not triton_launch.rdna(torch.zeros(1))


@pytest.mark.parametrize("kind", triton_launch.DEVICES)
def test_no_device(kind, monkeypatch):
    monkeypatch.setattr(getattr(torch, kind), "is_available", lambda: False)
    assert triton_launch._unfit.__wrapped__(kind, 0) == f"there is no {kind.upper()} device here"
    assert not triton_launch.runs_on("mps", 0)


def test_recorded_launches_are_not_done():
    with triton_launch.recorded() as recorded:
        kernel = SimpleNamespace(arg_names=["x", "size", "BLOCK"])
        triton_launch.launch(kernel, (2,), dict(size=3, other=4, x=None), BLOCK=16)
    assert recorded == [(kernel, (2,), (None, 3), {"BLOCK": 16})]
    assert not triton_launch.recording()


def test_what_triton_compiles_in_the_background_is_launched_by_triton(monkeypatch):
    """Its stand-in, from Triton 3.7, has every attribute of the compiled kernel and cannot be launched."""

    class Future:
        def __getattr__(self, name):
            return None

    launches = []
    monkeypatch.setattr(triton_launch, "_variant", lambda *arguments: ("variant",))
    for _ in range(2):
        triton_launch._run({(1,): lambda: launches.append("by Triton") or Future()}, (1,), (), {})
    assert launches == ["by Triton"] * 2


def test_sizes_are_rounded_up():
    assert [triton_launch.power_of_two(n) for n in (1, 16, 17, 64, 65)] == [16, 16, 32, 64, 128]
    assert triton_launch.power_of_two(3, 1) == 4
    assert triton_launch.power_of_two(1, 1) == 1


@needs_triton
@DTYPES
def test_multiply(dtype):
    from tests.ops import triton_product

    a, b = randn(16, 16, dtype=dtype), randn(16, 16, dtype=dtype, seed=1)
    result = torch.empty(16, 16, device=DEVICE)
    upcast = triton_launch.upcast(dtype)
    triton_launch.launch(
        triton_product.product, (1,), dict(a=a, b=b, result=result),
        BLOCK=16, PRECISION=triton_launch.precision(a), UPCAST=upcast,
    )  # fmt: skip
    torch.testing.assert_close(result, 1 + a.float() @ b.float(), rtol=TOLERANCES[dtype], atol=1e-4)
