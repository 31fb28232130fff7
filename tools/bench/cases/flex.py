"""FlexAttention as a peer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..case import Maker, Peer


def flex(query: Tensor, key: Tensor, value: Tensor, score: Any = None, mask: Any = None, scale: float = 1.0) -> Tensor:
    """Call FlexAttention on heads of maps or sequences; the caller is compiled, with the tensors that score reads."""
    from torch.nn.attention.flex_attention import flex_attention

    flat = (t.flatten(2, -2) for t in (query, key, value))
    return flex_attention(*flat, score, mask, scale).unflatten(2, query.shape[2:-1])  # type: ignore[union-attr]


def blocks(mask: Any, queries: int, keys: int) -> Any:
    """Return FlexAttention's block mask, on the default device."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask, None, None, queries, keys, device=str(torch.get_default_device()))


def flex_peer(make: Maker) -> dict[str, Peer]:
    """Return FlexAttention with logits of position, of whose gradients it computes those of content alone."""
    return {"FlexAttention, gradients of content alone": Peer(make, differentiated=3)}
