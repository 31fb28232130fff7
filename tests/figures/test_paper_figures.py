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


ROWS = [  # whole networks are slow, as are their figures without attention
    pytest.param(
        group, of, figures, id=f"{group} {of}", marks=[pytest.mark.slow] * ("slow" in content or of[-1] == "w/o")
    )
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


@pytest.mark.slow
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
        pytest.param("w/o", of_both_sides("none"), marks=pytest.mark.slow),
        pytest.param("1111", of_both_sides("1111"), marks=pytest.mark.slow),
        pytest.param("0010 + deformable", of_both_sides("0010", deformable=True), marks=pytest.mark.slow),
        pytest.param("0100 n=13", of_both_sides("0100", attention_range=13), marks=pytest.mark.slow),
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
