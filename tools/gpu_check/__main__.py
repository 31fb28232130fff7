"""Check and measure the operators on this machine's GPU, in two commands of under 500 seconds each.

python -m tools.gpu_check check              build if necessary, tests marked cuda, random calls, compute-sanitizer
python -m tools.gpu_check check --stages tests memory
python -m tools.gpu_check measure            time each operator and module with each backend, and its peers
python -m tools.gpu_check measure --all      every size, dtype and peer; needs half an hour: --seconds 1800
python -m tools.gpu_check measure -k window  only rows that match a regular expression, of all
python -m tools.gpu_check peers              copy mmcv's Python files here, for a machine that lacks mmcv

By default ``measure`` takes a selection of about 140 rows: every operator at one size, forward and with backward, and
every module with backward, in float32 and a half type. Compiled definitions stand beside the first row of each, and
beside others only where no other peer is known to be faster. The rest of about 600 rows is measured with --all, or by
name with -k. The first row of each operator and module comes before all others. Rows left without time are named.

Needs a Python with torch for CUDA, pytest and, for some peers, torchvision, timm, natten and mmcv; installs nothing.
Results are written to --out after every part, so an interrupted command keeps those of complete parts. Clocks, power
limits and other GPU settings are not changed. The exit status is 0 on success, 1 if something failed, and 2 without a
CUDA device: then every stage and part says so and ends.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import machine, peers

if __name__ == "__main__":  # before the package, which need not be installed, is imported
    machine.make_importable()

from . import check
from .processes import Budget

SECONDS = 480.0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    out = Path(os.environ.get("OUT") or machine.FOLDER / "out")
    jobs = max(1, (os.cpu_count() or 1) - 2)
    first = commands.add_parser("check", help="build, tests, random calls, memory checkers")
    first.add_argument("--stages", nargs="+", choices=check.STAGES, default=list(check.STAGES))
    first.add_argument("--build", action="store_true", help="compile even if the binaries load")
    second = commands.add_parser("measure", help="times, memory, and shares of the device's roofline")
    second.add_argument("-k", default="", metavar="REGEX", help="only rows whose names match")
    second.add_argument("--all", action="store_true", help="all rows and peers, not the selection")
    second.add_argument("--without", nargs="+", default=[], metavar="BACKEND", help="leave out slow backends of ours")
    second.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the tool")
    third = commands.add_parser("peers", help="copies of packages that peers need and this machine has")
    third.add_argument("--folder", type=Path, default=peers.FOLDER, help="where to (default: %(default)s)")
    for each in (first, second):
        each.add_argument("--seconds", type=float, default=SECONDS, help="time limit (default: %(default)g)")
        each.add_argument("--jobs", type=int, default=jobs, help="number of parallel processes (default: %(default)s)")
        each.add_argument("--out", type=Path, default=out, help="folder of the results (default: $OUT, %(default)s)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit status."""
    options = build_parser().parse_args(arguments)
    if options.command == "peers":
        return peers.copy(options.folder)
    if options.seconds <= 0 or options.jobs < 1:
        build_parser().error(f"--seconds and --jobs must be positive, got {options.seconds:g} and {options.jobs}")
    budget = Budget(options.seconds)
    if options.command == "check":
        return check.check(options.stages, budget, options.jobs, options.out, options.build)
    from . import measure

    choice = measure.Choice(options.k, tuple(options.without), options.all)
    return measure.measure(choice, budget, options.jobs, options.out, options.device)


if __name__ == "__main__":
    sys.exit(main())
