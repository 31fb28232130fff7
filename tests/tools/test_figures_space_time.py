"""Operation counts of TimeSformer's patterns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("timm")

from tools.bench import results
from tools.bench.__main__ import main as bench
from tools.bench.cases import space_time as cases
from tools.figures.space_time import INFERENCE, MODEL, PARAMETERS, cost, main, printed_figures

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "space-time-cost.md"
SMALL = ["--model", "timesformer_small_patch16_224"]


def test_the_papers_figures():
    rows = printed_figures()
    assert len(rows) == len(PARAMETERS) + len(INFERENCE)
    assert [row.name for row in rows if not row.agrees] == ["Table 3, TimeSformer-L: 96 frames of 224²"]
    repeated = 3 * 95 * 12 * (3 + 1) * 768**2 / 1e12  # projections of the class token in 95 more frames, 12 blocks
    assert round(rows[-1].ours + repeated, 2) == 7.14


def test_the_committed_table_is_of_this_code():
    text = BENCHMARK.read_text(encoding="utf-8")
    names = re.search(r"\| frames \| size \| (.*) \|", text).group(1).split(" | ")
    rows = re.findall(r"^\| (\d+) \| (\d+)² \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 20
    for frames, size, cells in rows[::9]:
        for pattern, cell in zip(names, cells.split(" | ")):
            assert f"{cost(MODEL, pattern, int(frames), int(size)) / 1e12:.3f}" == cell, (pattern, frames, size)


@pytest.mark.slow
def test_tables_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    arguments = [*SMALL, "--frames", "2", "4", "--sizes", "32", "48", "--patterns", "divided", "axial"]
    pictures = []
    for page in (tmp_path / "first.md", tmp_path / "second.md"):
        assert main([*arguments, "--markdown", str(page), "--plot", str(tmp_path / "cost.svg")]) == 0
        pictures.append((tmp_path / "cost.svg").read_bytes())
        assert page.read_text().rstrip() == capsys.readouterr().out.rstrip()
    assert pictures[0] == pictures[1]
    text = page.read_text()
    assert "![Cost over size and over frames](cost.svg)" in text
    assert len(re.findall(r"^\| [24] \| (32|48)² \|", text, re.MULTILINE)) == 4


@pytest.mark.slow
def test_measured_times(tmp_path, capsys, one_thread, monkeypatch):
    """Measured here and shown, and the committed ones, which version 0.2.0 stored."""
    pytest.importorskip("matplotlib")
    code = "import tools.bench.cases.space_time as s; s.CLIPS = (1, 32), (2, 32), (1, 48); s.DEPTH = 1; "
    monkeypatch.setattr("tools.bench.worker.WORK", code + "from tools.bench.worker import main; main()")
    quick = ["--threads", "1", "--seconds", "0", "--min-rounds", "3", "--attempts", "1", "--wait", "0"]
    assert bench(["space_time", "--out", str(tmp_path), *quick]) == 0
    new, old = tmp_path / "space_time-cpu.json", BENCHMARK.with_suffix(".json")
    assert len(results.read(new)["rows"]) == 6
    for file, clips in ((new, [(1, 32), (2, 32), (1, 48)]), (old, list(cases.CLIPS))):
        page, drawn = tmp_path / "page.md", tmp_path / "page.png"
        arguments = [*SMALL, "--frames", "2", "--sizes", "32", "--measured", str(file)]
        assert main([*arguments, "--markdown", str(page), "--plot", str(drawn)]) == 0
        text = page.read_text()
        assert "Nothing here is a time" not in text
        rows = re.findall(r"^\| (\d+) frames of (\d+)², (forward|training) \| [\d.]+ /", text, re.MULTILINE)
        assert rows == [(str(t), str(s), kind) for kind in cases.KINDS for t, s in clips]
        assert len(re.findall(r"² ?, forward \| [\d.]+ \(\d+/s\)", text)) == len(clips)
        assert drawn.stat().st_size > 1000
    capsys.readouterr()


OTHERS = {"other.json": results.dump({"benchmark": "calls", "rows": []}), "list.json": "[]", "broken.json": "{"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "resnet50"], "--model must be one of timesformer_base_patch16_224, .* got 'resnet50'"),
        (["--sizes", "100"], "--sizes must be positive multiples of 16, got 100"),
        (["--frames", "0"], "--frames must be positive, got 0"),
        (["--plot", "cost.gif"], "--plot must end with .svg, .png or .pdf, got cost.gif"),
        *((["--measured", name], f"file of tools.bench space_time, got {name}") for name in (*OTHERS, "none.json")),
    ],
)
def test_errors(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in OTHERS.items():
        Path(name).write_text(text)
    with pytest.raises(SystemExit):
        main(arguments)
    assert re.search(message, capsys.readouterr().err)
