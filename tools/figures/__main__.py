"""Count our models' parameters and operations and print them beside the papers' figures.

python -m tools.figures                                             # every paper
python -m tools.figures aaconv --markdown benchmarks/figures-aaconv.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.files import write_text
from tools.requires import extras

with extras():
    from . import aaconv, empirical, local_bilateral
    from .row import markdown

PAPERS = {"aaconv": aaconv, "empirical": empirical, "local_bilateral": local_bilateral}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"which: {', '.join(PAPERS)}; all if none is named")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    options = parser.parse_args(arguments)
    for name in options.papers:
        if name not in PAPERS:
            parser.error(f"PAPER must be one of {', '.join(PAPERS)}, got {name!r}")
    names = options.papers or list(PAPERS)
    text, unexplained = "", []
    for name in names:
        rows = PAPERS[name].rows()
        text += f"# {PAPERS[name].TITLE}\n\n{PAPERS[name].CONVENTION}\n\n{markdown(rows)}\n"
        unexplained += [row.name for row in rows if not row.agrees and not row.remark]
    print(text)
    if options.markdown is not None:
        write_text(options.markdown, text)
    if unexplained:
        print(f"not as printed, and no remark says why: {', '.join(unexplained)}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
