"""Rows as users run them: eager calls with the host's time, and whole models, stock beside ours in one process."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from attn_plugins.modules.tokens.parts.window_speed import SWITCH
from tests.tools.test_bench import Clock
from tools.bench import cases, report, timing, worker
from tools.bench.case import Case
from tools.bench.cases import eager, end_to_end, timm_models, whole
from tools.bench.cases.whole import ALONE, COMPILED
from tools.bench.measure import measure
from tools.bench.timing import Contestant, Settings, race

TINY = {"mmdet": (192, 256), "mmseg": (97, 97)}  # DINO selects 900 pixels
needs_toolkits = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mmdet", "mmseg"))), reason="mmdet or mmsegmentation is not installed"
)


def test_eager_calls_run_back_to_back_and_include_the_hosts_time(monkeypatch):
    waited, graphs = [], []
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    monkeypatch.setattr(timing, "flush", lambda device: pytest.fail("flushed: the host would run ahead meanwhile"))
    monkeypatch.setattr(timing, "captured", lambda run: graphs.append(run) or Clock.taking(1e-5))
    run = Clock.taking(1e-3)
    runs = {"ours": Contestant(run, "cuda", timing="eager"), "whole": Contestant(run, "cuda", timing="whole")}
    assert graphs == [run]  # of a whole model none
    assert runs["ours"].calls == 5
    assert runs["ours"].how["graph"] == pytest.approx(1e-5)
    assert runs["whole"].how.keys() == {"how", "calls", "host"}
    waited.clear()
    times = race(runs, "cuda", Settings(seconds=0, min_rounds=3))
    assert times == {name: [pytest.approx(1e-3)] * 3 for name in runs}
    assert len(waited) == 3 * (2 + 1)  # before each sample, and at the end of a round


def test_the_price_of_deterministic_gradients_is_measured_on_a_gpu():
    rows = [row for row in eager.cases("cuda") if eager.DETERMINISTIC in row.peers]
    assert {row.part for row in rows} == {"deform_conv2d", "deformable_attention"}
    assert all(row.name.endswith("forward+backward") for row in rows)
    assert not any(eager.DETERMINISTIC in row.peers for row in eager.cases("cpu"))
    run = eager.in_deterministic_mode(lambda: torch.are_deterministic_algorithms_enabled)()
    assert run()
    assert not torch.are_deterministic_algorithms_enabled()


def test_medians_are_compared():
    times = {"ours": [1.0, 2.0, 2.1], "a": [0.5, 3.0, 3.1], "b": [2.5, 2.6, 2.7]}
    run = dict.fromkeys("ab", lambda: lambda: None)
    case = Case("c", run["a"], run, timing="eager")
    row = measure(case, "cpu", Settings(attempts=1), timer=lambda *_: times)
    assert (row["by"], row["better_peer"], row["ratio"]) == ("median", "b", 1.3)
    assert "2000 ms   1.30x over b" in report.line(row)
    row["ours"] |= dict(how="eager", host=1.5, graph=0.5, memory=0)
    assert report.cell(row["ours"]) == "1000 / 1500 · 2000 · 2050 (0.0), host 1500, graph 500"


def test_a_part_leaves_its_rows_to_the_next_call(tmp_path, monkeypatch, quick_ceilings):
    rows = [Case(f"{part}{n}", lambda: lambda: None, part=part) for part in "ab" for n in (0, 1)]
    monkeypatch.setattr(worker, "cases", lambda name, device: rows)
    job = worker.Job(["eager"], "cpu", str(tmp_path / "r.jsonl"), part_seconds=0, settings=dict(seconds=0, rounds=1))
    for done, over in ((["a0", "b0"], True), (["a0", "b0", "a1", "b1"], False)):
        worker.work(job)
        lines = worker.read(tmp_path / "r.jsonl")
        assert [line["done"].removeprefix("eager: ") for line in lines if "done" in line] == done
        assert ("over" in lines[-1]) == over


def test_rows_of_another_gpu_are_set_aside(tmp_path):
    record = tmp_path / "gpu.jsonl"
    for device in ("NVIDIA H100 80GB", "NVIDIA H100 80GB", "NVIDIA H200"):
        worker.begin(record, device)
        worker.append(record, {"done": device})
    assert [line["done"] for line in worker.read(record) if "done" in line] == ["NVIDIA H200"]
    aside = worker.read(tmp_path / "gpu-NVIDIA-H100-80GB.jsonl")
    assert [line["done"] for line in aside if "done" in line] == ["NVIDIA H100 80GB"] * 2


# --- whole models -------------------------------------------------------------------------------------------------


def both_run(room, number):
    """Run both passes of a model beside its peer; return the losses."""
    prediction, training = (cases.cases(room, "cpu")[2 * number + n] for n in range(2))
    ((_, peer),) = prediction.peers.items()
    for run in (prediction.ours, peer):
        run()()
    ((_, peer),) = training.peers.items()
    return float(training.ours()()), float(peer()())


# By default the narrowest of each kind.
@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 7))])
def test_models_of_timm_run(one_thread, number):
    assert len(timm_models.ACCELERATED) + len(timm_models.RESNETS) == 7
    ours, peer = both_run("timm_models", number)
    if number < len(timm_models.ACCELERATED):  # the others are different models
        assert ours == pytest.approx(peer, rel=1e-4)
    assert 0 < ours < float("inf")


def test_models_of_this_package_are_also_measured_compiled_on_a_gpu():
    compiled = [row.name for row in timm_models.cases("cuda") if COMPILED in row.peers]
    batch = "224x224, batch 32, autocast to bfloat16"
    assert compiled == [f"{name}, {batch}, {step}" for name in timm_models.RESNETS for step in whole.PASSES]
    made = timm_models.beside_resnet50("dcn_resnet50", *timm_models.TINY, "cpu")
    assert made[COMPILED].network._orig_mod is made["ours"].network


def test_the_choice_and_our_operators_are_both_measured_on_a_gpu(one_thread, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    rows = timm_models.cases("cuda")
    both = {row.name for row in rows if ALONE in row.peers}
    sizes = timm_models.ACCELERATED.items()
    swin, v2, _ = (f"{name}, {side}x{side}, batch {batch}" for name, (batch, side, _) in sizes)
    assert both == {
        *(f"{title}, TF32, {name}" for title in (swin, v2) for name in whole.PASSES),
        *(f"{v2}, autocast to {dtype}, training step" for dtype in ("float16", "bfloat16")),
    }
    made = timm_models.accelerated("swinv2_tiny_window8_256", *timm_models.TINY, "cpu")
    assert made[ALONE].network is made["ours"].network
    for name, expected in (("ours", None), (ALONE, "0"), ("timm", None)):
        run = whole.step(replace(made[name], predict=lambda: os.environ.get(SWITCH)), "float32", False, "cpu")
        assert run() == expected
        assert SWITCH not in os.environ


@needs_toolkits
@pytest.mark.slow
@pytest.mark.parametrize("number", range(9))
def test_models_of_mmdet_and_mmseg_compute_the_same(one_thread, monkeypatch, number):
    from tests.mm.drop_in_helpers import restore

    restore()
    assert len(end_to_end.MODELS) == 9
    monkeypatch.setattr(end_to_end, "MODELS", [replace(m, size=TINY[m.package]) for m in end_to_end.MODELS])
    ours, stock = both_run("end_to_end", number)
    assert ours == pytest.approx(stock, rel=1e-3)
