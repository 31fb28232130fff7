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
WHOLE = f"""One picture, CPU, float32. Each cell: minimum / lower quartile · median · upper quartile of the
time in {{unit}} (MiB: the peak resident memory of the process during the pass, above its level with the model built;
runs of the same code differ by up to a quarter).
Stock is the upstream config as it is, ours the same config with the drop-in. Each measurement is a fresh process, in
turns, with the same random weights (offsets and gates at their start, zero), after one call that warms up. Ratio: the
minimum of stock over ours. Noisy: one of the two varies more than {NOISY}-fold between quartiles; loaded: other
processes used more than {LOADED} CPUs meanwhile."""
MISMATCH = {"bfloat16": 8e-2, "float16": 2e-2, "TF32": 1e-2, "float32": 1e-3}  # of another backend's result


def milliseconds(seconds: float | None) -> str:
    """Format milliseconds with three digits; "–" for None."""
    return "–" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def megabytes(size: int | None) -> str:
    """Format MiB with one decimal; "–" for None."""
    return "–" if size is None else f"{size / 2**20:.1f}"


def head(title: str, data: Mapping[str, Any]) -> list[str]:
    """Return the lines above a table: title, command, machine, load."""
    load = data["load"]
    return [
        f"# {title}",
        "",
        f"`{data['command']}`",
        "",
        ", ".join(f"{k} {v}" for k, v in data["machine"].items()),
        "",
        f"Other processes used {words(load['before'])} before and {words(load['after'])} after.",
        *([data["note"]] if "note" in data else []),
        "",
    ]


def line(row: Mapping[str, Any]) -> str:
    """Return the line that the command prints when a row ends."""
    if "error" in row:
        return f"{row['case']:60s} not measured: {row['error']}"
    share = f", {100 * row['share']:.0f} % of the roofline" if row.get("share") else ""
    ratio = "" if row["ratio"] is None else f"{row['ratio']:6.2f}x over {row['better_peer']}"
    text = f"{row['case']:60s} {milliseconds(row['ours'][row.get('by', 'min')]):>8s} ms {ratio}{share}"
    return text + (f"  [{marks(row)}]" if marks(row) else "")


def page(data: Mapping[str, Any]) -> str:
    """Return the whole page of one file."""
    lines = head(f"{data['benchmark']}, {data['device']}", data)
    if data.get("ceilings"):
        speeds = ", ".join(f"{kind} {rate / 1e12:.4g} T/s" for kind, rate in data["ceilings"].items())
        lines += [f"Ceilings, measured here: {speeds} (bytes of a copy are those read and written).", ""]
    rows = [row for row in data["rows"] if "error" not in row]
    rooms = list(dict.fromkeys(row.get("room", "") for row in rows))
    for room in rooms:
        own = [row for row in rows if row.get("room", "") == room]
        whole = "rounds" in own[0]
        lines += [f"## {room}", ""] if len(rooms) > 1 else []
        legend = EXPLANATION + (ON_CUDA if data["device"] == "cuda" else "")
        lines += table(own, WHOLE if whole else EAGER if "by" in own[0] else legend)
        lines += ["", *features_table(own)] if whole else []
        if memory := [row for row in own if "buffer" in row]:
            lines += ["", *memory_table(memory)]
        lines += [""] if len(rooms) > 1 else []
    if failed := [row for row in data["rows"] if "error" in row]:
        lines += ["", "## Not measured", "", *(f"* {row['room']}: {row['case']}: {row['error']}" for row in failed)]
    return "\n".join(lines).rstrip("\n") + "\n"


def table(rows: Sequence[Mapping[str, Any]], explanation: str = EXPLANATION) -> list[str]:
    """Return the lines of the rows' explanation, with its ``{unit}`` replaced, and of their table."""
    medians = [row["ours"]["median"] for row in rows]
    unit, factor = ("µs", 1e3) if max(medians) < 1e-3 else ("s", 1e-3) if min(medians) >= 1 else ("ms", 1.0)
    detailed, peers = any("backends" in row for row in rows), peers_of(rows)
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
        columns["goal"] = lambda row: "" if row["goal"] is None else f"≥ {row['goal']:.3g}×"
        columns["memory"] = _memory_ratio
    if any("share" in row for row in rows):
        columns["share"] = lambda row: f"{100 * row['share']:.0f} %" if row.get("share") else ""
    columns |= {"others, CPUs": lambda row: cpus(row["load"]["others"]), "marks": marks}
    lines = markdown(columns, [[of(row) for of in columns.values()] for row in rows])
    return [explanation.format(unit=unit), "", *lines]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *body = ("| " + " | ".join(cells) + " |" for cells in (header, *rows))
    return [head, "| --- " * len([*header]) + "|", *body]


def peers_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of all peers, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row["peers"]))


def cpus(others: float | None) -> str:
    """Format CPUs that other processes used, "?" if unknown."""
    return "?" if others is None else f"{others:.2f}"


def features_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the second table of whole models."""
    cells = []
    for row in rows:
        both = row["ours"], row["peers"]["stock"]
        features, losses = [f"{one['features']:.3g}" for one in both], [f"{one['loss']:g}" for one in both]
        cells.append([row["case"], str(row["rounds"]), *features, *losses, row["config"]])
    header = ["case", "rounds", "ours, s", "stock, s", "loss of ours", "loss of stock", "config"]
    return [
        "Forward time of backbone and neck, the least of all calls, and the loss of the first training step, in which",
        "both start from the same weights:",
        "",
        *markdown(header, cells),
    ]


def cell(result: Mapping[str, Any] | None, factor: float = 1.0) -> str:
    """Return times and memory of one contestant, or the reason why it could not run; empty for None."""
    if result is None:
        return ""
    if "error" in result:
        return result["error"]
    least, *quartiles = (milliseconds(result[key] * factor) for key in ("min", "q1", "median", "q3"))
    more = "".join(f", {key} {milliseconds(result[key] * factor)}" for key in ("host", "graph") if key in result)
    return f"{least} / {' · '.join(quartiles)} ({megabytes(result['memory'])})" + more * (result.get("how") == "eager")


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


def memory_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of working memory: memory of a call beyond its results, relative to a buffer."""
    peers, buffer = peers_of(rows), rows[0]["buffer"]["name"]
    cells = []
    for row in rows:
        size, results = row["buffer"]["size"], [row["ours"], *(row["peers"].get(name) for name in peers)]
        cells.append([row["case"], megabytes(size), *(shares(result, size) for result in results)])
    return [
        f"Working memory: the most that a call holds beyond its results, in MiB and as share of the {buffer}. First by",
        "torch's allocator, then of the whole process, with kernels' own scratch and without pages never touched.",
        "",
        *markdown(["case", buffer, "ours", *peers], cells),
    ]


def working_memory(result: Mapping[str, Any], key: str = "memory") -> int:
    """Return the bytes of ``memory`` or ``resident`` beyond the results."""
    return max(0, result[key] - result["results"])


def shares(result: Mapping[str, Any] | None, size: int) -> str:
    """Return working memory by both counts, with its share of ``size``."""
    if result is None or "error" in result:
        return ""
    both = (working_memory(result, key) for key in ("memory", "resident") if key in result)
    return "; ".join(f"{megabytes(used)} ({100 * used / size:.0f} %)" for used in both)
