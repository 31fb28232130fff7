"""What belongs to a call, kept with the storage of a tensor of that call.

Views of the tensor, detached copies and what autograd saves share the storage. Gradient checkpointing runs layers again
on the tensors that it saved, so a layer finds there what it kept in the forward pass, whatever ran in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep(x: Any, name: str, value: Any) -> None:
    """Keep ``value`` with the storage of ``x``, if that is a tensor with a storage; None changes nothing."""
    storage = _storage(x) if value is not None else None
    if storage is not None:
        # An attribute lives exactly as long as the storage, whose Python object torch keeps. In a table by address, a
        # later tensor in the same memory would find what belongs to an earlier call.
        setattr(storage, f"_attn_plugins_{name}", value)


def kept(x: Any, name: str) -> Any:
    """Return what was kept with the storage of ``x`` last, or None."""
    return getattr(_storage(x), f"_attn_plugins_{name}", None)


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, in which checkpointing repeats layers, or -1."""
    return torch._C._current_graph_task_id()


def _storage(x: Any) -> Any:
    try:
        return x.untyped_storage() if isinstance(x, Tensor) else None
    except RuntimeError:  # a tensor within torch.func.vmap has none
        return None
