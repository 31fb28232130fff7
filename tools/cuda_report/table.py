"""Tables of kernels, with or without a comparison to an earlier report."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
COUNTS = ("HMMA", "MATCH", "REDUX", "VOTE", "SHFL", "MOV", "MUFU", "LDS", "STS", "LDL", "STL", "ATOM", "BAR")
COLUMNS = ("registers", "stack", "shared", "instructions", "loop")
EXPLANATION = """Registers per thread, stack in bytes (spills), static shared memory in bytes per block (on sm_90
with the 1024 that CUDA reserves), instructions of the kernel; then instructions of its hottest loop, in total
and by expensive kind. The hottest loop is the innermost loop with the most matrix products, then with the most
loads of global memory, then the longest. LDG: loads of global memory, number × bits. ATOM includes RED and
ATOMS; MOV includes IMAD.MOV and UMOV. These are counts of compiled instructions, not measurements."""


def short(name: str) -> str:
    """Strip return type, arguments and namespaces from a demangled name: ``stats_kernel<half, Team<2, 4, 2>>``."""
    depth = 0
    for end, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and depth == 0 and not name.startswith("(anonymous namespace)", end):
            name = name[:end]
            break
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ").replace("__nv_bfloat16", "bfloat16")
    return re.sub(r"\b(?:[a-z]\w*)::", "", name.replace("__half", "half").replace("> >", ">>"))


def loads(counts: Mapping[str, int]) -> str:
    """Format loads of global memory, widest first: ``4×128 8×16``."""
    widths = sorted((int(key[3:]) for key in counts if re.fullmatch(r"LDG\d+", key)), reverse=True)
    return " ".join(f"{counts[f'LDG{width}']}×{width}" for width in widths)


def values(row: Row) -> dict[str, str]:
    """Return the cells of a kernel's row."""
    found = {name: str(row.get(name, "?")) for name in COLUMNS[:3]}
    loop = row["loop"]
    found["instructions"] = str(row["all"]["instructions"])
    found["loop"] = str(loop["instructions"] or "–")
    found |= {name: str(loop.get(name, "") or "") for name in COUNTS}
    return found | {"LDG": loads(loop)}


def key(row: Row) -> tuple[str, str]:
    """Return the key that identifies a kernel in another report."""
    return row["kernel"], row["architecture"]


def predecessors(rows: Sequence[Row], before: Sequence[Row]) -> dict[tuple[str, str], Row]:
    """Return the row of ``before`` that each row is compared with, by ``key``; rows without one are left out.

    It is the row of the same name. A template instance whose arguments changed is compared with the vanished instance
    that shares most of them, in the same places: more than half of the old ones, and more than any other instance.
    """
    old = {key(row): row for row in before}
    found = {each: old[each] for each in map(key, rows) if each in old}
    vanished = [row for each, row in old.items() if each not in found]
    for row in rows:
        name, *arguments = parts(row["kernel"])
        shared: dict[int, list[Row]] = {}
        for other in vanished:
            other_name, *others = parts(other["kernel"])
            if (name, row["architecture"]) == (other_name, other["architecture"]):
                same = sum(a == b for a, b in zip(arguments, others))
                if 2 * same > len(others):
                    shared.setdefault(same, []).append(other)
        if key(row) not in found and shared and len(most := shared[max(shared)]) == 1:
            found[key(row)] = most[0]
    return found


def parts(name: str) -> list[str]:
    """Return a kernel's name and all its template arguments: ``["f", "half", "Team", "2", "4"]``."""
    return re.split(r"<|, ", name.replace(">", ""))


def table(rows: Sequence[Row], before: Sequence[Row] | None = None) -> list[str]:
    """Return the lines of a table for each architecture; with ``before``, changed cells are ``old → new``.

    Columns that are empty for all kernels are omitted; kernels that exist only in ``before`` are listed last.
    """
    old = predecessors(rows, before or ())
    lines: list[str] = []
    for architecture in sorted({row["architecture"] for row in rows}):
        shown = sorted((row for row in rows if row["architecture"] == architecture), key=lambda row: row["kernel"])
        cells = {row["kernel"]: _cells(row, old, before is not None) for row in shown}
        names = [*COLUMNS, "LDG", *COUNTS]
        names = [name for name in names if any(each[name] for each in cells.values())]
        lines += ["", f"## {architecture}", "", "| kernel | " + " | ".join(names) + " |"]
        lines.append("| --- " + "| ---: " * len(names) + "|")
        for row in shown:
            each = cells[row["kernel"]]
            lines.append(f"| `{row['kernel']}`{each['new']} | " + " | ".join(each[name] for name in names) + " |")
        here = {key(each) for each in (*shown, *old.values())}
        gone = sorted(
            row["kernel"] for row in before or () if row["architecture"] == architecture and key(row) not in here
        )
        if gone:
            lines += ["", "No longer there: " + ", ".join(f"`{name}`" for name in gone) + "."]
    return lines[1:]


def _cells(row: Row, old: Mapping[tuple[str, str], Row], compared: bool) -> dict[str, str]:
    found = values(row)
    earlier = old.get(key(row))
    if earlier is None:
        return found | {"new": " (new)" if compared else ""}
    past = values(earlier)
    changes = {name: now if now == past[name] else f"{past[name] or 0} → {now or 0}" for name, now in found.items()}
    return changes | {"new": "" if key(row) == key(earlier) else f" (was `{earlier['kernel']}`)"}
