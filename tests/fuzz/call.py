"""Calls of an operator: what is known of one in advance, and its comparison with the reference, forward and backward.

The reference in float64 counts as exact. Rounding errors are measured, not guessed: the error of the reference in the
call's own dtype, and one unit of that dtype's precision of the numbers before they cancel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attn_plugins import ops
from attn_plugins.core import backends
from attn_plugins.core.arguments import arithmetic_dtype
from attn_plugins.core.chunks import WORKSPACE

from . import broken
from .broken import in_words
from .draw import Draw

LIMIT = 32.0  # maximum error in roundings; the largest observed was 12, for a mean of many equal numbers


def allow(sizes: Mapping[str, int]) -> bool:
    """Accept all sizes that agree with the axes' names."""
    return True


@dataclass
class Call:
    """One valid call of an operator.

    Axes of one name have the same size; those with a question mark may have size 1 instead. Magnitudes are sizes of
    numbers before they cancel: of the output (``"output"``) and of each argument's gradient. ``"condition"`` is the
    roundings of the result per rounding of an intermediate number, by default 1.
    """

    function: Callable[..., Tensor]  # a functional of attn_plugins.ops
    arguments: dict[str, Any]  # including those at their defaults
    axes: dict[str, str]  # of each tensor, such as "B? M? Hq Wq taps"
    options: dict[str, str]  # number, choice, bool, shapes or ints>=MINIMUM, with ? if None is allowed
    given: Callable[[set[str]], bool]  # whether tensors of these names, with the others None, are a valid call
    magnitude: Callable[[Tensor], dict[str, float]]  # from the gradient of the output
    fits: Callable[[Mapping[str, int]], bool] = allow  # whether sizes that agree with the axes are a valid call
    mixes: bool = False  # tensors may have different floating dtypes
    differentiated: list[str] = field(default_factory=list)
    backend: str | None = None  # None: the default one
    deterministic: bool = False  # in torch's deterministic mode, where uninitialized memory is NaN
    workspace: int | None = None  # bytes of logits that plain PyTorch materialises at once; None: the default
    grad: Any = None  # of the output
    source: Any = None  # the Draw that it comes from

    def complete(self, source: Draw) -> Call:
        """Draw how the call is run, and the gradient of its output."""
        self.source, self.deterministic = source, source.chance(0.3)
        self.backend = "eager" if source.chance(0.2) else None
        self.workspace = source.choice((1 << 10, 1 << 13)) if source.chance(0.5) else None
        self.differentiated = [name for name in self.floats() if source.chance(0.6)]
        meta = {name: v.to("meta") if isinstance(v, Tensor) else v for name, v in self.arguments.items()}
        self.grad = source.finish(source.normal(*self.function(**meta).shape), self.dtype())
        return self

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, in the order of the arguments."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    def floats(self) -> dict[str, Tensor]:
        """Return the floating tensors, without masks."""
        return {name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point()}

    def dtype(self) -> torch.dtype:
        return next(iter(self.floats().values())).dtype

    def legal(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Return whether tensors of these shapes are a valid call."""
        named = [pair for name, shape in shapes.items() for pair in zip(self.axes[name].split(), shape, strict=True)]
        sizes: dict[str, int] = {}
        for axis, size in sorted(named, key=lambda pair: pair[0].endswith("?")):
            if not (axis.endswith("?") and size == 1) and sizes.setdefault(axis.rstrip("?"), size) != size:
                return False
        return self.fits(sizes)

    def describe(self) -> str:
        lines = [self.function.__name__]
        for name, value in self.arguments.items():
            lines.append(f"    {name:16} {in_words(value)}{' with gradient' if name in self.differentiated else ''}")
        mode = ", deterministic" if self.deterministic else ""
        pieces = "" if self.workspace is None else f", in pieces of {self.workspace} bytes"
        return "\n".join([*lines, f"    by {self.backend or 'the default backend'}{mode}{pieces}"])

    def compute(self, backend: str | None = None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Compute ``"output"`` and gradients by name, with floats in ``dtype`` if that is not None."""
        leaves = {name: tensor.detach().to(dtype or tensor.dtype) for name, tensor in self.floats().items()}
        arguments = {**self.arguments, **leaves}
        leaves = {name: leaves[name].requires_grad_() for name in self.differentiated}
        with contextlib.nullcontext() if backend is None else ops.backend(backend):
            output = self.function(**arguments)
            results = {"output": output.detach()}
            if leaves:
                grad = self.grad.to(dtype or self.grad.dtype)
                results.update(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad)))
        return results

    @contextlib.contextmanager
    def mode(self) -> Iterator[None]:
        """Apply torch's deterministic mode and a small workspace if the call has them."""
        before, sizes = torch.are_deterministic_algorithms_enabled(), dict(WORKSPACE)
        torch.use_deterministic_algorithms(self.deterministic or before)
        if self.workspace is not None:
            WORKSPACE.update(dict.fromkeys(WORKSPACE, self.workspace))
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            WORKSPACE.update(sizes)

    def problems(self) -> list[str]:
        """Describe the faults of the call, then those of the same call with one argument broken."""
        wrong: list[str] = []
        with self.source.watched(wrong):
            with self.mode():
                results = self.compute(self.backend)
                again = self.compute(self.backend) if self.deterministic else results
            exact = self.compute(backends.REFERENCE, torch.float64)
            plain = self.compute(backends.REFERENCE)
        sizes = self.magnitude(self.grad)
        condition = sizes.get("condition", 1.0)
        for name, tensor in results.items():
            what = name if name == "output" else f"gradient of {name}"
            fault = compare(tensor, exact[name], plain[name], self.dtype(), sizes[name], condition)
            wrong += [f"{what} {fault}"] if fault else []
            if not torch.equal(bits(tensor), bits(again[name])):
                wrong.append(f"{what} differs between two runs in deterministic mode")
        return wrong + broken.problems(self)


def compare(
    result: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype, magnitude: float, condition: float = 1.0
) -> str | None:
    """Describe how a result differs from the exact one; ``plain`` is the reference's result in ``dtype``."""
    if result.dtype != dtype or result.shape != exact.shape:
        return f"is {result.dtype} {tuple(result.shape)}, not {dtype} {tuple(exact.shape)}"
    if result.numel() == 0:
        return None
    result, plain, finite = result.double(), plain.double(), exact.isfinite()
    other = (result != exact) & ~(result.isnan() & exact.isnan())
    if bool((other & ~finite).any()) or not bool(result[finite].isfinite().all()):
        return (
            f"has {int((other & ~(finite & result.isfinite())).sum())} numbers that are not finite as the reference's"
        )
    error, own, size = (t.abs().masked_fill(~finite, 0) for t in (result - exact, plain - exact, exact))
    precision = max(torch.finfo(dtype).eps, condition * torch.finfo(arithmetic_dtype(dtype)).eps)
    one = max(precision * max(float(size.max()), magnitude), float(own.max()), torch.finfo(dtype).tiny)
    roundings = float(error.max()) / one
    if roundings <= LIMIT:
        return None
    at = tuple(int(n) for n in torch.unravel_index(error.argmax(), result.shape))
    return f"is {result[at]:.6g} at {at}, not {exact[at]:.6g}: {roundings:.3g} roundings, {LIMIT:g} are allowed"


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def largest(tensor: Any) -> float:
    """Return the largest finite number of a tensor, or 0 if there is none."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return 0.0
    return float(tensor.detach().double().nan_to_num(0, 0, 0).abs().max())
