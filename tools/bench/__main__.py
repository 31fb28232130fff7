"""Benchmark our operators, modules and models beside their peers, side by side in one run.

python -m tools.bench                         # every operator (25 minutes on 2 cores), to benchmarks/
python -m tools.bench deform_conv             # one of them
python -m tools.bench deform_conv -k 1-D      # only rows whose names match a regular expression; nothing is written
python -m tools.bench end_to_end              # whole mmdet and mmsegmentation models, stock and ours (30 minutes)
python -m tools.bench --device cuda --name gpu --minutes 8 --resume   # on a GPU, in pieces: one file of all rows
python -m tools.bench eager end_to_end timm_models --device cuda --name gpu-eager --resume   # as users run them
python -m tools.bench table                   # write README's and the site's tables, and pages, from the JSON files

Run it on an idle machine: it waits until other processes end, and pages show their load. Every row is appended to
OUT/NAME.jsonl as it ends; --resume measures those that are missing there.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch

from tools import command_parser
from tools.machine import machine

from . import cases, load, report, results, worker
from .timing import Settings
from .worker import Job

SECONDS = {"cpu": 5.0, "cuda": 0.4}
ROW_SECONDS = {"cpu": 900.0, "cuda": 120.0}
ON_CUDA = ("triton", "natten")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = Settings()
    parser = command_parser("bench", __doc__)
    names = f"any of {', '.join(cases.NAMES)} (default: all of these), {', '.join(cases.MORE)}"
    parser.add_argument("names", nargs="*", metavar="BENCHMARK", help=names)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--seconds", type=float, help="time for the rounds of a row (5, on CUDA 0.4)")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="maximum rounds of a row")
    parser.add_argument("--min-rounds", type=int, default=defaults.min_rounds, help="rounds to run in any case")
    parser.add_argument("--attempts", type=int, default=defaults.attempts, help="maximum measurements of a noisy row")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for other processes to end")
    parser.add_argument("-k", metavar="REGEX", default="", help="only matching rows (written with --name alone)")
    parser.add_argument("--all", action="store_true", help="on CUDA: every size and dtype, not the main rows")
    parser.add_argument("--details", action="store_true", help="our other backends and the roofline (always on CUDA)")
    parser.add_argument("--name", help="one file of this name for all benchmarks")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of JSON files and pages")
    parser.add_argument("--resume", action="store_true", help="keep the rows that OUT/NAME.jsonl has")
    parser.add_argument("--minutes", type=float, help="start no row after this time")
    parser.add_argument("--part-seconds", type=float, help="then leave an operator's or model's rows to --resume")
    parser.add_argument("--row-seconds", type=float, help="abandon a row after this time (900, on CUDA 120)")
    parser.add_argument("--warm", type=int, default=0, metavar="N", help="first run all rows once in N processes")
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["table"]:
        from . import table

        return table.main(arguments[1:])
    parser = build_parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - {*cases.NAMES, *cases.MORE}:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(cases.NAMES)}, "
                     f"{', '.join(cases.MORE)}")  # fmt: skip
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    for name in ("minutes", "part_seconds", "row_seconds"):
        if (value := getattr(options, name)) is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if options.warm < 0:
        parser.error(f"--warm must be at least 0, got {options.warm}")
    if options.seconds is None:
        options.seconds = SECONDS[options.device]
    options.details |= options.device == "cuda"
    try:
        settings = Settings(options.seconds, options.rounds, options.min_rounds, options.attempts)
        re.compile(options.k)
    except (ValueError, re.error) as error:
        parser.error(str(error))
    if not options.names:
        options.names = [*cases.NAMES, *(["modules"] if options.device == "cuda" else [])]
    torch.set_num_threads(options.threads)
    job = Job(
        options.names,
        options.device,
        record="",
        pattern=options.k,
        every=options.all,
        threads=options.threads,
        details=options.details,
        until=time.time() + 60 * options.minutes if options.minutes else float("inf"),
        part_seconds=options.part_seconds or float("inf"),
        row_seconds=options.row_seconds or ROW_SECONDS[options.device],
        settings=vars(settings),
    )
    files = [(options.name, options.names)] if options.name else [(f"{n}-{options.device}", [n]) for n in options.names]
    status = 0
    try:
        for file, names in files:
            status |= measure(file, names, options, job)
    except OSError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return status


def measure(file: str, names: list[str], options: argparse.Namespace, job: Job) -> int:
    """Measure the rows of one file, print their page, and write it with its JSON."""
    gpu = options.device == "cuda"
    before = load.wait_until_quiet(options.wait)
    if (before or 0) > load.LOADED:
        print(f"other processes use {load.words(before)}: these rows are not for publication")
    written = options.name or not options.k
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(options.out if written else scratch) / f"{file}.jsonl"
        record.parent.mkdir(parents=True, exist_ok=True)
        if not options.resume:
            record.unlink(missing_ok=True)
        worker.begin(record, torch.cuda.get_device_name() if gpu else "cpu")
        job.record, job.names = str(record), names
        if options.warm:
            worker.warm(job, options.warm, min(job.until - time.time(), 3600) / 2)
        try:
            lines = worker.measured(job)
        except RuntimeError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        rows = [row for line in lines for row in line.get("rows", ())]
        over = bool(lines) and "over" in lines[-1]
        if not rows:
            print(f"{', '.join(names)}: no row {'in this time' if over else f'matches {options.k!r}'}")
            return 0
        data = {
            "benchmark": file.removesuffix(f"-{options.device}"),
            "device": options.device,
            "command": results.command_line(build_parser(), options),
            "machine": machine((*report.PACKAGES, *ON_CUDA * gpu), options.threads, gpu),
            "load": {"before": before, "after": load.sample()},
            **{key: line[key] for line in lines for key in ("ceilings",) if key in line},
            "rows": rows,
        }
        text = report.page(data)
        print("\n" + text)
        if written:
            print(f"written to {results.write(options.out, file, data, text)}")
            if over:
                print(f"the time was over: --resume measures the rows that {record} lacks")
            else:
                record.unlink()
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic mode needs it before CUDA starts
    sys.exit(main())
