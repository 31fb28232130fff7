"""Comparison of a paper's figure with ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    unit: str
    printed: str  # the paper's figure; its digits after the point are its precision
    ours: float
    remark: str = ""
    executed: float | None = None  # executed operations, if the paper's convention charges something else
    reason: str = ""  # a remark for figures that differ

    @property
    def agrees(self) -> bool:
        """Whether ours, rounded to the paper's digits, equals the paper's."""
        digits = len(self.printed.partition(".")[2])
        return round(self.ours, digits) == float(self.printed)


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a table; ``=`` if ours rounds to the printed figure, else the difference."""
    with_executed = any(row.executed is not None for row in rows)
    lines = ["| | unit | paper | ours | |" + " executed |" * with_executed + " remark |"]
    lines.append("|---|---|---:|---:|---|" + "---:|" * with_executed + "---|")
    for row in rows:
        change = row.ours / float(row.printed) - 1
        verdict = "=" if row.agrees else f"{change:+.1%}" if abs(change) >= 5e-4 else f"{change:+.3%}"
        remark = row.remark or ("" if row.agrees else row.reason)
        executed = f" {'' if row.executed is None else _figure(row.executed)} |" * with_executed
        lines.append(
            f"| {row.name} | {row.unit} | {row.printed} | {_figure(row.ours)} | {verdict} |{executed} {remark} |"
        )
    return "\n".join(lines) + "\n"


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:.6g}"
