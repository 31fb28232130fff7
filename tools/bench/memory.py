"""Peak memory of a run in torch's allocator."""

from __future__ import annotations

import torch

from .case import Run


def peak_memory(run: Run, device: str) -> int:
    """Return the peak of bytes in torch's allocator during ``run``, above the level before.

    On CUDA a warm-up comes first: the first run of a kernel also allocates permanent workspaces.
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
