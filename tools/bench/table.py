"""Write the performance tables of the README and the site, and the pages of benchmarks, from ``benchmarks/*.json``.

python -m tools.bench table            # rewrite them
python -m tools.bench table --check    # status 1 if a page differs from the files

A page holds ``<!-- benchmark NAME: begin -->`` and ``<!-- benchmark NAME: end -->`` around each table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tools import command_parser
from tools.files import write_text

from . import report, results
from .case import PASSES

ROOT = results.FOLDER.parent
PAGES = (ROOT / "README.md", ROOT / "docs/performance.md", ROOT / "docs/howto/faster.md")
_MARKER = re.compile(r"<!-- benchmark \w+: (?:begin|end) -->")
_MARKED = re.compile(
    r"(<!-- benchmark (\w+): begin -->)(?:(?!<!-- benchmark ).)*(?=<!-- benchmark \2: end -->)", re.DOTALL
)


class Entry(NamedTuple):
    """A row of a table."""

    title: str  # on the page
    file: str  # in benchmarks, without .json
    case: str  # name of the row in it, up to the pass
    passes: tuple[str, str] = PASSES


_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
STEPS = ("prediction", "training step")
OPERATORS = tuple(Entry(*entry) for entry in _TABLES["operators"])
MODELS = tuple(Entry(*entry, STEPS) for entry in _TABLES["models"])
SHORT = tuple(entry for title in _TABLES["short"] for entry in (*OPERATORS, *MODELS) if entry.title == title)
GPU = "gpu-h200"
READING = (
    "×: speed-up over the fastest peer, best against best, in bold from 1.05× on.",
    "Memory: peak extra bytes of ours over that peer's, in both passes; whole mmdet and mmseg models vary by 25 %.",
)


class Files(dict[str, Any]):
    """Contents of the files in a folder by name, as they are asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> dict[str, Any]:
        data = results.read(self._folder / f"{name}.json")
        if data is None:
            raise ValueError(f"{self._folder / name}.json is missing or of an older format, and a page shows its rows")
        return self.setdefault(name, data)

    def rows(self, entry: Entry) -> list[Mapping[str, Any]]:
        """Return the rows of both passes.

        Raises:
            ValueError: The file has no such row.
        """
        by_name = {row["case"]: row for row in self[entry.file]["rows"] if "error" not in row}
        try:
            return [by_name[f"{entry.case}, {name}"] for name in entry.passes]
        except KeyError:
            where = self._folder / entry.file
            raise ValueError(f"{where}.json has no row {entry.case!r}, which a page shows") from None


def everything(files: Files) -> list[str]:
    """Return all rows, a legend, and the overhead of calls."""
    ranges = []
    for kind in ("forward", "gradients recorded"):
        times = [row["ours"]["min"] * 1e6 for row in files["calls-cpu"]["rows"] if row["case"].endswith(kind)]
        ranges.append(f"{min(times):.0f} to {max(times):.0f} µs")
    return [
        *rows_table(files, OPERATORS, ["operator or module", *PASSES]),
        *rows_table(files, MODELS, ["whole model, stock config with the drop-in", *STEPS]),
        *reading(files, (*OPERATORS, *MODELS)),
        f"Overhead of a call on tiny inputs, one thread: {ranges[0]} without autograd, {ranges[1]} with it.",
    ]


def some(files: Files, entries: Sequence[Entry], header: Sequence[str]) -> list[str]:
    """Return some rows and their legend."""
    return [*rows_table(files, entries, header), *reading(files, entries)]


def gpu(files: Files) -> list[str]:
    """Return all rows that were measured on a GPU and their legend."""
    data = files[GPU]
    machine = data["machine"]
    measured = {f"{row['room']}: {row['case']}": row for row in data["rows"] if "error" not in row}
    titles = dict.fromkeys(name.rsplit(", ", 1)[0] for name in measured)
    body = [row_cells(title, [measured.get(f"{title}, {name}") for name in PASSES]) for title in titles]
    return [
        *report.markdown(["operator or module", "peers", *PASSES, "memory"], body),
        "",
        f"Times are our fastest run on an {machine['gpu']}, replayed from CUDA graphs with caches flushed (torch "
        f"{machine['torch']}, CUDA {machine['cuda']}, Triton {machine['triton']}, {machine['date']}).",
        *READING,
        "† the peer synchronizes with the host and is host-bound, or its time is noisy.",
    ]


TABLES: dict[str, Callable[[Files], list[str]]] = {
    "all": everything,
    "models": lambda files: some(files, MODELS, ["whole model", *STEPS]),
    "short": lambda files: some(files, SHORT, ["operator or model", *map(" / ".join, zip(PASSES, STEPS))]),
    "gpu": gpu,
}


def rows_table(files: Files, entries: Sequence[Entry], header: Sequence[str]) -> list[str]:
    """Return a table of rows, under a title and the names of two passes."""
    title, *passes = header
    body = [row_cells(entry.title, files.rows(entry)) for entry in entries]
    return [*report.markdown([title, "peers", *passes, "memory"], body), ""]


def row_cells(title: str, both: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return the cells of a title, from the rows of its passes, None for one that was not measured."""
    measured = [row for row in both if row is not None]
    peers = dict.fromkeys(name for row in measured for name, peer in row["peers"].items() if "error" not in peer)
    ratios = ("–" if row is None or row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}" for row in both)
    return [title, "; ".join(peers), *map(ratio, both), " / ".join(ratios)]


def ratio(row: Mapping[str, Any] | None) -> str:
    """Return our time and the speed-up, bold from 1.05 on; a dagger marks a noisy, loaded or host-bound row."""
    if row is None:
        return "–"
    least = row["ours"][row.get("by", "min")]
    text = f"{report.milliseconds(least)} ms" if least < 1 else f"{least:.3g} s"
    if row["ratio"] is not None:
        digits = 0 if row["ratio"] >= 10 else 1 if row["ratio"] >= 1.05 else 2
        speedup = f"{row['ratio']:.{digits}f}×"
        text += f", **{speedup}**" if row["ratio"] >= 1.05 else f", {speedup}"
    return text + "†" * bool(row["noisy"] or row["loaded"] or report.host_bound(row))


def reading(files: Files, entries: Sequence[Entry]) -> list[str]:
    """Return the legend of the rows of ``entries``: machines, dates, and what the columns mean."""
    machines = [files[entry.file]["machine"] for entry in entries]
    dates = [machine["date"] for machine in machines]
    when = " to ".join(dict.fromkeys((min(dates), max(dates))))
    where = "; ".join(dict.fromkeys(f"{machine['cpu']}, torch {machine['torch']}" for machine in machines))
    noisy = any(row["noisy"] or row["loaded"] for entry in entries for row in files.rows(entry))
    return [
        f"Times are our fastest run, float32 ({where}, {when}).",
        *READING,
        *["† noisy: measured on a busy machine, or varying more than 1.3-fold between quartiles."] * noisy,
        "",
    ]


def filled(text: str, folder: Path) -> str:
    """Return a page with its tables filled from the files of ``folder``.

    Raises:
        ValueError: The page has no markers, markers are not in pairs or name no table, or a row is missing.
    """
    pairs = len(_MARKED.findall(text))
    if not pairs or len(_MARKER.findall(text)) != 2 * pairs:
        raise ValueError("each table needs <!-- benchmark NAME: begin --> and, below it, <!-- benchmark NAME: end -->")
    files = Files(folder)

    def fill(marked: re.Match[str]) -> str:
        if marked[2] not in TABLES:
            raise ValueError(f"the table of a page must be one of {', '.join(TABLES)}, got {marked[2]!r}")
        return marked[1] + "\n" + "\n".join(TABLES[marked[2]](files)).strip("\n") + "\n"

    return _MARKED.sub(fill, text)


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("bench table", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pages", nargs="+", type=Path, default=PAGES, help="default: README's and the site's")
    parser.add_argument("--benchmarks", type=Path, default=results.FOLDER, help="the folder of JSON files")
    options = parser.parse_args(arguments)
    if not options.benchmarks.is_dir():
        parser.error(f"--benchmarks must be a folder, got {options.benchmarks}")
    status = 0
    pages: dict[Path, Callable[[], str]] = {
        page: lambda page=page: filled(page.read_text(encoding="utf-8"), options.benchmarks) for page in options.pages
    }
    for file in sorted(options.benchmarks.glob("*.json")):
        data = results.read(file)
        if data is not None and {"benchmark", "load"} <= data.keys() and "patterns" not in data:  # of version 0.2.0
            pages[file.with_suffix(".md")] = lambda data=data: report.page(data)
    for page, write in pages.items():
        try:
            after = write()
        except (ValueError, OSError) as error:
            print(f"bench: {page}: {error}", file=sys.stderr)
            status = 1
            continue
        if options.check and (not page.exists() or after != page.read_text(encoding="utf-8")):
            print(f"bench: {page} differs from {options.benchmarks} (make benchmark-table)")
            status = 1
        elif not options.check:
            write_text(page, after)
            print(f"written to {page}")
    return status
