"""Measure whole upstream models from their own configs: stock, and with our layers by the drop-in.

python -m tools.benchmark end_to_end                       # all (30 minutes on 2 cores), to benchmarks/
python -m tools.benchmark end_to_end --models ccnet --size 129 129 --seconds 0    # a quick look; nothing is written

Each measurement is a fresh process; stock and ours take turns. Both have the same random weights; pictures, boxes and
masks are synthetic. A training step is forward, loss, backward and the optimizer's step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tools import need

from .. import compiled_mmcv, load, report, results
from ..summary import NOISY, noisy, summarize
from .child import MARK
from .models import MODELS

ROOT = Path(__file__).parents[3]
RUN = "from tools.benchmark.end_to_end.child import main; main()"
SHOWN = ("name", "models", "size", "threads", "seconds", "rounds", "min_rounds", "minutes", "wait", "out")
PASSES = ("prediction", "training step")
EXPLANATION = f"""One picture, CPU, float32. Each cell: minimum / lower quartile · median · upper quartile of the
time in {{unit}} (MiB: the peak resident memory of the process during the pass, above its level with the model built).
Stock is the upstream config as it is, ours the same config with the drop-in. Each measurement is a fresh process, in
turns, with the same random weights (offsets and gates at their start, zero), after one call that warms up. Ratio: the
minimum of stock over ours. Noisy: one of the two varies more than {NOISY}-fold between quartiles; loaded: other
processes used more than {load.LOADED} CPUs meanwhile."""


class Failed(Exception):
    """A process ended with an error."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark end_to_end",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument(
        "--name", default="end_to_end", help="name of the files, for models measured separately (NAME-cpu.json)"
    )
    parser.add_argument("--size", type=int, nargs=2, metavar=("H", "W"), help="size of pictures (writes no file)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--seconds", type=float, default=10, help="time for the calls of a pass in a process")
    parser.add_argument("--rounds", type=int, default=5, help="maximum processes of each kind for a model")
    parser.add_argument("--min-rounds", type=int, default=2, help="minimum processes, however long they take")
    parser.add_argument("--minutes", type=float, default=28, help="total time; later rounds are left out")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for other processes to end")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of JSON file and page")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    for name in ("threads", "rounds", "min_rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    need("mmdet", "mmseg")
    if not compiled_mmcv.is_compiled():  # stock models would run on our operators
        raise SystemExit(f"tools.benchmark end_to_end: {compiled_mmcv.NOT_COMPILED}")
    torch.set_num_threads(options.threads)
    before = load.wait_until_quiet(options.wait)
    if (before or 0) > load.LOADED:
        print(f"other processes use {load.words(before)}: these rows are not for publication")
    rows = []
    try:
        for name in options.models:
            rows += measure(name, options)
    except Failed as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    data = {
        "benchmark": options.name,
        "device": "cpu",
        "command": results.command_line("python -m tools.benchmark end_to_end", [], options, SHOWN),
        "machine": report.machine("cpu", report.PEERS),
        "load": {"before": before, "after": load.sample()},
        "rows": rows,
    }
    text = page(data)
    print("\n" + text)
    if not options.size:
        print(f"written to {results.write(options.out, f'{options.name}-cpu', data, text)}")
    return 0


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one model, a row for each pass."""
    budget = 60 * options.minutes / len(options.models)
    found: dict[str, list[dict[str, Any]]] = {"stock": [], "ours": []}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(options.rounds, options.min_rounds)):
            spent = time.perf_counter() - begin
            if number >= options.min_rounds and spent * (number + 1) / number > budget:
                break
            for kind in found:
                settings = dict(
                    model=name,
                    ours=kind == "ours",
                    size=options.size,
                    threads=options.threads,
                    seconds=options.seconds,
                    weights=str(Path(folder) / "weights.pth"),
                )
                found[kind].append(process(settings))
                passes = found[kind][-1]["passes"]
                times = ", ".join(f"{each} {min(passes[each]['times']):.3g} s" for each in PASSES)
                print(f"{name}, round {number + 1}, {kind}: {times}", flush=True)
    return [row(name, each, found["ours"], found["stock"], options.size) for each in PASSES]


def process(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run a fresh process and return its measurements.

    Raises:
        Failed: the process ended with an error.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(f"{settings['model']} ended with status {done.returncode}:\n{done.stderr.rstrip()}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(MARK))[len(MARK) :])


def row(
    name: str,
    each: str,
    ours: Sequence[Mapping[str, Any]],
    stock: Sequence[Mapping[str, Any]],
    size: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the row of one pass from the measurements of both kinds of processes."""
    entry = MODELS[name]
    both = {}
    for kind, processes in (("ours", ours), ("stock", stock)):
        passes = [found["passes"][each] for found in processes]
        both[kind] = summarize([t for found in passes for t in found["times"]])
        both[kind] |= {
            "memory": max(found["memory"] for found in passes),
            "features": min(t for found in passes for t in found["features"]),
            "loss": float(f"{processes[0]['loss']:.6g}"),
        }
    loads = [found["load"] for found in (*ours, *stock)]
    others = max((found["others"] for found in loads if found["others"] is not None), default=None)
    height, width = size or entry.size
    return {
        "case": f"{entry.title}, {height}x{width}, {each}",
        "config": f"{entry.package}::{entry.config}",
        "ours": both["ours"],
        "peers": {"stock": both["stock"]},
        "better_peer": "stock",
        "ratio": both["stock"]["min"] / both["ours"]["min"],
        "memory_ratio": both["ours"]["memory"] / max(1, both["stock"]["memory"]),
        "noisy": noisy(both.values()),
        "attempts": 1,
        "rounds": len(ours),
        "load": {"others": others, "switches": sum(found["switches"] for found in loads)},
        "loaded": (others or 0) > load.LOADED,
        "goal": None,
    }


def page(data: Mapping[str, Any]) -> str:
    """Return the whole page."""
    rows = data["rows"]
    lines = report.head(f"{data['benchmark']}, cpu", data) + report.table(rows, EXPLANATION)
    lines += [
        "",
        "Forward time of backbone and neck, the least of all calls, and the loss of the first training step, in which",
        "both start from the same weights:",
        "",
        "| case | rounds | ours, s | stock, s | loss of ours | loss of stock | config |",
        "| --- " * 7 + "|",
    ]
    for each in rows:
        ours, stock = each["ours"], each["peers"]["stock"]
        cells = [each["case"], str(each["rounds"]), f"{ours['features']:.3g}", f"{stock['features']:.3g}"]
        lines.append("| " + " | ".join([*cells, f"{ours['loss']:g}", f"{stock['loss']:g}", each["config"]]) + " |")
    return "\n".join(lines) + "\n"
