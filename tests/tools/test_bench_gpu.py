"""The plan for a rented GPU: its steps exist, results are kept and resumed, and choices reach the kernels."""

from __future__ import annotations

import json
import time

import pytest
import torch

from attn_plugins.ops.common import tuned
from tools.bench import __main__, cases, gpu, worker
from tools.bench.__main__ import main
from tools.bench.case import normal, problem
from tools.bench.cases import variants
from tools.bench.cases.halves import attend
from tools.bench.measure import measure
from tools.bench.timing import Settings

STEPS = [(number, step) for number, steps in variants.plan()["calls"].items() for step in steps]


@pytest.mark.parametrize("number, step", [pair for pair in STEPS if "tests" not in pair[1]])
def test_steps_up_to_the_first_launch(number, step):
    """Rows exist, and candidates change what is launched."""
    pytest.importorskip("timm")
    pytest.importorskip("triton")
    assert list(gpu.walk(step))


@pytest.mark.slow
def test_a_dry_run_of_the_first_call(capsys):
    """With the tests that it names."""
    assert main(["gpu", "1", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"1, {step['name']}: " in printed for step in variants.plan()["calls"][1])


def row(name, ours, **peers):
    measured = {title: {"min": least} if least else {"error": "x"} for title, least in peers.items()}
    return {"case": f"{name}: halves: c", "ours": {"min": ours}, "peers": measured}


def test_the_best_variant_over_all_rows_is_what_kernels_read(tmp_path, monkeypatch):
    forward, keys = "sequence_attention/half/64/forward", "sequence_attention/half/64/keys"
    rows = [
        row(forward, 1.0, **{"32×32×4×2": 0.5, "64×64×4×3": 0.8, "64×64×4×4": 0.6}),
        row(forward, 1.0, **{"32×32×4×2": None, "64×64×4×3": 0.9, "64×64×4×4": 1.4}),
        row(keys, 1.0, **{"32×32×4×2": 0.99}),
        row("ATTN_PLUGINS_BLOCK_PIXELS", 1.0, **{"1": 0.5}),
        {"case": f"{keys}: halves: d", "error": "x"},
    ]
    chosen = gpu.choose(rows)
    assert chosen == {forward: (64, 64, 4, 3)}
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps({"9.0": {keys: 1}, "8.0": {forward: [1, 1, 1, 1]}}))
    gpu.store(file, "9.0", chosen)
    monkeypatch.setattr(tuned, "FILE", file)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    tuned._measured.cache_clear()
    default = (1, 2, 3, 4)
    device = torch.device("cuda", 0)
    assert tuned.tuned(forward, device, default) == (64, 64, 4, 3)
    assert tuned.tuned(keys, device, 5) == 1
    assert tuned.tuned("other", device, default) == tuned.tuned(forward, torch.device("cpu"), default) == default
    tuned._measured.cache_clear()


def test_rows_of_variants(monkeypatch):
    """From the plan to a choice, by Triton's interpreter."""
    pytest.importorskip("triton")
    names = [f"sequence_attention/half/64/{part}" for part in ("forward", "keys")]
    listed = dict(names=names, rows=[["halves", "^c, .*backward"]], values=[[32], [16], [4], [1]])
    shapes = [(1, 1, 20, 16)] * 3 + [(1, 1, 20, 20)]
    small = problem("c", "cpu", normal(*shapes), lambda: attend, kinds=("bfloat16",))
    monkeypatch.setattr(variants, "plan", lambda: {"variants": [listed]})
    monkeypatch.setattr(cases, "cases", lambda room, device: small)
    rows = [measure(case, "cpu", Settings(0, min_rounds=1)) for case in variants.cases("cuda")]
    assert [row["case"] for row in rows] == [f"{name}: halves: c, bfloat16, forward+backward" for name in names]
    for row in rows:
        assert row["peers"].keys() == {"32×16×4×1"}
        row["ours"]["min"] = 2 * row["peers"]["32×16×4×1"]["min"]
    assert gpu.choose(rows) == dict.fromkeys(names, (32, 16, 4, 1))


def test_a_variant_with_other_results_cannot_run(monkeypatch):
    monkeypatch.setattr(variants, "forced", lambda run, name: run)
    made = variants.ours_with("n", 2, lambda: lambda: torch.ones(3) * tuned.tuned("n", torch.device("cpu"), 1), 1e-3)
    with pytest.raises(RuntimeError, match="the results differ by 1"):
        made()
    made = variants.ours_with("n", 2, lambda: lambda: torch.ones(3) * tuned.tuned("m", torch.device("cpu"), 1), 1e-3)
    assert made()().tolist() == [1, 1, 1]


def test_a_call_keeps_what_is_done_and_ends_in_time(tmp_path, monkeypatch):
    steps = [
        dict(name="good", run="echo 1"),
        dict(name="bad", run="false"),
        dict(name="long", run="sleep 60", seconds=20),
    ]
    monkeypatch.setattr(variants, "plan", lambda: {"calls": {1: steps}})
    monkeypatch.setattr(gpu, "ROW_SECONDS", 1)
    assert gpu.Call(1, tmp_path, time.time() + 3).carry_out() == 1
    lines = worker.read(tmp_path / "done.jsonl")
    assert [(line["step"], line["status"]) for line in lines] == [("good", 0), ("bad", 1)]
    assert lines[0]["last"] == ["1"]
    steps.pop()
    assert gpu.Call(1, tmp_path, time.time() + 3).carry_out() == 0
    assert worker.read(tmp_path / "done.jsonl") == lines
    (tmp_path / "done.jsonl").unlink()
    assert gpu.Call(1, tmp_path, time.time()).carry_out() == 1
    assert not (tmp_path / "done.jsonl").exists()


@pytest.mark.slow
def test_rows_and_kernels_are_appended_and_resumed(tmp_path, monkeypatch, capfd):
    steps = [
        dict(name="one row", rows=["calls"], k="window.*forward"),
        dict(name="kernels", profile={"a title": ["calls", "^window.*forward"]}),
    ]
    monkeypatch.setattr(variants, "plan", lambda: {"calls": {1: steps}})
    for _ in range(2):
        assert gpu.Call(1, tmp_path, time.time() + 300, "cpu").carry_out() == 0
    rows = [row for line in worker.read(tmp_path / "one-row.jsonl") for row in line.get("rows", ())]
    assert [row["case"] for row in rows] == ["window_attention, 1 thread, forward"]
    (line,) = worker.read(tmp_path / "kernels.jsonl")
    names = [name for name, count, microseconds in line["kernels"] if count >= 1 and microseconds > 0]
    assert any("window" in name for name in names)
    assert [line["step"] for line in worker.read(tmp_path / "done.jsonl")] == ["one row", "kernels"]


def test_the_whole_table_is_resumed(tmp_path, monkeypatch):
    record, calls = tmp_path / "gpu.jsonl", []
    monkeypatch.setattr(__main__, "main", lambda arguments: calls.append(__main__.build_parser().parse_args(arguments)))
    (step,) = variants.plan()["calls"][4]
    for written in (True, False):
        record.touch() if written else record.unlink()
        assert gpu.Call(4, tmp_path, time.time() + 100).rows(step, 90)["over"] == written
    first, second = calls
    assert (first.name, first.resume, first.minutes, first.warm, second.warm) == ("gpu", True, 0.5, 0, 8)


@pytest.mark.parametrize("arguments, message", [([], "name a call"), (["5"], "invalid choice"), (["1"], "--dry-run")])
def test_bad_options(arguments, message, capsys):
    if arguments == ["1"] and torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(SystemExit):
        main(["gpu", *arguments])
    assert message in capsys.readouterr().err
