"""Timing of TimeSformer's patterns: forward passes and training steps of small models, patterns in turn.

Used by ``python -m tools.space_time_cost --measure FILE``, which shows the times beside the counted operations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch

from tools.benchmark import load, report, results
from tools.benchmark.case import Case, Run, forward
from tools.benchmark.measure import Settings, Timer, interleaved, measure
from tools.files import write_text

MODEL, DEPTH = "timesformer_small_patch16_224", 2  # all blocks are alike: two take a sixth of the time
FRAMES, SIZES = (4, 8, 16, 32), (224, 336, 448)
KINDS = ("forward", "training")
SHOWN = ("measure", "measure_frames", "measure_sizes", "training", "threads", "seconds", "wait")
EXPLANATION = """Each cell: minimum / lower quartile · median · upper quartile of the time of one clip in ms (peak extra
memory of torch's allocator in MiB). The patterns take turns, call by call, in one process. A training step is a forward
pass and the gradients of all parameters. Noisy: the first pattern or the fastest of the others varies more than
1.3-fold between quartiles; loaded: other processes used the CPUs meanwhile."""

Clip = tuple[int, int]  # frames, and pixels of a side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a measurement."""
    made = parser.add_argument_group(
        "measured time", f"of {MODEL} with {DEPTH} blocks, in minutes; on a machine with nothing else to do"
    )
    either = made.add_mutually_exclusive_group()
    either.add_argument("--measure", type=Path, metavar="FILE", help="measure, and store the times in this .json")
    either.add_argument("--measured", type=Path, metavar="FILE", help="show the times that --measure stored there")
    made.add_argument("--measure-frames", nargs="+", type=int, default=FRAMES, metavar="T", help=f"{FRAMES}")
    made.add_argument("--measure-sizes", nargs="+", type=int, default=SIZES, metavar="PIXELS", help=f"{SIZES}")
    made.add_argument("--training", action="store_true", help="measure training steps as well")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads; all cores")
    made.add_argument("--seconds", type=float, default=4.0, help="time for the rounds of a row; 4")
    made.add_argument("--wait", type=float, default=60.0, help="seconds to wait for other processes to end; 60")


def over_sizes(frames: Sequence[int], sizes: Sequence[int]) -> list[Clip]:
    """Return clips of the fewest frames, in every size."""
    return [(min(frames), size) for size in sizes]


def over_frames(frames: Sequence[int], sizes: Sequence[int]) -> list[Clip]:
    """Return clips of every number of frames, in the smallest size."""
    return [(count, min(sizes)) for count in frames]


def prepare(pattern: str, clip: Clip, kind: str, depth: int = DEPTH) -> Run:
    """Create a model and a clip, and return the function to time."""
    frames, size = clip
    torch.manual_seed(0)
    model = timm.create_model(MODEL, pattern=pattern, num_frames=frames, img_size=size, depth=depth)
    x = torch.randn(1, frames, 3, size, size)
    if kind == "forward":
        return forward(model.eval(), x)
    parameters = list(model.parameters())
    return lambda: torch.autograd.grad(model(x).sum(), parameters)


def rows(
    patterns: Sequence[str], clips: Sequence[Clip], kinds: Sequence[str], settings: Settings, timer: Timer = interleaved
) -> Iterator[dict[str, Any]]:
    """Measure every clip, and yield a row of all patterns for each.

    Args:
        patterns: Names of the patterns.
        clips: Frames and sizes.
        kinds: Keys of :data:`KINDS`.
        settings: Rounds and attempts.
        timer: As for :func:`tools.benchmark.measure.measure`.
    """
    for kind in kinds:
        for clip in clips:
            first, *others = (partial(prepare, pattern, clip, kind) for pattern in patterns)
            case = Case(f"{clip[0]} frames of {clip[1]}², {kind}", first, dict(zip(patterns[1:], others)))
            found = measure(case, "cpu", settings, timer)
            times = {patterns[0]: found["ours"], **found["peers"]}
            kept = {key: found[key] for key in ("case", "noisy", "attempts", "load", "loaded", "threads")}
            yield dict(kept, kind=kind, frames=clip[0], size=clip[1], patterns=times)


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Run the measurements of the command line, print each row, and store and return all."""
    torch.set_num_threads(options.threads)
    before = load.wait_until_quiet(options.wait)
    if (before or 0) > load.LOADED:
        print(f"other processes use {load.words(before)}: these times are not for publication")
    frames, sizes = list(options.measure_frames), list(options.measure_sizes)
    clips = list(dict.fromkeys([*over_frames(frames, sizes), *over_sizes(frames, sizes)]))
    found = []
    settings = Settings(options.seconds, rounds=10, min_rounds=3, attempts=2)
    for row in rows(options.patterns, clips, KINDS if options.training else KINDS[:1], settings):
        found.append(row)
        times = ", ".join(f"{name} {report.milliseconds(own['min'])}" for name, own in row["patterns"].items())
        print(f"{row['case']:34s} {times} ms  {report.marks(row)}", flush=True)
    shown = argparse.Namespace(**{**vars(options), "measure_frames": frames, "measure_sizes": sizes})
    data = {
        "benchmark": "space-time-cost",
        "device": "cpu",
        "command": results.command_line("python -m tools.space_time_cost", [], shown, SHOWN),
        "machine": report.machine("cpu"),
        "load": {"before": before, "after": load.sample()},
        "model": MODEL,
        "depth": DEPTH,
        "patterns": list(options.patterns),
        "frames": frames,
        "sizes": sizes,
        "rows": found,
    }
    write_text(options.measure, results.dump(data))
    return data


def section(data: Mapping[str, Any], cost: Callable[..., int]) -> str:
    """Return the page's section of measured times.

    Args:
        data: As :func:`measured` returns it.
        cost: Counts multiply-adds, as :func:`tools.space_time_cost.cost`.
    """
    patterns = data["patterns"]
    lines = ["## Measured", *report.head("", data)[1:]]
    lines += [f"One clip, {data['model']} with {data['depth']} blocks. {EXPLANATION}", ""]
    lines += _header(["clip", *patterns, "others, CPUs", "marks"])
    for row in data["rows"]:
        cells = [report.cell(row["patterns"][pattern]) for pattern in patterns]
        others = row["load"]["others"]
        lines.append(
            "| "
            + " | ".join([row["case"], *cells, "?" if others is None else f"{others:.2f}", report.marks(row)])
            + " |"
        )
    lines += ["", "Counted G multiply-adds of a forward pass, and those a second by the minimum:", ""]
    lines += _header(["clip", *patterns])
    for row in data["rows"]:
        if row["kind"] == "forward":
            cells = []
            for pattern in patterns:
                count = cost(data["model"], pattern, row["frames"], row["size"], depth=data["depth"]) / 1e9
                cells.append(f"{count:.1f} ({count / row['patterns'][pattern]['min']:.0f}/s)")
            lines.append("| " + " | ".join([row["case"], *cells]) + " |")
    return "\n".join(lines) + "\n"


def _header(cells: Sequence[str]) -> list[str]:
    return ["| " + " | ".join(cells) + " |", "| --- " * len(cells) + "|"]
