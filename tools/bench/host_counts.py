"""Counts of what the host does for one call: launches, ATen operators, functions of Python and C, and CPU time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

# ATen operators that launch nothing themselves: views, allocations, and those that only call others. Every other one is
# a kernel on CUDA, whatever it calls.
LAUNCHES_NOTHING = {
    f"aten::{n}"
    for n in """
    _batch_norm_impl_index _conj _local_scalar_dense _reshape_alias _to_copy _unsafe_view adaptive_avg_pool2d
    alias as_strided as_strided_ batch_norm chunk clone contiguous conv1d conv2d conv3d detach detach_ dropout
    einsum embedding empty empty_like empty_strided expand expand_as feature_dropout flatten full full_like
    is_nonzero item lift lift_fresh linear mH mT matmul max_pool2d mean_dim movedim narrow new_empty
    new_empty_strided new_full new_ones new_zeros numpy_T ones ones_like output_nr pad permute real
    requires_grad_ reshape resize_ resolve_conj resolve_neg result_type select select_backward set_ slice
    slice_backward split split_with_sizes squeeze stride sum_to_size swapaxes t to transpose transpose_ type_as
    unbind unflatten unfold unsqueeze unsqueeze_ view view_as zeros zeros_like
    """.split()
}
SEVERAL = {"aten::convolution_backward": 2}  # the gradients of input and weight


class Count(NamedTuple):
    """Of one call; ``launches`` leaves out our own kernels, ``us`` is None where no time was taken."""

    python: int
    c: int
    aten: int
    launches: int
    us: float | None


def count(run: Callable[[], Any], rounds: int = 200, calls: int = 10) -> Count:
    """Count one call of ``run``; the time is the least of ``rounds`` means over ``calls``, none for no rounds."""
    for _ in range(3):
        run()
    entered = {"call": 0, "c_call": -1}  # sys.setprofile itself

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in entered:
            entered[event] += 1

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run()
    events = [event for event in profile.events() if event.name.startswith("aten::")]
    launches = sum(SEVERAL.get(event.name, 1) for event in events if _launches(event))
    times = [_seconds(run, calls) / calls for _ in range(rounds)]
    return Count(entered["call"] - 1, entered["c_call"], len(events), launches, min(times) * 1e6 if times else None)


def _launches(event: Any) -> bool:
    return event.name not in LAUNCHES_NOTHING and all(map(_calls_others, _above(event)))


def _calls_others(name: str) -> bool:
    return name in LAUNCHES_NOTHING or not name.startswith("aten::")


def _above(event: Any) -> Iterator[str]:
    while event := event.cpu_parent:
        yield event.name


def _seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.thread_time()  # not that of other work on the machine
    for _ in range(calls):
        run()
    return time.thread_time() - start
