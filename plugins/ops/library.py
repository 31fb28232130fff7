"""Loads the compiled operators and says, in one place, which of them can serve a tensor.

Backends ask :func:`refusal`; where it has a reason PyTorch's own operations serve instead, and :func:`explain_once`
logs why.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch
from packaging.version import Version

from . import backends

logger = logging.getLogger("attn_plugins")

_is_compiling = getattr(torch.compiler, "is_compiling", lambda: False)  # torch >= 2.3
OLDEST_TORCH = Version("2.10")  # the stable ABI that the binaries were compiled for
_PACKAGE = Path(__file__).resolve().parent.parent


def _load(name: str) -> str | None:
    """Load binary ``name``; return None on success, else the reason in words."""
    if Version(torch.__version__) < OLDEST_TORCH:
        return f"torch {torch.__version__} is older than {OLDEST_TORCH}, whose ABI the binary needs"
    files = sorted(_PACKAGE.glob(f"{name}.*so")) + sorted(_PACKAGE.glob(f"{name}.*pyd"))
    if not files:
        return f"no {name} binary lies in {_PACKAGE.name}/: it was not compiled at installation"
    try:
        torch.ops.load_library(str(files[0]))
    except OSError as error:
        return f"{files[0].name} does not load: {error}"
    return None


@cache
def failures() -> dict[str, str | None]:
    """Device type -> None where its binary loaded, else the reason why not. Loads on the first call."""
    reasons = {"cpu": _load("_C")}
    if reasons["cpu"] is not None:  # _C holds the schemas, so nothing stands without it
        reasons["cuda"] = reasons["cpu"]
    elif torch.version.cuda is None:
        reasons["cuda"] = f"torch {torch.__version__} was built without CUDA"
    else:
        reasons["cuda"] = _load("_C_cuda")
    return reasons


_FAILURES = failures()


def has_kernel(device_type: str) -> bool:
    """True where the compiled operators run on ``device_type`` (``'cpu'`` or ``'cuda'``)."""
    return device_type in _FAILURES and _FAILURES[device_type] is None


def has_schemas() -> bool:
    """True where the binary defined the operators' schemas, on whatever device."""
    return _FAILURES["cpu"] is None


@cache
def explain_once(device_type: str) -> None:
    """Log, once per device type, why the reference serves it."""
    reason = _FAILURES.get(device_type, f"there are no kernels for {device_type}")
    logger.warning("attn_plugins runs on its PyTorch reference on %s: %s", device_type, reason)


def refusal(device_type: str, kind: str) -> str | None:
    """The reason why the compiled kernels of device ``kind`` do not take tensors of ``device_type``, or None.

    Where the binary itself is missing, one log line per device says so.
    """
    if device_type != kind:
        return f"its kernels are for {kind}, and the tensors are on {device_type}"
    reason = _FAILURES[kind]
    if reason is not None and not backends.explaining() and not _is_compiling():  # a log line would break the graph
        explain_once(kind)
    return reason
