"""Page of a benchmark: its rows as a Markdown table, with the command, the machine, the versions and the load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from .load import LOADED, words
from .results import NOISY

PACKAGES = (
    "torch", "torchvision", "mmcv", "onedl-mmcv", "timm", "attn-plugins", "onedl-mmdetection", "onedl-mmsegmentation",
    "fairseq-fixed", "transformers",
)  # fmt: skip
EXPLANATION = f"""Each cell: minimum / lower quartile · median · upper quartile of the time in {{unit}} (peak extra
memory of torch's allocator in MiB). Ours and its peers take turns, call by call, in one process. Ratio: the better
peer's minimum over ours. Memory: ours over that peer's. Noisy: ours or the better peer varies more than {NOISY}-fold
between quartiles, after the attempts shown; loaded: other processes used more than {LOADED} CPUs meanwhile. Share: the
least time of the device for the operations or bytes, over our time; for causal attention, masked pairs included."""
ON_CUDA = """ Runs under
50 ms are replayed from a CUDA graph, with caches flushed before each."""
EAGER = f"""Each cell: minimum / lower quartile · median · upper quartile of the time of an eager call in {{unit}} (peak
extra memory of torch's allocator in MiB), the host's time of a call, and the time by a CUDA graph where there is one.
Calls run back to back for some 5 ms, so that the slower of host and device counts, without flushed caches. Ours and
its peers take turns in one process. Ratio: the better peer's median over ours. Memory: ours over that peer's. Noisy:
ours or the better peer varies more than {NOISY}-fold between quartiles; loaded: others used more than {LOADED} CPUs."""
MISMATCH = {"bfloat16": 8e-2, "float16": 2e-2, "TF32": 1e-2, "float32": 1e-3}  # of another backend's result


def milliseconds(seconds: float | None) -> str:
    """Format milliseconds with three digits; "–" for None."""
    return "–" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def line(row: Mapping[str, Any]) -> str:
    """Return the line that the command prints when a row ends."""
    if "error" in row:
        return f"{row['case']:60s} not measured: {row['error']}"
    share = f", {100 * row['share']:.0f} % of the roofline" if row.get("share") else ""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:6.2f}x over {row['better_peer']}"
    text = f"{row['case']:60s} {milliseconds(row['ours'][row.get('by', 'min')]):>8s} ms {ratio}{share}"
    return text + (f"  [{marks(row)}]" if marks(row) else "")


def page(data: Mapping[str, Any]) -> str:
    """Return the whole page of one file: command, machine and load above the rows, and those that were not measured."""
    load = data["load"]
    lines = [
        f"# {data['benchmark']}, {data['device']}",
        "",
        f"`{data['command']}`",
        "",
        ", ".join(f"{k} {v}" for k, v in data["machine"].items()),
        "",
        f"Other processes used {words(load['before'])} before and {words(load['after'])} after.",
        *([data["note"]] if "note" in data else []),
        "",
    ]
    if data.get("ceilings"):
        speeds = ", ".join(f"{kind} {rate / 1e12:.4g} T/s" for kind, rate in data["ceilings"].items())
        lines += [f"Ceilings, measured here: {speeds} (bytes of a copy are those read and written).", ""]
    rows = [row for row in data["rows"] if "error" not in row]
    rooms = list(dict.fromkeys(row.get("room", "") for row in rows))
    for room in rooms:
        own = [row for row in rows if row.get("room", "") == room]
        lines += [f"## {room}", ""] if len(rooms) > 1 else []
        lines += table(own, EAGER if "by" in own[0] else EXPLANATION + ON_CUDA * (data["device"] == "cuda"))
        lines += [""] if len(rooms) > 1 else []
    if failed := [row for row in data["rows"] if "error" in row]:
        lines += ["", "## Not measured", "", *(f"* {row['room']}: {row['case']}: {row['error']}" for row in failed)]
    return "\n".join(lines).rstrip("\n") + "\n"


def table(rows: Sequence[Mapping[str, Any]], explanation: str = EXPLANATION) -> list[str]:
    """Return the lines of the rows' explanation, with its ``{unit}`` replaced, and of their table."""
    medians = [row["ours"]["median"] for row in rows]
    unit, factor = ("µs", 1e3) if max(medians) < 1e-3 else ("s", 1e-3) if min(medians) >= 1 else ("ms", 1.0)
    detailed = any("backends" in row for row in rows)
    peers = dict.fromkeys(name for row in rows for name in row["peers"])
    columns: dict[str, Callable[[Any], str]] = {
        "case": lambda row: row["case"],
        "ours": lambda row: cell(row["ours"], factor),
    }
    if detailed:
        columns["served by"] = lambda row: "+".join(dict.fromkeys(chain.from_iterable(row["served_by"].values())))
        columns["our other backends"] = lambda row: "; ".join(
            [*(f"{name} {cell(result, factor)}" for name, result in row["backends"].items()), *row["refusals"].values()]
        )
    columns |= {name: lambda row, name=name: cell(row["peers"].get(name), factor) for name in peers}
    if peers:
        columns["ratio"] = lambda row: "" if row["ratio"] is None else f"{row['ratio']:.2f}× over {row['better_peer']}"
        columns["memory"] = _memory_ratio
    if any("share" in row for row in rows):
        columns["share"] = lambda row: f"{100 * row['share']:.0f} %" if row.get("share") else ""
    columns |= {"others, CPUs": lambda row: words(row["load"]["others"]).removesuffix(" CPUs"), "marks": marks}
    lines = markdown(columns, [[of(row) for of in columns.values()] for row in rows])
    return [explanation.format(unit=unit), "", *lines]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *body = ("| " + " | ".join(cells) + " |" for cells in (header, *rows))
    return [head, "| --- " * len([*header]) + "|", *body]


def cell(result: Mapping[str, Any] | None, factor: float = 1.0) -> str:
    """Return times and memory of one contestant, or the reason why it could not run; empty for None."""
    if result is None:
        return ""
    if "error" in result:
        return result["error"]
    least, *quartiles = (milliseconds(result[key] * factor) for key in ("min", "q1", "median", "q3"))
    more = "".join(f", {key} {milliseconds(result[key] * factor)}" for key in ("host", "graph") if key in result)
    return f"{least} / {' · '.join(quartiles)} ({result['memory'] / 2**20:.1f})" + more * (result.get("how") == "eager")


def marks(row: Mapping[str, Any]) -> str:
    """Return the reservations about a row."""
    attempts = f"attempt {row['attempts']}" if row["attempts"] > 1 else ""
    host = "host's time" * host_bound(row)
    limit = MISMATCH.get(row.get("kind", ""), 0.1)
    wrong = [f"{name} differs by {d:.1g}" for name, d in row.get("differences", {}).items() if not d < limit]
    return ", ".join(filter(None, ("noisy" * row["noisy"], "loaded" * row["loaded"], host, *wrong, attempts)))


def host_bound(row: Mapping[str, Any]) -> bool:
    """Return whether the time of ours or the better peer on CUDA includes the host's."""
    return any("host" in result.get("how", "") for result in (row["ours"], row["peers"].get(row["better_peer"], {})))


def _memory_ratio(row: Mapping[str, Any]) -> str:
    """Return our memory over the better peer's; empty if there is no peer, or it takes none."""
    best = row["better_peer"]
    return f"{row['memory_ratio']:.2f}" if best is not None and row["peers"][best]["memory"] else ""
