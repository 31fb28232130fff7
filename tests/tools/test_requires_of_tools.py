"""Every tool without a package that it needs prints one line: the package and the command that installs it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = "pip install ."
MM, FAIRSEQ = (f"python -m attn_plugins install {stack}" for stack in ("mm", "fairseq"))
TIMM_TOOLS = "python -m attn_plugins install timm tools"
TOOLS, TIMM = "python -m attn_plugins install tools", "python -m attn_plugins install timm"
CAPTIONING, CAPTIONS = (
    "python -m attn_plugins install captioning",
    "python -m attn_plugins install captioning timm tools",
)

# Tool and arguments, missing package, install command. Tools without --help fail before any work.
CASES = [
    ("augmented_study --help", "timm", TIMM_TOOLS),
    ("augmented_study DIR/out", "skimage", TIMM_TOOLS),
    ("average_checkpoints --help", "torch", OWN),
    ("benchmark --help", "torch", OWN),
    ("benchmark window_attention", "attn_plugins", OWN),
    ("benchmark augmented_conv --wait 0 -k aa_resnet50", "timm", TIMM),
    ("benchmark end_to_end --models ccnet", "mmseg", MM),
    ("benchmark table --check", "attn_plugins", OWN),
    ("caption --help", "PIL", CAPTIONS),
    ("caption nowhere.png --path nowhere.pt", "fairseq", FAIRSEQ),
    ("captioning.extract_regions --help", "PIL", CAPTIONS),
    ("captioning.extract_regions DIR DIR/out.h5 --grid resnet10t", "h5py", CAPTIONING),
    ("captioning.extract_regions DIR DIR/out.lmdb --grid resnet10t", "lmdb", CAPTIONING),
    ("captioning.extract_regions DIR DIR/out.npz --grid resnet10t", "timm", TIMM_TOOLS),
    ("captioning.extract_regions DIR DIR/out.npz --torchvision fasterrcnn_resnet50_fpn", "torchvision",
     TIMM_TOOLS),
    ("captioning.extract_regions DIR DIR/out.npz --mmdet x.py --no-weights", "mmdet", MM),
    ("captioning.make_splits --help", "numpy", CAPTIONING),
    ("captioning.train_attributes --help", "timm", TIMM_TOOLS),
    ("captioning.train_attributes --help", "safetensors", TIMM_TOOLS),
    ("captioning_study --help", "torch", OWN),
    ("captioning_study DIR/out", "fairseq", FAIRSEQ),
    ("captioning_study DIR/out", "skimage", CAPTIONS),
    ("cuda_report --help", "attn_plugins", OWN),
    ("datasets.captioned_scenes --help", "PIL", TOOLS),
    ("datasets.captioned_scenes DIR/out", "sklearn", TOOLS),
    ("datasets.digits_on_photographs --help", "PIL", TOOLS),
    ("datasets.digits_on_photographs DIR/out", "sklearn", TOOLS),
    ("datasets.digits_on_photographs DIR/out", "skimage", TOOLS),
    ("datasets.digits_on_photographs DIR/out", "pycocotools", TOOLS),
    ("datasets.face_parsing --help", "PIL", TOOLS),
    ("datasets.gettext_corpus --help", "polib", TOOLS),
    ("datasets.gettext_corpus DIR/out --bpe 100", "sentencepiece", TOOLS),
    ("datasets.image_folders digits DIR/out", "sklearn", TOOLS),
    ("datasets.image_folders crops DIR/out", "skimage", TOOLS),
    ("datasets.moving_digits --help", "PIL", TOOLS),
    ("datasets.moving_digits DIR/out", "sklearn", TOOLS),
    ("datasets.moving_digits DIR/out", "skimage", TOOLS),
    ("datasets.moving_digits DIR/out --format mp4", "cv2", MM),
    ("datasets.video_order --help", "PIL", TOOLS),
    ("datasets.video_order DIR/out --source DIR", "cv2", MM),
    ("demo --help", "PIL", TOOLS),
    ("demo", "mmdet", MM),
    ("demo", "matplotlib", TOOLS),
    ("demo_quick --help", "timm", TIMM_TOOLS),
    ("detection_study --help", "PIL", TOOLS),
    ("detection_study DIR/out", "mmdet", MM),
    ("detection_study DIR/out", "matplotlib", TOOLS),
    ("digits_study --help", "PIL", TOOLS),
    ("digits_study deformable DIR/out", "mmdet", MM),
    ("digits_study sharing DIR/out", "mmseg", MM),
    ("digits_study sharing DIR/out", "sklearn", TOOLS),
    ("figures --help", "torch", OWN),
    ("figures aaconv", "timm", TIMM),
    ("figures empirical", "mmdet", MM),
    ("findings --list", "torch", OWN),
    ("fuzz --help", "torch", OWN),
    ("fuzz window_attention", "attn_plugins", OWN),
    ("gpu_check --help", "torch", OWN),
    ("host_time --help", "timm", TIMM),
    ("score_compounds --help", "attn_plugins", OWN),
    ("score_compounds DIR/generate.txt", "sacrebleu", FAIRSEQ),
    ("show_sampling --help", "PIL", TOOLS),
    ("show_sampling config.py model.pth image.png DIR/out.png", "mmdet", MM),
    ("space_time_cost --help", "timm", TIMM_TOOLS),
    ("space_time_cost --frames 1 --sizes 32 --plot DIR/out.svg", "matplotlib", TOOLS),
    ("space_time_study --help", "torch", OWN),
    ("space_time_study DIR/out", "timm", TIMM_TOOLS),
    ("space_time_study DIR/out", "skimage", TIMM_TOOLS),
    ("space_time_study DIR/out", "cv2", MM),
    ("translation_study --help", "torch", OWN),
    ("translation_study corpus DIR/out", "fairseq", FAIRSEQ),
    ("translation_study DIR/new DIR/out --target ja", "polib", TOOLS),
    ("triton_report --help", "torch", OWN),
    ("vit_study --help", "timm", TIMM_TOOLS),
    ("vit_study DIR/out", "matplotlib", TIMM_TOOLS),
]  # fmt: skip
RUN = """
import runpy, sys
tool, missing, *sys.argv[1:] = sys.argv[1:]
sys.modules[missing] = None
runpy.run_module(f"tools.{tool}", run_name="__main__", alter_sys=True)
"""


def run(words: str, missing: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a tool like ``python -m`` in an interpreter that finds no package ``missing``."""
    tool, *arguments = words.replace("DIR", str(folder)).split()
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch would miss attn_plugins first
    command = [sys.executable, "-W", "ignore", "-c", RUN, tool, missing, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)


@pytest.mark.parametrize("words, missing, command", CASES, ids=lambda value: value.replace(" --help", ""))
def test_one_line_with_the_command(words, missing, command, tmp_path):
    # Packages that are imported before the missing one must be installed.
    for module in ("PIL", "numpy", "polib", "torch"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    (tmp_path / "picture.png").touch()
    result = run(words, missing, tmp_path)
    assert result.returncode == 1
    assert result.stderr == f"tools.{words.split()[0]} needs {missing}, which is not installed: {command}\n"
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]


def test_scores_without_the_standard_package(tmp_path):
    (tmp_path / "results.json").write_text('[{"image_id": 1, "caption": "a cat"}]')
    captions = '{"images": [{"id": 1}], "annotations": [{"id": 1, "image_id": 1, "caption": "a cat"}]}'
    (tmp_path / "captions.json").write_text(captions)
    result = run("captioning.score DIR/results.json DIR/captions.json", "pycocoevalcap", tmp_path)
    assert result.returncode == 2
    assert result.stderr == f"score: scores need pycocoevalcap, which is not installed: {CAPTIONING}\n"


def test_every_tool_is_here():
    """Image classification is in test_requires.py; release runs in the environment of ``make``."""
    own = {words.split()[0] for words, _, _ in CASES}
    own |= {"captioning.score", "release", "show_attention", "train_classifier"}
    files = [path for path in (ROOT / "tools").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    names = {".".join(path.relative_to(ROOT / "tools").with_suffix("").parts) for path in files}
    assert {name.removesuffix(".__main__") for name in names} == own
