"""How autograd meets an operator: its kernel, its second derivative, and autograd inside its own kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def differentiable(operator: Any, setup_context: Callable[..., None], backward: Callable[..., tuple]) -> Callable:
    """Return an operator's kernel for autograd, as ``torch.library.register_autograd`` makes it.

    That one looks for default arguments in the schema at every call, which takes longer than all the rest (27 of 60 µs
    for a small call); our schemas have none.
    """

    def forward(ctx: Any, keyset: Any, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)
            setup_context(ctx, args, result)
        return result

    def differentiate(ctx: Any, *grads: Any) -> tuple:
        return (None, *backward(ctx, *grads))

    function = type(
        f"{operator._opname}_function",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(differentiate)},
    )

    def kernel(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args):
            return function.apply(keyset, *args)  # type: ignore[attr-defined]
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return kernel


def second_gradients(
    reference: Callable[..., Tensor],
    saved: Sequence[Tensor | None],
    needs: Sequence[bool],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Return the gradient of a backward.

    Args:
        reference: The operator's definition, of the terms alone.
        saved: grad_output, then the terms.
        needs: Which terms the backward gave gradients of.
        wanted: Of which of ``saved`` a gradient is wanted.
        grads: Of the backward's results.

    Returns:
        As many as ``saved``; None where not wanted.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        grad_output, *terms = (
            t if t is None or (create_graph and t.requires_grad) else t.detach().requires_grad_() for t in saved
        )
        output = reference(*terms)
        chosen = [(t, g) for t, g, need in zip(terms, grads, needs) if t is not None and need and g is not None]
        first = torch.autograd.grad(output, [t for t, _ in chosen], grad_output, create_graph=True)
        second = torch.autograd.grad(
            first,
            [t for t, want in zip((grad_output, *terms), wanted) if want and t is not None],
            [g for _, g in chosen],
            create_graph=create_graph,
            allow_unused=True,
        )
    found = iter(second)
    return [next(found) if want else None for want in wanted]


@contextlib.contextmanager
def autograd_within_operator() -> Iterator[None]:
    """Let autograd record within an operator's kernel, where the dispatcher has left it behind."""
    below = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        below = below - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), below), torch.enable_grad():
        yield
