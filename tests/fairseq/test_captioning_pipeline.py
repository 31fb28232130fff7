"""The documented commands, from captioned pictures to scores and an attention picture, at a tiny size."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fairseq.fairseq_helpers import ENVIRONMENT, ROOT

pytest.importorskip("fairseq")

from PIL import Image

from attn_plugins.captioning.region_features import RegionFeatures

# Options that make each command small. If an option occurs twice, the last one counts.
SMALLER = {
    "tools.datasets.captioned_scenes": "--train 30 --val 6 --test 6 --size 64",
    "tools.train attributes": "--backbone test_resnet --size 64 --epochs 2 --batch-size 10 --device cpu",
    "tools.caption extract": "--grid test_resnet --grid-size 2 --device cpu",
    "fairseq-train": "--embed-dim 32 --ffn-dim 32 --max-epoch 2 --lr 0.01 --warmup-updates 4",
    "fairseq-generate": "--beam 2 --max-len-b 12",
    "tools.caption score": "--json work_dirs/scores.json",
    "tools.caption caption": "--beam 2 --max-len 12 --device cpu",
}
DOCUMENTS = ("docs/howto/captioning.md", "configs/fairseq/captioning/README.md")


def sequence(document: str) -> str:
    """Return the lines of the shell block that creates the scenes, or nothing if a document has no such block."""
    text = (ROOT / document).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(python -m tools\.datasets\.captioned_scenes.*?)^```$", text, flags=re.M | re.S)
    return next((block for block in blocks if "tools.caption caption" in block), "")


def commands() -> list[str]:
    return [line.replace("\\\n", " ") for line in re.findall(r"(?:.*\\\n)*.+", sequence(DOCUMENTS[1]))]


def run(command: str, folder: Path) -> str:
    """Run a line of the sequence in a shell, with its reduced options, and return its output."""
    name = re.search(r"^(?:python -m )?(tools\.(?:caption|train) \w+|\S+)", command)[1]
    environment = {**ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"}
    command = re.sub(r"/\d{6}\.jpg", "/000042.jpg", f"{command} {SMALLER[name]}")  # the last occurrence counts
    shell = dict(shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    result = subprocess.run(command, **shell)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout + result.stderr


def test_the_documents_have_the_same_sequence():
    sequences = [sequence(document) for document in DOCUMENTS]
    assert sequences[1]
    assert sequences[0] == sequences[1]


@pytest.mark.slow
def test_the_documented_sequence(tmp_path):
    """Run the sequence in a folder that looks like the root of a clone."""
    for name in ("tools", "plugins", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    logs = [run(command, tmp_path) for command in commands()]
    assert len(logs) == 8
    scenes, attributes, regions, first, second, generated, scores, captioned = logs
    data = tmp_path / "data/scenes"
    assert "30 train, 6 val, 6 test images written to" in scenes
    assert re.search(r"best mAP \d+\.\d", attributes)
    assert json.loads((data / "attributes.json").read_text()).keys() == {str(n) for n in range(1, 43)}
    assert "42 images, 168 regions" in regions
    assert len(RegionFeatures(data / "regions.npz")) == 42
    assert "train: 30 images, 150 samples" in first
    assert "loading pretrained model from checkpoints/scenes/checkpoint_best.pt" in second
    assert "train: 30 images, 30 samples" in second
    for log, value in ((first, "loss"), (second, "reward")):
        assert len(re.findall(rf"\| valid \| epoch \d+ \|.*\| {value} \d", log)) == 2
    results = json.loads((tmp_path / "work_dirs/results.json").read_text())
    assert [result["image_id"] for result in results] == list(range(37, 43))
    assert "6 captions are in work_dirs/results.json" in generated
    for name, value in json.loads((tmp_path / "work_dirs/scores.json").read_text())["scores"].items():
        assert re.search(rf"^{name} +{100 * value:.1f}$", scores, re.M)
    assert "CIDEr-D" in scores
    [result] = json.loads((tmp_path / "work_dirs/captions/captions.json").read_text())
    words = {line.split()[0] for line in (data / "dict.txt").read_text().splitlines()}
    assert result["image_id"] == "000042"
    assert {*result["caption"].split()} <= {*words, "<unk>"} - {""}
    assert f"000042.jpg: {result['caption']}" in captioned
    with Image.open(tmp_path / "work_dirs/captions/000042.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 1000
