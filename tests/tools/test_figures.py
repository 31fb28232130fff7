"""The figure tables, and our models against counts derived from the papers' architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from attn_plugins.modules import AAConv2d
from tools.figures import aaconv, convention, empirical, local_bilateral, networks, translation
from tools.figures.__main__ import main
from tools.figures.row import Row, markdown

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def needs(*packages):
    """Skip the test if a toolkit is not installed."""
    for package in packages:
        pytest.importorskip(package)


# Model, options, parameters and GFLOPs, counted independently from Bello et al. (2019), Tables 3, 4 and 6.
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
    # The baselines. SE of ratio 16 with biases adds C * C / 8 + C + C / 16 to a block of C channels.
    ("resnet34", {}, 21_797_672, 7.328),
    ("resnet50", {}, 25_557_032, 8.178),
    ("resnet101", {}, 44_549_160, 15.603),
    ("resnet152", {}, 60_192_808, 23.027),
    ("aa_wide_resnet28_10", aaconv.GATHER, 36_278_324, 10.429),
    (
        "aa_wide_resnet28_10",
        aaconv.SQUEEZE,
        36_278_324 + sum(4 * C * C // 8 + 68 * C // 16 for C in (160, 320, 640)),
        10.430,
    ),
]


@pytest.mark.parametrize("name, options, parameters, gflops", DETERMINED)
def test_a_model_has_the_papers_size(name, options, parameters, gflops):
    needs("timm")
    model = aaconv.model(name, **options)
    size = model.default_cfg["input_size"][-1]
    found = convention.parameters(model)
    assert (round(found, -3) if parameters % 1000 == 0 else found) == parameters
    # abs: the counts above are rounded to three digits.
    assert aaconv.operations(model, size) / 1e9 == pytest.approx(gflops, abs=6e-4)


def test_the_layers_of_table_9():
    needs("timm")
    model = aaconv.model("aa_resnet50")
    for stage, parameters in (("layer2", 43_128), ("layer3", 89_720), ("layer4", 191_240)):
        layers = [m for m in getattr(model, stage).modules() if isinstance(m, AAConv2d)]
        assert {convention.parameters(m) - convention.parameters(m.conv) for m in layers} == {parameters}


def test_the_operations_of_table_9():
    """Projections count two per multiply-add, QKᵀ and AV one; d_k is 160, d_v a tenth of the channels, rounded to 8."""
    needs("timm")
    calls = convention.calls(aaconv.model("aa_resnet50"), 1, 3, 224, 224)
    for layer, side, channels, dv in (("layer2.1", 14, 128, 8), ("layer3.2", 14, 256, 24), ("layer4.2", 7, 512, 48)):
        N = side * side
        projections, logits, sums = 2 * N * (channels * (2 * 160 + dv) + dv * dv), N * N * 160, N * N * dv
        found = aaconv.attention_operations(calls, f"AAResNet.{layer}.conv2")
        assert found == (projections + logits + sums, projections + logits)


# Independent count of Zhu et al. (2019), Tables 2 and 3: detection and segmentation, in GFLOPs.
COUNTED = {
    ("1111", "1110", "1101", "1100", "1011", "1001"): (281.394, 1112.01),
    ("1010", "1000"): (281.186, 1111.46),
    ("0111", "0110"): (253.587, 813.98),
    ("0101", "0100"): (251.101, 800.66),
    ("0011",): (250.137, 794.35),
    ("0010",): (221.148, 489.43),
    ("0001",): (247.652, 781.03),
    ("deformable",): (213.7, 449.5),
    ("dynamic n=31",): (352.873, 1028.98),
    ("dynamic n=25",): (306.812, 840.31),
    ("dynamic n=19",): (270.621, 692.07),
    ("dynamic n=13",): (244.300, 584.26),
}
BY_SETTING = {setting: giga for settings, giga in COUNTED.items() for setting in settings}
PRINTED = {setting: printed for setting, *printed, _ in empirical.SETTINGS}


def by_formula(setting: str, C: int, H: int, W: int) -> int:
    """Compute by hand what a module adds to a network, in the paper's convention."""
    kind, _, n = setting.partition(" n=")
    N, taps = H * W, int(n or 0) ** 2
    if kind == "deformable":
        return 0
    if kind == "dynamic":
        return N * (2 * C * C + C * C + 16 * C * taps + C * taps)
    e1, e2, e3, e4 = (bit == "1" for bit in kind)
    projections = N * C * C * (2 + (e1 or e2) + (e1 or e3))
    offsets = 2 * int(n) if n else 2 * W - 1 + 2 * H - 1
    table = offsets * C * C if e2 or e4 else 0
    aggregation = N * (taps or N) * C if e1 or e2 or e4 else N * C
    if e1:
        logits = N * (taps or N) * C
    else:
        query_position = N * (2 * int(n) if n else H + W) * C
        logits = query_position * e2 + N * C * e3 + offsets * C * (e4 and not e2)
    return projections + table + logits + aggregation


@pytest.mark.parametrize("shape", [(256, 50, 84), (512, 25, 42), (128, 33, 35)], ids=str)
@pytest.mark.parametrize("setting", PRINTED)
def test_a_module_costs_what_the_paper_charges(setting, shape):
    assert empirical.operations(setting, *shape)[0] == by_formula(setting, *shape)


@pytest.mark.parametrize("task, column, digits", [("detection", 0, 3), ("segmentation", 1, 2)])
def test_the_empirical_study_is_met(task, column, digits):
    baseline = float(empirical.TASKS[task][0])
    increments = {setting: empirical.added(setting, task)[0] for setting in PRINTED}
    for setting, giga in BY_SETTING.items():
        assert round(baseline + increments[setting], digits) == giga[column], setting
    # One figure without attention, which rounds to the printed one, makes all others round to theirs.
    unrounded = empirical.UNROUNDED[task]
    assert round(unrounded, 1) == baseline
    missed = {s for s, printed in PRINTED.items() if round(unrounded + increments[s], 1) != float(printed[column])}
    assert missed == (set() if task == "detection" else {"1010", "1000"})


def test_shortcuts_execute_less_than_is_charged():
    for setting, charged in (("0010", 1_000_000), ("0001", 4_000_000_000)):
        counted, executed = empirical.operations(setting, 256, 50, 84)
        assert executed < counted - charged


@pytest.mark.parametrize(
    "infix, settings",
    [("-attn1111", ["1111"]), ("-attn0010-dcn", ["0010", "deformable"]), ("-attn0100-nk13", ["0100 n=13"])],
)
def test_a_detector_of_ours_has_the_modules_that_are_counted(infix, settings):
    needs("mmdet")
    attended = networks.faster_rcnn(empirical.DETECTOR.format(infix))
    added = convention.executed(attended) - convention.executed(empirical.without("detection"))
    expected = sum(empirical.added(setting, "detection")[1] for setting in settings)
    assert added / 1e9 == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "infix, settings",
    [("attn0110", ["0110"]), ("attn0010-dcn", ["0010", "deformable"]), ("dynamic-nk31", ["dynamic n=31"])],
)
def test_a_segmentor_of_ours_has_the_modules_that_are_counted(infix, settings):
    needs("mmseg")
    attended = networks.segmentor(empirical.SEGMENTOR.format(infix))
    added = convention.executed(attended) - convention.executed(empirical.without("segmentation"))
    expected = sum(empirical.added(setting, "segmentation")[1] for setting in settings)
    assert added / 1e9 == pytest.approx(expected, rel=1e-12)


# Independent count of the paper's translation in GFLOPs; it omits u·k and v·R.
TRANSLATION = {
    "w/o": 1.744, "w/o + deformable": 2.216,
    "1111": 2.715, "1110": 2.715, "1101": 2.715, "1100": 2.715,
    "0111": 2.715, "0110": 2.715, "0101": 2.558, "0100": 2.558,
    "1011 + deformable": 3.187, "1010 + deformable": 2.876, "0011 + deformable": 3.014,
    "0010 + deformable": 2.688, "0001 + deformable": 2.857,
    "0100 n=31": 2.332,
    "dynamic n=31": 2.378, "dynamic n=25": 2.35, "dynamic n=19": 2.32, "dynamic n=13": 2.28,
}  # fmt: skip
# The paper's percentages of operations, from one setting to another.
PERCENTAGES = [
    ("1111", "1011 + deformable", 17.3), ("1110", "1010 + deformable", 5.8), ("1101", "1001 + deformable", 17.3),
    ("1100", "1000 + deformable", 5.8), ("0111", "0011 + deformable", 10.9), ("0110", "0010 + deformable", -1.1),
    ("0101", "0001 + deformable", 11.6), ("0100", "w/o + deformable", -13.5), ("0100 n=31", "dynamic n=31", 1.8),
    ("0100 n=25", "dynamic n=25", 1.4), ("0100 n=19", "dynamic n=19", 1.1), ("0100 n=13", "dynamic n=13", 0.7),
]  # fmt: skip


def bits_of(setting: str) -> list[bool]:
    return [bit == "1" for bit in setting[:4]] if setting[0] in "01" else [False] * 4


def sequence_formula(setting: str, C: int = 512, N: int = 50) -> tuple[int, int]:
    """Compute all 12 self-attention layers by hand in the paper's convention, and the share of u·k and v·R."""
    size = int(setting.partition(" n=")[2] or 0)
    total = 3 * N * C * C if setting.endswith("deformable") else 0
    if setting.startswith("w/o"):
        return 12 * total, 0
    if setting.startswith("dynamic"):
        return 12 * (total + N * (2 * C * C + C * C + 16 * C * size + C * size)), 0
    e1, e2, e3, e4 = bits_of(setting)
    total += N * C * C * (2 + (e1 or e2) + (e1 or e3)) + (size or 2 * N - 1) * C * C * (e2 or e4)
    total += N * (size or N) * C * (e1 + (e2 and not e1)) + N * (size or N if e1 or e2 or e4 else 1) * C
    salient = 0 if e1 else N * C * e3 + (size or N) * C * (e4 and not e2)
    return 12 * (total + salient), 12 * salient


def test_translation_costs_what_the_paper_charges():
    C, N = 512, 50
    rest = 6 * (2 * 8 * N * C * C + 4 * N * C * C + (2 * N - 1) * C * C + 2 * N * N * C)
    for setting, *_ in translation.SETTINGS:
        total, salient = sequence_formula(setting)
        assert translation.operations(setting)[0] == rest + total, setting
        if setting in TRANSLATION:
            digits = len(str(TRANSLATION[setting]).partition(".")[2])
            assert round((rest + total - salient) / 1e9, digits) == TRANSLATION[setting], setting


def test_every_figure_of_translation_but_one_is_met():
    settings = [setting for setting, *_ in translation.SETTINGS]
    assert set(TRANSLATION) < set(settings)
    ours = {setting: translation.operations(setting)[0] / 1e9 for setting in settings}
    missed = {setting for setting, printed, _ in translation.SETTINGS if round(ours[setting], 1) != float(printed)}
    assert missed == {"0100 n=31"}


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


# Independent count of the thesis' Table 4.2: parameters, GFLOPs (None: the table counts them in another way).
LOCAL_BILATERAL = dict(zip("abcdefghij", [
    (265_216, 2.454), (217_560, 2.012), (267_547, 2.475), (274_540, 2.540), (283_864, 2.626), (302_512, 2.797),
    (131_840, 1.217), (150_272, 1.387), (150_272, None), (590_080, 5.438),
]))  # fmt: skip


@pytest.mark.parametrize("entry", local_bilateral.LAYERS, ids=lambda entry: entry[0])
def test_local_bilateral_attention_is_met(entry):
    """The GFLOPs include one per output for the ReLU after every BatchNorm but that of the geometric logits (256)."""
    name, options, _, printed, *_ = entry
    parameters, giga = LOCAL_BILATERAL[name[0]]
    assert convention.parameters(local_bilateral.layer(256, 256, options)) == parameters
    (with_relu, executed), linear = (local_bilateral.operations(options, kind) for kind in ("relu", "none"))
    if giga is not None:
        assert round(with_relu, 3) == giga
    if options is not None:
        normalised = 1 if options.get("shared") else 4 if options.get("content", True) else 3
        assert linear[0] == pytest.approx(with_relu - normalised * 256 * 96 * 96 / 1e9, rel=1e-12)
        assert linear[1] == executed
    if name[0] in "acdefh":
        assert f"{linear[0]:.2f}" != printed


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


@pytest.mark.parametrize("printed, ours, agrees", [("25.8", 25.84, True), ("25.8", 25.86, False), ("600", 600.3, True)])
def test_a_row_agrees_to_the_printed_digits(printed, ours, agrees):
    row = Row("x", "M", printed, ours)
    assert row.agrees is agrees
    assert ("| = |" in markdown([row])) is agrees


def test_an_unknown_paper(capsys):
    with pytest.raises(SystemExit):
        main(["resnext"])
    assert "PAPER must be one of aaconv" in capsys.readouterr().err
