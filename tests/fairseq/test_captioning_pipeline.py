"""The documented commands, from captioned pictures to captions of new ones, at a tiny size."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fairseq.fairseq_helpers import ENVIRONMENT, ROOT
from tests.helpers.captioned_pictures import COLORS, SHAPES, draw

pytest.importorskip("fairseq")

from attn_plugins.captioning.region_features import RegionFeatures

# Options that make each command small. If an option occurs twice, the last one counts.
SMALLER = {
    "tools.caption extract": "--no-weights --size 64 --max-regions 10 --device cpu",
    "fairseq-train": "--embed-dim 32 --ffn-dim 32 --max-epoch 2 --lr 0.01 --warmup-updates 4 --cpu",
    "fairseq-generate": "--beam 2 --max-len-b 12 --cpu",
    "tools.caption caption": "--beam 2 --max-len 12 --device cpu",
}


def commands() -> list[str]:
    """Return the lines of the page's shell block."""
    text = (ROOT / "docs/howto/captioning.md").read_text(encoding="utf-8")
    [block] = re.findall(r"^```bash\n(.*?)^```$", text, flags=re.M | re.S)
    return [line.replace("\\\n", " ") for line in re.findall(r"(?:.*\\\n)*.+", block)]


def run(command: str, folder: Path) -> str:
    """Run a line of the page in a shell, with its reduced options, and return its output."""
    name = re.search(r"^(?:python -m )?(tools\.caption \w+|\S+)", command)[1]
    environment = {**ENVIRONMENT, "PATH": f"{Path(sys.executable).parent}:{ENVIRONMENT['PATH']}"}
    shell = dict(shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    result = subprocess.run(f"{command} {SMALLER[name]}", **shell)
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout + result.stderr


@pytest.mark.slow
def test_the_documented_sequence(tmp_path):
    """Run the page's commands in a folder that looks like the root of a clone."""
    for name in ("tools", "plugins"):
        (tmp_path / name).symlink_to(ROOT / name)
    data = draw(tmp_path / "data/own", 36)
    shutil.copy(data / "images/000001.jpg", tmp_path / "photo.jpg")
    words = {str(n): [[COLORS[n % 4], 0.9], [SHAPES[n % 3], 0.8]] for n in range(1, 37)}
    (data / "attributes.json").write_text(json.dumps(words))
    (tmp_path / "attributes.json").write_text(json.dumps({"photo": words["1"]}))
    regions, first, second, generated, captioned = [run(command, tmp_path) for command in commands()]
    assert "36 images with regions of 1024 channels" in regions
    assert len(RegionFeatures(data / "regions.hdf5")) == 36
    assert "train: 24 images, 48 samples" in first
    assert "loading pretrained model from checkpoints/own/checkpoint_best.pt" in second
    assert "train: 24 images, 24 samples" in second
    for log, value in ((first, "loss"), (second, "reward")):
        assert len(re.findall(rf"\| valid \| epoch \d+ \|.*\| {value} \d", log)) == 2
    results = json.loads((tmp_path / "work_dirs/results.json").read_text())
    test = {row["cocoid"] for row in json.loads((data / "splits.json").read_text())["images"] if row["split"] == "test"}
    assert {result["image_id"] for result in results} == test
    assert "6 captions are in work_dirs/results.json" in generated
    [result] = json.loads((tmp_path / "work_dirs/captions.json").read_text())
    words = {line.split()[0] for line in (data / "dict.txt").read_text().splitlines()}
    assert result["image_id"] == "photo"
    assert {*result["caption"].split()} <= {*words, "<unk>"}
    assert f"photo.jpg: {result['caption']}" in captioned
