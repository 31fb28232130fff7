"""Accuracy against operations: the paper's printed values, our small runs, and the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from tools.figures import tradeoff
from tools.figures.__main__ import main
from tools.figures.tradeoff import operations

RUNS = Path(__file__).parents[2] / tradeoff.RUNS


@pytest.mark.parametrize("bits", ["1000", "0010"])
def test_the_operations_of_a_small_translator_by_hand(bits):
    pytest.importorskip("fairseq")
    C, N, layers = 64, tradeoff.TOKENS, 2
    cross = {"1000": 4 * N * C**2 + 2 * N**2 * C, "0010": 2 * N * C**2 + C**2 + 2 * N * C}[bits]  # one query in 0010
    options = dict(arch="spatial_transformer_tiny", cross_attention=bits, encoder_attention="none")
    assert operations({**options, "decoder_attention": "none"}, ".self_attn") == 0
    assert operations(options, ".encoder_attn") == layers * cross


def test_our_runs_have_their_panels():
    pytest.importorskip("fairseq")
    panels = tradeoff.measured(RUNS)
    titles = [f"BLEU, ours, {kind}, 1500 updates" for kind in tradeoff.KINDS.values()]
    assert list(panels)[:2] == titles
    rows = {row["setting"]: row for row in json.loads(RUNS.read_text())["1500 updates"]}
    own = {point.name: point for point in panels[titles[0]]}
    assert own.keys() == {name for name in rows if not name.startswith("cross-")}
    assert all(own[name].accuracy == rows[name]["bleu"] for name in own)
    assert min(own.values(), key=lambda point: point.operations).operations == 0


def test_classifiers_of_deformed_digits(tmp_path):
    """Points are means over seeds, at the multiply-adds that a setting adds to the plain network."""
    pytest.importorskip("timm")
    from tools.study.settings import Study
    from tools.train.config import Config, load

    study, file = Study("deformed-digits"), tmp_path / "runs.json"
    results = []
    for setting, added in (("plain", 0), ("deformable", 5), ("0010+deformable", 7), ("1111", 1)):
        config = load(tradeoff.networks.CONFIGS.parent / study.data["recipe"], study.options(setting))
        options = {key: value for key, value in vars(config).items() if value != getattr(Config(""), key)}
        row = {"set": "stride-8", "setting": setting, "options": options, "images": {"classes": 10}}
        results += [{**row, "seed": seed, "top1": [10, 50 + added + seed]} for seed in (0, 2)]
    file.write_text(json.dumps({"results": results}))
    ((title, points),) = tradeoff.classified(file).items()
    assert title == "top-1 in %, ours, deformed digits, stride 8"
    assert [point.accuracy for point in points] == [51, 56, 58, 52]
    assert points[0].interval == pytest.approx(12.706 * 2**0.5 / 2**0.5)
    plain, deformable, salient, full = (point.operations for point in points)
    assert 0 == plain < deformable < salient < full
    tradeoff.plot(tmp_path / "figure.png", RUNS, [file])
    assert Image.open(tmp_path / "figure.png").width > 800
    assert not tradeoff.classified(tmp_path / "missing.json")


def test_the_picture(tmp_path, capsys):
    pytest.importorskip("fairseq")
    file = tmp_path / "tradeoff.svg"
    assert main(["--plot", str(file), "--runs", str(RUNS)]) == 0
    out = capsys.readouterr().out
    assert "0010 + deformable        7.40   40.8" in out
    text = " ".join(ElementTree.parse(file).getroot().itertext())
    assert all(title in text for title in tradeoff.TASKS.values())
    assert "0010 + deformable" in text
    assert {f.name for f in tmp_path.iterdir()} == {file.name}


def test_bad_input(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("[1]")
    for arguments, words in (
        (["resnext"], "PAPER must be one of aaconv"),
        (["--plot", "figure.jpg"], "--plot must be a .png or .svg file, got figure.jpg"),
        (["aaconv", "--plot", str(tmp_path / "x.png")], "--plot draws only empirical, got aaconv"),
        (["--plot", str(tmp_path / "x.png"), "--runs", str(other)], "RUNS must be a file of tools.study"),
        (["--plot", str(tmp_path / "x.png"), "--runs", str(tmp_path / "no.json")], "RUNS must be a file of tools."),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert words in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
