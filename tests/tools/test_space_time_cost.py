"""Operation counts of TimeSformer's patterns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("timm")

from tools import space_time_measure
from tools.benchmark import results
from tools.space_time_cost import INFERENCE, MODEL, PARAMETERS, cost, main, printed_figures

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "space-time-cost.md"
SMALL = ["--model", "timesformer_small_patch16_224"]


def test_the_papers_figures():
    rows = printed_figures()
    assert len(rows) == len(PARAMETERS) + len(INFERENCE)
    assert [row.name for row in rows if not row.agrees] == ["Table 3, TimeSformer-L: 96 frames of 224²"]
    repeated = 3 * 95 * 12 * (3 + 1) * 768**2 / 1e12  # projections of the class token in 95 more frames, 12 blocks
    assert round(rows[-1].ours + repeated, 2) == 7.14


def test_cost_by_hand():
    """Count the products of one block's attention, including the pairs of each pattern."""
    T, N, P, C, depth = 8, 14 * 14, 1, 768, 12
    tokens = P + T * N
    once = T * N * 3 * 16**2 * C + C * 400 + depth * tokens * (4 + 8) * C**2
    pairs = dict(joint=tokens**2, divided=N * T**2 + T * (P + N) ** 2)
    added = depth * T * N * 5 * C**2  # qkv, proj and fc of the temporal step
    assert cost(MODEL, "joint", 8, 224) == once + depth * 2 * pairs["joint"] * C
    assert cost(MODEL, "divided", 8, 224) == once + added + depth * 2 * pairs["divided"] * C


def test_the_committed_table_is_of_this_code():
    text = BENCHMARK.read_text(encoding="utf-8")
    names = re.search(r"\| frames \| size \| (.*) \|", text).group(1).split(" | ")
    rows = re.findall(r"^\| (\d+) \| (\d+)² \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 20
    for frames, size, cells in rows[::9]:
        for pattern, cell in zip(names, cells.split(" | ")):
            assert f"{cost(MODEL, pattern, int(frames), int(size)) / 1e12:.3f}" == cell, (pattern, frames, size)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_tables_and_plot(tmp_path, capsys, suffix):
    pytest.importorskip("matplotlib")
    arguments = [*SMALL, "--frames", "2", "4", "--sizes", "32", "48", "--patterns", "divided", "axial"]
    pictures = []
    for run in ("first", "second"):
        folder = tmp_path / run
        folder.mkdir()
        plot = folder / f"cost{suffix}"
        assert main([*arguments, "--markdown", str(folder / "cost.md"), "--plot", str(plot)]) == 0
        pictures.append(plot.read_bytes())
    assert pictures[0] == pictures[1]
    text = (tmp_path / "first" / "cost.md").read_text()
    assert text.rstrip() == capsys.readouterr().out.split("# What")[1].join(["# What", ""]).rstrip()
    assert f"![Cost over size and over frames](cost{suffix})" in text
    assert len(re.findall(r"^\| [24] \| (32|48)² \|", text, re.MULTILINE)) == 4


@pytest.mark.parametrize("kind", space_time_measure.KINDS)
def test_what_is_timed(kind):
    result = space_time_measure.prepare("divided", (2, 32), kind, depth=1)()
    if kind == "forward":
        assert result.shape == (1, 400)
        assert not result.requires_grad
    else:
        names = {"cls_token", "pos_embed", "time_embed", "patch_embed.proj.weight", "blocks.0.temporal_attn.qkv.weight"}
        assert len(result) > len(names)
        assert all(gradient is not None for gradient in result)
        assert {tuple(gradient.shape) for gradient in result} >= {(1, 2, 384), (384, 3, 16, 16), (1152, 384)}


def test_measured_times(tmp_path, capsys, one_thread):
    pytest.importorskip("matplotlib")
    tiny = [*SMALL, "--frames", "2", "--sizes", "32", "--patterns", "joint", "divided"]
    given = ["--measure-frames", "1", "2", "--measure-sizes", "32", "48", "--training", "--threads", "1"]
    file = tmp_path / "times.json"
    measured = [*tiny, *given, "--seconds", "0", "--wait", "0", "--measure", str(file)]
    assert main([*measured, "--markdown", str(tmp_path / "first.md"), "--plot", str(tmp_path / "first.png")]) == 0
    data = results.read(file)
    clips = [(1, 32), (2, 32), (1, 48)]
    found = [(row["kind"], row["frames"], row["size"]) for row in data["rows"]]
    assert found == [(kind, *clip) for kind in ("forward", "training") for clip in clips]
    for row in data["rows"]:
        assert list(row["patterns"]) == ["joint", "divided"]
        for own in row["patterns"].values():
            assert 0 < own["min"] <= own["q1"] <= own["median"] <= own["q3"]
            assert len(own["times"]) == 3
            assert own["memory"] > 0
    least = {row["kind"]: row["patterns"]["divided"]["memory"] for row in data["rows"]}
    assert least["training"] > least["forward"]  # tensors kept for the backward
    assert "--measure-frames 1 2 --measure-sizes 32 48 --training --threads 1 --seconds 0" in data["command"]
    text = (tmp_path / "first.md").read_text()
    assert "Nothing here is a time" not in text
    assert len(re.findall(r"^\| [12] frames of (?:32|48)², (?:forward|training) \|", text, re.MULTILINE)) == 6 + 3
    count = cost(space_time_measure.MODEL, "divided", 2, 32, depth=space_time_measure.DEPTH) / 1e9
    assert f"| {count:.1f} (" in text
    capsys.readouterr()
    stored = [*tiny, "--measured", str(file), "--markdown", str(tmp_path / "b.md"), "--plot", str(tmp_path / "b.png")]
    assert main(stored) == 0
    assert (tmp_path / "b.md").read_text() == text.replace("first.png", "b.png")
    assert (tmp_path / "b.png").read_bytes() == (tmp_path / "first.png").read_bytes()


def test_stored_times_of_something_else(tmp_path, capsys):
    (tmp_path / "other.json").write_text(results.dump({"benchmark": "calls", "rows": []}))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for name in ("other", "list", "broken", "none"):
        with pytest.raises(SystemExit):
            main([*SMALL, "--measured", str(tmp_path / f"{name}.json")])
        assert f"--measured must be a file that --measure wrote, got {tmp_path / name}.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "resnet50"], "--model must be one of timesformer_base_patch16_224, .* got 'resnet50'"),
        (["--sizes", "100"], "--sizes must be positive multiples of 16, got 100"),
        (["--frames", "0"], "--frames must be positive, got 0"),
        (["--measure-sizes", "100"], "--measure-sizes must be positive multiples of 16, got 100"),
        (["--measure-frames", "0"], "--measure-frames must be positive, got 0"),
        (["--threads", "0"], "--threads must be positive, got 0"),
        (["--seconds", "-1"], "--seconds must not be negative, got -1"),
        (["--measure", "times.txt"], "--measure must end with .json, got times.txt"),
        (["--measure", "a.json", "--measured", "a.json"], "--measured: not allowed with argument --measure"),
        (["--plot", "cost.gif"], "--plot must end with .svg, .png or .pdf, got cost.gif"),
    ],
)
def test_errors(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert re.search(message, capsys.readouterr().err)
