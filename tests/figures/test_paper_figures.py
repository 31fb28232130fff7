"""Parameters and operations of ``paper_figures.yaml``, those of our whole networks, and how they are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tests.figures import conventions, counts, networks
from tests.figures.conventions import calls, executed

GROUPS = yaml.safe_load((Path(__file__).parent / "paper_figures.yaml").read_text(encoding="utf-8"))
UNROUNDED = {"detection": 213.69, "segmentation": 449.546}  # GFLOPs without attention; the paper prints one digit


def needs(*packages: str) -> None:
    """Skip the test if a toolkit is not installed."""
    for package in packages:
        pytest.importorskip(package)


def rows_of(group: str) -> Iterator[tuple[list[Any], dict[str, list[Any]]]]:
    """Yield the arguments and the figures of all rows, of one setting each."""
    for row in GROUPS[group]["rows"]:
        figures = {unit: [*figure, None][:3] for unit, figure in row.items() if unit != "of"}
        settings = row["of"][-1].split(", ") if isinstance(row["of"][-1], str) else row["of"][-1:]
        for setting in settings:
            yield [*row["of"][:-1], setting], figures


def rounds_to(number: float, printed: str) -> bool:
    return round(number, len(printed.partition(".")[2])) == float(printed)


ROWS = [
    pytest.param(group, of, figures, id=f"{group} {of}", marks=[pytest.mark.slow] * ("slow" in content))
    for group, content in GROUPS.items()
    for of, figures in rows_of(group)
]


@pytest.mark.parametrize("group, of, figures", ROWS)
def test_our_figures_and_those_of_the_papers(group, of, figures):
    """Ours are the recorded ones and round to the printed ones, unless the row says why not."""
    needs(*GROUPS[group].get("toolkits", ()))
    counted = getattr(counts, group)(*of)
    recorded = {unit: ours for unit, (_, ours, _) in figures.items()}
    assert {unit: counted[unit] for unit in figures} == pytest.approx(recorded, rel=6e-6)
    printed = {unit: figure for unit, figure in figures.items() if figure[0] is not None}
    agree = {unit: rounds_to(counted[unit], figure) for unit, (figure, _, _) in printed.items()}
    assert agree == {unit: why is None for unit, (_, _, why) in printed.items()}


@pytest.mark.parametrize("task", UNROUNDED)
def test_one_digit_more_of_the_figure_without_attention_meets_all_but_two(task):
    missed = [
        setting
        for (of_task, setting), figures in rows_of("networks_on_images")
        if of_task == task and setting != "w/o"
        if not rounds_to(UNROUNDED[task] + counts.added(setting, task)[0], figures["GFLOPs"][0])
    ]
    assert missed == ([] if task == "detection" else ["1010", "1000"])


def test_the_class_token_of_every_frame_would_meet_the_figure_of_timesformer_l():
    needs("timm")
    repeated = 3 * 95 * 12 * (3 + 1) * 768**2 / 1e12  # projections of the class token in 95 more frames, 12 blocks
    assert round(counts.timesformers("divided", 96, 224)["TFLOPs"] + repeated, 2) == 7.14


def test_the_operations_of_table_9():
    """Projections count two per multiply-add, QKᵀ and AV one; d_k is 160, d_v a tenth of the channels, rounded to 8."""
    needs("timm")
    for layer, side, channels, dv in (("layer2.1", 14, 128, 8), ("layer3.2", 14, 256, 24), ("layer4.2", 7, 512, 48)):
        N = side * side
        projections, logits, sums = 2 * N * (channels * (2 * 160 + dv) + dv * dv), N * N * 160, N * N * dv
        counted = counts.attention_operations(f"AAResNet.{layer}.conv2")
        assert counted == (projections + logits + sums, projections + logits)


@pytest.mark.parametrize(
    "task, config, settings",
    [
        ("detection", counts.DETECTOR.format("-attn1111"), ["1111"]),
        ("detection", counts.DETECTOR.format("-attn0100-nk13"), ["0100 n=13"]),
        ("segmentation", counts.SEGMENTOR.format("attn0010-dcn"), ["0010", "deformable"]),
        ("segmentation", counts.SEGMENTOR.format("dynamic-nk31"), ["dynamic n=31"]),
    ],
)
def test_a_network_of_ours_has_the_modules_that_are_counted(task, config, settings):
    needs("mmdet", "mmseg")
    attended = networks.segmentor(config) if task == "segmentation" else networks.detector(config)[1]
    added = executed(attended) - executed(counts.without(task))
    assert added / 1e9 == pytest.approx(sum(counts.added(setting, task)[1] for setting in settings), rel=1e-12)


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
    recorded = networks.translator(counts.TOKENS, **options)
    counted, run = counts.of_a_translator(setting)
    assert executed(recorded) == run
    if setting == "w/o":
        assert conventions.zhu_2019_sequence(recorded, counts.TOKENS) == counted


# The paper's percentages of operations, from one setting to another.
PERCENTAGES = [
    ("1111", "1011 + deformable", 17.3), ("1110", "1010 + deformable", 5.8), ("1101", "1001 + deformable", 17.3),
    ("1100", "1000 + deformable", 5.8), ("0111", "0011 + deformable", 10.9), ("0110", "0010 + deformable", -1.1),
    ("0101", "0001 + deformable", 11.6), ("0100", "w/o + deformable", -13.5), ("0100 n=31", "dynamic n=31", 1.8),
    ("0100 n=25", "dynamic n=25", 1.4), ("0100 n=19", "dynamic n=19", 1.1), ("0100 n=13", "dynamic n=13", 0.7),
]  # fmt: skip


def test_one_offset_more_meets_the_percentages_of_translation():
    def of(setting, more):
        positions = setting[0] in "01" and "1" in setting[1:4:2]  # ε2 or ε4, for which layers project offsets
        return counts.of_a_translator(setting)[0] + (6 + 12 * positions) * more * 512**2

    met = [[round(100 * (of(b, more) / of(a, more) - 1), 1) == p for a, b, p in PERCENTAGES] for more in (0, 1)]
    assert [sum(of_all) for of_all in met] == [0, 10]


@pytest.mark.parametrize("bits", ["1000", "0010"])
def test_the_operations_of_a_small_translator_by_hand(bits):
    needs("fairseq")
    C, N, layers = 64, 50, 2
    cross = {"1000": 4 * N * C**2 + 2 * N**2 * C, "0010": 2 * N * C**2 + C**2 + 2 * N * C}[bits]  # one query in 0010
    options = dict(cross_attention=bits, encoder_attention="none", decoder_attention="none")
    recorded = networks.translator(N, "spatial_transformer_tiny", **options)
    assert not [call for call in recorded if ".self_attn" in call.module]
    assert executed([call for call in recorded if ".encoder_attn" in call.module]) == layers * cross


def test_calls_are_named_and_counted():
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.BatchNorm2d(5))
    convolution, norm = calls(module, 2, 3, 9, 7)
    assert (convolution.operator, convolution.module) == ("aten.convolution", "Sequential.0")
    assert convolution.shapes[:3] == ((2, 3, 9, 7), (5, 3, 3, 3), (5,))
    assert convolution.products == 2 * 5 * 4 * 3 * 3 * 9
    assert (norm.module, norm.shapes[0], norm.operations) == ("Sequential.1", (2, 5, 4, 3), 0)
    assert executed([convolution, norm]) == convolution.products
    assert conventions.thesis([convolution, norm]) == convolution.products + 2 * 5 * 4 * 3 * (1 + 2)
    with torch.device("meta"):
        (relu,) = calls(nn.ReLU(), 2, 5, 4, 3)
    assert (relu.operator, relu.operations, conventions.thesis([relu])) == ("aten.relu", 0, 2 * 5 * 4 * 3)


def test_a_convention_refuses_what_the_paper_does_not_count():
    with torch.device("meta"):
        recorded = calls(nn.Linear(4, 4), 2, 4)
    for count in (lambda: conventions.zhu_2019(recorded, 2, 4), lambda: conventions.thesis(recorded)):
        with pytest.raises(RuntimeError, match=r"says nothing of aten\.addmm, called by Linear"):
            count()
