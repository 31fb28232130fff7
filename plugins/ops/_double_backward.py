"""Second derivatives of operators, from their references."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiate_twice(
    reference: Callable[..., Tensor],
    saved: Sequence[Tensor | None],
    needs: Sequence[bool],
    wanted: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradient of an operator's backward: the reference is differentiated twice.

    What the forward kept besides its terms (log-sum-exp, weights, output) are functions of the terms, no variables.

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
