"""Matrix products of float32 by oneDNN on AMD processors with AVX-512.

PyTorch computes ``mm`` and ``addmm`` by MKL, which reaches AVX2's speed there; oneDNN, which PyTorch ships as well, is
about twice as fast (``benchmarks/products-cpu.md``), and 1.1 to 1.2 times where it is limited to AVX2.
"""

from __future__ import annotations

import os
import threading
from functools import cache

import torch
from torch import Tensor

from .library import override

SWITCH = "ATTN_PLUGINS_ONEDNN"
WORK = 4_000_000  # multiplications from which oneDNN is faster; below, its preparation of a call costs more
WIDE = 256  # minimum of max(rows, columns) where the left factor is transposed: oneDNN copies it
DEEP = 128  # minimum of the inner size for which the transposed product is computed, and its result copied

_lock = threading.Lock()
_overrides: torch.library.Library | None = None


def use_onednn(enabled: bool = True) -> bool:
    """Let oneDNN compute the large float32 matrix products of this process where it is faster than MKL.

    Replaces the CPU kernels of ``aten::mm`` and ``aten::addmm``, by which ``nn.Linear`` and its gradients are computed;
    autograd, ``torch.func``, counters and exporters see the same operators. ``torch.compile`` calls other kernels, and
    products of other dtypes are computed as before. Results differ by rounding and are reproducible. Affects the whole
    process, on AMD processors with AVX-512 only. ``deform_conv2d`` uses oneDNN there in any case. The environment
    variable ``ATTN_PLUGINS_ONEDNN=0`` turns off both.

    Args:
        enabled: False restores PyTorch's kernels.

    Returns:
        Whether oneDNN computes these products now.
    """
    global _overrides
    with _lock:
        if not enabled and _overrides is not None:
            _overrides._destroy()
            _overrides = None
        elif enabled and _overrides is None and os.environ.get(SWITCH, "1") != "0" and is_faster():
            _overrides = override("aten", {"mm": _mm, "addmm": _addmm})
        return _overrides is not None


@cache
def is_faster() -> bool:
    """Return whether oneDNN is much faster than MKL on this processor, as measured on Zen 4 and Zen 5."""
    usable = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and vendor() == "AuthenticAMD"
    return usable and wide and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def vendor() -> str:
    """Return the processor's vendor as CPUID names it, or an empty string where the system does not say."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return "AuthenticAMD" if "AuthenticAMD" in os.environ.get("PROCESSOR_IDENTIFIER", "") else ""


def serves(a: Tensor, b: Tensor) -> bool:
    """Return whether oneDNN computes ``a @ b`` faster than MKL."""
    if a.dtype is not torch.float32 or b.dtype is not torch.float32 or a.dim() != 2 or b.dim() != 2:
        return False
    (rows, width), (depth, columns) = a.shape, b.shape
    if depth != width or rows * width * columns < WORK or not torch.backends.mkldnn.enabled:
        return False
    if a.stride(1) == 1 and a.stride(0) >= width:
        return True
    return max(rows, columns) >= WIDE and a.stride(0) == 1 and a.stride(1) >= rows


def _mm(self: Tensor, mat2: Tensor) -> Tensor:
    if serves(self, mat2):
        return _product(self, mat2, None)
    return torch.ops.aten.mm.out(self, mat2, out=self.new_empty(0))


def _addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if alpha == 1 and beta == 1 and self.shape == mat2.shape[1:] and self.dtype is mat1.dtype and serves(mat1, mat2):
        return _product(mat1, mat2, self)
    return torch.ops.aten.addmm.out(self, mat1, mat2, beta=beta, alpha=alpha, out=mat1.new_empty(0))


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``a @ b``, or ``(b.T @ a.T).T`` where a is transposed, has more rows, and the result's copy is cheap.

    oneDNN refuses a factor whose elements overlap, as those of an unfolded signal, and ignores the stride of a bias.
    """
    if not (b.stride(1) == 1 and b.stride(0) >= b.shape[1]) and not (b.stride(0) == 1 and b.stride(1) >= b.shape[0]):
        b = b.contiguous()
    if a.stride(1) != 1 and a.shape[0] >= b.shape[1] and a.shape[1] >= DEEP:
        product = _linear(b.t(), a).t().contiguous()
        return product if bias is None else product.add_(bias)
    return _linear(a, b.t(), bias if bias is None else bias.contiguous())


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")
