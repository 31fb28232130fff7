"""What makes a key salient whatever the query: ε3 = u·key of Zhu et al. (2019), Eq. 2."""

from __future__ import annotations

import torch
from torch import Tensor


def key_saliency(key: Tensor, vector: Tensor) -> Tensor:
    """ε3 of every key.

    Args:
        key: (B, M, ..., d), projected: of a map (B, M, Hk, Wk, d), of a sequence (B, M, S, d).
        vector: u, (M, d).

    Returns:
        (B, M, ...).
    """
    return torch.einsum("bm...d,md->bm...", key, vector)


def add_vector(query: Tensor, vector: Tensor) -> Tensor:
    """q + u, so that one product gives ε1 + ε3 = (q + u)·key; likewise ε2 + ε4 with v and R.

    Args:
        query: (B, M, Hq, Wq, d).
        vector: (M, d).

    Returns:
        (B, M, Hq, Wq, d).
    """
    return query + vector[:, None, None]
