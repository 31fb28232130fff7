"""Whole upstream models, stock and with the drop-in, on a small picture, each in its own process."""

from __future__ import annotations

import importlib.util

import pytest

from tools.benchmark import compiled_mmcv
from tools.benchmark.end_to_end import command
from tools.benchmark.end_to_end.models import MODELS

needs_models = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mmdet", "mmseg"))), reason="mmdet or mmsegmentation is not installed"
)


def passes(least: float, memory: int) -> dict:
    found = dict(times=[least, 1.1 * least], features=[0.5 * least, 0.6 * least], memory=memory)
    return dict(passes=dict.fromkeys(command.PASSES, found), loss=5.25, load=dict(others=0.01, switches=3))


def test_rows_pool_the_processes_of_each_kind():
    ours, stock = [passes(1.0, 100), passes(0.9, 120)], [passes(3.6, 400), passes(4.0, 300)]
    row = command.row("ccnet", "training step", ours, stock)
    assert row["case"] == "CCNet R-50, 769x769, training step"
    assert row["ours"]["times"] == [1.0, 1.1, 0.9, 0.99]
    assert row["ratio"] == pytest.approx(4.0)
    assert row["memory_ratio"] == pytest.approx(0.3)
    assert row["ours"]["features"] == 0.45
    assert (row["rounds"], row["noisy"], row["loaded"]) == (2, False, False)


def test_models_are_known_by_name(capsys):
    with pytest.raises(SystemExit):
        command.main(["--models", "nothing"])
    assert "nothing" in capsys.readouterr().err


@needs_models
def test_stock_models_are_not_measured_on_our_operators(monkeypatch):
    monkeypatch.setattr(compiled_mmcv, "is_compiled", lambda: False)
    with pytest.raises(SystemExit, match="mmcv is not compiled here: make env-peers"):
        command.main(["--models", "ccnet"])


@needs_models
@pytest.mark.parametrize("name", ["attn0010-dcn", pytest.param("ccnet", marks=pytest.mark.slow)])
def test_stock_and_drop_in_compute_the_same(name, tmp_path):
    settings = dict(model=name, size=[97, 129], threads=1, seconds=0, weights=str(tmp_path / "weights.pth"))
    stock, ours = (command.process({**settings, "ours": kind}) for kind in (False, True))
    assert ours["loss"] == pytest.approx(stock["loss"], rel=1e-3)
    for each in command.PASSES:
        row = command.row(name, each, [ours], [stock], (97, 129))
        assert row["ours"]["min"] > row["ours"]["features"] > 0
        assert row["ours"]["memory"] > 2**20
        assert row["case"].startswith(f"{MODELS[name].title}, 97x129")


@needs_models
def test_a_process_that_fails_says_why(tmp_path):
    (tmp_path / "weights.pth").write_text("no weights")
    settings = dict(model="ccnet", ours=False, size=[65, 65], threads=1, seconds=0)
    with pytest.raises(command.Failed, match="ccnet ended with status 1"):
        command.process({**settings, "weights": str(tmp_path / "weights.pth")})
