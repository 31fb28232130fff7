"""Accuracy against operations: the paper's printed values, our small runs, and the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from tools.figures import tradeoff
from tools.figures.__main__ import main
from tools.figures.tradeoff import Point, envelope, operations, options_of, printed

RUNS = Path(__file__).parents[2] / tradeoff.RUNS

# Tables 2 and 3: both settings, differences of mAP, mIoU and BLEU, and of GFLOPs in percent for images.
DIFFERENCES = [
    ("w/o", "1111 + deformable", (4.6, 5.9, 7.1), (31.7, 147.4)),
    ("1111", "1011 + deformable", (2.2, 1.1, 0.3), (0.0, 0.0)),
    ("1110", "1010 + deformable", (2.1, 1.0, 0.3), (-0.1, -0.1)),
    ("1101", "1001 + deformable", (2.2, 1.1, 0.3), (0.0, 0.0)),
    ("1100", "1000 + deformable", (2.1, 1.0, 0.3), (-0.1, -0.1)),
    ("0111", "0011 + deformable", (2.2, 0.9, 0.1), (-1.4, -2.4)),
    ("0110", "0010 + deformable", (2.0, 0.7, 0.1), (-12.8, -39.9)),
    ("0101", "0001 + deformable", (2.1, 1.0, 0.2), (-1.4, -2.5)),
    ("0100", "w/o + deformable", (1.3, 0.9, -0.1), (-14.9, -43.9)),
    ("0100 n=31", "dynamic n=31", (-0.7, -1.3, 0.2), (53.8, 96.6)),
    ("0100 n=25", "dynamic n=25", (-0.8, -1.3, 0.2), (35.4, 64.2)),
    ("0100 n=19", "dynamic n=19", (-1.0, -1.7, 0.1), (20.6, 37.7)),
    ("0100 n=13", "dynamic n=13", (-1.0, -2.5, 0.1), (9.7, 17.8)),
]


@pytest.mark.parametrize(("column", "task"), enumerate(tradeoff.TASKS))
def test_the_paper_s_values_differ_as_it_says(column, task):
    points = {point.name: point for point in printed(task)}
    assert points.keys() == {name for row in DIFFERENCES for name in row[:2]} == tradeoff.ACCURACY.keys()
    assert points["w/o"].operations == 0
    for first, second, accuracy, percent in DIFFERENCES:
        a, b = points[first], points[second]
        assert round(b.accuracy - a.accuracy, 1) == accuracy[column], (first, second)
        if task != "translation":  # printed with one digit
            whole = {"detection": 213.7, "segmentation": 449.5}[task]
            found = 100 * (b.operations - a.operations) / (a.operations + whole)
            assert abs(found - percent[column]) < 0.06, (first, second)


def test_the_envelope_is_what_no_cheaper_setting_reaches():
    points = [
        Point("a", 0, 1),
        Point("b", 2, 3),
        Point("c", 2, 4),
        Point("d", 3, 4),
        Point("e", 5, 6),
        Point("f", 1, 0),
    ]
    assert [point.name for point in envelope(points)] == ["a", "c", "e"]
    assert envelope([]) == []
    best = [point.name for point in envelope(printed("detection")) if point.accuracy > 40]
    assert best == ["0010 + deformable", "0011 + deformable"]


def test_options_of_a_command_line():
    assert options_of("--arch tiny --adam-betas '(0.9, 0.98)' --deformable --lr=5e-3 --share") == dict(
        arch="tiny", adam_betas="(0.9, 0.98)", deformable=True, lr="5e-3", share=True
    )


@pytest.mark.parametrize("bits", ["1000", "0010"])
def test_the_operations_of_a_small_translator_by_hand(bits):
    pytest.importorskip("fairseq")
    C, N, layers = 64, tradeoff.TOKENS, 2
    cross = {"1000": 4 * N * C**2 + 2 * N**2 * C, "0010": 2 * N * C**2 + C**2 + 2 * N * C}[bits]  # one query in 0010
    options = dict(arch="spatial_transformer_tiny", cross_attention=bits, encoder_attention="none")
    assert operations({**options, "decoder_attention": "none"}, ".self_attn") == 0
    assert operations(options, ".encoder_attn") == layers * cross


def test_our_runs_have_their_panels(monkeypatch):
    pytest.importorskip("fairseq")
    data = json.loads(RUNS.read_text())
    panels = tradeoff.measured(RUNS)
    titles = list(panels)
    assert titles[:2] == [f"BLEU, ours, {kind}, 1500 updates" for kind in tradeoff.KINDS.values()]
    rows = {row["setting"]: row for row in data["1500 updates"]}
    for title, points in panels.items():
        assert len(points) > 1
        assert len({point.name for point in points}) == len(points), title
    own = {point.name: point for point in panels[titles[0]]}
    assert all(own[name].accuracy == rows[name]["bleu"] for name in own)
    assert own.keys() == {name for name in rows if not name.startswith("cross-")}
    assert min(own.values(), key=lambda point: point.operations).operations == 0


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture(tmp_path, capsys, suffix):
    pytest.importorskip("fairseq")
    file = tmp_path / f"tradeoff.{suffix}"
    assert main(["--plot", str(file), "--runs", str(RUNS)]) == 0
    out = capsys.readouterr().out
    assert "0010 + deformable        7.40   40.8" in out
    if suffix == "png":
        assert Image.open(file).width > 800
    else:
        text = " ".join(ElementTree.parse(file).getroot().itertext())
        assert all(title in text for title in tradeoff.TASKS.values())
        assert "0010 + deformable" in text
    assert {f.name for f in tmp_path.iterdir()} == {file.name}


def test_bad_input(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("[1]")
    for arguments, words in (
        (["--plot", "figure.jpg"], "--plot must be a .png or .svg file, got figure.jpg"),
        (["aaconv", "--plot", str(tmp_path / "x.png")], "--plot draws only empirical, got aaconv"),
        (["--plot", str(tmp_path / "x.png"), "--runs", str(other)], "RUNS must be a file of tools.study"),
        (["--plot", str(tmp_path / "x.png"), "--runs", str(tmp_path / "no.json")], "RUNS must be a file of tools."),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
