"""Measurements of the GPU check without a GPU: rows that fail, hang or crash, shares of parts, tables, peers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_plugins import ops
from tests.tools.gpu_check_helpers import entry
from tools.benchmark.case import Case
from tools.gpu_check import measure, module_rows, ratios, roofline, rows, timing, worker
from tools.gpu_check.backends import backends_of, operators, served_by

# --- the worker -------------------------------------------------------------------------------------------------------


def prepared(function=lambda: torch.ones(3)):
    return lambda: function


def raising(error: Exception):
    def run():
        raise error

    return run


@pytest.fixture
def few_rows(monkeypatch) -> None:
    """Return rows of two parts: one that works with failing peers, and one whose own function fails."""
    found = {
        "operators": [
            Case("good, bfloat16, forward", prepared(), {"peer": prepared(), "none": raising(ImportError("no such"))}),
            Case("bad", prepared(raising(RuntimeError("out of luck\nand more")))),
        ],
        "modules": [Case("a module", prepared(lambda: (torch.ones(2), torch.zeros(2))))],
    }
    monkeypatch.setattr(worker, "PARTS", {"operators": 1.0, "modules": 1.0})
    monkeypatch.setattr(worker, "part_cases", lambda part, device: found[part])


def worked(tmp_path: Path, **settings: Any) -> list[dict[str, Any]]:
    record = tmp_path / "rows.jsonl"
    worker.run_rows(worker.Settings("cpu", str(record), seconds=60, race_seconds=0.0, every=True, **settings))
    return measure.read(record)[0]


def test_one_row_that_fails_ends_nothing(few_rows, tmp_path):
    found = {row["end"]: row["row"] for row in worked(tmp_path)}
    assert set(found) == {"operators: good, bfloat16, forward", "operators: bad", "modules: a module"}
    assert found["operators: bad"] == {"error": "RuntimeError: out of luck"}
    good = found["operators: good, bfloat16, forward"]
    assert set(good["entries"]) == {"ours", "peer"}
    assert good["errors"] == {"none": "ImportError: no such"}
    assert set(good["first"]) == {"ours", "peer", "none"}
    assert good["kind"] == "bfloat16"
    assert all(entry["how"] == "clock" and entry["min"] > 0 for entry in good["entries"].values())


def test_rows_that_are_done_are_left_out_and_those_that_crashed_have_no_peers(few_rows, tmp_path):
    name = "operators: good, bfloat16, forward"
    found = worked(tmp_path, skip=["modules: a module"], pattern="good|module", losses={name: 1})
    assert [row["end"] for row in found] == [name]
    assert set(found[0]["row"]["entries"]) == {"ours"}


def test_workers_that_fill_caches_share_all_rows_between_them(few_rows, tmp_path):
    found = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        found += [row["end"] for row in worked(folder, share=(number, 2))]
    assert len(found) == 3
    assert len(set(found)) == 3


def test_the_part_with_the_least_of_its_time_is_next():
    planned = {
        part: [worker.Row(part, f"{part}: {n}", Case(str(n), prepared())) for n in range(2)]
        for part in ("operators", "halves")
    }
    spent = {"operators": 0.0, "halves": 0.0}
    order = []
    for row in worker.in_turn(planned, spent):
        order.append(row.name)
        spent[row.part] += 10.0
    # "operators" has six times the weight of "halves"
    assert order == ["operators: 0", "halves: 0", "operators: 1", "halves: 1"]


def test_every_row_has_a_name_of_its_own():
    for pattern in ("operators", "modules"):
        names = [row.name for row in worker.plan("cpu", f"^{pattern}")[0][pattern]]
        assert len(names) == len(set(names)) > 20
    for words in ("sequence", "FlexAttention"):
        case = next(case for case in worker.part_cases("operators", "cpu") if "sequence" in case.name)
        assert words in case.name or words in case.peers


def test_every_public_module_has_a_row():
    from attn_plugins import modules
    from tools.gpu_check.module_rows import MODULES

    public = {
        n
        for n in modules.__all__
        if isinstance(kind := getattr(modules, n), type) and issubclass(kind, torch.nn.Module)
    }
    assert {name.split(",")[0] for name in MODULES} == public


class Clock:
    """Stands in for a device's events: ``took`` gives the time of each run."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Clock.now

    def elapsed_time(self, end: Clock) -> float:
        return (end.at - self.at) * 1e3

    @staticmethod
    def taking(seconds: float):
        def run() -> None:
            Clock.now += seconds

        return run


def test_short_runs_are_timed_by_graphs_and_long_ones_by_events(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "captured", lambda run: Clock.taking(1e-5))
    short, long = (timing.Contestant(Clock.taking(seconds), "cuda") for seconds in (1e-4, 1e-1))
    assert (short.how, long.how) == ("graph", "events")
    found = timing.race({"short": short, "long": long}, lambda: order.append(1), 0.0)  # type: ignore[arg-type]
    assert len(order) == 2 * timing.LEAST_ROUNDS  # caches are emptied before each run
    assert found["short"]["min"] == pytest.approx(1e-5)
    assert found["long"]["median"] == pytest.approx(1e-1)
    assert found["short"]["eager"] == pytest.approx(1e-4)  # with the host's time

    def refuse(run):
        raise RuntimeError("called a synchronizing CUDA operation\nand more")

    monkeypatch.setattr(timing, "captured", refuse)
    assert timing.Contestant(Clock.taking(1e-4), "cuda").how == (
        "events, with the host's time: no graph (called a synchronizing CUDA operation)"
    )


# --- backends ---------------------------------------------------------------------------------------------------------


def window() -> torch.Tensor:
    q, k, v = torch.randn(3, 1, 2, 5, 6, 8).unbind()
    v.requires_grad_()
    output = ops.window_attention(q, k, v, None, 3)
    return torch.autograd.grad(output.sum(), v)[0]


def test_backends_are_read_from_the_tables():
    assert {"window_attention", "global_attention", "deform_conv2d"} <= set(operators())
    names = backends_of("window_attention")
    assert names[-1] == "torch"
    assert len(names) > 1
    assert backends_of("no_operator") == []


def test_what_serves_is_seen_forward_and_backward():
    assert served_by(window).keys() == {"window_attention"}
    with ops.backend("torch"):
        assert served_by(window) == {"window_attention": ["torch"]}


def test_contestants_are_every_backend_that_does_not_refuse():
    runs, facts = worker.contestants(Case("window", prepared(window)))
    others = set(backends_of("window_attention")) - set(facts["served_by"]["window_attention"])
    assert {name.removeprefix("ours, by ") for name in runs if "by" in name} | set(facts["refusals"]) == others
    assert "cuda" in facts["refusals"]


def test_variants_of_a_backend_run_with_their_environment(monkeypatch):
    serving = served_by(window)["window_attention"][0]
    monkeypatch.setattr(worker, "VARIANTS", {
        ("window_attention", serving): ("a variant", {"CHECKED": "1"}),
        ("window_attention", "another"): ("of a backend that does not serve", {}),
    })  # fmt: skip
    seen = []

    def run():
        seen.append(os.environ.get("CHECKED"))
        torch.manual_seed(0)
        return window()

    runs, facts = worker.contestants(Case("window", prepared(run)))
    assert facts["differences"]["a variant"] == 0
    assert [name for name in runs if "variant" in name] == ["ours, by a variant"]
    assert not any("does not serve" in name for name in runs)
    seen.clear()
    for name in ("ours", "ours, by a variant", "ours"):
        runs[name]()
    assert seen == [None, "1", None]


def test_the_definition_stands_for_operators_also_while_they_are_compiled():
    q, k, v = torch.randn(3, 1, 2, 5, 6, 8).unbind()
    compiled = torch.compile(lambda *t: ops.window_attention(*t, None, 3), backend="aot_eager", fullgraph=True)
    with rows.definitions():
        assert served_by(lambda: compiled(q, k, v)) == {}
    torch.testing.assert_close(compiled(q, k, v), ops.window_attention(q, k, v, None, 3))
    torch._dynamo.reset()


@pytest.mark.parametrize("maker", ["window", "global", "sequence", "criss_cross", "deform"])
def test_peers_compute_the_same(maker, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    sizes = {"window": dict(B=1, S=7), "criss_cross": dict(B=1, S=6), "deform": dict(B=1, C=8, S=6)}
    make = getattr(rows, f"{maker}_rows")
    if maker == "global":
        monkeypatch.setattr(rows, "GLOBAL", (2, 4, 5, 3, 4, 8))
    cases = make(torch.float32, 0, "cpu", **sizes.get(maker, dict(B=1)))[:2]
    compared = 0
    for case in cases:
        torch.manual_seed(0)
        expected = case.ours()()
        for name, prepare in case.peers.items():
            torch.manual_seed(0)
            try:
                found = prepare()()
            except ImportError:
                continue
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=name)
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", module_rows.MMCV)
def test_mmcv_s_modules_compute_the_same(name, monkeypatch):
    pytest.importorskip("mmcv")
    make, _ = module_rows.MODULES[name]
    channels = {"CrissCrossAttention2d": 512, "NonLocal1d": 512, "NonLocal2d": 512, "NonLocal3d": 256}[name]
    shape = (1, channels, *(3, 4, 5)[: {"1": 1, "3": 3}.get(name[-2], 2)])
    monkeypatch.setitem(module_rows.MODULES, name, (make, lambda: ((torch.randn(shape),), {})))
    case = module_rows.module_case(name, torch.float32, True, "cpu")
    found = []
    for prepare in (case.ours, case.peers["mmcv"]):
        torch.manual_seed(0)
        found.append(prepare()()[0])  # the gradient of the input
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


# --- work and tables --------------------------------------------------------------------------------------------------


def test_work_counts_products_and_what_is_read_and_returned_once():
    a, b = torch.randn(30, 40), torch.randn(40, 50)

    def run():
        c = a @ b
        return c + (a @ b).relu()

    work = roofline.work_of(run)
    assert work == (2 * 2 * 30 * 40 * 50, 4 * (30 * 40 + 40 * 50 + 30 * 50))
    rates = {"float32": 1e6, "bytes": 1e3}
    assert roofline.floor(work, "float32", rates) == work.moved / 1e3
    assert roofline.kind_of("x, TF32, forward") == "TF32"
    assert roofline.kind_of("x, autocast to bfloat16") == "bfloat16"


DATA = {
    "machine": {"gpu": "none"},
    "command": "measure",
    "ceilings": {"bfloat16": 1e13, "bytes": 1e12},
    "rows": [
        entry("a: one", 2e-3, by_triton=1e-3, sdpa=4e-3, flex=3e-3),
        entry("a: two", 1e-3, sdpa=0.5e-3),
        entry("b: three", 1e-3, by_triton=4e-3),
        {"end": "b: four", "part": "b", "seconds": 1.0, "row": {"error": "RuntimeError: out of luck"}},
    ],
}


def test_ratios_shares_and_the_faster_backend():
    one, two, three = (ratios.compare(row, DATA["ceilings"]) for row in DATA["rows"][:3])
    assert (one.peer, one.ratio, one.best, one.gain, one.memory) == ("flex", 1.5, "triton", 2.0, 1.0)
    assert one.share == pytest.approx(1e-4 / 2e-3)
    assert (two.peer, two.ratio, two.best) == ("sdpa", 0.5, None)
    assert (three.peer, three.ratio, three.best) == (None, None, None)
    assert ratios.compare(DATA["rows"][0], None).share is None


def test_the_last_lines_are_the_table_with_the_worst_row_at_the_end():
    lines = ratios.closing(DATA)
    assert lines[-1] == " 0.50  10%      1 ms a: two [torch] over sdpa"
    assert lines[-2] == " 1.50   5%      2 ms a: one [torch; triton 2.0x] over flex"
    assert lines[-3] == "    –  10%      1 ms b: three [torch]"
    assert "b: four: RuntimeError: out of luck" in lines
    assert "f, bfloat16, triton against torch: 0.71x (0.25 to 2.00, 2 rows)" in lines
    assert "a: 2 rows, ratio 0.87, 7% of the roofline; a peer is faster in 1" in lines


def test_the_page_has_a_table_a_part_with_errors_and_refusals():
    page = ratios.page(DATA)
    assert (
        "| one | 2 (1.0 MiB) | torch | triton 1 | sdpa 4; flex 3 | 1.50× | 5 % | 1.00 | ValueError: too wide |" in page
    )
    assert "* b: four: RuntimeError: out of luck" in page
    assert "bfloat16 10 T/s" in page
    assert "\nmmcv's files.\n" in ratios.page({**DATA, "peers": "mmcv's files"})


def test_what_is_to_be_said_against_a_row():
    row = entry("a: one", 1e-3, sdpa=1e-3)
    row["row"]["entries"]["ours"] |= {"q3": 2e-3}
    row["row"]["entries"]["sdpa"]["how"] = "events, with the host's time: no graph"
    row["row"]["differences"] = {"triton": 0.5, "cuda": float("nan"), "torch": 1e-3}
    assert ratios.compare(row, None).marks == "noisy, host's time, triton differs by 0.5, cuda differs by nan"
