"""The main use case at a small scale: train a detector with the "0010 + deformable" block on photographs, and draw it.

::

    python -m tools.demo                  the attended detector, into work_dirs/demo
    python -m tools.demo --no-attention   the same detector without the block, into work_dirs/demo-plain

Creates a set of five digits on photographs, runs mmdet's own training tool on ``configs/mmdet/digits/`` (about six
minutes on two free CPU cores, more on busy ones) and saves ``detections.png`` and ``sampling.png`` beside the
checkpoint. An interrupted run resumes from its last checkpoint; a finished one only draws again, in half a minute.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from tools import command_parser, need
from tools.datasets.digits_on_photographs import Recipe, build
from tools.detections_picture import Detection, draw, known_objects
from tools.view.follow import distinct, follow_picture
from tools.view.models import load_mm

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data/five_digits"
RECIPE = Recipe(train=1600, digits=(0, 1, 2, 3, 4), sides=(40, 80))
CONFIGS = ROOT / "configs/mmdet/digits"
# A score is low because it is the product of a class's probability and a centredness: half are below 0.55. With
# threshold 0.25 the detector finds 93 % of the digits, and 98 % of its boxes lie on a digit.
SCORE = 0.25
PROGRESS = re.compile(r"Epoch\(train\)\s+\[(\d+)\]\[ *(\d+)/(\d+)\].*?eta: (\S+).*?loss: (\S+)")
ACCURACY = re.compile(r"coco/bbox_mAP: (\S+)\s+coco/bbox_mAP_50: (\S+)")


def training_tool() -> Path:
    """Return the path of ``tools/train.py``, which mmdet's package contains."""
    import mmdet

    return Path(mmdet.__file__).parent / ".mim/tools/train.py"


def prepare(data: Path, work_dir: Path) -> None:
    """Create the set in ``data``, or exit if ``data`` or ``work_dir`` holds one of another recipe."""
    stamp = work_dir / "recipe.json"
    trained_on = json.loads(stamp.read_text()) if stamp.is_file() else None
    if work_dir.is_dir() and any(work_dir.iterdir()) and trained_on != RECIPE.stamp():
        raise SystemExit(
            f"tools.demo: {work_dir} holds a training on another set; remove it or name another by --work-dir"
        )
    try:
        build(data, RECIPE)
        work_dir.mkdir(parents=True, exist_ok=True)
        stamp.write_text(json.dumps(RECIPE.stamp()))
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.demo: {error}") from None


def final_checkpoint(work_dir: Path) -> Path | None:
    """Return the checkpoint of a finished training, or None for an unfinished one."""
    done = work_dir / "finished.json"
    return work_dir / json.loads(done.read_text())["checkpoint"] if done.is_file() else None


def show_progress(line: str) -> None:
    """Print the progress that a line of the training log reports, if any."""
    if "resumed epoch" in line:
        print(f"  {line.split(' - ')[-1].strip()}", flush=True)
    elif match := PROGRESS.search(line):
        epoch, step, steps, eta, loss = match.groups()
        print(f"  epoch {epoch:>2} {step:>3}/{steps}  loss {float(loss):.3f}  left {eta}", flush=True)
    elif match := ACCURACY.search(line):
        print(f"  validation: mAP {match[1]}, at IoU 0.5 {match[2]}", flush=True)


def train(config: Path, work_dir: Path) -> Path:
    """Run mmdet's tool on ``config``, showing its progress, and return the last checkpoint."""
    command = [sys.executable, "-u", str(training_tool()), str(config), "--work-dir", str(work_dir), "--resume"]
    # Maps this small gain little from a second thread, which halves the speed on a busy machine; the loader has the
    # other core. Threads that spin at a barrier slow a busy machine down as well: let them sleep.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    began, recent = time.monotonic(), deque[str](maxlen=40)
    output: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    with subprocess.Popen(command, cwd=ROOT, env=environment, **output) as process:
        try:
            for line in process.stdout:
                recent.append(line)
                show_progress(line)
        except BaseException:  # interrupted or terminated: do not leave the training running
            process.terminate()
            raise
    if process.returncode:
        raise SystemExit(f"{''.join(recent)}\ntools.demo: the training tool ended with code {process.returncode}")
    checkpoint = Path((work_dir / "last_checkpoint").read_text().strip())
    (work_dir / "finished.json").write_text(json.dumps(dict(checkpoint=checkpoint.name)))
    print(f"  trained in {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    return checkpoint


def history(work_dir: Path) -> tuple[list[float], list[float]]:
    """Return the losses and the validation mAPs of a training, across all interruptions."""
    losses, accuracies = {}, {}
    for file in sorted(work_dir.glob("*/vis_data/scalars.json")):
        for entry in map(json.loads, file.read_text().splitlines()):
            if "loss" in entry:
                losses[entry["step"]] = entry["loss"]
            elif "coco/bbox_mAP" in entry:
                accuracies[entry["step"]] = entry["coco/bbox_mAP"]
    return [losses[n] for n in sorted(losses)], [accuracies[n] for n in sorted(accuracies)]


def draw_detections(model: Any, out: Path, count: int = 6) -> str:
    """Save ``count`` validation images with the detections on them; return the caption of the picture."""
    from mmdet.apis import inference_detector

    names = model.dataset_meta["classes"]

    def detect(file: Path) -> list[Detection]:
        seen = inference_detector(model, str(file)).pred_instances
        return [
            Detection(tuple(seen.bboxes[n].tolist()), names[int(seen.labels[n])], float(seen.scores[n]))
            for n in distinct(seen)
        ]

    objects = known_objects(DATA / "annotations/val.json")
    return draw(sorted((DATA / "val").glob("*.png"))[:count], detect, objects, SCORE, out)


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("demo", __doc__)
    parser.add_argument("--no-attention", action="store_true", help="the same detector without the block")
    parser.add_argument("--work-dir", type=Path, help="default: work_dirs/demo or work_dirs/demo-plain")
    options = parser.parse_args(arguments)
    need("mmdet", "mmcv", "mmengine", "sklearn", "skimage", "pycocotools", "matplotlib")
    name, folder = "atss_narrow-r50-attn0010-dcn_fpn_five-digits", "demo"
    if options.no_attention:
        name, folder = "atss_narrow-r50_fpn_five-digits", "demo-plain"
    config, work_dir = CONFIGS / f"{name}.py", (options.work_dir or ROOT / "work_dirs" / folder).resolve()

    print(f"1/3 data: {RECIPE.train} + {RECIPE.val} images of digits on photographs in {DATA}", flush=True)
    prepare(DATA, work_dir)
    print(f"2/3 training: {config.name}, log and checkpoints in {work_dir}", flush=True)
    checkpoint = final_checkpoint(work_dir)
    if checkpoint is None:
        checkpoint = train(config, work_dir)
    losses, accuracies = history(work_dir)
    accuracy = f"{accuracies[-1]:.3f}" if accuracies else "unknown: it detected nothing"
    print(f"  loss {losses[0]:.2f} -> {losses[-1]:.2f}, validation mAP {accuracy}")
    print("3/3 pictures", flush=True)
    model, picture = load_mm(str(config), checkpoint), work_dir / "detections.png"
    print(f"  {picture}\n    {draw_detections(model, picture)}", flush=True)
    if not options.no_attention:
        picture = work_dir / "sampling.png"
        line = follow_picture(model, DATA / "val/000001.png", picture, patterns=["*layer3.5.conv2"])
        print(f"  {picture}\n    {line}")
    return 0


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, lambda *_: sys.exit("tools.demo: interrupted; run it again to resume"))
    raise SystemExit(main())
