"""Chunks of queries, so that only one chunk's logits are in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

WORKSPACE = {"cpu": 4 << 20, "cuda": 64 << 20}  # bytes of one chunk's logits


def chunks(B: int, M: int, Hq: int, Wq: int, keys: int, budget: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut the queries into chunks of about ``budget`` logits: whole images, else rows, else parts of a row."""
    per_query = max(1, M * keys)
    images = _even(B, budget // max(1, per_query * Hq * Wq))
    rows = Hq if images > 1 else _even(Hq, budget // max(1, per_query * Wq))
    columns = Wq if rows > 1 else _even(Wq, budget // per_query)
    for b in range(0, B, images):
        for h in range(0, Hq, rows):
            for w in range(0, Wq, columns):
                yield slice(b, min(b + images, B)), slice(h, min(h + rows, Hq)), slice(w, min(w + columns, Wq))


def add_chunk(total: Tensor, index: Sequence[slice], addend: Tensor) -> None:
    """Add to the part ``index`` of ``total``, summed over the axes where ``total`` has size 1."""
    target = total[tuple(part if size > 1 else slice(None) for part, size in zip(index, total.shape))]
    target += addend.sum_to_size(target.shape)


def _even(total: int, most: int) -> int:
    """Return the piece size, at most ``most``, that cuts ``total`` into the fewest and most equal pieces."""
    pieces = -(-total // max(1, most))
    return max(1, -(-total // max(1, pieces)))
