"""The CUDA backends with kernels that the emulator runs, as backends "emulated" for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from attn_plugins.core import library
from attn_plugins.core.operator import OPERATORS

NAME = "emulated"
# Operators of the binary, and the emulator's.
KERNELS = {
    "window_attention_forward_": "forward_",
    "window_attention_gather_backward_": "backward_",
    **{
        f"{name}{of}_kernel": f"{name}{of.removeprefix('_forward')}"
        for name in ("deform_conv2d", "deformable_attention")
        for of in ("_forward", "_backward", "_deterministic_backward")
    },
}


@contextmanager
def emulated_by(name: str, emulator: Any) -> Iterator[None]:
    """Add the backend to the table of operator ``name``, of which ``emulator`` has the kernels."""
    operator = OPERATORS[name]
    (cuda,) = [row for row in operator.table if row.name == "cuda"]
    kernels = {ours: getattr(emulator, other) for ours, other in KERNELS.items() if hasattr(emulator, other)}

    def on_cpu(function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            with (
                patch.multiple(torch.ops.attn_plugins, create=True, **kernels),
                patch.object(library, "refusal", lambda *_: None),
            ):
                return function(*args)

        return run

    row = cuda._replace(
        name=NAME, cannot=on_cpu(cuda.cannot), forward=on_cpu(cuda.forward), backward=on_cpu(cuda.backward)
    )
    with patch.object(operator, "table", [*operator.table[:-1], row, operator.table[-1]]):
        yield
