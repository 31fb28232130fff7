"""Count what TimeSformer's patterns cost, over frames and resolution, and print it beside the paper's figures.

python -m tools.space_time_cost
python -m tools.space_time_cost --model timesformer_small_patch16_224 --frames 8 16 --sizes 224 --patterns divided joint
python -m tools.space_time_cost --markdown benchmarks/space-time-cost.md --plot benchmarks/space-time-cost.svg

Multiply-adds of one clip by torch's flop counter, on shapes alone: nothing is computed or timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tools.files import write, write_text
from tools.requires import extras

with extras("timm", "tools"):
    import timm
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    import attn_plugins.timm  # noqa: F401 - registers the models
    from attn_plugins.modules.space_time_attention import STEPS
    from tools.figures.row import Row, markdown

MODEL = "timesformer_base_patch16_224"
PATTERNS = tuple(STEPS)
FRAMES, SIZES = (8, 16, 32, 64, 96), (224, 336, 448, 560)
VIEWS = 3  # spatial crops that the paper adds up for its cost of inference
SSV2_CLASSES = 174
# Bertasius et al. (2021): parameters in millions, Table 1, and inference in TFLOPs, Table 3.
PARAMETERS = {"space": "85.9", "joint": "85.9", "divided": "121.4", "local_global": "121.4", "axial": "156.8"}
INFERENCE = {"TimeSformer": (8, 224, "0.59"), "TimeSformer-HR": (16, 448, "5.11"), "TimeSformer-L": (96, 224, "7.14")}
REPEATED = "7.140 with the class token projected once a frame, as in the official code, not once a clip as here"
COLOURS = {"space": "#718096", "joint": "#c53030", "divided": "#2b6cb0", "local_global": "#2f855a", "axial": "#b7791f"}


def build(name: str, pattern: str, frames: int, size: int, **options: int) -> torch.nn.Module:
    """The model, without memory."""
    with torch.device("meta"):
        return timm.create_model(name, pattern=pattern, num_frames=frames, img_size=size, **options).eval()


@cache
def cost(name: str, pattern: str, frames: int, size: int) -> int:
    """Multiply-adds of one clip, of all products: projections, MLPs, attention, patches and the head."""
    model = build(name, pattern, frames, size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, frames, 3, size, size, device="meta"))
    return counter.get_total_flops() // 2


def printed_figures() -> list[Row]:
    """The paper's figures beside ours."""
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
    """TFLOPs of a clip, a row for each number of frames and size."""
    lines = ["| frames | size | " + " | ".join(patterns) + " |", "|---:|---:|" + "---:|" * len(patterns)]
    for size in sizes:
        for count in frames:
            cells = [f"{cost(name, pattern, count, size) / 1e12:.3f}" for pattern in patterns]
            lines.append(f"| {count} | {size}² | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(path: Path, name: str, patterns: Sequence[str], frames: Sequence[int], sizes: Sequence[int]) -> None:
    """Draw cost over size, of the fewest frames, and over frames, of the smallest size (the paper's Fig. 4)."""
    with extras("tools"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "space-time", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        panels = (
            (axes[0], f"{min(frames)} frames", "size in pixels", sizes, [(min(frames), size) for size in sizes]),
            (axes[1], f"{min(sizes)}² pixels", "frames", frames, [(count, min(sizes)) for count in frames]),
        )
        for panel, title, label, ticks, clips in panels:
            for pattern in patterns:
                costs = [cost(name, pattern, *clip) / 1e12 for clip in clips]
                panel.plot(ticks, costs, marker="o", markersize=3, color=COLOURS[pattern], label=pattern)
            panel.set(title=title, xlabel=label, ylabel="TFLOPs a clip", xticks=list(ticks), ylim=(0, None))
            panel.grid(alpha=0.3)
        axes[0].legend(frameon=False, fontsize="small")
        kind = path.suffix.removeprefix(".")
        metadata = {"Date": None} if kind == "svg" else {}
        write(path, lambda partial: figure.savefig(partial, format=kind, dpi=150, metadata=metadata))
        pyplot.close(figure)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m tools.space_time_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--model", default=MODEL, metavar="NAME", help=f"a TimeSformer of timm's registry; {MODEL}")
    made.add_argument("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, metavar="PATTERN", help="all")
    made.add_argument("--frames", nargs="+", type=int, default=FRAMES, metavar="T", help=f"{FRAMES}")
    made.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="PIXELS", help=f"multiples of 16; {SIZES}")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there as well")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the cost, as .svg, .png or .pdf")
    return made


def main(arguments: list[str] | None = None) -> int:
    made = parser()
    options = made.parse_args(arguments)
    if not options.model.startswith("timesformer_") or not timm.is_model(options.model):
        made.error(f"--model must be one of {', '.join(timm.list_models('timesformer_*'))}, got {options.model!r}")
    for flag, numbers, unit in (("--frames", options.frames, 1), ("--sizes", options.sizes, 16)):
        for number in numbers:
            if number < 1 or number % unit:
                made.error(f"{flag} must be positive{' multiples of 16' if unit > 1 else ''}, got {number}")
    if options.plot is not None and options.plot.suffix not in (".svg", ".png", ".pdf"):
        made.error(f"--plot must end with .svg, .png or .pdf, got {options.plot}")
    clips = options.model, options.patterns, options.frames, options.sizes
    text = (
        "# What TimeSformer's patterns cost\n\n"
        "Multiply-adds of all products in a forward pass, counted by torch's flop counter on shapes alone: FLOPs as "
        "the paper counts them. Nothing here is a time.\n\n"
        f"## The paper's figures\n\nThe paper's model, {MODEL}: parameters with the {SSV2_CLASSES} classes of "
        f"Something-Something V2, inference on {VIEWS} views of a clip by the pattern 'divided'. `=`: ours rounds to "
        f"the printed figure.\n\n{markdown(printed_figures())}\n"
        f"## TFLOPs of one clip, {options.model}\n\n"
    )
    if options.plot is not None:
        plot(options.plot, *clips)
        text += f"![Cost over size and over frames]({options.plot.name})\n\n"
    text += table(*clips)
    print(text)
    if options.markdown is not None:
        write_text(options.markdown, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
