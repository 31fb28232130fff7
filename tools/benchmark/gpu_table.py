"""Lines of the GPU tables on pages, from what ``python -m tools.gpu_check measure`` wrote."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tools.gpu_check.ratios import OWN, Compared, compare

from .report import milliseconds

FILE = "gpu-h100"
PASSES = ("forward", "forward+backward")
# README's rows: titles there, and names in the file up to the pass.
SHORT = {
    "`window_attention`, (16,256,56,56), 8 heads, 7×7, bfloat16":
        "operators: window, (16,256,56,56), 8 heads, 7x7, content, bfloat16",
    "`deformable_attention`, DETR's encoder, bfloat16":
        "deformable_attention: encoder, DETR's four levels (Q 17821, L 4, K 4, 8 x 32), bfloat16",
    "SAM's decomposed positions, 64×64, 12 heads × 64, bfloat16":
        "vision_transformers: decomposed positions (SAM), 64x64, 12 heads x 64, bfloat16",
    "`sequence_attention`, band of 21, T 1024, bfloat16":
        "sequence_attention: band, B 4, M 8, d 64, T 1024, k 21, bfloat16",
    "`deform_conv2d`, (2,256,50,68), 3×3, masks, float32":
        "deform_conv: 2-D (2,256,50,68), 1 offset group, float32",
    "criss-cross attention with projections, (8,512,64,64), bfloat16":
        "criss_cross: operator and projections, (8, 512, 64, 64), bfloat16",
}  # fmt: skip
HEAD = ["| operator or module | peers | forward | forward+backward | memory |", "| --- " * 5 + "|"]


def every_line(data: Mapping[str, Any]) -> list[str]:
    """Return a table of all measured rows."""
    names = dict.fromkeys(entry["end"].rsplit(", ", 1)[0] for entry in data["rows"])
    return [*HEAD, *(line for name in names for line in lines(data, {name: name})), "", *legend(data)]


def short_lines(data: Mapping[str, Any]) -> list[str]:
    """Return README's table."""
    return [*HEAD, *lines(data, {name: title for title, name in SHORT.items()}), "", *legend(data)]


def lines(data: Mapping[str, Any], titles: Mapping[str, str]) -> Iterator[str]:
    """Yield the line of each name.

    Raises:
        ValueError: the file has no such row.
    """
    entries = {entry["end"]: entry for entry in data["rows"] if "entries" in entry["row"]}
    for name, title in titles.items():
        found = [entries.get(f"{name}, {each}") for each in PASSES]
        both = [None if entry is None else compare(entry, data.get("ceilings")) for entry in found]
        if not any(both):
            raise ValueError(f"{FILE}.json has no row {name!r}, which a page shows")
        shown = peers(entry for entry in found if entry is not None)
        memory = " / ".join("–" if each is None or each.memory is None else f"{each.memory:.2f}" for each in both)
        yield f"| {title} | {'; '.join(shown)} | {' | '.join(map(cell, both))} | {memory} |"


def peers(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of the peers that were measured."""
    return list(
        dict.fromkeys(name for entry in entries for name in entry["row"]["entries"] if not name.startswith(OWN))
    )


def cell(each: Compared | None) -> str:
    """Return our time and the speed-up, bold from 1.05 on; a dagger marks rows with the host's time, or noisy ones."""
    if each is None:
        return "–"
    text = f"{milliseconds(each.ours)} ms"
    if each.ratio is not None:
        digits = 0 if each.ratio >= 10 else 1 if each.ratio >= 1.05 else 2
        speedup = f"{each.ratio:.{digits}f}×"
        text += f", **{speedup}**" if each.ratio >= 1.05 else f", {speedup}"
    return text + "†" * ("noisy" in each.marks or "host" in each.marks)


def legend(data: Mapping[str, Any]) -> list[str]:
    """Return the lines below a table."""
    machine = data["machine"]
    return [
        f"Best times of ours on an {machine['gpu']}, replayed from CUDA graphs with caches flushed (torch "
        f"{machine['torch']}, CUDA {machine['cuda']}, Triton {machine['triton']}, {machine['date']}).",
        "×: the better peer's best time over ours, in bold from 1.05× on.",
        "Memory: peak extra bytes of ours over that peer's, in both passes.",
        "† the peer synchronizes with the host and is host-bound, or its time is noisy.",
        "",
    ]
