"""Studies that test the claims: their commands, their files, and which of them are missing."""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.files import write_text
from tools.findings import values
from tools.findings.values import Reader, Samples
from tools.study import ROOT, StudyError, run

WORK = Path("work_dirs/findings")
BENCHMARKS = Path("benchmarks")
SCENES = "configs/mmdet/scenes/faster-rcnn_narrow-r50_fpn_scenes.py"
DATA = threading.Lock()  # two studies may need the same data set
DETECTOR = "work_dirs/faster-rcnn_narrow-r50_fpn_scenes/epoch_12.pth"


@dataclass(frozen=True)
class Step:
    """A command, and the file that marks it as finished, if the command itself would start again.

    Attributes:
        words: A module of ours and its arguments, or ``mmdet`` or ``mmseg`` and those of its training tool.
        product: The file, relative to the repository's root.
    """

    words: str
    product: str = ""

    @property
    def command(self) -> str:
        """Return the command as typed in a shell."""
        command, _, arguments = self.words.partition(" ")
        arguments = f" {arguments}" if arguments else ""
        return f"python {'$TOOLS/train.py' if command in ('mmdet', 'mmseg') else f'-m {command}'}{arguments}"


@dataclass(frozen=True)
class Study:
    """Settings that are trained and scored alike.

    Attributes:
        data: Data in a few words.
        file: File in ``benchmarks``.
        read: Function that reads samples from it.
        steps: Commands of the study.
        minutes: Approximate minutes on one core.
        product: File that the last step writes, of which ``file`` is a copy; empty if the study was measured by hand
            and cannot be run from here.
        needed: Names of the samples of a finished study.
        seeds: Number of seeds of each sample.
        page: Page on the study in ``benchmarks``, if ``file`` is not the copy of a product.
        folder: Folder of a training beside ``product``, from the fields of its result. An unfinished study whose
            trainings depend on no file of each other has one; it resumes from ``file`` on another machine.
    """

    data: str
    file: str
    read: Reader
    steps: tuple[Step, ...]
    minutes: int
    product: str = ""
    needed: tuple[str, ...] = ()
    seeds: int = 3
    page: str = ""
    folder: str = ""

    def samples(self, root: Path = ROOT) -> Samples:
        """Return the samples; empty if the file is missing."""
        path = root / BENCHMARKS / self.file
        return self.read(path) if path.is_file() else {}

    def complete(self, root: Path = ROOT) -> Samples:
        """Return the samples without those of ``needed`` that lack seeds."""
        found = self.samples(root)
        return {n: s for n, s in found.items() if n not in self.needed or len(s.values) >= self.seeds}

    def finished(self, root: Path = ROOT) -> bool:
        """Return whether every setting has all its seeds."""
        found = self.complete(root)
        return bool(found) and all(name in found for name in self.needed)


def _settings(prefix: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names)


_PHOTOGRAPHS = Step("tools.datasets.digits_on_photographs data/digits", "data/digits/recipe.json")
_CROPS = Step("tools.datasets.image_folders crops data/photograph_crops", "data/photograph_crops")


def _digits(which: str, data: str, minutes: int, needed: str) -> Study:
    """Return a study of tools.digits_study."""
    return Study(
        data, f"digits-{which}.json", values.digits,
        (_PHOTOGRAPHS, Step(f"tools.digits_study {which} {WORK / which}")), minutes,
        f"{WORK / which}/{which}.json", tuple(needed.split()), folder="{setting}-{seed}",
    )  # fmt: skip


_FUSIONS = ("eta", "parallel", "stacked-visual", "stacked-semantic")
STUDIES = {
    "cross-attention": Study(
        "4,227 English–Japanese entries of user interfaces, of 6 words and more; BLEU of characters",
        "translation-gettext-ja.json", values.translation,
        (Step(f"tools.translation_study data/gettext-ja {WORK / 'cross'} --study cross --target ja --seeds 1 2 3"),),
        40, f"{WORK / 'cross'}/cross.json", ("1111", "cross-1000", "cross-0111", "cross-0110", "self-0111"),
    ),
    "translation-paddings": Study(
        "11,174 English–German entries of user interfaces; BLEU", "translation-gettext-paddings.json",
        values.translation,
        (
            Step("tools.datasets.gettext_corpus data/gettext --download --bpe 3000", "data/gettext/recipe.json"),
            Step(f"tools.translation_study data/gettext {WORK / 'paddings-nmt'} --study paddings --seeds 1 2 3"),
        ),
        35, f"{WORK / 'paddings-nmt'}/paddings.json",
        ("bilateral", "bilateral-min", "bilateral-inf", "bilateral-learned", "1000+absolute"),
    ),
    "deformable": _digits(
        "deformable", "400 + 100 photographs with digits of 14 to 100 pixels, turned by up to 60°; mAP", 65,
        "plain deformable 1111 0010+deformable",
    ),
    "sharing": _digits(
        "sharing", "400 + 100 photographs with digits; mIoU", 55,
        "j-conv e-unshared h-shared i-shared-refined g-content-shared-refined a-content b-geometric",
    ),
    "paddings": _digits(
        "paddings", "400 + 100 photographs with digits; mIoU", 60,
        "learned-zscore cc inf-sqrt_d zero-zscore learned-sqrt_d zero-sqrt_d k-3 k-31",
    ),
    "augmented": Study(
        "2,750 crops of 11 photographs, 32×32; top-1", "augmented-crops.json", values.classifiers,
        (_CROPS, Step(f"tools.augmented_study {WORK / 'augmented'}")), 55, f"{WORK / 'augmented'}/augmented.json",
        _settings("crops/", "plain none relative sine coordconv share-0.75 share-1.0 none-share-1.0".split()),
        folder="crops/{setting}-{seed}",
    ),
    "fusion": Study(
        "2,200 made-up scenes, regions of a detector; CIDEr-D", "captioning-fusion.json", values.captions,
        (
            Step("tools.datasets.captioned_scenes data/scenes --train 1500 --val 200 --test 500"),
            Step(f"mmdet {SCENES}", DETECTOR),
            Step(
                f"tools.captioning_study {WORK / 'fusion'} --regions '--mmdet {SCENES} {DETECTOR}' "
                f"--settings {' '.join(_FUSIONS)} --seeds 1 2 3"
            ),
        ),
        60, f"{WORK / 'fusion'}/study.json", tuple(f"{name}/self-critical" for name in _FUSIONS),
    ),
    "space-time": Study(
        "clips of moving digits; top-1", "space-time-digits.json", values.clips,
        (Step(f"tools.space_time_study {WORK / 'space-time'} --tasks two-directions four-directions"),), 60,
        f"{WORK / 'space-time'}/space-time.json",
        ("two-directions/space", "two-directions/divided", "four-directions/space", "four-directions/divided"),
    ),
    "vision-transformers": Study(
        "2,750 crops of photographs and 1,797 digits; top-1", "vit-crops-digits.json", values.classifiers,
        (_CROPS, Step(f"tools.vit_study {WORK / 'vit'}")), 45, f"{WORK / 'vit'}/vit.json",
        _settings("crops/", ("vit-1111", "vit-0110", "swin", "swin-unshifted")),
    ),
    "translation": Study(
        "11,174 English–German entries of user interfaces, half of them of at most 4 words; BLEU",
        "translation-gettext.json", values.translation_by_part,
        (Step(f"tools.translation_study data/gettext {WORK / 'attention'} --train '--max-update 1500'"),), 40,
        page="translation-gettext.md",
    ),
    "captioning": Study(
        "2,200 made-up scenes, regions of a detector; CIDEr-D", "captioning-scenes.json", values.captions,
        (Step(f"tools.captioning_study OUT --regions '--mmdet {SCENES} {DETECTOR}'"),), 90, page="captioning-scenes.md",
    ),
    "captioning-grid": Study(
        "2,200 made-up scenes, regions are cells of a grid; CIDEr-D", "captioning-scenes-grid.json", values.captions,
        (Step("tools.captioning_study OUT"),), 90, page="captioning-scenes.md",
    ),
    "detection": Study(
        "400 + 100 photographs with digits of one class; mAP", "detection-digits.json", values.detection,
        (Step("tools.detection_study"),), 88, page="detection-digits.md",
    ),
    "classifier": Study(
        "2,750 crops of photographs and 1,797 digits; top-1", "classifier-digits.md", values.classifier_page,
        (Step("tools.train_classifier configs/timm/crops.yaml --data data/photograph_crops --set seed=0"),), 30,
        page="classifier-digits.md",
    ),
    "segmentation": Study(
        "400 + 100 photographs with digits; mIoU", "segmentation-digits.md", values.segmentation_page,
        (Step("mmseg configs/mmseg/digits/bi-cc_narrow-r18_digits.py"),), 10, page="segmentation-digits.md",
    ),
}  # fmt: skip


def missing(root: Path = ROOT) -> list[str]:
    """Return the unfinished studies that can be run from here, the shortest first."""
    names = [name for name, study in STUDIES.items() if study.product and not study.finished(root)]
    return sorted(names, key=lambda name: STUDIES[name].minutes)


def take(step: Step, name: str, log: Path) -> None:
    """Run a step of the study ``name``.

    Raises:
        StudyError: the step failed.
    """
    print(f"{name}: {step.command}, see {log}", flush=True)
    command, *arguments = shlex.split(step.words)
    if command == "mmdet":
        from tools.digits_study import training_tool

        run(training_tool("mmdet"), arguments, log)
    else:
        run(command, arguments, log)


def restore(study: Study, root: Path = ROOT) -> None:
    """Write the results of the trainings in ``benchmarks`` to their folders, so that they are not repeated."""
    source = root / BENCHMARKS / study.file
    if study.folder and source.is_file():
        for result in json.loads(source.read_text(encoding="utf-8"))["results"]:
            path = (root / study.product).parent / study.folder.format_map(result) / "result.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_text(path, json.dumps(result, indent=1) + "\n")


def collect(study: Study, root: Path = ROOT) -> None:
    """Copy the figures of a study to ``benchmarks``, if there are any."""
    if (root / study.product).is_file():
        text = (root / study.product).read_text(encoding="utf-8")
        write_text(root / BENCHMARKS / study.file, text)


def carry_out(name: str, root: Path = ROOT) -> None:
    """Resume a study in the current folder, which is ``root``, and copy its file to ``benchmarks``.

    Raises:
        StudyError: a command failed.
    """
    study = STUDIES[name]
    restore(study, root)
    for number, step in enumerate(study.steps, 1):
        with DATA if step.words.startswith("tools.datasets.") else contextlib.nullcontext():
            if not (step.product and (root / step.product).exists()):
                take(step, name, root / WORK / f"{name}-{number}.log")
    if not (root / study.product).is_file():
        raise StudyError(f"{name}: its last command wrote no {study.product}")
    collect(study, root)
