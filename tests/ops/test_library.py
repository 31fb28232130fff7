"""The compiled operators that can serve a tensor, and the reasons of those that cannot."""

from __future__ import annotations

import ctypes
import logging
import platform
from importlib.util import find_spec

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_plugins.core import backends, library, triton_launch
from attn_plugins.ops import backend, deform_conv2d, deformable_attention, explain, window_attention
from attn_plugins.ops.deform_conv import cuda, deform_conv
from attn_plugins.ops.deform_conv import torchvision_kernels as by_torchvision
from attn_plugins.ops.window_attention.operands import Options
from attn_plugins.ops.window_attention.operands import Terms as WindowTerms
from attn_plugins.ops.window_attention.window_attention import ATTEND

NO_IMAGE = "no kernel image is available for execution on the device"
WORDS = (
    "the CUDA binary has no code for Ancient 7 of compute capability 6.1 (no kernel image is available for execution "
    "on the device): reinstall with TORCH_CUDA_ARCH_LIST=6.1 to compile it"
)
needs_torchvision = pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed")
BORROWED = "torchvision's kernels" if find_spec("torchvision") else "its PyTorch implementation"


@pytest.fixture
def gpus(monkeypatch):
    """Emulate a machine with a CUDA binary and two GPUs, whose binary has code for GPU 1 only."""
    asked = []

    def code_refusal(index):
        asked.append(index)
        return None if index == 1 else NO_IMAGE

    monkeypatch.setitem(library._FAILURES, "cuda", None)
    monkeypatch.setattr(library, "_code_refusal", code_refusal)
    monkeypatch.setattr(library, "_gpu", lambda device: device.index or 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (6, 1))
    monkeypatch.setattr(triton_launch, "_refusal", lambda kind, index: "the device is too old")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"Ancient {index + 7}")
    caches = [library._gpu_failure, backends._warn]
    for cache in caches:
        cache.cache_clear()
    yield asked
    for cache in caches:
        cache.cache_clear()


def test_a_gpu_that_the_binary_has_no_code_for_is_refused_in_words(gpus):
    assert library.refusal(torch.device("cuda", 0), "cuda") == WORDS
    assert library.refusal("cuda:0", "cuda") == library.refusal("cuda", "cuda") == WORDS
    assert gpus == [0]  # the answer is remembered


def test_what_serves_instead_is_logged_once(gpus, caplog):
    with FakeTensorMode():
        convolution, window = (calls()[operator] for operator in (deform_conv2d, window_attention))
        terms = deform_conv.Terms(*convolution[:3], None, None)
    with caplog.at_level(logging.WARNING, logger="attn_plugins"):
        for _ in range(2):
            backends.choose("deform_conv2d", deform_conv.CONVOLVE.table, terms, None)
            options = Options((3, 3), (1, 1), (1, 1), (1, 1), "exclude", 1.0)
            backends.choose("window_attention", ATTEND.table, WindowTerms(*window[:4]), options)
    assert [record.getMessage() for record in caplog.records] == [
        f"attn_plugins computes deform_conv2d on cuda with {BORROWED}: {WORDS}",
        f"attn_plugins computes window_attention on cuda with its PyTorch implementation: {WORDS}",
    ]


def test_every_gpu_is_asked_for_itself(gpus):
    there = map(library.has_kernel, (torch.device("cuda", 1), "cuda:1", "cuda:0", "cuda"))
    assert list(there) == [True, True, False, False]
    assert library.refusal("cuda:1", "cuda") is None
    assert gpus == [1, 0]
    assert library.refusal("cuda:1", "cpu") == "its kernels are for cpu, but the tensors are on cuda"


def calls():
    """Return calls with CUDA tensors that hold nothing."""
    if torch.version.cuda is None:
        pytest.skip("a CPU-only torch")
    window = torch.empty(2, 2, 5, 6, 8, device="cuda")
    value, places = torch.empty(1, 4, 2, 8, device="cuda"), torch.empty(1, 3, 2, 1, 2, 2, device="cuda")
    image = [torch.empty(shape, device="cuda") for shape in ((2, 4, 5, 6), (2, 18, 5, 6), (4, 4, 3, 3))]
    return {
        deform_conv2d: (*image, None, 1, 1),
        window_attention: (window, window, window, None, 3),
        deformable_attention: (value, ((2, 2),), places, places[..., 0]),
    }


def test_explain_says_that_no_code_fits_the_gpu(gpus):
    with FakeTensorMode():
        for operator, args in calls().items():
            choice = explain(operator, *args)
            assert choice.serves not in ("cpu", "cuda"), operator
            assert choice.refusals["cuda"] == WORDS, operator


@pytest.mark.parametrize(
    "operator, second",
    [(window_attention, "triton"), (deformable_attention, "triton"),
     pytest.param(deform_conv2d, "torchvision", marks=needs_torchvision)],
    ids=lambda given: getattr(given, "__name__", given),
)  # fmt: skip
def test_what_serves_cuda_where_no_binary_does(operator, second, monkeypatch):
    missing, refusal = backends.Failure("there is no _C_cuda binary"), library.refusal
    monkeypatch.setattr(library, "refusal", lambda device, kind: missing if kind == "cuda" else refusal(device, kind))
    monkeypatch.setattr(triton_launch, "_refusal", lambda kind, index: None)
    with FakeTensorMode():
        choice = explain(operator, *calls()[operator])
        assert (choice.serves, choice.refusals["cuda"]) == (second, missing)
        monkeypatch.setattr(triton_launch, "_refusal", lambda kind, index: "triton is not installed")
        monkeypatch.setattr(by_torchvision, "_missing", lambda key: "torchvision is not installed")
        choice = explain(operator, *calls()[operator])
        assert (choice.serves, choice.refusals[second]) == ("eager", f"{second} is not installed")


def test_a_forced_backend_without_code_for_the_gpu_raises(gpus):
    with FakeTensorMode():
        terms = deform_conv.Terms(*calls()[deform_conv2d][:3], None, None)
    with pytest.raises(ValueError, match=r"has no code for Ancient 7"), backend("cuda"):
        backends.choose("deform_conv2d", [cuda.BACKEND], terms, None)


def test_without_a_gpu_the_binary_that_loaded_serves(gpus, monkeypatch):
    """The same holds for tensors without data, which `explain` accepts on any machine."""
    monkeypatch.setattr(library, "_gpu", lambda device: None)
    assert library.refusal("cuda:0", "cuda") is None
    assert not gpus


def test_the_number_of_a_gpu(monkeypatch):
    monkeypatch.setattr(library, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert [library._gpu(torch.device(name)) for name in ("cuda:1", "cuda", "cpu")] == [1, 3, None]
    monkeypatch.setattr(library, "_has_gpu", lambda: False)
    assert library._gpu(torch.device("cuda:1")) is None


def test_the_binary_names_its_instructions():
    if library.failures()["cpu"] is not None:
        pytest.skip("no CPU binary is compiled")
    widest = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 3
    assert library.cpu_level() in (range(widest + 1) if platform.machine() in ("x86_64", "AMD64") else [0])


def test_the_binary_answers():
    file = library._binary("_C_cuda")
    if file is None or library.failures()["cuda"] is not None:
        pytest.skip("no CUDA binary is compiled")
    ask = ctypes.CDLL(str(file)).attn_plugins_cuda_refusal
    ask.restype = ctypes.c_char_p
    assert ask() is None  # also without a GPU, which does not mean missing code
