"""Peak memory of a run: what torch's allocator held, and what the process held."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

import torch
from torch import Tensor

from .case import Run

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(run: Run, device: str) -> int:
    """Return the most bytes that torch's allocator held at once for ``run``, beyond what it held before.

    On CUDA a warm-up comes first: the first run of a kernel also allocates workspaces that stay.
    """
    if device == "cuda":
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = run()
        del result
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def size(result: object) -> int:
    """Return the bytes of a tensor, or of all tensors in a tuple or list."""
    if isinstance(result, Tensor):
        return result.numel() * result.element_size()
    return sum(map(size, result)) if isinstance(result, (tuple, list)) else 0


class ResidentPeak:
    """The most memory that this process held at once, scratch of kernels included, in bytes.

    Linux keeps it per process; where it cannot be reset, the peak is that of the whole life of the process.
    """

    def __init__(self) -> None:
        release()
        self.before = _status("VmRSS")

    def reset(self) -> None:
        """Forget peaks so far; ``before`` stays."""
        release()
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")

    def read(self) -> int:
        """Return the peak since :meth:`reset`, above what was held when this was made."""
        return max(0, _status("VmHWM") - self.before)


def resident_peak(run: Run) -> tuple[int, int]:
    """Return the most bytes that the process held at once for ``run``, beyond what it held before, and its results'.

    The peak counts memory that torch's allocator does not see, in pages that were touched.
    """
    peak = ResidentPeak()
    peak.reset()
    result = run()
    return peak.read(), size(result)


def release() -> None:
    """Give freed memory back to the system, where the C library can: it would hide what a run takes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
