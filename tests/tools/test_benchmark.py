"""Benchmark timings: statistics, noise, the better peer, load, memory, files and command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from attn_plugins import mmcv_ext
from tools.benchmark import compiled_mmcv, load, memory, report, results
from tools.benchmark.__main__ import SHOWN, build_parser, main
from tools.benchmark.case import Buffer, Case, forward, forward_backward
from tools.benchmark.measure import Settings, interleaved, measure
from tools.benchmark.sampled import deform_conv, deformable_attention
from tools.benchmark.summary import better_peer, noisy, spread, summarize


def fixed(value: object = None):
    """Return a prepared run that does nothing."""
    return lambda: lambda: value


class Timer:
    """Returns prepared timings, one per attempt."""

    def __init__(self, *attempts: dict[str, list[float]]):
        self.attempts = list(attempts)

    def __call__(self, runs, device, settings, calls):
        found = self.attempts.pop(0)
        return {name: found[name] for name in runs}


STEADY = {"ours": [1.0, 1.1, 1.2], "a": [3.0, 3.1, 3.2], "b": [2.0, 2.1, 2.2]}


def test_statistics():
    found = summarize([4.0, 1.0, 3.0, 2.0, 5.0])
    assert found == {"min": 1.0, "q1": 2.0, "median": 3.0, "q3": 4.0, "times": [4.0, 1.0, 3.0, 2.0, 5.0]}
    assert spread(found) == 2.0
    assert summarize([0.123456789]) == dict(min=0.12346, q1=0.12346, median=0.12346, q3=0.12346, times=[0.12346])
    with pytest.raises(ValueError, match="at least one timing"):
        summarize([])


def test_noise_is_a_matter_of_quartiles():
    outlier = summarize([1.0, 1.0, 1.0, 1.0, 9.0])
    assert not noisy([outlier])
    assert noisy([outlier, summarize([1.0, 1.0, 1.4, 1.4])])


def test_the_better_peer_has_the_least_minimum():
    peers = {"median": summarize([2.0, 2.0, 2.0]), "best": summarize([1.0, 4.0, 4.0]), "broken": {"error": "x"}}
    assert better_peer(peers) == "best"
    assert better_peer({"broken": {"error": "x"}}) is None


def test_a_row_compares_best_with_best():
    row = measure(Case("c", fixed(), dict(a=fixed(), b=fixed()), 1.5), "cpu", Settings(), Timer(STEADY))
    assert (row["better_peer"], row["ratio"], row["attempts"], row["noisy"]) == ("b", 2.0, 1, False)
    assert row["goal"] == 1.5
    assert row["peers"]["a"]["min"] == 3.0


def test_a_peer_that_cannot_run_is_named():
    def broken():
        raise ImportError("no module named peer\nand more")

    row = measure(Case("c", fixed(), dict(a=broken)), "cpu", Settings(), Timer(STEADY))
    assert row["peers"]["a"] == {"error": "cannot run: no module named peer"}
    assert row["ratio"] is None
    assert "no module named peer" in "\n".join(report.table([row]))


def test_our_operators_are_not_measured_as_mmcvs(monkeypatch):
    mmcv_ops = pytest.importorskip("mmcv.ops", reason="mmcv is not installed")
    monkeypatch.setattr(mmcv_ops, "get_compiler_version", lambda: mmcv_ext.NOT_COMPILED)
    assert not compiled_mmcv.is_compiled()
    case = deform_conv.cases("cpu")[0]
    case = Case("c", fixed(), dict(mmcv=case.peers["mmcv"]))
    row = measure(case, "cpu", Settings(), Timer(STEADY))
    assert row["peers"]["mmcv"] == {"error": "cannot run: mmcv is not compiled here: make env-peers"}
    with pytest.raises(ImportError, match="make env-peers"):
        deformable_attention.mmcv(((2, 3),), "cuda", torch.float16)
    deformable_attention.mmcv(((2, 3),), "cpu", torch.float32)  # plain PyTorch in mmcv as well
    monkeypatch.setattr(mmcv_ops, "get_compiler_version", lambda: "GCC 12.2")
    assert compiled_mmcv.operators() is mmcv_ops


def test_a_noisy_row_is_measured_again():
    wild = {**STEADY, "ours": [1.0, 2.0, 4.0]}
    case = Case("c", fixed(), dict(a=fixed(), b=fixed()))
    row = measure(case, "cpu", Settings(attempts=3), Timer(wild, wild, STEADY))
    assert (row["attempts"], row["noisy"], row["ours"]["times"]) == (3, False, STEADY["ours"])
    row = measure(case, "cpu", Settings(attempts=2), Timer(wild, wild))
    assert (row["attempts"], row["noisy"]) == (2, True)
    assert report.marks(row).startswith("noisy")


def test_noise_of_the_worse_peer_does_not_matter():
    row = measure(Case("c", fixed(), dict(a=fixed(), b=fixed())), "cpu", Settings(), Timer({**STEADY, "a": [3, 6, 9]}))
    assert (row["attempts"], row["noisy"]) == (1, False)


def test_calls_take_turns():
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in ("ours", "a")}
    times = interleaved(runs, "cpu", Settings(seconds=60, rounds=3, min_rounds=1), calls=2)
    assert order == ["ours", "ours", "a", "a"] * 3
    assert [len(each) for each in times.values()] == [3, 3]


def test_the_fewest_rounds_are_made_in_no_time():
    times = interleaved({"ours": lambda: None}, "cpu", Settings(seconds=0, rounds=40, min_rounds=4))
    assert len(times["ours"]) == 4


@pytest.mark.parametrize("options", [dict(rounds=0), dict(min_rounds=0), dict(attempts=0), dict(seconds=-1.0)])
def test_settings_that_measure_nothing_are_errors(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} must .*{value}"):
        Settings(**options)


def test_rows_have_their_own_threads():
    seen = []
    before = torch.get_num_threads()
    case = Case("c", lambda: lambda: seen.append(torch.get_num_threads()), threads=1)
    row = measure(case, "cpu", Settings(seconds=0, min_rounds=1))
    assert set(seen) == {1}
    assert row["threads"] == 1
    assert torch.get_num_threads() == before


def test_memory_beyond_the_results_is_compared_with_a_buffer():
    a, b = torch.randn(2, 1024, 1024)
    plain, wasteful = (lambda a, b: a @ b), (lambda a, b: (a @ b) + torch.zeros(4, 1024, 1024).sum())
    case = Case(
        "c", lambda: forward(plain, a, b), dict(w=lambda: forward(wasteful, a, b)), buffer=Buffer("buffer", 2**24)
    )
    row = measure(case, "cpu", Settings(seconds=0, min_rounds=1))
    assert row["buffer"] == dict(name="buffer", size=2**24)
    assert row["ours"]["results"] == row["peers"]["w"]["results"] == 2**22
    assert report.working_memory(row["ours"]) < 2**20
    assert report.working_memory(row["peers"]["w"]) >= 2**24
    lines = report.memory_table([row])
    assert lines[-1].startswith("| c | 16.0 | ")
    assert "(1" in lines[-1]


def test_memory_that_torch_does_not_see_counts_in_the_process():
    def run():
        held = bytearray(b"x") * 2**26
        return torch.zeros(len(held) // 2**20)

    peak, results_of_run = memory.resident_peak(run)
    assert peak >= 0.9 * 2**26
    assert results_of_run == 64 * 4
    assert memory.peak_memory(run, "cpu") < 2**20


def test_gradients_are_results():
    x = torch.randn(4, 8)
    assert memory.size(forward_backward(lambda x: x * 2, x)()) == 4 * 8 * 4


# --- load ---------------------------------------------------------------------------------------------------------


def test_load_of_others_leaves_out_our_own(monkeypatch):
    busy, own, wall = iter((10.0, 14.0)), iter((1.0, 3.0)), iter((100.0, 102.0))
    monkeypatch.setattr(load, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(load, "own_seconds", lambda: next(own))
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: next(wall)))
    assert load.Watch().read()["others"] == 1.0  # (4 - 2) / 2


def test_load_reads_the_kernels_counters(tmp_path, monkeypatch):
    file = tmp_path / "stat"
    monkeypatch.setattr(load, "STAT", file)
    assert load.busy_seconds() is None
    file.write_text("cpu  100 20 30 9999 9999 4 5 6 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert load.busy_seconds() == (100 + 20 + 30 + 4 + 5 + 6) / os.sysconf("SC_CLK_TCK")
    file.write_text("")
    assert load.busy_seconds() is None
    assert load.Watch().read()["others"] is None


def test_others_that_end_are_waited_for():
    readings = iter((1.7, 0.9, 0.02))
    assert load.wait_until_quiet(60, lambda: next(readings)) == 0.02
    assert load.wait_until_quiet(0, lambda: 1.7) == 1.7
    assert load.wait_until_quiet(60, lambda: None) is None


def test_a_row_on_a_loaded_machine_is_marked(monkeypatch):
    monkeypatch.setattr(load.Watch, "read", lambda self: {"others": 0.8, "switches": 5})
    row = measure(Case("c", fixed()), "cpu", Settings(), Timer(STEADY))
    assert row["loaded"]
    assert "loaded" in report.marks(row)
    assert "| 0.80 | loaded |" in "\n".join(report.table([row]))


# --- command and files --------------------------------------------------------------------------------------------


def test_the_command_has_all_its_options():
    options = build_parser().parse_args(["calls", "--threads", "2", "--seconds", "0.5", "-k", "1-D (8,512"])
    command = results.command_line("python -m tools.benchmark", options.names, options, SHOWN)
    assert command == (
        "python -m tools.benchmark calls --device cpu --threads 2 --seconds 0.5 --rounds 40 --min-rounds 5 "
        "--attempts 3 --wait 60 -k '1-D (8,512'"
    )


def test_a_file_reads_as_it_was_written(tmp_path):
    data = dict(benchmark="b", rows=[dict(case="c", times=[0.5, 1e-05, 2.0], peers={}, names=["x", "y"])])
    page = results.write(tmp_path, "b-cpu", data, "# b\n")
    assert page.read_text() == "# b\n"
    assert results.read(tmp_path / "b-cpu.json") == {"format": results.FORMAT, **data}
    assert "[0.5, 1e-05, 2.0]" in (tmp_path / "b-cpu.json").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["b-cpu.json", "b-cpu.md"]


def test_files_of_another_format_are_not_read(tmp_path):
    (tmp_path / "old.json").write_text('{"rows": []}')
    assert results.read(tmp_path / "old.json") is None
    assert results.read(tmp_path / "missing.json") is None


def test_one_benchmark_from_command_to_page(tmp_path, capsys):
    threads = torch.get_num_threads()
    arguments = ["calls", "--threads", "1", "--seconds", "0", "--min-rounds", "2", "--attempts", "1", "--wait", "0"]
    try:
        assert main([*arguments, "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(threads)
    data = results.read(tmp_path / "calls-cpu.json")
    command = (
        f"python -m tools.benchmark calls --device cpu --threads 1 --seconds 0 --rounds 40 --min-rounds 2 "
        f"--attempts 1 --wait 0 --out {tmp_path}"
    )
    assert data["command"] == command
    assert set(data["load"]) == {"before", "after"}
    assert data["machine"]["torch"] == torch.__version__.partition("+")[0]
    page = (tmp_path / "calls-cpu.md").read_text()
    assert page == report.page(data)
    assert f"`{command}`" in page
    assert page in capsys.readouterr().out
    assert all(len(row["ours"]["times"]) == 2 for row in data["rows"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nothing"], "no benchmark named nothing"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--against", "nowhere"], "must be a checkout of this project, got nowhere"),
    ],
)
def test_bad_options_are_one_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


def test_an_unbuilt_checkout_is_an_error(tmp_path, capsys):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "__init__.py").touch()
    with pytest.raises(SystemExit):
        main(["--against", str(tmp_path)])
    assert "its operators are not built there" in capsys.readouterr().err


def test_a_comparison_with_another_checkout(tmp_path):
    """The other checkout is a copy of this one."""
    root = results.FOLDER.parent
    shutil.copytree(root / "plugins", tmp_path / "plugins", ignore=shutil.ignore_patterns("__pycache__"))
    if not list((tmp_path / "plugins").glob("_C.*")):
        (tmp_path / "plugins" / "_C.none").touch()  # only the reference is installed
    code = "import sys; from tools.benchmark import against, __main__; against.PROCESSES = 1; sys.exit(__main__.main())"
    options = "calls -k window_attention --threads 1 --seconds 0 --min-rounds 2 --wait 0".split()
    done = subprocess.run(
        [sys.executable, "-c", code, "--against", str(tmp_path), *options],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    assert f"--against {tmp_path} --device cpu --threads 1 --seconds 0" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("| calls: window_attention")]
    assert len(rows) == 2
    assert all(" → " in row for row in rows)


def test_what_another_checkout_lacks_is_reported():
    from tools.benchmark.against import table

    fast, slow = {"times": [1.0, 1.0]}, {"times": [2.0, 2.0]}
    lines = table([{"a": fast, "b": {"error": "ImportError: x"}}], [{"a": slow, "b": fast, "c": fast}])
    assert lines[2] == "| a | 1000 → 2000 | 1000 → 2000 | 2.00 |  |"
    assert lines[3].endswith("before: ImportError: x |")
    assert lines[4].endswith("before: no such row |")


def test_the_json_of_a_row_is_plain():
    row = measure(Case("c", fixed(), dict(a=fixed(), b=fixed())), "cpu", Settings(), Timer(STEADY))
    assert json.loads(results.dump({"rows": [row]}))["rows"] == [row]
