"""Compare the documents' claims with small trainings: run missing studies, write ``benchmarks/findings.md``.

::

    python -m tools.findings --list              # studies, their state, and the time of missing ones
    python -m tools.findings                     # run missing studies, two at a time, the shortest first
    python -m tools.findings --studies sharing paddings --jobs 1
    python -m tools.findings --write             # only write the page, from the files in benchmarks/
    python -m tools.findings --collect           # copy the figures of unfinished studies to benchmarks/, write the page

Run it in the repository's root. A study works in ``work_dirs/findings``, continues where it stopped, and copies its
figures to ``benchmarks`` when all settings and seeds are finished; the page is rewritten after each study. Collected
figures of an unfinished study are reused on another machine. Each training runs on one CPU thread. In the background:
``nohup nice python -m tools.findings > findings.log &``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tools.files import write_text
from tools.findings.page import counts, markdown
from tools.findings.studies import BENCHMARKS, STUDIES, carry_out, collect, missing
from tools.study import ROOT, StudyError

PAGE = "findings.md"


def listing(root: Path = ROOT) -> str:
    """Return a line for each study, and the total of missing ones."""
    left = missing(root)
    lines = []
    for name in [*left, *(name for name in STUDIES if name not in left)]:
        study = STUDIES[name]
        state = f"missing, about {study.minutes} minutes of one core" if name in left else "measured"
        lines.append(f"{name:20s} {state}: {study.data}")
    minutes = sum(STUDIES[name].minutes for name in left)
    return "\n".join([*lines, f"missing: {len(left)} studies, about {minutes} minutes of one core"])


def write_page(root: Path = ROOT) -> None:
    """Write the page from the files in ``benchmarks``."""
    write_text(root / BENCHMARKS / PAGE, markdown(root))


def carry_out_all(names: Sequence[str], jobs: int, root: Path = ROOT) -> list[str]:
    """Run studies, ``jobs`` at a time, and rewrite the page after each; return the errors of failed ones."""
    errors = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(carry_out, name, root): name for name in names}
        for done in as_completed(running):
            if error := done.exception():
                if not isinstance(error, StudyError):
                    raise error
                errors.append(f"{running[done]}: {error}")
                print(f"findings: {errors[-1]}", file=sys.stderr, flush=True)
            else:
                print(f"{running[done]}: finished", flush=True)
            write_page(root)
    return errors


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.findings", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the studies and stop")
    what.add_argument("--write", action="store_true", help="write the page and stop")
    what.add_argument(
        "--collect", action="store_true", help="copy figures of unfinished studies, write the page and stop"
    )
    what.add_argument("--studies", nargs="+", metavar="NAME", help="studies to run; default: all missing ones")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="studies at a time, default %(default)s")
    options = parser.parse_args(arguments)
    runnable = [name for name, study in STUDIES.items() if study.product]
    for name in options.studies or ():
        if name not in runnable:
            parser.error(f"--studies must be among {', '.join(runnable)}, got {name!r}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if options.list:
        print(listing())
        return 0
    errors: list[str] = []
    if options.collect:
        for name in missing():
            collect(STUDIES[name])
    elif not options.write:
        if Path.cwd() != ROOT:
            parser.error(f"studies run in the repository's root, {ROOT}, not in {Path.cwd()}")
        print(listing(), flush=True)
        errors = carry_out_all(options.studies or missing(), options.jobs)
    write_page()
    print(", ".join(f"{count} {verdict}" for verdict, count in counts().items()))
    print(f"written: {BENCHMARKS / PAGE}")
    return 2 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
