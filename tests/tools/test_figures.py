"""The figure tables, and our models against counts derived from the papers' architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tools.figures import aaconv, convention, empirical, networks, translation
from tools.figures.__main__ import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def needs(*packages):
    """Skip the test if a toolkit is not installed."""
    for package in packages:
        pytest.importorskip(package)


def test_the_operations_of_table_9():
    """Projections count two per multiply-add, QKᵀ and AV one; d_k is 160, d_v a tenth of the channels, rounded to 8."""
    needs("timm")
    calls = convention.calls(aaconv.model("aa_resnet50"), 1, 3, 224, 224)
    for layer, side, channels, dv in (("layer2.1", 14, 128, 8), ("layer3.2", 14, 256, 24), ("layer4.2", 7, 512, 48)):
        N = side * side
        projections, logits, sums = 2 * N * (channels * (2 * 160 + dv) + dv * dv), N * N * 160, N * N * dv
        counted = aaconv.attention_operations(calls, f"AAResNet.{layer}.conv2")
        assert counted == (projections + logits + sums, projections + logits)


@pytest.mark.parametrize(
    "task, config, settings",
    [
        ("detection", empirical.DETECTOR.format("-attn1111"), ["1111"]),
        ("detection", empirical.DETECTOR.format("-attn0100-nk13"), ["0100 n=13"]),
        ("segmentation", empirical.SEGMENTOR.format("attn0010-dcn"), ["0010", "deformable"]),
        ("segmentation", empirical.SEGMENTOR.format("dynamic-nk31"), ["dynamic n=31"]),
    ],
)
def test_a_network_of_ours_has_the_modules_that_are_counted(task, config, settings):
    needs("mmdet", "mmseg")
    attended = networks.segmentor(config) if task == "segmentation" else networks.detector(config)[1]
    added = convention.executed(attended) - convention.executed(empirical.without(task))
    expected = sum(empirical.added(setting, task)[1] for setting in settings)
    assert added / 1e9 == pytest.approx(expected, rel=1e-12)


# The paper's percentages of operations, from one setting to another.
PERCENTAGES = [
    ("1111", "1011 + deformable", 17.3), ("1110", "1010 + deformable", 5.8), ("1101", "1001 + deformable", 17.3),
    ("1100", "1000 + deformable", 5.8), ("0111", "0011 + deformable", 10.9), ("0110", "0010 + deformable", -1.1),
    ("0101", "0001 + deformable", 11.6), ("0100", "w/o + deformable", -13.5), ("0100 n=31", "dynamic n=31", 1.8),
    ("0100 n=25", "dynamic n=25", 1.4), ("0100 n=19", "dynamic n=19", 1.1), ("0100 n=13", "dynamic n=13", 0.7),
]  # fmt: skip


def bits_of(setting: str) -> list[bool]:
    return [bit == "1" for bit in setting[:4]] if setting[0] in "01" else [False] * 4


def of_both_sides(attention, **options):
    return dict(encoder_attention=attention, decoder_attention=attention, **options)


@pytest.mark.parametrize(
    "setting, options",
    [
        ("w/o", of_both_sides("none")),
        ("1111", of_both_sides("1111")),
        ("0010 + deformable", of_both_sides("0010", deformable=True)),
        ("0100 n=13", of_both_sides("0100", attention_range=13)),
        ("dynamic n=25", of_both_sides("dynamic", encoder_kernel_sizes="25", decoder_kernel_sizes="25")),
    ],
)
def test_a_translator_of_ours_has_the_modules_that_are_counted(setting, options):
    needs("fairseq")
    calls = networks.translator(translation.TOKENS, **options)
    counted, executed = translation.operations(setting)
    assert convention.executed(calls) == executed
    if setting == "w/o":
        assert convention.zhu_2019_sequence(calls, translation.TOKENS) == counted


def test_one_offset_more_meets_the_percentages_of_translation():
    def of(setting, more):
        attentions = 6 + 12 * (bits_of(setting)[1] or bits_of(setting)[3])  # all layers that project offsets
        return translation.operations(setting)[0] + attentions * more * 512**2

    met = [[round(100 * (of(b, more) / of(a, more) - 1), 1) == p for a, b, p in PERCENTAGES] for more in (0, 1)]
    assert [sum(of_all) for of_all in met] == [0, 10]


def test_calls_are_named_and_counted():
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.BatchNorm2d(5))
    convolution, norm = convention.calls(module, 2, 3, 9, 7)
    assert (convolution.operator, convolution.module) == ("aten.convolution", "Sequential.0")
    assert convolution.shapes[:3] == ((2, 3, 9, 7), (5, 3, 3, 3), (5,))
    assert convolution.products == 2 * 5 * 4 * 3 * 3 * 9
    assert (norm.module, norm.shapes[0], norm.operations) == ("Sequential.1", (2, 5, 4, 3), 0)
    assert convention.executed([convolution, norm]) == convolution.products
    assert convention.thesis([convolution, norm]) == convolution.products + 2 * 5 * 4 * 3 * (1 + 2)
    with torch.device("meta"):
        (relu,) = convention.calls(nn.ReLU(), 2, 5, 4, 3)
    assert (relu.operator, relu.operations, convention.thesis([relu])) == ("aten.relu", 0, 2 * 5 * 4 * 3)


def test_a_convention_refuses_what_the_paper_does_not_count():
    with torch.device("meta"):
        calls = convention.calls(nn.Linear(4, 4), 2, 4)
    for count in (lambda: convention.zhu_2019(calls, 2, 4), lambda: convention.thesis(calls)):
        with pytest.raises(RuntimeError, match=r"says nothing of aten\.addmm, called by Linear"):
            count()


@pytest.mark.parametrize(
    "paper, toolkits, line, differing",
    [
        pytest.param(
            "aaconv", ["timm", "mmdet"], "| Table 3: aa_resnet50 | M parameters | 25.8 | 25.8094 | = |  |", 27,
            marks=pytest.mark.slow,
        ),
        (
            "empirical", ["mmdet", "mmseg", "fairseq"],
            f"| detection: 0010 | GFLOPs | 221.1 | 221.148 | = | 218.672 | {empirical.ONCE} |", 19,
        ),
        ("local_bilateral", [], "| Table 4.2 e: both | GFLOPs | 2.63 | 2.62553 | = | 2.62826 |  |", 10),
    ],
    ids=["aaconv", "empirical", "local_bilateral"],
)  # fmt: skip
def test_a_table_is_written_and_every_difference_has_its_reason(tmp_path, capsys, paper, toolkits, line, differing):
    needs(*toolkits)
    file = tmp_path / "deep" / "figures.md"
    assert main([paper, "--markdown", str(file)]) == 0
    text = file.read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert text == (BENCHMARKS / f"figures-{paper}.md").read_text()  # the committed tables are up to date
    rows = [row for row in text.splitlines() if row.startswith("| ")][1:]
    assert line in rows
    assert sum("%" in row for row in rows) == differing
    assert [f.name for f in file.parent.iterdir()] == ["figures.md"]
