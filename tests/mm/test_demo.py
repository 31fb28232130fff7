"""The demo on a tiny set for two epochs: it trains with mmdet's tool, resumes, and then only draws."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from tests.mm.mm_helpers import ROOT
from tools import demo
from tools.datasets.digits_on_photographs import Recipe

CONFIG = """
_base_ = {base!r}
data_root = {data!r}
train_dataloader = dict(batch_size=4, num_workers=0, persistent_workers=False, dataset=dict(data_root=data_root))
val_dataloader = dict(num_workers=0, persistent_workers=False, dataset=dict(data_root=data_root))
val_evaluator = dict(ann_file=data_root + "annotations/val.json")
train_cfg = dict(max_epochs={epochs}, val_interval=1)
default_hooks = dict(logger=dict(interval=1))
model = dict(test_cfg=dict(score_thr=0.0))  # it hardly learns here: let it detect something
"""


@pytest.fixture
def small(monkeypatch, tmp_path, digits):
    """Reduce the demo's configs to the tests' small data; call the fixture with a number of epochs."""
    monkeypatch.setattr(demo, "DATA", digits)
    monkeypatch.setattr(demo, "RECIPE", Recipe(train=16, val=4, seed=3))
    monkeypatch.setattr(demo, "CONFIGS", tmp_path)

    def write(epochs: int) -> None:
        for base in (ROOT / "configs/mmdet/digits").glob("*five-digits.py"):
            text = CONFIG.format(base=str(base), data=f"{digits}/", epochs=epochs)
            (tmp_path / base.name).write_text(text)

    return write


@pytest.mark.slow
def test_demo_trains_draws_resumes_and_then_only_draws(small, tmp_path, capsys, monkeypatch):
    work = tmp_path / "work"
    small(epochs=1)
    assert demo.main(["--work-dir", str(work)]) == 0
    printed = capsys.readouterr().out
    for text in ("epoch  1   4/4", "validation: mAP", "Found from a score of 0.25 on: ", "Left: each ring is a query"):
        assert text in printed
    for name in ("detections.png", "sampling.png"):
        assert min(Image.open(work / name).size) > 200

    small(epochs=2)
    (work / "finished.json").unlink()  # as if interrupted after its first epoch
    assert demo.main(["--work-dir", str(work)]) == 0
    printed = capsys.readouterr().out
    assert "resumed epoch: 1" in printed
    assert "epoch  2" in printed
    assert "epoch  1" not in printed
    assert [len(values) for values in demo.history(work)] == [8, 2]
    assert json.loads((work / "finished.json").read_text())["checkpoint"] == "epoch_2.pth"

    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained again"))
    (work / "detections.png").unlink()
    assert demo.main(["--work-dir", str(work)]) == 0
    assert (work / "detections.png").exists()


@pytest.mark.slow
def test_demo_shows_why_the_training_tool_failed(small, tmp_path):
    small(epochs=1)
    for config in tmp_path.glob("*.py"):
        config.write_text(config.read_text() + "custom_imports = dict(imports=['not_there'])\n")
    with pytest.raises(SystemExit, match=r"not_there[\s\S]*ended with code 1"):
        demo.main(["--no-attention", "--work-dir", str(tmp_path / "work")])
    assert not (tmp_path / "work/finished.json").exists()


def test_a_demo_of_another_set_is_kept(small, tmp_path, digits, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    (work / "epoch_20.pth").touch()  # of a demo that wrote no recipe
    with pytest.raises(SystemExit, match="work holds a training on another set; remove it or name another"):
        demo.main(["--work-dir", str(work)])
    (work / "epoch_20.pth").unlink()
    demo.prepare(digits, work)
    monkeypatch.setattr(demo, "RECIPE", Recipe(train=16, val=4, seed=4))
    with pytest.raises(SystemExit, match="work holds a training on another set"):
        demo.prepare(digits, work)
    with pytest.raises(SystemExit, match="digits holds a set of another recipe"):
        demo.prepare(digits, tmp_path / "other")
    assert not (tmp_path / "other").exists()
