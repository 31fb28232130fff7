"""Attention weights of each term alone in a partition's windows, for inspection.

Shapes: B batch, M heads, d width per head, (H, W) the map, n windows, N tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..common.capture import softmax_over_keys
from .windows import Attend, Pair, Project, masked, window_maps

# Logits (n or 1, M or 1, N, N) of a term, from its name, scaled queries, keys, the mask and the window's tokens.
Term = Callable[[str, Tensor, Tensor, Tensor | None, Tensor], Tensor]


def window_parts(
    x: Tensor,
    window: Pair,
    shift: Pair,
    num_heads: int,
    project: Project,
    operands: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    term: Term,
    names: Sequence[str],
    queries: Tensor | None = None,
) -> dict[str, Tensor]:
    """Compute the softmax of each term's own logits on the whole map, 0 outside the query's window.

    Args:
        x: See :func:`.in_windows`.
        window: See :func:`.in_windows`.
        shift: See :func:`.in_windows`.
        num_heads: See :func:`.in_windows`.
        project: See :func:`.in_windows`.
        operands: Function from queries and keys to those whose product is the content term.
        term: Function that computes the logits of a term.
        names: Names of the terms.
        queries: (Q, 2), rows and columns; None for all.

    Returns:
        (B, M, H, W, H, W), or (B, M, Q, H, W) with ``queries``, by name.

    Raises:
        ValueError: ``queries`` are not positions on the map.
    """

    def weigh(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tokens: Tensor) -> Tensor:
        q, k = operands(q, k)
        logits = masked(term(name, q, k, mask, tokens), mask, q)
        assert logits is not None
        return softmax_over_keys(logits.expand(len(q), num_heads, -1, -1))

    found: dict[str, Tensor] = {}
    for name in names:
        weights: Attend = partial(weigh, name)
        found[name] = window_maps(x, window, shift, num_heads, project, weights, queries)
    return found
