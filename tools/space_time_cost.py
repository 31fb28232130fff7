"""Count the cost of TimeSformer's patterns over frames and resolution, and compare it with the paper's figures.

python -m tools.space_time_cost
python -m tools.space_time_cost --model timesformer_small_patch16_224 --frames 8 16 --sizes 224 --patterns divided joint
python -m tools.space_time_cost --markdown benchmarks/space-time-cost.md --plot benchmarks/space-time-cost.svg
python -m tools.space_time_cost --measure benchmarks/space-time-cost.json --training --markdown … --plot …

Multiply-adds of one clip are counted by torch's flop counter on shapes alone: nothing is computed. --measure also times
small models, patterns in turn, with their peak memory; --measured shows the stored times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import attn_plugins.timm  # noqa: F401 - registers the models
from attn_plugins.modules.space_time_attention import STEPS
from tools.benchmark import results
from tools.figures.row import Row, markdown
from tools.files import write, write_text
from tools.space_time_measure import KINDS, Clip, add_arguments, measured, over_frames, over_sizes, section

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


def build(name: str, pattern: str, frames: int, size: int, **options: int) -> torch.nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return timm.create_model(name, pattern=pattern, num_frames=frames, img_size=size, **options).eval()


@cache
def cost(name: str, pattern: str, frames: int, size: int, **options: int) -> int:
    """Count the multiply-adds of all products for one clip: projections, MLPs, attention, patches and the head."""
    model = build(name, pattern, frames, size, **options)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, frames, 3, size, size, device="meta"))
    return counter.get_total_flops() // 2


def printed_figures() -> list[Row]:
    """Return rows with the paper's figures and ours."""
    rows = []
    for pattern, printed in PARAMETERS.items():
        model = build(MODEL, pattern, 8, 224, num_classes=SSV2_CLASSES)
        count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        rows.append(Row(f"Table 1, {pattern}", "M parameters", printed, count))
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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def counted(axes: Any, ticks: Sequence[int], clips: Sequence[Clip]) -> None:
        for pattern in patterns:
            costs = [cost(name, pattern, *clip) / 1e12 for clip in clips]
            axes.plot(ticks, costs, marker="o", markersize=3, color=COLOURS[pattern], label=pattern)

    kinds = [] if data is None else [kind for kind in KINDS if any(row["kind"] == kind for row in data["rows"])]
    with pyplot.rc_context({"svg.hashsalt": "space-time", "svg.fonttype": "none", "font.family": "sans-serif"}):
        rows = 1 + len(kinds)
        figure, axes = pyplot.subplots(rows, 2, figsize=(9, 3.6 * rows), layout="constrained", squeeze=False)
        _draw(axes[0], frames, sizes, "TFLOPs a clip", "", counted)
        for kind, pair in zip(kinds, axes[1:]):
            assert data is not None
            model = f"{data['model'].removesuffix('_patch16_224')}, {data['depth']} blocks: "
            _draw(pair, data["frames"], data["sizes"], f"seconds, {kind}", model, partial(_timed, data, kind))
        axes[0, 0].legend(frameon=False, fontsize="small")
        suffix = path.suffix.removeprefix(".")
        metadata = {"Date": None} if suffix == "svg" else {}
        write(path, lambda beside: figure.savefig(beside, format=suffix, dpi=150, metadata=metadata))
        pyplot.close(figure)


def _timed(data: Mapping[str, Any], kind: str, axes: Any, ticks: Sequence[int], clips: Sequence[Clip]) -> None:
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
        (pair[0], f"{min(frames)} frames", "size in pixels", sizes, over_sizes(frames, sizes)),
        (pair[1], f"{min(sizes)}² pixels", "frames", frames, over_frames(frames, sizes)),
    ):
        curves(axes, ticks, clips)
        axes.set(title=start + title, xlabel=label, ylabel=unit, xticks=list(ticks), ylim=(0, None))
        axes.grid(alpha=0.3)


def stored(file: Path) -> dict[str, Any] | None:
    """Read the results that --measure stored; return None for any other file."""
    try:
        data = results.read(file)
    except (OSError, ValueError, AttributeError):
        return None
    return data if data is not None and data.get("benchmark") == "space-time-cost" else None


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.space_time_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=MODEL, metavar="NAME", help=f"a TimeSformer of timm's registry; {MODEL}")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, metavar="PATTERN", help="all")
    parser.add_argument("--frames", nargs="+", type=int, default=FRAMES, metavar="T", help=f"{FRAMES}")
    parser.add_argument(
        "--sizes", nargs="+", type=int, default=SIZES, metavar="PIXELS", help=f"multiples of 16; {SIZES}"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the cost, as .svg, .png or .pdf")
    add_arguments(parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    if not options.model.startswith("timesformer_") or not timm.is_model(options.model):
        parser.error(f"--model must be one of {', '.join(timm.list_models('timesformer_*'))}, got {options.model!r}")
    checked = (
        ("--frames", options.frames, 1), ("--sizes", options.sizes, 16),
        ("--measure-frames", options.measure_frames, 1), ("--measure-sizes", options.measure_sizes, 16),
        ("--threads", [options.threads], 1),
    )  # fmt: skip
    for flag, numbers, unit in checked:
        for number in numbers:
            if number < 1 or number % unit:
                parser.error(f"{flag} must be positive{' multiples of 16' if unit > 1 else ''}, got {number}")
    if options.plot is not None and options.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot must end with .svg, .png or .pdf, got {options.plot}")
    if options.measure is not None and options.measure.suffix != ".json":
        parser.error(f"--measure must end with .json, got {options.measure}")
    if options.seconds < 0:
        parser.error(f"--seconds must not be negative, got {options.seconds:g}")
    data = None
    if options.measured is not None and (data := stored(options.measured)) is None:
        parser.error(f"--measured must be a file that --measure wrote, got {options.measured}")
    if options.measure is not None:
        data = measured(options)
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
        text += "\n" + section(data, cost)
    print(text)
    if options.markdown is not None:
        write_text(options.markdown, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
