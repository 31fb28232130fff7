"""Benchmarks: what is measured, by which command, and what is kept when a process crashes or the time is over."""

from __future__ import annotations

import importlib.util
import json
import weakref
from unittest.mock import MagicMock

import pytest
import torch

from attn_plugins import mmcv_ext, modules, ops
from tools.bench import cases, compiled_mmcv, load, report, results, timing, worker
from tools.bench.__main__ import main
from tools.bench.case import Case, problem
from tools.bench.cases import calls, deform_conv, end_to_end
from tools.bench.cases.modules import MODULES
from tools.bench.measure import backends_of, measure
from tools.bench.results import summarize
from tools.bench.timing import Contestant, Settings, race

QUICK = ["--threads", "1", "--seconds", "0", "--min-rounds", "2", "--attempts", "1", "--wait", "0"]
STEADY = {"ours": [1.0, 1.1, 1.2], "a": [3.0, 3.1, 3.2], "b": [2.0, 2.1, 2.2]}


def nothing():
    """Prepare a run that does nothing."""
    return lambda: None


def taking(*attempts):
    """Return a timer of prepared times, one dict for each attempt."""
    left = list(attempts)
    return lambda contestants, device, settings: left.pop(0)


CASE = Case("c", nothing, dict(a=nothing, b=nothing))


@pytest.fixture
def bench(one_thread, monkeypatch):
    monkeypatch.setattr(load, "LOOK", 0.02)
    return lambda *arguments: main([*map(str, arguments), *QUICK])


# --- a row --------------------------------------------------------------------------------------------------------


def test_a_row_compares_best_with_best(monkeypatch):
    row = measure(CASE, "cpu", Settings(), timer=taking(STEADY))
    assert (row["better_peer"], row["ratio"], row["attempts"], row["noisy"]) == ("b", 2.0, 1, False)
    assert row["peers"]["a"]["min"] == 3.0
    assert row["ours"] | dict(memory=0) == dict(summarize(STEADY["ours"]), memory=0)
    assert summarize([1.2, 1.0, 1.1]) == dict(min=1.0, q1=1.05, median=1.1, q3=1.15, times=[1.2, 1.0, 1.1])
    assert json.loads(results.dump({"rows": [row]}))["rows"] == [row]
    monkeypatch.setattr(load.Watch, "read", lambda self: 0.8)
    row = measure(CASE, "cpu", Settings(), timer=taking(STEADY))
    assert "| 0.80 | loaded |" in "\n".join(report.table([row]))


def test_a_noisy_row_is_measured_again():
    wild = {**STEADY, "ours": [1.0, 2.0, 4.0]}
    row = measure(CASE, "cpu", Settings(attempts=3), timer=taking(wild, wild, STEADY))
    assert (row["attempts"], row["noisy"], row["ours"]["times"]) == (3, False, STEADY["ours"])
    row = measure(CASE, "cpu", Settings(attempts=2), timer=taking(wild, wild))
    assert report.marks(row) == "noisy, attempt 2"
    row = measure(CASE, "cpu", Settings(), timer=taking({**STEADY, "a": [3, 6, 9]}))  # not the better peer
    assert (row["attempts"], row["noisy"]) == (1, False)


def test_our_operators_are_not_measured_as_mmcvs(monkeypatch):
    pytest.importorskip("mmcv.ops", reason="mmcv is not installed")
    extension = pytest.importorskip("mmcv._ext")
    monkeypatch.setattr(extension, "get_compiler_version", lambda: mmcv_ext.NOT_COMPILED)
    case = Case("c", nothing, dict(mmcv=deform_conv.cases("cpu")[0].peers["mmcv"]))
    row = measure(case, "cpu", Settings(), timer=taking(STEADY))
    assert row["peers"]["mmcv"] == {"error": "cannot run: mmcv is not compiled here: make env-peers"}
    assert row["ratio"] is None
    if importlib.util.find_spec("mmdet") and importlib.util.find_spec("mmseg"):
        assert all("stock on our operators for mmcv's" in case.peers for case in end_to_end.cases("cpu"))
    monkeypatch.setattr(extension, "get_compiler_version", lambda: "GCC 12.2")
    assert compiled_mmcv.extension() is extension


def test_calls_take_turns():
    order: list[str] = []
    runs = {name: Contestant(lambda name=name: order.append(name), "cpu", calls=2) for name in ("ours", "a")}
    times = race(runs, "cpu", Settings(seconds=60, rounds=3, min_rounds=1))
    assert order == ["ours", "ours", "a", "a"] * 3
    assert [len(values) for values in times.values()] == [3, 3]
    assert len(race(runs, "cpu", Settings(seconds=0, rounds=40, min_rounds=4))["a"]) == 4


class Clock:
    """Stands in for a device's events: a run takes the time that it adds."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Clock.now

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3

    @staticmethod
    def taking(seconds):
        def run():
            Clock.now += seconds

        return run


def test_short_runs_on_cuda_are_timed_by_graphs_and_long_ones_by_events(monkeypatch):
    flushed = []
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "flush", flushed.append)
    monkeypatch.setattr(timing, "captured", lambda run: Clock.taking(1e-5))
    runs = {"short": Contestant(Clock.taking(1e-4), "cuda"), "long": Contestant(Clock.taking(1e-1), "cuda")}
    assert 0 < runs["short"].how.pop("host") < 1e-2
    assert runs["short"].how == {"how": "graph", "eager": pytest.approx(1e-4)}  # the latter with the host's time
    assert runs["long"].how["how"] == "events"
    times = race(runs, "cuda", Settings(seconds=0, min_rounds=3))
    assert len(flushed) == 2 * 3  # caches are flushed before each run
    assert times == {"short": [pytest.approx(1e-5)] * 3, "long": [pytest.approx(1e-1)] * 3}

    def refuse(run):
        raise RuntimeError("called a synchronizing CUDA operation\nand more")

    monkeypatch.setattr(timing, "captured", refuse)
    how = Contestant(Clock.taking(1e-4), "cuda").how["how"]
    assert how == "events, with the host's time: no graph (called a synchronizing CUDA operation)"


def test_a_graph_keeps_the_tensors_that_it_reads(monkeypatch):
    for name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph", "synchronize", "set_sync_debug_mode"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())

    tensor = torch.ones(2)
    input = weakref.ref(tensor)
    replay = timing.captured(lambda tensor=tensor: tensor + 1)
    del tensor
    assert input() is not None
    assert replay().tolist() == [2, 2]


def test_runs_compute_all_gradients_in_their_arithmetic():
    def inputs(dtype):
        return [torch.ones(2, 3, dtype=dtype), {"n": torch.ones(3, dtype=dtype)}, None, torch.tensor([1])]

    layer = torch.nn.Linear(3, 3)

    def forward(x, other, none, number):
        return layer.weight.sum() * x * other["n"] * number

    layer.forward = forward
    for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        both = problem("c", "cpu", inputs, lambda: layer, kinds=(kind,))
        output, gradients = (case.ours()() for case in both)
        assert (output.dtype, output.requires_grad) == (dtype, False)
        assert [g if g is None else tuple(g.shape) for g in gradients] == [(2, 3), (3,), (3, 3), None]
    case, _ = problem("c", "cpu", lambda dtype: [torch.ones(2, 2)], lambda: torch.mm, kinds=("autocast to bfloat16",))
    assert case.name == "c, autocast to bfloat16, forward"


def test_load_of_others_leaves_out_our_own(tmp_path, monkeypatch):
    file = tmp_path / "stat"
    monkeypatch.setattr(load, "STAT", file)
    assert load.Watch().read() is None
    hertz = load.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(load, "own_seconds", iter((1.0, 3.0)).__next__)
    monkeypatch.setattr(load.time, "perf_counter", iter((100.0, 102.0)).__next__)
    file.write_text("cpu  0 0 0 9999 9999 0 0 0 0 0\n")
    watch = load.Watch()
    file.write_text(f"cpu  {hertz} {hertz} 0 9999 9999 {hertz} 0 {hertz} 0 0\n")
    assert watch.read() == 1.0  # (4 - 2) / 2


def test_others_that_end_are_waited_for():
    readings = iter((1.7, 0.9, 0.02))
    assert load.wait_until_quiet(60, lambda: next(readings)) == 0.02
    assert load.wait_until_quiet(0, lambda: 1.7) == 1.7


# --- which rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_of_a_benchmark_have_different_names(device):
    """Rows of a GPU are listed without one."""
    for name in (*cases.NAMES, "modules", *(["eager"] if device == "cuda" else []), *cases.MODELS):
        rows = cases.cases(name, device)
        names = [case.name for case in rows]
        assert len(names) == len(set(names)) > 1
        if device == "cuda" and name != "calls":
            assert any(case.main for case in rows)


def test_every_operator_and_module_has_a_row():
    assert set(calls.OPERATORS) == set(ops.__all__) - {"backend", "explain", "use_onednn"}
    public = [getattr(modules, name) for name in modules.__all__]
    wanted = {kind.__name__ for kind in public if isinstance(kind, type) and issubclass(kind, torch.nn.Module)}
    assert {name.split(",")[0] for name in MODULES} == wanted


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch, quick_ceilings):
    """Measure in this process, and one call a sample."""
    monkeypatch.setattr(worker, "start", lambda job: (worker.work(job) or 0, ""))
    monkeypatch.setattr(worker.faulthandler, "dump_traceback_later", lambda *_, **__: None)  # writes to no capture
    monkeypatch.setattr(calls, "CALLS", 1)


def test_one_benchmark_from_command_to_page(bench, in_process, tmp_path, capsys):
    """With our other backends and the roofline."""
    assert bench("calls", "--out", tmp_path, "--name", "small", "-k", "(window|criss).*forward", "--details") == 0
    data = results.read(tmp_path / "small.json")
    command = (
        "python -m tools.bench calls --device cpu --threads 1 --seconds 0 --rounds 40 --min-rounds 2 --attempts 1 "
        f"--wait 0 -k '(window|criss).*forward' --details --name small --out {tmp_path}"
    )
    assert data["command"] == command
    assert set(data["load"]) == {"before", "after"}
    page = (tmp_path / "small.md").read_text()
    assert page == report.page(data)
    assert all(words in page for words in (f"`{command}`", "Ceilings, measured here: bfloat16", "% |"))
    assert "cannot run" not in page
    assert sorted(file.name for file in tmp_path.iterdir()) == ["small.json", "small.md"]
    assert [row["case"].split(",")[0] for row in data["rows"]] == ["window_attention", "criss_cross_attention"]
    for row in data["rows"]:
        assert len(row["ours"]["times"]) == 2
        ((operator, (served,)),) = row["served_by"].items()
        assert {*row["backends"], *row["refusals"]} == set(backends_of(operator)) - {served}
        assert all(difference < 1e-5 for difference in row["differences"].values())
        assert row["work"]["moved"] > 4 * 3 * 2 * 16 * 8
        assert 0 < row["share"] < 1


def test_a_part_of_the_rows_writes_nothing(bench, tmp_path, monkeypatch, capsys):
    lines = [{"rows": [{"room": "calls", "case": "c", "error": "as it was"}]}, {"over": True}]
    monkeypatch.setattr(worker, "measured", lambda job: lines)
    assert bench("calls", "--out", tmp_path, "-k", "c") == 1
    assert "* calls: c: as it was" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


CRASHES = """
import os, sys, time, types
from tools.bench.case import Case

def prepare(run):
    return lambda: run

fine = prepare(lambda: None)
rooms = types.ModuleType("tools.bench.cases.calls")
rooms.cases = lambda device: [
    Case("fine", fine),
    Case("peer", fine, {"bad": prepare(lambda: os._exit(3)), "good": fine}),
    Case("ours", prepare(lambda: os.abort())),
    Case("hangs", fine, {"slow": prepare(lambda: time.sleep(60))}),
    Case("raises", prepare(lambda: 1 / 0)),
    Case("last", fine),
]
sys.modules["tools.bench.cases.calls"] = rooms
from tools.bench.worker import main
main()
"""


@pytest.mark.slow
def test_a_crash_costs_one_contestant(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(worker, "WORK", CRASHES)
    assert bench("calls", "--out", tmp_path, "--row-seconds", 20) == 1
    rows = {row["case"]: row for row in results.read(tmp_path / "calls-cpu.json")["rows"]}
    assert list(rows) == ["fine", "peer", "ours", "hangs", "raises", "last"]
    assert not {"error"} & {*rows["fine"], *rows["last"]}
    assert rows["peer"]["better_peer"] == "good"
    assert "its process ended with status 3" in rows["peer"]["peers"]["bad"]["error"]
    assert "its process ended with status -6" in rows["ours"]["error"]
    assert rows["hangs"]["peers"]["slow"]["error"] == "cannot run: took more than 20 s"
    assert rows["raises"]["error"] == "ZeroDivisionError: division by zero"
    assert "## Not measured" in (tmp_path / "calls-cpu.md").read_text()


def test_what_was_not_measured_in_time_is_resumed(bench, in_process, tmp_path):
    options = ["calls", "--out", tmp_path, "--name", "part", "-k", "window"]
    record = tmp_path / "part.jsonl"
    worker.work(worker.Job(["calls"], "cpu", str(record), until=0))
    assert worker.read(record) == [{"over": True}]
    first = "window_attention, 1 thread, forward"
    kept = {"room": "calls", "case": first, "error": "as it was"}
    with record.open("a") as file:
        file.write(json.dumps({"done": f"calls: {first}", "rows": [kept]}) + '\n{"start": "calls: wind')
    assert bench(*options, "--resume") == 1
    rows = results.read(tmp_path / "part.json")["rows"]
    assert rows[0] == kept
    assert [row["case"] for row in rows] == [first, "window_attention, 1 thread, gradients recorded"]
    assert not record.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "no benchmark named nothing"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--seconds", "-1"], "seconds must not be negative, got -1"),
        (["-k", "1-D (8"], "missing ), unterminated subpattern"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--minutes", "0"], "--minutes must be above 0, got 0"),
    ],
)
def test_bad_options_are_one_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
