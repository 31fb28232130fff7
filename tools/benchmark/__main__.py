"""Benchmark our operators against their peers, side by side in one run.

python -m tools.benchmark                        # every operator (20 minutes on 2 cores), to benchmarks/
python -m tools.benchmark deform_conv            # one of them
python -m tools.benchmark --device cuda          # on a GPU
python -m tools.benchmark deform_conv -k 1-D     # only cases whose name contains 1-D; nothing is written
python -m tools.benchmark --against CHECKOUT     # only our rows, here and in another, built checkout of this project
python -m tools.benchmark end_to_end             # whole mmdet and mmsegmentation models, stock and drop-in
python -m tools.benchmark table                  # write README's table from benchmarks/*.json

Run it on an idle machine: it waits until other processes end, and pages show their load.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from . import load, report, results
from .measure import Settings, measure
from .operators import OPERATORS, cases

# Options shown in a page's command, in this order.
SHOWN = ("device", "threads", "seconds", "rounds", "min_rounds", "attempts", "wait", "k", "out")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="OPERATOR", help=f"any of {', '.join(OPERATORS)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--seconds", type=float, default=defaults.seconds, help="time for the rounds of a row")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="maximum rounds of a row")
    parser.add_argument("--min-rounds", type=int, default=defaults.min_rounds, help="rounds to run in any case")
    parser.add_argument("--attempts", type=int, default=defaults.attempts, help="maximum measurements of a noisy row")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for other processes to end")
    parser.add_argument("-k", metavar="TEXT", default="", help="only cases whose name contains TEXT (writes no file)")
    parser.add_argument("--out", type=Path, default=results.FOLDER, help="folder of JSON files and pages")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with another checkout; no peers")
    return parser


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["table"]:
        from . import table

        return table.main(arguments[1:])
    if arguments[:1] == ["end_to_end"]:
        from .end_to_end import command

        return command.main(arguments[1:])
    parser = build_parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(OPERATORS):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(OPERATORS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    try:
        settings = Settings(options.seconds, options.rounds, options.min_rounds, options.attempts)
    except ValueError as error:
        parser.error(str(error))
    if options.threads < 1:
        parser.error(f"--threads must be at least 1, got {options.threads}")
    options.names = options.names or list(OPERATORS)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.against is not None:
        from . import against

        return against.compare(parser, options, settings)
    for name in options.names:
        run(name, options, settings)
    return 0


def run(name: str, options: argparse.Namespace, settings: Settings) -> None:
    """Measure one operator's rows, print them, and write its JSON and page."""
    chosen = [case for case in cases(name, options.device) if options.k in case.name]
    before = load.wait_until_quiet(options.wait)
    if (before or 0) > load.LOADED:
        print(f"other processes use {load.words(before)}: these rows are not for publication")
    rows = []
    for case in chosen:
        rows.append(measure(case, options.device, settings))
        row = rows[-1]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:6.2f}x over {row['better_peer']}"
        marks = report.marks(row)
        print(
            f"{name}: {case.name:60s} {report.milliseconds(row['ours']['min']):>8s} ms {ratio}"
            + (f"  [{marks}]" if marks else ""),
            flush=True,
        )
    data = {
        "benchmark": name,
        "device": options.device,
        "command": results.command_line("python -m tools.benchmark", options.names, options, SHOWN),
        "machine": report.machine(options.device, report.PEERS),
        "load": {"before": before, "after": load.sample()},
        "rows": rows,
    }
    if not rows:
        print(f"{name}: no case contains {options.k!r}")
        return
    text = report.page(data)
    print("\n" + text)
    if not options.k:
        print(f"written to {results.write(options.out, f'{name}-{options.device}', data, text)}")


if __name__ == "__main__":
    sys.exit(main())
