"""The figure tables, and our models against the counts that the papers' architectures determine."""

from __future__ import annotations

import pytest

pytest.importorskip("timm")

from attn_plugins.modules.augmented_conv import AAConv2d
from tools.figures import aaconv
from tools.figures.__main__ import main
from tools.figures.row import Row, markdown

# Model, options, parameters and GFLOPs, counted from Bello et al. (2019), Tables 3, 4 and 6, independently of us.
DETERMINED = [
    ("aa_resnet34", {}, 20_745_072, 7.092),
    ("aa_resnet50", {}, 25_809_392, 8.326),
    ("aa_resnet101", {}, 45_386_728, 16.093),
    ("aa_resnet152", {}, 61_613_536, 23.813),
    ("aa_resnet50", dict(kappa=0.25, nu=0.25), 24_303_728, 7.895),
    ("aa_resnet50", dict(kappa=0.5, nu=0.5), 22_342_680, 7.307),
    ("aa_resnet50", dict(kappa=0.75, nu=0.75), 20_735_496, 6.806),
    ("aa_resnet50", dict(kappa=1.0, nu=1.0), 19_383_560, 6.383),
    ("aa_mnasnet_075", {}, 3_015_000, 0.489),
    ("aa_mnasnet_100", {}, 4_061_000, 0.685),
    ("aa_mnasnet_125", {}, 5_529_000, 1.099),
    ("aa_mnasnet_140", {}, 6_441_000, 1.281),
    ("aa_wide_resnet28_10", {}, 36_054_100, 11.404),
    ("aa_wide_resnet28_10", dict(nu=0.0), 36_278_324, 10.429),
]


@pytest.mark.parametrize("name, options, parameters, gflops", DETERMINED)
def test_a_model_has_the_papers_size(name, options, parameters, gflops):
    model = aaconv.model(name, **options)
    size = model.default_cfg["input_size"][-1]
    found = aaconv.parameters(model)
    assert (round(found, -3) if parameters % 1000 == 0 else found) == parameters
    # abs: the counts above are rounded to three digits.
    assert aaconv.operations(model, size) / 1e9 == pytest.approx(gflops, abs=6e-4)


def test_the_layers_of_table_9():
    model = aaconv.model("aa_resnet50")
    for stage, parameters in (("layer2", 43_128), ("layer3", 89_720), ("layer4", 191_240)):
        layers = [m for m in getattr(model, stage).modules() if isinstance(m, AAConv2d)]
        assert {aaconv.parameters(m) - aaconv.parameters(m.conv) for m in layers} == {parameters}


def test_the_table_is_written_and_every_difference_has_its_reason(tmp_path, capsys):
    file = tmp_path / "deep" / "figures.md"
    assert main(["aaconv", "--markdown", str(file)]) == 0
    text = file.read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert "| Table 3: aa_resnet50 | M parameters | 25.8 | 25.8094 | = |  |" in text
    assert [f.name for f in file.parent.iterdir()] == ["figures.md"]


@pytest.mark.parametrize("printed, ours, agrees", [("25.8", 25.84, True), ("25.8", 25.86, False), ("600", 600.3, True)])
def test_a_row_agrees_to_the_printed_digits(printed, ours, agrees):
    row = Row("x", "M", printed, ours)
    assert row.agrees is agrees
    assert ("| = |" in markdown([row])) is agrees


def test_an_unknown_paper(capsys):
    with pytest.raises(SystemExit):
        main(["resnext"])
    assert "PAPER must be one of aaconv" in capsys.readouterr().err
