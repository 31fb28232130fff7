"""Loads the compiled operators and says, in one place, which of them can serve a tensor.

The functionals ask :func:`has_kernel`; where it answers no they run the PyTorch reference instead and
:func:`explain_once` logs why.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch
from packaging.version import Version

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


def serves(device_type: str) -> bool:
    """True where ``torch.ops.attn_plugins`` can take tensors of this device; logs once where it cannot.

    An export to ONNX, which knows no operators of ours, gets the reference, written in standard ones.
    """
    if torch.onnx.is_in_onnx_export():
        return False
    if has_kernel(device_type) or (device_type == "meta" and has_schemas()):
        return True
    if not _is_compiling():  # a log line would break the graph
        explain_once(device_type)
    return False


if has_schemas():
    _FRAGMENT = torch.library.Library("attn_plugins", "FRAGMENT")
    _AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def register_autocast(name: str, *, cast: bool) -> None:
    """Give operator ``name`` its autocast rule.

    With ``cast`` its float16, bfloat16 and float32 tensors take autocast's dtype, as a convolution's do. In
    any case autocast is off inside the operator, whose own matrix products choose their dtypes themselves.
    """
    operator = getattr(torch.ops.attn_plugins, name).default
    for device_type, key in _AUTOCAST_KEYS.items():
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def rule(*args, _keys=keys, _device_type=device_type):
            with torch._C._ExcludeDispatchKeyGuard(_keys):
                if cast:
                    dtype = torch.get_autocast_dtype(_device_type)
                    args = tuple(_cast(a, dtype) for a in args)
                return operator(*args)

        _FRAGMENT.impl(name, rule, key)


def _cast(argument: object, dtype: torch.dtype) -> object:
    if isinstance(argument, torch.Tensor) and argument.is_floating_point() and argument.dtype != torch.float64:
        return argument.to(dtype)
    return argument
