"""Count the cost of TimeSformer's patterns over frames and resolution, and compare it with the paper's figures.

python -m tools.figures space_time
python -m tools.figures space_time --model timesformer_small_patch16_224 --frames 8 16 --sizes 224 --patterns divided
python -m tools.figures space_time --measured benchmarks/space-time-cost.json --markdown … --plot …

Multiply-adds of one clip are counted by torch's flop counter on shapes alone: nothing is computed. --measured shows
times that `python -m tools.bench space_time` stored, or the committed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch

import attn_plugins.timm  # noqa: F401 - registers the models
from attn_plugins.modules.tokens.space_time_attention import STEPS
from tools import command_parser
from tools.bench import report, results
from tools.bench.cases import space_time as cases
from tools.files import write_text
from tools.plots import figure

from . import convention
from .row import Row, markdown

MODEL = "timesformer_base_patch16_224"
PATTERNS = tuple(STEPS)
FRAMES, SIZES = (8, 16, 32, 64, 96), (224, 336, 448, 560)
VIEWS = 3  # spatial crops in the paper's cost of inference
SSV2_CLASSES = 174
# Bertasius et al. (2021): parameters in millions, Table 1, and inference in TFLOPs, Table 3.
PARAMETERS = {"space": "85.9", "joint": "85.9", "divided": "121.4", "local_global": "121.4", "axial": "156.8"}
INFERENCE = {"TimeSformer": (8, 224, "0.59"), "TimeSformer-HR": (16, 448, "5.11"), "TimeSformer-L": (96, 224, "7.14")}
REPEATED = "7.140 with the class token projected once a frame, as in the official code, not once a clip as here"
COLOURS = {"space": "#718096", "joint": "#c53030", "divided": "#2b6cb0", "local_global": "#2f855a", "axial": "#b7791f"}
EXPLANATION = """Each cell: minimum / lower quartile · median · upper quartile of the time of one clip in ms (peak extra
memory of torch's allocator in MiB). The patterns take turns, call by call, in one process. A training step is a forward
pass and the gradients of all parameters. Noisy: the first pattern or the fastest of the others varies more than
1.3-fold between quartiles; loaded: other processes used the CPUs meanwhile."""


def build(name: str, pattern: str, frames: int, size: int, **options: int) -> torch.nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return timm.create_model(name, pattern=pattern, num_frames=frames, img_size=size, **options).eval()


@cache
def cost(name: str, pattern: str, frames: int, size: int, **options: int) -> int:
    """Count the multiply-adds of all products for one clip: projections, MLPs, attention, patches and the head."""
    model = build(name, pattern, frames, size, **options)
    return convention.executed(convention.calls(model, 1, frames, 3, size, size))


def printed_figures() -> list[Row]:
    """Return rows with the paper's figures and ours."""
    rows = []
    for pattern, printed in PARAMETERS.items():
        model = build(MODEL, pattern, 8, 224, num_classes=SSV2_CLASSES)
        rows.append(Row(f"Table 1, {pattern}", "M parameters", printed, convention.parameters(model) / 1e6))
    for name, (frames, size, printed) in INFERENCE.items():
        tera = VIEWS * cost(MODEL, "divided", frames, size) / 1e12
        remark = REPEATED if name == "TimeSformer-L" else ""
        rows.append(Row(f"Table 3, {name}: {frames} frames of {size}²", "TFLOPs", printed, tera, remark))
    return rows


def table(name: str, patterns: Sequence[str], frames: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the table of TFLOPs per clip, with a row for each number of frames and size."""
    lines = ["| frames | size | " + " | ".join(patterns) + " |", "|---:|---:|" + "---:|" * len(patterns)]
    for size in sizes:
        for count in frames:
            cells = [f"{cost(name, pattern, count, size) / 1e12:.3f}" for pattern in patterns]
            lines.append(f"| {count} | {size}² | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def stored(file: Path) -> dict[str, Any] | None:
    """Read times of ``tools.bench space_time``, each row with its clip and its patterns; None for any other file."""
    try:
        data = results.read(file)
    except (OSError, ValueError, AttributeError):
        return None
    if data is None or data.get("benchmark") not in ("space_time", "space-time-cost"):
        return None
    if "patterns" in data:  # as version 0.2.0 wrote them
        return {**data, "rows": [{"ours": {}, "peers": {}, "better_peer": None, **row} for row in data["rows"]]}
    rows = []
    for row in data["rows"]:
        frames, size, kind = row["case"].replace(" frames of ", " ").replace("², ", " ").split()
        times = dict(zip(cases.PATTERNS, (row["ours"], *row["peers"].values())))
        rows.append({**row, "frames": int(frames), "size": int(size), "kind": kind, "patterns": times})
    facts = {
        "model": cases.MODEL, "depth": cases.DEPTH, "patterns": list(cases.PATTERNS),
        "frames": sorted({row["frames"] for row in rows}), "sizes": sorted({row["size"] for row in rows}),
    }  # fmt: skip
    return {**data, **facts, "rows": rows}


def section(data: Mapping[str, Any]) -> str:
    """Return the page's section of measured times."""
    patterns = data["patterns"]
    lines = ["## Measured", *report.head("", data)[1:]]
    lines += [f"One clip, {data['model']} with {data['depth']} blocks. {EXPLANATION}", ""]
    measured, counted = [], []
    for row in data["rows"]:
        cells = [report.cell(row["patterns"][pattern]) for pattern in patterns]
        measured.append([row["case"], *cells, report.cpus(row["load"]["others"]), report.marks(row)])
        if row["kind"] == "forward":
            clip = data["model"], row["frames"], row["size"]
            counts = {p: cost(clip[0], p, *clip[1:], depth=data["depth"]) / 1e9 for p in patterns}
            cells = [f"{count:.1f} ({count / row['patterns'][p]['min']:.0f}/s)" for p, count in counts.items()]
            counted.append([row["case"], *cells])
    lines += report.markdown(["clip", *patterns, "others, CPUs", "marks"], measured)
    lines += ["", "Counted G multiply-adds of a forward pass, and those a second by the minimum:", ""]
    return "\n".join([*lines, *report.markdown(["clip", *patterns], counted)]) + "\n"


def plot(
    path: Path,
    name: str,
    patterns: Sequence[str],
    frames: Sequence[int],
    sizes: Sequence[int],
    data: Mapping[str, Any] | None = None,
) -> None:
    """Draw cost over size, for the fewest frames, and over frames, for the smallest size (the paper's Fig. 4).

    With measured ``data``, a row of panels for each kind of step follows; its bands are the quartiles.
    """

    def counted(axes: Any, ticks: Sequence[int], clips: Sequence[tuple[int, int]]) -> None:
        for pattern in patterns:
            costs = [cost(name, pattern, *clip) / 1e12 for clip in clips]
            axes.plot(ticks, costs, marker="o", markersize=3, color=COLOURS[pattern], label=pattern)

    kinds = [] if data is None else [kind for kind in cases.KINDS if any(row["kind"] == kind for row in data["rows"])]
    rows, style = 1 + len(kinds), {"svg.hashsalt": "space-time", "font.family": "sans-serif"}
    with figure(path, rows, 2, style, dict(dpi=150), figsize=(9, 3.6 * rows)) as (_, axes):
        _draw(axes[0], frames, sizes, "TFLOPs a clip", "", counted)
        for kind, pair in zip(kinds, axes[1:]):
            model = f"{data['model'].removesuffix('_patch16_224')}, {data['depth']} blocks: "
            _draw(pair, data["frames"], data["sizes"], f"seconds, {kind}", model, partial(_timed, data, kind))
        axes[0, 0].legend(frameon=False, fontsize="small")


def _timed(
    data: Mapping[str, Any], kind: str, axes: Any, ticks: Sequence[int], clips: Sequence[tuple[int, int]]
) -> None:
    times = {(row["frames"], row["size"]): row["patterns"] for row in data["rows"] if row["kind"] == kind}
    for pattern in data["patterns"]:
        low, least, high = ([times[clip][pattern][key] for clip in clips] for key in ("q1", "min", "q3"))
        axes.plot(ticks, least, marker="o", markersize=3, color=COLOURS[pattern])
        axes.fill_between(ticks, low, high, color=COLOURS[pattern], alpha=0.2, linewidth=0)


def _draw(
    pair: Sequence[Any], frames: Sequence[int], sizes: Sequence[int], unit: str, start: str, curves: Callable[..., None]
) -> None:
    """Draw curves over size and over frames, with their titles."""
    for axes, title, label, ticks, clips in (
        (pair[0], f"{min(frames)} frames", "size in pixels", sizes, [(min(frames), size) for size in sizes]),
        (pair[1], f"{min(sizes)}² pixels", "frames", frames, [(count, min(sizes)) for count in frames]),
    ):
        curves(axes, ticks, clips)
        axes.set(title=start + title, xlabel=label, ylabel=unit, xticks=list(ticks), ylim=(0, None))
        axes.grid(alpha=0.3)


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("figures space_time", __doc__)
    parser.add_argument("--model", default=MODEL, metavar="NAME", help=f"a TimeSformer of timm's registry; {MODEL}")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, metavar="PATTERN", help="all")
    parser.add_argument("--frames", nargs="+", type=int, default=FRAMES, metavar="T", help=f"{FRAMES}")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=SIZES, metavar="PIXELS", help=f"multiples of 16; {SIZES}"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the cost, as .svg, .png or .pdf")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="show the times of this JSON file as well")
    options = parser.parse_args(arguments)
    if not options.model.startswith("timesformer_") or not timm.is_model(options.model):
        parser.error(f"--model must be one of {', '.join(timm.list_models('timesformer_*'))}, got {options.model!r}")
    for flag, numbers, unit in (("--frames", options.frames, 1), ("--sizes", options.sizes, 16)):
        for number in numbers:
            if number < 1 or number % unit:
                parser.error(f"{flag} must be positive{' multiples of 16' if unit > 1 else ''}, got {number}")
    if options.plot is not None and options.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot must end with .svg, .png or .pdf, got {options.plot}")
    data = None
    if options.measured is not None and (data := stored(options.measured)) is None:
        parser.error(f"--measured must be a file of tools.bench space_time, got {options.measured}")
    clips = options.model, options.patterns, options.frames, options.sizes
    text = (
        "# What TimeSformer's patterns cost\n\n"
        "Multiply-adds of all products in a forward pass, counted by torch's flop counter on shapes alone: FLOPs as "
        f"the paper counts them. {'Nothing here is a time.' if data is None else 'Measured times follow below.'}\n\n"
        f"## The paper's figures\n\nThe paper's model, {MODEL}: parameters with the {SSV2_CLASSES} classes of "
        f"Something-Something V2, inference on {VIEWS} views of a clip by the pattern 'divided'. `=`: ours rounds to "
        f"the printed figure.\n\n{markdown(printed_figures())}\n"
        f"## TFLOPs of one clip, {options.model}\n\n"
    )
    if options.plot is not None:
        plot(options.plot, *clips, data)
        text += f"![Cost over size and over frames]({options.plot.name})\n\n"
    text += table(*clips)
    if data is not None:
        text += "\n" + section(data)
    print(text)
    if options.markdown is not None:
        write_text(options.markdown, text)
    return 0
