"""Write the performance tables of the README and the site from ``benchmarks/*.json``.

python -m tools.benchmark table            # rewrite them
python -m tools.benchmark table --check    # status 1 if a page differs from the files

A page holds ``<!-- benchmark NAME: begin -->`` and ``<!-- benchmark NAME: end -->`` around each table.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.files import write_text

from . import gpu_table, results
from .report import megabytes, milliseconds, working_memory

ROOT = results.FOLDER.parent
PAGES = (ROOT / "README.md", ROOT / "docs/performance.md", ROOT / "docs/howto/faster.md")
_MARKER = re.compile(r"<!-- benchmark (\w+): (begin|end) -->")


class Entry(NamedTuple):
    """A row of a table.

    Attributes:
        title: Title on the page.
        file: Name of the file in ``benchmarks``, without ``.json``.
        case: Name of the row in it, up to the pass.
        passes: Names of both passes.
    """

    title: str
    file: str
    case: str
    passes: tuple[str, str] = ("forward", "forward+backward")


# Rows of the site, including those where ours is slower; all others are on the pages in benchmarks/.
OPERATORS = (
    Entry("`deform_conv2d`, (2,256,50,68), 3×3, masks", "deform_conv-cpu",
          "2-D (2,256,50,68), 1 offset group, float32"),
    Entry("… (2,256,100,152)", "deform_conv-cpu", "2-D (2,256,100,152), 1 offset group, float32"),
    Entry("`deformable_attention`, DETR's encoder, 17,821 queries, 4 levels", "deformable_attention-cpu",
          "encoder, DETR's four levels (Q 17821, L 4, K 4, 8 x 32), float32"),
    Entry("… its decoder, 300 queries", "deformable_attention-cpu",
          "decoder, 300 queries (Q 300, L 4, K 4, 8 x 32), float32"),
    Entry("`GeneralizedAttention2d` 1111, (1,256,50,84), kv_stride 2", "global_attention-cpu",
          "module 1111, (1,256,50,84), 9 heads, kv_stride 2, float32"),
    Entry("… 0001", "global_attention-cpu", "module 0001, (1,256,50,84), 9 heads, kv_stride 2, float32"),
    Entry("… 0010", "global_attention-cpu", "module 0010, (1,256,50,84), 9 heads, kv_stride 2, float32"),
    Entry("… 1111, (2,512,25,42)", "global_attention-cpu", "module 1111, (2,512,25,42), 9 heads, kv_stride 2, float32"),
    Entry("relative attention of `AAConv2d`, batch 8, 8 heads × 20, 14×14", "augmented_conv-cpu",
          "relative attention, 14x14, batch 8, 8 heads, d 20, d_v 20, float32"),
    Entry("… 28×28", "augmented_conv-cpu", "relative attention, 28x28, batch 8, 8 heads, d 20, d_v 20, float32"),
    Entry("… 40×40", "augmented_conv-cpu", "relative attention, 40x40, batch 8, 8 heads, d 20, d_v 20, float32"),
    Entry("`aa_resnet50` beside a plain ResNet-50 (the paper's price: 0.78× and 0.80×)", "augmented_conv-cpu",
          "aa_resnet50, 224x224, batch 8, float32"),
    Entry("`global_attention`, 50×84 queries, 25×42 keys, 8 heads × 32", "global_attention-cpu",
          "operator, 50x84 queries, 25x42 keys, 8 heads x 32, float32"),
    Entry("`window_attention`, content, (1,256,56,56), 8 heads, 3×3", "window_attention-cpu",
          "content, (1,256,56,56), 3x3, 8 heads, float32"),
    Entry("… 7×7", "window_attention-cpu", "content, (1,256,56,56), 7x7, 8 heads, float32"),
    Entry("… 13×13", "window_attention-cpu", "content, (1,256,56,56), 13x13, 8 heads, float32"),
    Entry("dynamic convolution, (1,256,56,56), 7×7, 16 groups", "window_attention-cpu",
          "dynamic convolution, (1,256,56,56), 7x7, 16 heads, float32"),
    Entry("dynamic convolution, T 512, B 4, C 512, K 31", "window_attention-cpu",
          "dynamic convolution 1-D, T 512, B 4, C 512, K 31, 16 groups, float32"),
    Entry("`CrissCrossAttention2d`, (1,512,97,97)", "criss_cross-cpu", "module, (1, 512, 97, 97), float32"),
    Entry("`sequence_attention`, band of 21, B 4, 8 heads × 64, T 512", "sequence_attention-cpu",
          "band, B 4, M 8, d 64, T 512, k 21, float32"),
    Entry("… T 2048", "sequence_attention-cpu", "band, B 4, M 8, d 64, T 2048, k 21, float32"),
    Entry("attention in Swin's windows of 7×7, batch 4, 56×56, 3 heads × 32", "vision_transformers-cpu",
          "Swin's windows, batch 4, 56x56, 3 heads x 32, float32"),
    Entry("… shifted", "vision_transformers-cpu", "Swin's windows, shifted, batch 4, 56x56, 3 heads x 32, float32"),
    Entry("attention with decomposed positions (SAM), 12 heads × 64, 32×32", "vision_transformers-cpu",
          "decomposed positions (SAM), 32x32, 12 heads x 64, float32"),
    Entry("… 64×64", "vision_transformers-cpu", "decomposed positions (SAM), 64x64, 12 heads x 64, float32"),
    Entry("timm's `swin_tiny_patch4_window7_224` with `accelerate`, batch 2", "vision_transformers-cpu",
          "swin_tiny_patch4_window7_224, 224x224, batch 2, float32"),
)  # fmt: skip
STEPS = ("prediction", "training step")
MODELS = (
    Entry("mmdet, Faster R-CNN R-50, attention 0010 and DCN, 800×1344", "end_to_end-cpu",
          "Faster R-CNN R-50, attention 0010 and DCN, 800x1344", STEPS),
    Entry("mmdet, Faster R-CNN R-50, attention 1111, 800×1344", "end_to_end-cpu",
          "Faster R-CNN R-50, attention 1111, 800x1344", STEPS),
    Entry("mmseg, CCNet R-50, 769×769", "end_to_end-cpu", "CCNet R-50, 769x769", STEPS),
    Entry("mmdet, Deformable DETR R-50, 800×1344", "end_to_end-cpu", "Deformable DETR R-50, 800x1344", STEPS),
    Entry("mmdet, DINO R-50, 800×1344", "end_to_end-cpu", "DINO R-50, 4 scales, 800x1344", STEPS),
    Entry("mmdet, Mask2Former R-50, 800×1344", "end_to_end-cpu", "Mask2Former R-50, instances, 800x1344", STEPS),
    Entry("mmdet, Mask2Former Swin-T, 800×1344", "end_to_end_swin-cpu",
          "Mask2Former Swin-T, instances, 800x1344", STEPS),
    Entry("mmdet, Mask R-CNN Swin-T, 800×1344", "end_to_end_swin-cpu", "Mask R-CNN Swin-T, 800x1344", STEPS),
    Entry("mmseg, Mask2Former R-50, 512×1024", "end_to_end-cpu", "Mask2Former R-50, semantic (mmseg), 512x1024", STEPS),
)  # fmt: skip
# Titles of the README's rows.
SHORT = (
    "`deform_conv2d`, (2,256,50,68), 3×3, masks",
    "`deformable_attention`, DETR's encoder, 17,821 queries, 4 levels",
    "`GeneralizedAttention2d` 1111, (1,256,50,84), kv_stride 2",
    "mmdet, Faster R-CNN R-50, attention 0010 and DCN, 800×1344",
    "mmdet, Deformable DETR R-50, 800×1344",
    "timm's `swin_tiny_patch4_window7_224` with `accelerate`, batch 2",
)
COLUMN_BUFFER = ("deform_conv-cpu", "2-D (2,256,100,152), 1 offset group, float32")

# Descriptions of backends for readers.
BACKENDS = {
    "cpu": "C++ kernels",
    "cuda": "CUDA kernels",
    "triton": "Triton kernels",
    "sdpa": "PyTorch's SDPA",
    "amx": "PyTorch's SDPA (bfloat16 with AMX)",
    "flash": "PyTorch's flash attention",
    "torch": "PyTorch operations",
}


class Rows:
    """Rows of the files in a folder, and the names of missing files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, dict[str, Any]()
        self.missing: dict[str, None] = {}

    def file(self, name: str) -> dict[str, Any] | None:
        """Return the content of a file; record it and return None if it is missing or of an older format."""
        if name not in self._files:
            self._files[name] = results.read(self._folder / f"{name}.json")
        if self._files[name] is None:
            self.missing[name] = None
        return self._files[name]

    def find(self, file: str, case: str) -> Mapping[str, Any] | None:
        """Return a row, or None if its file is missing.

        Raises:
            ValueError: the file has no such row.
        """
        data = self.file(file)
        if data is None:
            return None
        for row in data["rows"]:
            if row["case"] == case:
                return row
        raise ValueError(f"{self._folder / file}.json has no row {case!r}, which a page shows")


def everything(rows: Rows) -> list[str]:
    """Return all rows, a legend, and the backends of each operator."""
    lines: list[str] = []
    for entries, title in ((OPERATORS, "operator or module"), (MODELS, "whole model, stock config with the drop-in")):
        lines += rows_table(rows, entries, title)
    return [*lines, *sentences(rows), *unmeasured(rows), *backends()]


def models(rows: Rows) -> list[str]:
    """Return the rows of whole models."""
    return [*rows_table(rows, MODELS, "whole model"), *reading(rows, MODELS), *unmeasured(rows)]


def short(rows: Rows) -> list[str]:
    """Return README's rows."""
    by_title = {entry.title: entry for entry in (*OPERATORS, *MODELS)}
    entries = [by_title[title] for title in SHORT]
    made = [line for entry in entries if (line := entry_line(rows, entry))]
    passes = " | ".join(map(" / ".join, zip(OPERATORS[0].passes, STEPS)))
    head = [f"| operator or model | peers | {passes} | memory |", "| --- " * 5 + "|"]
    return [*(head if made else []), *made, "", *reading(rows, entries), *unmeasured(rows)]


def gpu(rows: Rows) -> list[str]:
    """Return all rows of the GPU."""
    data = rows.file(gpu_table.FILE)
    return unmeasured(rows) if data is None else gpu_table.every_line(data)


def gpu_short(rows: Rows) -> list[str]:
    """Return README's rows of the GPU."""
    data = rows.file(gpu_table.FILE)
    return unmeasured(rows) if data is None else gpu_table.short_lines(data)


TABLES: dict[str, Callable[[Rows], list[str]]] = {
    "all": everything, "models": models, "short": short, "gpu": gpu, "gpu_short": gpu_short,
}  # fmt: skip


def generate(folder: Path, table: str) -> str:
    """Return the content between the markers of a table.

    Raises:
        ValueError: a file lacks a row of the table, or there is no such table.
    """
    if table not in TABLES:
        raise ValueError(f"the table of a page must be one of {', '.join(TABLES)}, got {table!r}")
    return "\n".join(TABLES[table](Rows(folder))).strip("\n") + "\n"


def rows_table(rows: Rows, entries: Sequence[Entry], title: str) -> list[str]:
    """Return a table of the measured rows; empty if there are none."""
    body = [line for entry in entries if (line := entry_line(rows, entry))]
    head = [f"| {title} | peers | {' | '.join(entries[0].passes)} | memory |", "| --- " * 5 + "|"]
    return [*head, *body, ""] if body else []


def unmeasured(rows: Rows) -> list[str]:
    """Return a line that names the files that are missing."""
    names = ", ".join(f"`{name}`" for name in rows.missing)
    return [f"Not measured yet in this way: {names}.", ""] if names else []


def entry_line(rows: Rows, entry: Entry) -> str | None:
    """Return the line of an entry, or None if its file is missing."""
    found = [rows.find(entry.file, f"{entry.case}, {each}") for each in entry.passes]
    both = [row for row in found if row is not None]
    if len(both) < len(found):
        return None
    peers = dict.fromkeys(name for row in both for name, peer in row["peers"].items() if "error" not in peer)
    memory = " / ".join("–" if row["memory_ratio"] is None else f"{row['memory_ratio']:.2f}" for row in both)
    return f"| {entry.title} | {'; '.join(peers)} | {' | '.join(map(ratio, both))} | {memory} |"


def ratio(row: Mapping[str, Any]) -> str:
    """Return our time and the speed-up, bold from 1.05 on; a dagger marks a noisy or loaded row."""
    least = row["ours"]["min"]
    text = f"{milliseconds(least)} ms" if least < 1 else f"{least:.3g} s"
    if row["ratio"] is not None:
        digits = 0 if row["ratio"] >= 10 else 1 if row["ratio"] >= 1.05 else 2
        speedup = f"{row['ratio']:.{digits}f}×"
        text += f", **{speedup}**" if row["ratio"] >= 1.05 else f", {speedup}"
    return text + "†" * (row["noisy"] or row["loaded"])


def reading(rows: Rows, entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the legend of the rows of ``entries``."""
    shown = [row for entry in entries for row in _rows(rows, entry)]
    if shown:
        files = [rows.file(name) for name in dict.fromkeys(entry.file for entry in entries)]
        machines = [file["machine"] for file in files if file is not None and "machine" in file]
        dates = [machine["date"] for machine in machines]
        when = " to ".join(dict.fromkeys((min(dates), max(dates)))) if dates else ""
        where = f" ({machines[0]['cpu']}, torch {machines[0]['torch']}, {when})" if machines else ""
        yield f"Best times of ours, float32{where}."
        yield "×: the better peer's best time over ours, in bold from 1.05× on."
        yield "Memory: peak extra bytes of ours over that peer's, in both passes."
        if any(row["noisy"] or row["loaded"] for row in shown):
            yield "† noisy: measured on a busy machine, or varying more than 1.3-fold between quartiles."
        yield ""


def sentences(rows: Rows) -> Iterator[str]:
    """Yield the sentences below all tables: legend, memory, calls."""
    yield from reading(rows, (*OPERATORS, *MODELS))
    both = [rows.find(COLUMN_BUFFER[0], f"{COLUMN_BUFFER[1]}, {each}") for each in ("forward", "forward+backward")]
    if both[0] is not None and both[1] is not None:
        size = both[0]["buffer"]["size"]
        found = []
        for name in ("ours", *both[0]["peers"]):
            each = [row["ours"] if name == "ours" else row["peers"][name] for row in both]
            if not any("error" in one for one in each):
                shares = " and ".join(f"{100 * working_memory(one, 'resident') / size:.0f} %" for one in each)
                found.append(f"{name} {shares}")
        yield "Peak working memory of `deform_conv2d` (2,256,100,152) as a share of the"
        yield f"{megabytes(size)} MiB column buffer, forward and forward+backward: {', '.join(found)}."
        yield ""
    calls = rows.file("calls-cpu")
    if calls is not None:
        ranges = []
        for kind in ("forward", "gradients recorded"):
            times = [row["ours"]["min"] * 1e6 for row in calls["rows"] if row["case"].endswith(kind)]
            ranges.append(f"{min(times):.0f} to {max(times):.0f} µs")
        yield f"Overhead of a call on tiny inputs, one thread: {ranges[0]} without autograd, {ranges[1]} with it."
        yield ""


def _rows(rows: Rows, entry: Entry) -> list[Mapping[str, Any]]:
    found = (rows.find(entry.file, f"{entry.case}, {each}") for each in entry.passes)
    return [row for row in found if row is not None]


def tables() -> dict[str, list[str]]:
    """Return the names of every operator's backends, in order of preference."""
    from attn_plugins import ops
    from attn_plugins.ops.operator import Operator

    names = {}
    for functional in ops.__all__:
        module = sys.modules[getattr(ops, functional).__module__]
        for value in vars(module).values():
            if isinstance(value, Operator) and functional not in ("backend", "explain"):
                names[value.name] = [backend.name for backend in value.table]
    return names


def backends() -> list[str]:
    """Return the lines of the table of each operator's backends on CPUs and on CUDA."""
    lines = ["| operator | on CPUs | on CUDA |", "| --- | --- | --- |"]
    for name, table in sorted(tables().items()):
        cells = []
        for absent in (("cuda", "triton", "flash"), ("cpu", "amx")):
            cells.append(", then ".join(BACKENDS.get(each, each) for each in table if each not in absent))
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def filled(text: str, folder: Path) -> str:
    """Return a page with its tables filled from the files of ``folder``.

    Raises:
        ValueError: the page has no markers, markers are not in pairs, or a row is missing.
    """
    found = list(_MARKER.finditer(text))
    begins, ends = found[::2], found[1::2]
    paired = len(begins) == len(ends) and all(
        begin[2] == "begin" and end[2] == "end" and begin[1] == end[1] for begin, end in zip(begins, ends)
    )
    if not found or not paired:
        raise ValueError("each table needs <!-- benchmark NAME: begin --> and, below it, <!-- benchmark NAME: end -->")
    parts, last = [], 0
    for begin, end in zip(begins, ends):
        parts += [text[last : begin.end()], "\n", generate(folder, begin[1])]
        last = end.start()
    return "".join([*parts, text[last:]])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pages", nargs="+", type=Path, default=PAGES, help="default: README's and the site's")
    parser.add_argument("--benchmarks", type=Path, default=results.FOLDER, help="the folder of JSON files")
    options = parser.parse_args(arguments)
    status = 0
    for page in options.pages:
        before = page.read_text(encoding="utf-8")
        try:
            after = filled(before, options.benchmarks)
        except ValueError as error:
            print(f"benchmark: {page}: {error}", file=sys.stderr)
            status = 1
            continue
        if options.check and after != before:
            print(f"benchmark: {page} differs from {options.benchmarks} (make benchmark-table)")
            status = 1
        elif not options.check:
            write_text(page, after)
            print(f"written to {page}")
    return status
