"""Load the compiled operators, and report which devices they run on.

Backends call :func:`refusal`. If it returns a reason, the next backend of the operator's table is tried. If no binary
runs on the device, :func:`.backends.choose` also logs the reason and the backend that is used instead.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from .backends import Failure

OLDEST_TORCH = Version("2.10")  # the stable ABI that the binaries were compiled for
_PACKAGE = Path(__file__).resolve().parents[1]


def override(namespace: str, kernels: Mapping[str, Callable[..., Any]]) -> torch.library.Library:
    """Replace CPU kernels of another library's operators, by name, as long as the result is kept."""
    library = torch.library.Library(namespace, "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    return library


def _binary(name: str) -> Path | None:
    """Return the path of binary ``name``, or None if there is none."""
    return next(iter(sorted(_PACKAGE.glob(f"{name}.*so")) + sorted(_PACKAGE.glob(f"{name}.*pyd"))), None)


def _load(name: str) -> str | None:
    """Load binary ``name``; return None on success, else the reason for the failure."""
    if Version(torch.__version__) < OLDEST_TORCH:
        return f"torch {torch.__version__} is older than {OLDEST_TORCH}, whose ABI the binary needs"
    file = _binary(name)
    if file is None:
        return f"there is no {name} binary in {_PACKAGE.name}/: it was not compiled at installation"
    try:
        torch.ops.load_library(str(file))
    except OSError as error:
        return f"{file.name} does not load: {error}"
    return None


@cache
def failures() -> dict[str, str | None]:
    """Load the binaries, once; return for each device type why its binary did not load, or None if it did."""
    reasons = {"cpu": _load("_C")}
    if reasons["cpu"] is not None:  # _C defines the schemas that _C_cuda implements
        reasons["cuda"] = reasons["cpu"]
    elif torch.version.cuda is None:
        reasons["cuda"] = f"torch {torch.__version__} was built without CUDA"
    else:
        reasons["cuda"] = _load("_C_cuda")
    return reasons


_FAILURES = failures()


@cache
def cpu_level() -> int | None:
    """Return the x86-64 level of the CPU kernels that run here: 4 (AVX-512), 3 (AVX2) or 1; 0 on other processors.

    None if no binary loaded, or one compiled from an older version.
    """
    if _FAILURES["cpu"] is not None:
        return None
    ask = getattr(ctypes.CDLL(str(_binary("_C"))), "attn_plugins_cpu_level", None)
    return None if ask is None else int(ask())


def _code_refusal(index: int) -> str | None:
    """Return CUDA's reason why the CUDA binary has no code that GPU ``index`` can run, or None."""
    ask = ctypes.CDLL(str(_binary("_C_cuda"))).attn_plugins_cuda_refusal
    ask.restype = ctypes.c_char_p
    with torch.cuda.device(index):
        reason = ask()
    return None if reason is None else reason.decode()


@cache
def _gpu_failure(index: int) -> str | None:
    """Return the reason why the CUDA binary's kernels do not run on GPU ``index``, or None."""
    reason = _code_refusal(index)
    if reason is None:
        return None
    major, minor = torch.cuda.get_device_capability(index)
    return (
        f"the CUDA binary has no code for {torch.cuda.get_device_name(index)} of compute capability "
        f"{major}.{minor} ({reason}): reinstall with TORCH_CUDA_ARCH_LIST={major}.{minor} to compile it"
    )


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()  # asks the driver at each call


def _gpu(device: torch.device) -> int | None:
    """Return the index of a CUDA device, or None without a GPU: fake CUDA tensors exist there as well."""
    if device.type != "cuda" or not _has_gpu():
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _failure(device: torch.device) -> str | None:
    """Return the reason why the compiled operators do not run on ``device``, or None."""
    reason = _FAILURES.get(device.type, f"there are no kernels for {device.type}")
    if reason is not None or device.type != "cuda" or (gpu := _gpu(device)) is None:
        return reason
    return _gpu_failure(gpu)


def has_kernel(device: torch.device | str) -> bool:
    """Return whether the compiled operators run on ``device``; ``'cuda'`` is the current GPU."""
    return _failure(torch.device(device)) is None


def has_schemas() -> bool:
    """Return whether the binary that defines the operators' schemas was loaded."""
    return _FAILURES["cpu"] is None


def refusal(device: torch.device | str, kind: str) -> str | None:
    """Return the reason why the compiled kernels for device type ``kind`` cannot run on ``device``, or None.

    A missing binary, or one without code for the GPU, is a :class:`.backends.Failure`.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if device.type != kind:
        return f"its kernels are for {kind}, but the tensors are on {device.type}"
    reason = _failure(device) if kind == "cuda" else _FAILURES[kind]
    return None if reason is None else Failure(reason)


def refuses_other_devices(terms: Any, options: Any) -> str | None:
    """Refuse values that are not on the CPU, and those that are where the kernels cannot run."""
    return refusal(terms.value.device, "cpu")


def refuses_determinism(terms: Any, options: Any) -> str | None:
    """Refuse the backward in deterministic mode: kernels add with atomics, those of plain PyTorch need not."""
    return "its backward is not deterministic" if torch.are_deterministic_algorithms_enabled() else None


def refuses_determinism_in_float64(terms: Any, options: Any) -> str | None:
    """Refuse float64 in deterministic mode: the order-free sums of ``fixed_point.cuh`` are for float32 and halves."""
    if terms[0].dtype == torch.float64 and (reason := refuses_determinism(terms, options)):
        return f"{reason} in float64"
    return None
