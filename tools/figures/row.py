"""A figure of a paper beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: What is counted.
        unit: ``'M parameters'``, ``'GFLOPs'``, ``'bytes'``, ...
        printed: The paper's figure, in this unit; its digits after the point are its precision.
        ours: Our count, in this unit.
        remark: Why it differs, where it does.
    """

    name: str
    unit: str
    printed: str
    ours: float
    remark: str = ""

    @property
    def agrees(self) -> bool:
        """Whether ours, rounded to the paper's digits, is the paper's."""
        digits = len(self.printed.partition(".")[2])
        return round(self.ours, digits) == float(self.printed)


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table; ``=`` where ours rounds to the printed figure, else the difference."""
    lines = ["| | unit | paper | ours | | remark |", "|---|---|---:|---:|---|---|"]
    for row in rows:
        ours = f"{row.ours:,.0f}" if row.ours == int(row.ours) else f"{row.ours:.6g}"
        verdict = "=" if row.agrees else f"{row.ours / float(row.printed) - 1:+.1%}"
        lines.append(f"| {row.name} | {row.unit} | {row.printed} | {ours} | {verdict} | {row.remark} |")
    return "\n".join(lines) + "\n"
