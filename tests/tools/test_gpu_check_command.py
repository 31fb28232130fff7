"""The GPU check's command ``measure`` without a GPU: what it measures, processes that crash, time that is over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_plugins import ops
from tests.tools.gpu_check_helpers import entry
from tools.gpu_check import backends, measure, peers, rows, selection, worker
from tools.gpu_check.__main__ import SECONDS
from tools.gpu_check.processes import Budget, Done

# --- what is measured -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def every() -> dict[str, worker.Row]:
    """All rows on a GPU by name, which are listed without one: to list them allocates nothing on it."""
    planned, broken = worker.plan("cuda", "", every=True)
    assert not broken
    return {row.name: row for rows in planned.values() for row in rows}


@pytest.fixture(scope="module")
def selected() -> dict[str, worker.Row]:
    """Rows of the selection on a GPU, in the order in which they are measured."""
    planned, broken = worker.plan("cuda", "")
    assert not broken
    return {row.name: row for row in worker.in_turn(planned, {})}


def test_the_selection_has_every_operator_and_module_in_two_dtypes(every, selected):
    from tools.gpu_check.module_rows import MODULES

    assert set(selected) == {name for name in every if selection.is_selected(name)}
    for each in selection.SELECTED:
        assert any(name in each for name in every), each
    wanted = {
        "window_attention": "operators: window", "global_attention": "operators: global",
        "sequence_attention": "operators: sequence", "criss_cross_attention": "operators: criss-cross",
        "deform_conv2d": "operators: deform_conv2d", "deformable_attention": "deformable_attention: encoder",
    }  # fmt: skip
    assert set(wanted) == set(backends.operators())
    assert {*wanted, "deform_conv1d"} == set(ops.__all__) - {"backend", "explain"}
    for begin, half in [*((each, "bfloat16") for each in wanted.values()), ("deform_conv: 1-D", "float16")]:
        found = [name for name in selected if name.startswith(begin)]
        for dtype in ("float32", half):
            for passes in ("forward", "forward+backward"):
                assert any(name.endswith(f"{dtype}, {passes}") for name in found), (begin, dtype, passes)
    for name in MODULES:
        for dtype in selection.MAIN:
            assert f"modules: {name}, {dtype}, forward+backward" in selected


def test_the_first_rows_have_every_operator_and_module(selected):
    ranks = [selection.rank(name) for name in selected]
    assert ranks == sorted(ranks)
    assert set(ranks) == {0, 1}
    first = [name for name in selected if selection.rank(name) == 0]
    assert {name.split(",")[0] for name in first} == {
        *(name.split(",")[0] for name in selected if name.startswith("modules: ")), "operators: window",
        "operators: global", "operators: sequence", "operators: criss-cross", "operators: deform_conv2d",
        "deform_conv: 1-D (8", "deformable_attention: encoder",
    }  # fmt: skip
    for every in (False, True):  # rows that are not selected come last
        order = [selection.rank(row.name) for row in worker.in_turn(worker.plan("cpu", "", every)[0], {})]
        assert order == sorted(order)


def test_the_selection_fits_into_its_time(every, selected):
    """By figures of an H100, beside the time for filling the caches, and 40 seconds for binaries and ceilings."""
    assert selection.estimate([row.case.peers for row in every.values()]) > 3 * SECONDS
    left = (1 - measure.WARM_SHARE) * SECONDS - 40
    assert selection.estimate([row.case.peers for row in selected.values()]) < left
    first = [row.case.peers for row in selected.values() if selection.rank(row.name) == 0]
    assert selection.estimate(first) < 0.3 * SECONDS
    assert len(selected) < 150


def test_peers_of_the_selection(every, selected):
    peers = {name: set(row.case.peers) for name, row in selected.items()}
    assert all(peers[name] or not every[name].case.peers for name in peers)
    assert peers["modules: NonLocal2d, bfloat16, forward+backward"] == {"definition", "definition, compiled", "mmcv"}
    assert peers["modules: NonLocal2d, float32, forward+backward"] == {"definition", "mmcv"}
    window = "operators: window, (16,256,56,56), 8 heads, 7x7, content{}, {}, forward+backward"
    assert peers[window.format("", "float32")] == {"FlexAttention", "NATTEN"}
    assert "definition, compiled" in peers[window.format(" and position", "float32")]  # Flex lacks gradients there
    assert selected[window.format("", "float32")].without == ("torch",)
    assert selected[window.format("", "bfloat16")].without == ()
    assert "ours, compiled" in every["modules: NonLocal2d, float32, forward"].case.peers
    found = set().union(*peers.values())
    assert found >= {"torchvision", "SDPA", "SDPA with mask", "FlexAttention", "NATTEN", "mmcv", "mmcv, plain PyTorch"}


def test_a_pattern_and_all_take_rows_that_are_not_selected(every):
    unselected = "operators: window, (16,256,56,56), 8 heads, 13x13, content, float16, forward"
    assert unselected in every
    chosen = {each: [row.name for row in worker.plan("cpu", "", each)[0]["operators"]] for each in (False, True)}
    assert unselected in chosen[True]
    assert unselected not in chosen[False]
    (row,) = worker.plan("cpu", "operators: .* 13x13, content, float16, forward$")[0]["operators"]
    assert (row.name, set(row.case.peers)) == (unselected, {"definition, compiled", "FlexAttention", "NATTEN"})


def test_the_command_line_is_recorded():
    choice = measure.Choice("window", ("torch", "sdpa"), True)
    assert choice.command() == "python -m tools.gpu_check measure -k 'window' --all --without torch sdpa"
    assert measure.Choice().command() == "python -m tools.gpu_check measure"
    assert worker.Settings("cpu", "record", 1.0, **choice.settings()).every


def test_flex_attention_is_beside_both_passes_of_logits(monkeypatch):
    """It has no gradients of logits that a score function indexes: there it computes those of content."""
    content = "FlexAttention, gradients of content alone"
    titles = "7x7, content and position, bfloat16", "global, all terms", "band 21, B 4, M 8, d 64, T 1024, bfloat16"
    cases = [case for case in worker.part_cases("operators", "cpu") if any(title in case.name for title in titles)]
    assert len(cases) == 10
    for case in cases:
        backward = case.name.endswith("forward+backward")
        assert (content in case.peers, "FlexAttention" in case.peers) == (backward, not backward)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(rows, "flex", lambda query, key, value, *others: (query @ key.mT) @ value)
    case = rows.sequence_rows(torch.float32, 1, "cpu", B=1)[2]
    assert len(case.ours()()) == 4
    assert len(case.peers[content]()()) == 3


COPIED = """
import sys
from pathlib import Path

from tools.gpu_check import peers

folder = {folder!r}
print(peers.make_importable(Path(folder)))
assert sys.path[-1] == folder
import torch
from mmcv.cnn.bricks.non_local import NonLocal2d
from mmcv.cnn.bricks.generalized_attention import GeneralizedAttention
from mmcv.ops import modulated_deform_conv2d
from mmcv.ops.cc_attention import CrissCrossAttention
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

for name in {names}:  # all of them are used, from the copies
    assert name in sys.modules, name
    for module in [value for key, value in sys.modules.items() if key.split(".")[0] == name]:
        place = getattr(module, "__file__", None)
        assert place is None or place.startswith(folder), place
x = torch.randn(1, 16, 6, 7, requires_grad=True)
for module in (GeneralizedAttention(16, num_heads=2), CrissCrossAttention(16), NonLocal2d(16)):
    module(x).sum().backward()
value, places = torch.randn(1, 20, 2, 4, requires_grad=True), torch.rand(1, 3, 2, 1, 4, 2)
output = multi_scale_deformable_attn_pytorch(value, ((4, 5),), places, torch.rand(1, 3, 2, 1, 4))
assert output.shape == (1, 3, 8)
output.sum().backward()
try:
    modulated_deform_conv2d(x, x, x, x)
except ImportError as error:
    assert "modulated_deform_conv" in str(error), error
else:
    raise AssertionError("a compiled operator ran")
"""


@pytest.fixture
def installed(tmp_path) -> Path:
    """A folder of what is installed, without mmcv and packages that come with it."""
    folder = tmp_path / "installed"
    folder.mkdir()
    absent = re.compile(
        r"_*(mm(cv|engine|det|seg)|onedl|addict|termcolor|yapf|platformdirs|terminaltables|pycocotools)"
    )
    for path in Path(torch.__file__).parents[1].iterdir():
        if not absent.match(path.name) and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


def test_copied_files_of_mmcv_work_without_its_binary(tmp_path, installed, capsys):
    folder = tmp_path / "made" / "copied"
    for _ in range(2):  # the second replaces the first
        assert peers.copy(folder) == 0
    assert capsys.readouterr().out.endswith(f"MiB: {folder}\n")
    assert list(folder.parent.iterdir()) == [folder]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert all(path.suffix == ".py" or path.name == "METADATA" for path in files)
    assert sum(path.stat().st_size for path in files) < 10 * 2**20
    done = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", "-c", COPIED.format(names=peers.PACKAGES, folder=str(folder))],
        capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": f"{peers.ROOT}:{installed}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Python files of mmcv [\d.]+ in {folder}, without its compiled operators", done.stdout)


def test_copied_files_serve_where_mmcv_is_not_installed(tmp_path, monkeypatch):
    assert peers.make_importable(tmp_path) is None  # mmcv is installed
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert peers.make_importable(tmp_path).startswith("mmcv is not installed, nor copied here by")
    assert str(tmp_path) not in sys.path
    for name in ("mmcv", "mmcv-2.3.4.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "mmcv-2.3.4.dist-info" / "METADATA").write_text("Name: mmcv\nVersion: 2.3.4\n")
    for _ in range(2):
        assert peers.make_importable(tmp_path).startswith(f"Python files of mmcv 2.3.4 in {tmp_path}")
    assert sys.path.count(str(tmp_path)) == 1
    assert peers.copy(tmp_path / "copied") == 1


# --- processes ------------------------------------------------------------------------------------------------------


class Workers:
    """Stands in for workers, each of which appends lines to the record and exits with a status."""

    def __init__(self, *ends: tuple[int | None, list[dict[str, Any]]]) -> None:
        self.ends, self.settings = list(ends), []

    def __call__(self, settings: dict[str, Any], limit: float, log: Path) -> Done:
        self.settings.append(settings)
        status, lines = self.ends.pop(0)
        with Path(settings["record"]).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        return Done(status, 1.0, "Segmentation fault\n")


def test_a_row_that_crashes_is_retried_smaller_and_the_rest_continues(tmp_path, monkeypatch):
    first, third = entry("a: 0", 1e-3), entry("a: 2", 1e-3)
    workers = Workers(
        (-11, [{"start": "a: 0"}, first, {"start": "a: 1"}, {"at": "ours"}, {"at": "sdpa"}]),
        (-11, [{"start": "a: 1"}, {"at": "ours, by triton"}]),
        (-11, [{"start": "a: 1"}, {"at": "ours"}]),
        (0, [{"start": "a: 2"}, third]),
    )
    monkeypatch.setattr(measure, "start_worker", workers)
    found = measure.rows_of(measure.Choice(), Budget(60), tmp_path, tmp_path / "log", "cpu")
    assert [row["end"] for row in found] == ["a: 0", "a: 2", "a: 1"]
    assert found[-1]["row"] == {"error": "ours: its process ended with status -11: Segmentation fault"}
    assert [settings["skip"] for settings in workers.settings] == [[], ["a: 0"], ["a: 0"], ["a: 0", "a: 1"]]
    assert [settings["losses"].get("a: 1", 0) for settings in workers.settings[-1:]] == [3]


def test_a_row_that_works_without_its_peers_says_so(tmp_path, monkeypatch):
    workers = Workers((71, [{"start": "a: 0"}, {"at": "sdpa"}]), (0, [{"start": "a: 0"}, entry("a: 0", 1e-3)]))
    monkeypatch.setattr(measure, "start_worker", workers)
    (row,) = measure.rows_of(measure.Choice(), Budget(60), tmp_path, tmp_path / "log", "cpu")
    assert row["row"]["errors"]["left out"].startswith("peers; sdpa: its process ended with status 71")


def test_rows_that_ended_a_process_while_caches_were_filled_begin_without_peers(tmp_path, monkeypatch):
    workers = Workers((-9, [{"start": "a: 0"}]), (0, [{"start": "a: 1"}, entry("a: 1", 1e-3)]))
    monkeypatch.setattr(measure, "start_worker", workers)
    assert measure.warm(measure.Choice(), Budget(60), 1, tmp_path, "cpu") == (1, {"a: 0": 1})
    assert workers.settings[1]["skip"] == ["a: 0"]


def test_time_that_is_over_leaves_what_there_is(tmp_path, monkeypatch):
    workers = Workers((None, [{"start": "a: 0"}, entry("a: 0", 1e-3), {"start": "a: 1"}]))
    monkeypatch.setattr(measure, "start_worker", workers)
    budget = Budget(60)
    kept: list[Any] = []

    def keep(found):
        kept.append(found)
        budget.seconds = 0.0

    found = measure.rows_of(measure.Choice(), budget, tmp_path, tmp_path / "log", "cpu", keep)
    assert found == kept[-1]
    assert [row["row"].get("error") for row in found] == [None, "the time was over"]


def test_a_part_whose_rows_cannot_be_listed_is_a_failed_row_and_the_others_run(tmp_path, monkeypatch):
    def part_cases(part, device):
        if part == "halves":
            raise RuntimeError("no such device")
        return []

    monkeypatch.setattr(worker, "part_cases", part_cases)
    planned, broken = worker.plan("cpu", "")
    assert planned == {part: [] for part in worker.PARTS if part != "halves"}
    assert broken == {"halves": "RuntimeError: no such device"}
    record = tmp_path / "rows.jsonl"
    worker.run_rows(worker.Settings("cpu", str(record), 10.0))
    (row,), _ = measure.read(record)
    assert row["end"] == "halves: every row"
    assert row["row"] == {"error": "RuntimeError: no such device"}


def test_rows_for_which_there_was_no_time_are_named(tmp_path, monkeypatch, capsys):
    names = ["halves: 0", "halves: 1", "modules: 0"]
    workers = Workers((0, [{"planned": names}, {"start": "halves: 0"}, entry("halves: 0", 1e-3)]))
    monkeypatch.setattr(measure, "start_worker", workers)
    monkeypatch.setattr(measure, "measure_ceilings", lambda *arguments: None)
    assert measure.measure(measure.Choice(), Budget(60), 1, tmp_path, "cpu") == 1
    assert "the time was over before 2 of 3 rows\nhalves: 1\nmodules: 1\n" in capsys.readouterr().out
    assert json.loads((tmp_path / "measure.json").read_text())["not_started"] == names[1:]
    assert "* modules: 0: the time was over" in (tmp_path / "measure.md").read_text()


def test_the_whole_command_on_the_cpu(tmp_path, capsys):
    """The numbers are meaningless; the files and the last lines are those of a GPU."""
    status = measure.measure(
        measure.Choice("decoder, 300 queries .*bfloat16, forward$"), Budget(120), 1, tmp_path, "cpu"
    )
    printed = capsys.readouterr().out
    assert status == 0, printed
    data = json.loads((tmp_path / "measure.json").read_text())
    (row,) = data["rows"]
    assert row["row"]["entries"]["ours"]["min"] > 0
    assert row["row"]["work"]["moved"] > 0
    assert "deformable_attention: decoder, 300 queries" in printed.splitlines()[-1]
    assert "## deformable_attention" in (tmp_path / "measure.md").read_text()
