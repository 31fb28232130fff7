"""Instructions of the main kernels for a unit of work, a tap or a tile, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .table import Row

CHANNELS = 128  # that a tap is counted for
EXPLANATION = f"""Instructions of a warp in the hottest loop, for a unit of work:

* a tap of deformable convolution, or a point of deformable attention: a sample of {CHANNELS} channels, which is read at
  four pixels. Of a sample, a thread has as many channels as the kernel's last number says; an iteration has two
  samples forward, one backward, and in `scatter_kernel` eight, of which a thread has one pixel;
* a tile of keys and queries of windows on tensor cores (half precision): an iteration. Position logits are absent,
  staged in shared memory, or read directly from global memory: 0, 1 and 2 in the kernels' names;
* a key of windows on ordinary cores (float32), for four queries forward, two backward: an iteration.

Atomics are the instructions that add to global memory, for the same unit; those of `sample_backward_kernel` are not
executed where `scatter_kernel` computes the input's gradient. A dash: there was no such kernel."""


class Work(NamedTuple):
    """A kernel's unit of work.

    Attributes:
        title: Operator and pass.
        before: The kernel of the earlier report, or None.
        now: The kernel, or its name for each architecture.
        unit: ``tap``, ``tile`` or ``key``.
    """

    title: str
    before: str | None
    now: str | Mapping[str, str]
    unit: str = "tap"


_SAMPLES = {"sample_kernel": 2, "attend_kernel": 2, "scatter_kernel": 8}  # of an iteration; of other kernels one
_PIXELS = {"scatter_kernel": 1}  # of a sample that a thread has; in other kernels all four


def _atomic(kernel: str, kind: str) -> dict[str, str]:
    """Return names for architectures: with vectors of four atomic additions since 9.0, with single ones before."""
    return {"sm_80": f"{kernel}<{kind}, 1>", "sm_90": f"{kernel}<{kind}, 4>"}


MAIN = [
    work
    for kind, wide in (("float", 4), ("half", 8))
    for work in (
        Work(f"`deform_conv2d`, {kind}, forward", f"sample_kernel<{kind}, {wide}>", f"sample_kernel<{kind}, {wide}>"),
        Work(f"`deform_conv2d`, {kind}, gradients: all but the input's",
             f"sample_backward_kernel<{kind}, {wide}>", f"sample_backward_kernel<{kind}, {wide}>"),
        Work(f"`deform_conv2d`, {kind}, gradients: the input's", None, f"scatter_kernel<{kind}, 2>"),
        Work(f"`deform_conv2d`, {kind}, all gradients, small", f"sample_backward_kernel<{kind}, {wide}>",
             _atomic("sample_backward_kernel", kind)),
        Work(f"`deformable_attention`, {kind}, forward", f"attend_kernel<{kind}, {wide}>",
             f"attend_kernel<{kind}, {wide}>"),
        Work(f"`deformable_attention`, {kind}, gradients", f"attend_backward_kernel<{kind}, {wide}>",
             _atomic("attend_backward_kernel", kind)),
    )
]  # fmt: skip
_GRADIENTS = {"gradients of queries": "query_gradient", "gradients of keys": "key_gradient"}
for _lanes, _width in ((4, 32), (8, 64)):
    for _title, _kernel in {"forward": "forward", **_GRADIENTS}.items():
        _queries = 4 if _kernel == "forward" else 2
        _name = f"window_{_kernel}_kernel<float, Team<{_lanes}, 4, 2>, {_queries}>"
        MAIN.append(Work(f"`window_attention`, float, width {_width}, {_title}", _name, _name, "key"))
for _width in (32, 64):
    for _title, _kernel in {"forward": "forward", **_GRADIENTS}.items():
        _name = f"window_{_kernel}_tensor_kernel<half, {_width}"
        for _terms, _logits in {"content": 0, "content and position": 2 if _kernel == "key_gradient" else 1}.items():
            _both = f"{_name}>", f"{_name}, (Logits){_logits}, true>"
            MAIN.append(Work(f"`window_attention`, half, width {_width}, {_terms}, {_title}", *_both, "tile"))


def units(kernel: str, unit: str) -> float:
    """Return how many units of work an iteration of a kernel's hottest loop has."""
    if unit != "tap":
        return 1.0
    name, arguments = kernel.rstrip(">").split("<")
    channels = 32 * int(arguments.split(", ")[1])
    return _SAMPLES.get(name, 1) * _PIXELS.get(name, 4) / 4 * channels / CHANNELS


def summary(rows: Sequence[Row], before: Sequence[Row]) -> list[str]:
    """Return a table for each architecture of ``rows``."""
    lines: list[str] = []
    for architecture in sorted({row["architecture"] for row in rows}):
        now, past = ({row["kernel"]: row for row in each if row["architecture"] == architecture}
                     for each in (rows, before))  # fmt: skip
        lines += ["", f"### {architecture}, main kernels", ""]
        lines.append("| operator, pass | kernel | unit | instructions | ratio | atomics | registers | stack |")
        lines.append("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
        for work in MAIN:
            name = work.now if isinstance(work.now, str) else work.now.get(architecture, "")
            row, earlier = now.get(name), past.get(work.before or "")
            if row is None:
                continue
            counts, earlier_counts = _counts(row, work.unit), earlier and _counts(earlier, work.unit)
            ratio = "–" if earlier_counts is None else f"{counts[0] / earlier_counts[0]:.2f}"
            same = earlier is None or earlier["kernel"] == name
            cells = [
                work.title, f"`{name}`" if same else f"`{work.before}` → `{name}`", work.unit,
                _change(earlier_counts and earlier_counts[0], counts[0]), ratio,
                _change(earlier_counts and earlier_counts[1], counts[1]),
                _change(earlier and earlier["registers"], row["registers"]),
                _change(earlier and earlier["stack"], row["stack"]),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines[1:]


def spilling(rows: Sequence[Row]) -> str:
    """Describe which kernels have a stack, that is, spill registers."""
    found = sorted(f"`{row['kernel']}` ({row['architecture']}, {row['stack']} bytes)" for row in rows if row["stack"])
    return "No kernel spills." if not found else f"Kernels that spill: {', '.join(found)}. No other kernel spills."


def _counts(row: Row, unit: str) -> tuple[float, float]:
    """Return instructions and atomic additions for a unit of work."""
    number = units(row["kernel"], unit)
    return row["loop"]["instructions"] / number, row["loop"].get("ATOM", 0) / number


def _change(before: float | None, now: float) -> str:
    return f"{'–' if before is None else f'{before:.0f}'} → {now:.0f}"
