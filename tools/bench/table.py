"""Write the performance tables of the README and the site, and the pages of benchmarks, from ``benchmarks/*.json``.

python -m tools.bench table            # rewrite them
python -m tools.bench table --check    # status 1 if a page differs from the files

A page holds ``<!-- benchmark NAME: begin -->`` and ``<!-- benchmark NAME: end -->`` around each table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tools import command_parser
from tools.files import write_text

from . import report, results
from .case import PASSES
from .measure import backends_of, operators
from .report import megabytes, milliseconds, working_memory

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
GPU, EARLIER_GPU = "gpu-h200", "gpu-h100"
COLUMN_BUFFER = Entry("", "deform_conv-cpu", "2-D (2,256,100,152), 1 offset group, float32")

READING = (
    "×: the better peer's best time over ours, in bold from 1.05× on.",
    "Memory: peak extra bytes of ours over that peer's, in both passes; whole mmdet and mmseg models vary by 25 %.",
)
# Descriptions of backends for readers.
BACKENDS = {
    "cpu": "C++ kernels",
    "cuda": "CUDA kernels",
    "triton": "Triton kernels",
    "sdpa": "PyTorch's SDPA",
    "eager": "PyTorch operations",
}


class Rows(dict[str, Any]):
    """Contents of the files in a folder by name, as they are asked for; None where missing or of an older format."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> dict[str, Any] | None:
        return self.setdefault(name, results.read(self._folder / f"{name}.json"))

    def of(self, entry: Entry) -> list[Mapping[str, Any] | None]:
        """Return the rows of both passes; None for each if the file is missing, and for one that a GPU did not run.

        Raises:
            ValueError: The file has no such row.
        """
        data = self[entry.file]
        if data is None:
            return [None, None]
        rows = [row for row in data["rows"] if "error" not in row]
        of_gpu = entry.file in (GPU, EARLIER_GPU)
        by_name = {f"{row['room']}: {row['case']}" if of_gpu else row["case"]: row for row in rows}
        both = [by_name.get(f"{entry.case}, {name}") for name in entry.passes]
        if not (any(both) if of_gpu else all(both)):
            raise ValueError(f"{self._folder / entry.file}.json has no row {entry.case!r}, which a page shows")
        return both


def everything(rows: Rows) -> list[str]:
    """Return all rows, a legend, and the backends of each operator."""
    lines = rows_table(rows, OPERATORS, "operator or module")
    lines += rows_table(rows, MODELS, "whole model, stock config with the drop-in")
    return [*lines, *sentences(rows), *unmeasured(rows), *backends()]


def some(rows: Rows, entries: Sequence[Entry], title: str, passes: Sequence[str] | None = None) -> list[str]:
    """Return some rows and their legend."""
    return [*rows_table(rows, entries, title, passes), *reading(rows, entries), *unmeasured(rows)]


def gpu(rows: Rows, file: str = GPU) -> list[str]:
    """Return a GPU's rows and their legend."""
    data = rows[file]
    if data is None:
        return unmeasured(rows)
    machine, measured = data["machine"], (row for row in data["rows"] if "error" not in row)
    names = dict.fromkeys(f"{row['room']}: {row['case']}".rsplit(", ", 1)[0] for row in measured)
    return [
        *rows_table(rows, [Entry(name, file, name) for name in names], "operator or module"),
        f"Best times of ours on an {machine['gpu']}, replayed from CUDA graphs with caches flushed (torch "
        f"{machine['torch']}, CUDA {machine['cuda']}, Triton {machine['triton']}, {machine['date']}).",
        *READING,
        "† the peer synchronizes with the host and is host-bound, or its time is noisy.",
        "",
    ]


TABLES: dict[str, Callable[[Rows], list[str]]] = {
    "all": everything,
    "models": lambda rows: some(rows, MODELS, "whole model"),
    "short": lambda rows: some(rows, SHORT, "operator or model", [" / ".join(both) for both in zip(PASSES, STEPS)]),
    "gpu": gpu,
    "gpu_earlier": lambda rows: gpu(rows, EARLIER_GPU),
}


def generate(folder: Path, table: str) -> str:
    """Return the content between the markers of a table.

    Raises:
        ValueError: A file lacks a row of the table, or there is no such table.
    """
    if table not in TABLES:
        raise ValueError(f"the table of a page must be one of {', '.join(TABLES)}, got {table!r}")
    return "\n".join(TABLES[table](Rows(folder))).strip("\n") + "\n"


def rows_table(rows: Rows, entries: Sequence[Entry], title: str, passes: Sequence[str] | None = None) -> list[str]:
    """Return a table of the measured rows; empty if there are none."""
    measured = [(entry.title, rows.of(entry)) for entry in entries]
    body = [row_cells(title, both) for title, both in measured if any(both)]
    header = [title, "peers", *(passes or entries[0].passes), "memory"]
    return [*report.markdown(header, body), ""] if body else []


def unmeasured(rows: Rows) -> list[str]:
    """Return a line that names the files that are missing."""
    names = ", ".join(f"`{name}`" for name, content in rows.items() if content is None)
    return [f"Not measured yet in this way: {names}.", ""] if names else []


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
    text = f"{milliseconds(least)} ms" if least < 1 else f"{least:.3g} s"
    if row["ratio"] is not None:
        digits = 0 if row["ratio"] >= 10 else 1 if row["ratio"] >= 1.05 else 2
        speedup = f"{row['ratio']:.{digits}f}×"
        text += f", **{speedup}**" if row["ratio"] >= 1.05 else f", {speedup}"
    return text + "†" * bool(row["noisy"] or row["loaded"] or report.host_bound(row))


def reading(rows: Rows, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the legend of the rows of ``entries``."""
    shown = [row for entry in entries for row in rows.of(entry) if row]
    if shown:
        files = [rows[name] for name in dict.fromkeys(entry.file for entry in entries)]
        machines = [file["machine"] for file in files if file is not None]
        dates = [machine["date"] for machine in machines]
        when = " to ".join(dict.fromkeys((min(dates), max(dates))))
        where = "; ".join(dict.fromkeys(f"{machine['cpu']}, torch {machine['torch']}" for machine in machines))
        yield f"Best times of ours, float32 ({where}, {when})."
        yield from READING
        if any(row["noisy"] or row["loaded"] for row in shown):
            yield "† noisy: measured on a busy machine, or varying more than 1.3-fold between quartiles."
        yield ""


def sentences(rows: Rows) -> Iterator[str]:
    """Yield the sentences below all tables: legend, memory, calls."""
    yield from reading(rows, (*OPERATORS, *MODELS))
    both = rows.of(COLUMN_BUFFER)
    if both[0] is not None and both[1] is not None:
        size = both[0]["buffer"]["size"]
        parts = []
        for name in ("ours", *both[0]["peers"]):
            passes = [row["ours"] if name == "ours" else row["peers"][name] for row in both]
            if not any("error" in one for one in passes):
                shares = " and ".join(f"{100 * working_memory(one, 'resident') / size:.0f} %" for one in passes)
                parts.append(f"{name} {shares}")
        yield "Peak working memory of `deform_conv2d` (2,256,100,152) as a share of the"
        yield f"{megabytes(size)} MiB column buffer, forward and forward+backward: {', '.join(parts)}."
        yield ""
    calls = rows["calls-cpu"]
    if calls is not None:
        ranges = []
        for kind in ("forward", "gradients recorded"):
            times = [row["ours"]["min"] * 1e6 for row in calls["rows"] if row["case"].endswith(kind)]
            ranges.append(f"{min(times):.0f} to {max(times):.0f} µs")
        yield f"Overhead of a call on tiny inputs, one thread: {ranges[0]} without autograd, {ranges[1]} with it."
        yield ""


def backends() -> list[str]:
    """Return the lines of the table of each operator's backends on CPUs and on CUDA."""
    rows = []
    for name in sorted(operators()):
        table = backends_of(name)
        cells = []
        for absent in (("cuda", "triton"), ("cpu",)):
            cells.append(", then ".join(BACKENDS.get(backend, backend) for backend in table if backend not in absent))
        rows.append([f"`{name}`", *cells])
    return report.markdown(["operator", "on CPUs", "on CUDA"], rows)


def filled(text: str, folder: Path) -> str:
    """Return a page with its tables filled from the files of ``folder``.

    Raises:
        ValueError: The page has no markers, markers are not in pairs, or a row is missing.
    """
    pairs = len(_MARKED.findall(text))
    if not pairs or len(_MARKER.findall(text)) != 2 * pairs:
        raise ValueError("each table needs <!-- benchmark NAME: begin --> and, below it, <!-- benchmark NAME: end -->")
    return _MARKED.sub(lambda marked: f"{marked[1]}\n{generate(folder, marked[2])}", text)


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
