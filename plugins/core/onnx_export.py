"""What an operator needs to know of the ONNX export that it is called in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch


def target_opset() -> int:
    """Return the opset that a running ``torch.onnx.export`` writes; 0 outside one, or where Dynamo traces its model.

    Exporters pass it to their own functions only, so that it is read from theirs, among the callers.
    """
    if torch.compiler.is_dynamo_compiling():  # which cannot look at frames
        return 0
    frame = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch.onnx"):
            opset = frame.f_locals.get("opset_version")
            if isinstance(opset, int):
                return opset
        frame = frame.f_back  # type: ignore[assignment]
    return 0


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Run without ``torch.jit.trace`` or the older exporter recording it; sizes are plain numbers inside."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]
