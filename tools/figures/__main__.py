"""Count our models' parameters and operations, and compare them with the papers' figures.

python -m tools.figures                                             # every paper
python -m tools.figures aaconv --markdown benchmarks/figures-aaconv.md
python -m tools.figures --plot                                      # Zhu et al.'s Fig. 3: accuracy over operations
python -m tools.figures space_time --help                           # cost of TimeSformer's patterns
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools import command_parser
from tools.files import write_text

from . import aaconv, empirical, local_bilateral, tradeoff
from .row import markdown

PLOT = Path("docs/accuracy_over_flops.png")
PAPERS = {"aaconv": aaconv, "empirical": empirical, "local_bilateral": local_bilateral}


def draw(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Draw the figure, and print its points."""
    if options.plot.suffix not in (".png", ".svg"):
        parser.error(f"--plot must be a .png or .svg file, got {options.plot}")
    if options.papers not in ([], ["empirical"]):
        parser.error(f"--plot draws only empirical, got {' '.join(options.papers)}")
    try:
        panels = tradeoff.plot(options.plot, options.runs)
    except ValueError as error:
        parser.error(str(error))
    for title, points in panels.items():
        print(f"{title}\n" + "\n".join(f"  {p.name:20} {p.operations:8.2f} {p.accuracy:6.1f}" for p in points))
    print(options.plot)
    return 0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["space_time"]:
        from . import space_time

        return space_time.main(arguments[1:])
    parser = command_parser("figures", __doc__)
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"any of {', '.join(PAPERS)}; default: all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    parser.add_argument(
        "--plot", type=Path, nargs="?", const=PLOT, metavar="FILE",
        help=f"draw accuracy over operations, png or svg, instead of counting; default {PLOT}",
    )  # fmt: skip
    parser.add_argument(
        "--runs", type=Path, default=tradeoff.RUNS, metavar="FILE",
        help=f"with --plot: our small runs, of tools.study; default {tradeoff.RUNS}",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.plot is not None:
        return draw(parser, options)
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
