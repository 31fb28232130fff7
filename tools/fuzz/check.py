"""Comparison of valid calls with the reference, forward and backward.

The reference in float64 counts as exact. Rounding errors are measured, not guessed: the error of the reference in the
call's own dtype, and one unit of that dtype's precision of the numbers before they cancel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_plugins import ops
from attn_plugins.ops.common import backends
from attn_plugins.ops.common.arguments import arithmetic_dtype
from attn_plugins.ops.common.chunks import WORKSPACE

from .call import Call

LIMIT = 32.0  # maximum error in roundings; the largest observed was 12, for a mean of many equal numbers


def compute(call: Call, backend: str | None = None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Compute ``"output"`` and gradients by name of a call, with floats in ``dtype`` if that is not None."""
    arguments = dict(call.arguments)
    leaves: dict[str, Tensor] = {}
    for name, tensor in call.floats().items():
        leaf = tensor.detach() if dtype is None else tensor.detach().to(dtype)
        arguments[name] = leaf.requires_grad_(name in call.differentiated)
        if name in call.differentiated:
            leaves[name] = leaf
    with contextlib.nullcontext() if backend is None else ops.backend(backend):
        output = call.function(**arguments)
        results = {"output": output.detach()}
        if leaves:
            grad = call.grad if dtype is None else call.grad.to(dtype)
            results.update(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad)))
    return results


@contextlib.contextmanager
def mode_of(call: Call) -> Iterator[None]:
    """Apply torch's deterministic mode and a small workspace if the call has them."""
    before, sizes = torch.are_deterministic_algorithms_enabled(), dict(WORKSPACE)
    torch.use_deterministic_algorithms(call.deterministic or before)
    if call.workspace is not None:
        WORKSPACE.update(dict.fromkeys(WORKSPACE, call.workspace))
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        WORKSPACE.update(sizes)


def problems(call: Call) -> tuple[list[str], float]:
    """Return descriptions of a valid call's faults, and the largest error in roundings."""
    wrong, largest = list[str](), 0.0
    with call.source.watched(wrong):
        with mode_of(call):
            results = compute(call, call.backend)
        exact = compute(call, backends.REFERENCE, torch.float64)
        plain = compute(call, backends.REFERENCE)
    sizes = call.magnitude(call.grad)
    for name, tensor in results.items():
        words, roundings = compare(
            tensor, exact[name], plain[name], call.dtype(), sizes[name], sizes.get("condition", 1.0)
        )
        what = name if name == "output" else f"gradient of {name}"
        wrong += [f"{what} {word}" for word in words]
        largest = max(largest, roundings)
    return wrong, largest


def compare(
    result: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype, magnitude: float, condition: float = 1.0
) -> tuple[list[str], float]:
    """Describe how a result differs from the exact one, and by how many roundings.

    ``exact`` is the reference's result in float64, ``plain`` that in ``dtype``.
    """
    if result.dtype != dtype or result.shape != exact.shape:
        return [f"is {result.dtype} {tuple(result.shape)}, not {dtype} {tuple(exact.shape)}"], 0.0
    if result.numel() == 0:
        return [], 0.0
    result, plain = result.double(), plain.double()
    finite = exact.isfinite()
    other = (result != exact) & ~(result.isnan() & exact.isnan())
    if bool((other & ~finite).any()) or not bool(result[finite].isfinite().all()):
        wrong = (result.isfinite() != finite).sum() + (other & ~finite & ~result.isfinite()).sum()
        return [f"has {int(wrong)} numbers that are not finite as the reference's are"], 0.0
    error, own, size = ((t.abs().masked_fill(~finite, 0)).max() for t in (result - exact, plain - exact, exact))
    precision = max(torch.finfo(dtype).eps, condition * torch.finfo(arithmetic_dtype(dtype)).eps)
    one = max(precision * max(float(size), magnitude), float(own), torch.finfo(dtype).tiny)
    roundings = float(error) / one
    if roundings <= LIMIT:
        return [], roundings
    at = int((result - exact).abs().masked_fill(~finite, 0).argmax())
    place = tuple(int(n) for n in torch.unravel_index(torch.tensor(at), result.shape))
    return [
        f"is {float(result.flatten()[at]):.6g} at {place}, not {float(exact.flatten()[at]):.6g}: "
        f"{roundings:.3g} roundings, {LIMIT:g} are allowed"
    ], roundings
