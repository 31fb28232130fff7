"""Count our models' parameters and operations, and compare them with the papers' figures.

python -m tools.figures                                             # every paper
python -m tools.figures aaconv --markdown benchmarks/figures-aaconv.md
python -m tools.figures space_time --help                           # cost of TimeSformer's patterns
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools import command_parser
from tools.files import write_text

from . import aaconv, empirical, local_bilateral
from .row import markdown

PAPERS = {"aaconv": aaconv, "empirical": empirical, "local_bilateral": local_bilateral}


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["space_time"]:
        from . import space_time

        return space_time.main(arguments[1:])
    parser = command_parser("figures", __doc__)
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"any of {', '.join(PAPERS)}; default: all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    options = parser.parse_args(arguments)
    for name in options.papers:
        if name not in PAPERS:
            parser.error(f"PAPER must be one of {', '.join(PAPERS)}, got {name!r}")
    text, unexplained = "", []
    for paper in [PAPERS[name] for name in options.papers or PAPERS]:
        rows = paper.rows()
        text += f"# {paper.TITLE}\n\n{paper.CONVENTION}\n\n{markdown(rows)}\n"
        unexplained += [row.name for row in rows if not row.agrees and not (row.remark or row.reason)]
    print(text)
    if options.markdown is not None:
        write_text(options.markdown, text)
    if unexplained:
        print(f"not as printed, and no remark says why: {', '.join(unexplained)}", file=sys.stderr)
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
