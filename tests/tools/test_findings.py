"""tools.findings: rules on samples, claims and their studies, the page, and the files of a run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tools.findings import __main__ as command
from tools.findings import studies, values
from tools.findings.claims import CLAIMS, Claim
from tools.findings.page import markdown, outcome
from tools.findings.rules import CANNOT, MISSING, NOT, SEEN, Above, AsGood, Beyond, Every
from tools.findings.studies import STUDIES, Step, Study
from tools.findings.values import Sample
from tools.study import ROOT, StudyError

ONE = Sample((30.0,))


def bleu(value: float, interval: float = 3.0) -> Sample:
    return Sample((value,), interval)


@pytest.mark.parametrize(
    ("high", "low", "effect", "p", "verdict", "why"),
    [
        (Sample((5.0, 6.0, 7.0)), Sample((1.0, 2.0, 4.9)), None, None, SEEN, "larger than the variation of seeds"),
        (Sample((1.0, 2.0, 4.9)), Sample((5.0, 6.0, 7.0)), None, None, NOT, "the opposite order"),
        (Sample((5.0, 6.0, 7.0)), Sample((1.0, 2.0, 5.1)), None, None, CANNOT, "within chance, ±"),
        (Sample((5.0, 6.0, 7.0)), Sample((5.1, 6.1, 6.9)), 9.0, None, NOT, "excludes the document's +9.0"),
        (Sample((5.0, 6.0, 7.0)), Sample((5.1, 6.1, 6.9)), 0.5, None, CANNOT, "within chance, ± 1.6"),
        (Sample((5.0, 6.0)), Sample((1.0, 2.0)), None, None, CANNOT, "chance"),  # two seeds are not enough
        (ONE, Sample((10.0, 11.0, 12.0)), None, None, SEEN, "(one seed)"),  # beyond 4.97 deviations
        (Sample((15.0,)), Sample((10.0, 11.0, 12.0)), None, None, CANNOT, "± 5.0 (one seed)"),
        (ONE, Sample((10.0,)), 5.0, None, CANNOT, "one seed, whose variation is unknown"),
        (bleu(30), bleu(25), None, None, SEEN, "(one seed)"),  # 4.24 by both intervals
        (bleu(30), bleu(26), None, None, CANNOT, "± 4.2"),
        (bleu(30), bleu(26), None, 0.001, SEEN, "p = 0.001 (one seed)"),
        (bleu(26), bleu(30), None, 0.001, NOT, "p = 0.001"),
        (bleu(26), bleu(30), None, 0.2, CANNOT, "± 4.2"),
        (Sample((2.0,), exact=True), Sample((1.9,), exact=True), None, None, SEEN, "larger"),
        (Sample((1.9,), exact=True), Sample((2.0,), exact=True), None, None, NOT, "the opposite order"),
    ],
)
def test_above(high, low, effect, p, verdict, why):
    found = Above("a", "b", effect, p)({"a": high, "b": low})
    assert found.verdict == verdict
    assert why in found.why
    assert f"{high.mean - low.mean:+.1f}" in found.result


@pytest.mark.parametrize(
    ("one", "other", "p", "verdict"),
    [
        (Sample((5.0, 5.1, 5.2)), Sample((5.1, 5.2, 5.3)), None, SEEN),
        (Sample((5.0, 6.0, 7.0)), Sample((5.1, 6.1, 7.1)), None, CANNOT),
        (Sample((1.0, 2.0, 3.0)), Sample((5.1, 6.1, 7.1)), None, NOT),
        (Sample((5.1, 6.1, 7.1)), Sample((1.0, 2.0, 3.0)), None, SEEN),  # better
        (Sample((5.0, 5.1, 5.2)), Sample((5.5, 5.6, 5.7)), None, SEEN),  # different, but by less than the margin
        (bleu(28), bleu(28), None, CANNOT),
        (bleu(25), bleu(28), 0.001, NOT),
        (ONE, ONE, None, CANNOT),
    ],
)
def test_as_good(one, other, p, verdict):
    assert AsGood("a", "b", 1.0, p)({"a": one, "b": other}).verdict == verdict


def test_every():
    samples = {"a": Sample((5.0, 6.0, 7.0)), "b": Sample((1.0, 2.0, 3.0)), "c": Sample((4.0, 6.0, 7.0))}
    above, close, below = Above("a", "b"), Above("a", "c"), Above("b", "a")
    assert Every((above, above))(samples).verdict == SEEN
    assert Every((above, close))(samples).verdict == CANNOT
    found = Every((above, close, below))(samples)
    assert found.verdict == NOT
    assert found.why == below(samples).why
    assert found.result.count("; ") == 2


def test_samples_in_words():
    assert str(Sample((1.0, 2.0, 3.0))) == "2.0 ± 1.0"
    assert str(bleu(27.91, 3.21)) == "27.9 (± 3.2 of the texts)"
    assert str(ONE) == "30.0"
    assert str(Sample((415.88,), exact=True)) == "415.9"


def names(rule) -> list[str]:
    """Return the samples that a rule reads."""
    if isinstance(rule, Every):
        return [name for part in rule.rules for name in names(part)]
    return (
        [] if isinstance(rule, Beyond) else [v for k, v in vars(rule).items() if k in ("high", "low", "one", "other")]
    )


def simple(rule) -> list:
    return list(rule.rules) if isinstance(rule, Every) else [rule]


def test_claims():
    for claim in CLAIMS:
        assert "|" not in claim.text + claim.place + claim.note
        if isinstance(claim.rule, Beyond):
            assert not claim.study, claim.text
            continue
        study = STUDIES[claim.study]
        known = set(study.samples()) | set(study.needed) | {f"{name}/operations" for name in study.needed}
        assert set(names(claim.rule)) <= known, claim.text
        for rule in simple(claim.rule):
            if p := getattr(rule, "p", None):
                assert f"p = {p}" in (ROOT / "benchmarks" / study.page).read_text(), claim.text


def test_effects_are_the_printed_differences():
    """Check the claims whose brackets contain two figures."""
    checked = 0
    for claim in CLAIMS:
        printed = re.fullmatch(r"(?:.* )?\(?([\d.]+)(?:, | to | from )([\d.]+)\)", claim.text[claim.text.rfind("(") :])
        if printed and isinstance(claim.rule, Above) and claim.rule.effect is not None:
            first, second = map(float, printed.groups())
            assert claim.rule.effect == pytest.approx(abs(first - second), abs=0.011), claim.text
            checked += 1
    assert checked > 15


@pytest.mark.parametrize("name", STUDIES)
def test_studies(name):
    study = STUDIES[name]
    assert any(claim.study == name for claim in CLAIMS)
    assert bool(study.product) != bool(study.page)
    if study.page:
        assert (ROOT / "benchmarks" / study.page).is_file()
        assert study.samples()
    for step in study.steps:
        module = step.words.split()[0]
        assert module in ("mmdet", "mmseg") or (ROOT / f"{module.replace('.', '/')}.py").is_file()
        for word in step.words.replace("'", "").split():
            assert not word.startswith("configs/") or (ROOT / word).is_file()


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.product])
def test_commands_are_understood(name):
    pytest.importorskip("timm")
    pytest.importorskip("skimage")
    *_, step = STUDIES[name].steps
    module, *arguments = shlex.split(step.words)
    options, _ = importlib.import_module(module).parse(arguments)
    assert (ROOT / STUDIES[name].product).parent == ROOT / options.output


def test_needed_settings_are_those_of_the_studies():
    pytest.importorskip("timm")
    pytest.importorskip("skimage")
    pytest.importorskip("sacrebleu")
    from tools import augmented_study, digits_study, translation_study

    for name, study in digits_study.STUDIES.items():
        assert STUDIES[name].needed == tuple(study.settings)
    assert STUDIES["augmented"].needed == tuple(f"crops/{name}" for name in augmented_study.SETTINGS)
    assert STUDIES["translation-paddings"].needed == tuple(translation_study.STUDIES["paddings"].settings)
    assert STUDIES["cross-attention"].needed == tuple(translation_study.STUDIES["cross"].settings)


def write(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_readers(tmp_path):
    rows = [{"setting": "a", "seed": n, "values": [1.0, 30.0 + n], "multiply_adds": 2_500_000} for n in range(3)]
    found = values.digits(write(tmp_path / "digits.json", {"results": rows}))
    assert found["a"].values == (30.0, 31.0, 32.0)
    assert found["a/operations"] == Sample((2.5,), exact=True)
    rows = [{"set": "crops", "task": "four", "setting": "a", "top1": [1.0, 80.0], "mAP": [0.1, 0.5]}]
    path = write(tmp_path / "top1.json", {"results": rows})
    assert values.classifiers(path) == {"crops/a": Sample((80.0,))}
    assert values.clips(path) == {"four/a": Sample((80.0,))}
    assert values.detection(path) == {"a": Sample((50.0,))}
    rows = [
        {"setting": name, "bleu": value, "bleu_interval": 2.0} for name, value in (("a", 1.0), ("a", 2.0), ("b", 3.0))
    ]
    found = values.translation(write(tmp_path / "bleu.json", {"results": rows}))
    assert found == {"a": Sample((1.0, 2.0)), "b": Sample((3.0,), 2.0)}
    found = values.translation_by_part(write(tmp_path / "parts.json", {"facts": {}, "4 updates": rows[2:]}))
    assert found == {"4 updates/b": Sample((3.0,), 2.0)}


def test_what_was_measured_before():
    samples = {name: STUDIES[name].samples() for name in ("classifier", "segmentation", "captioning", "translation")}
    assert samples["classifier"]["photograph crops/plain"].values == (84.55, 81.64, 84.18)
    assert samples["classifier"]["digits/augmented"].mean == pytest.approx(98.87, abs=0.01)
    assert samples["segmentation"]["fcn"].values == (37.6,)
    assert samples["segmentation"]["lba"].values == (19.5,)
    assert len(samples["captioning"]["eta/self-critical"].values) == 3
    assert samples["translation"]["4000 updates/1111"].interval == pytest.approx(3.5, abs=0.05)


def test_page():
    text = markdown()
    assert len([line for line in text.splitlines() if line.startswith("| ") and "**" in line]) == len(CLAIMS)
    for claim in CLAIMS:
        assert f"| {claim.text} | {claim.document}, {claim.place} |" in text
    widths = {len(line.split(" | ")) for line in text.split("## Studies")[0].splitlines() if line.startswith("| ")}
    assert widths == {6}


def test_what_is_missing_is_named(tmp_path):
    claim = Claim("a beats b", "Thesis", "Table 9", "sharing", Above("j-conv", "h-shared"))
    found = outcome(claim, {"j-conv": ONE})
    assert found.verdict == MISSING
    assert "`h-shared` is missing: `python -m tools.findings --studies sharing`" in found.why
    assert "not measured yet" in markdown(tmp_path)


@pytest.fixture
def toy(tmp_path, monkeypatch) -> list[list[str]]:
    """Create two studies whose commands write their figures, and a record of the commands that ran."""
    ran: list[list[str]] = []

    def run(name, arguments, log):
        ran.append([name, *arguments])
        if "bad" in arguments:
            raise StudyError("bad ended with status 1")
        product = arguments[0]
        rows = [
            {"setting": s, "seed": n, "values": [n + ("ab".find(s))], "multiply_adds": 1}
            for s in "ab"
            for n in (1, 2, 3)
        ]
        write(tmp_path / product, {"results": rows})

    steps = (Step("tools.first work/made.pth", "work/made.pth"), Step("tools.second work/out.json"))
    short = Study("digits", "toy.json", values.digits, steps, 5, "work/out.json", ("a", "b"))
    long = dataclasses.replace(
        short, file="long.json", minutes=9, steps=(Step("tools.third bad"),), product="work/no.json"
    )
    monkeypatch.setattr(studies, "run", run)
    for module in (studies, command):
        monkeypatch.setattr(module, "STUDIES", {"long": long, "short": short})
    monkeypatch.setattr("tools.findings.page.STUDIES", {**STUDIES, "long": long, "short": short})
    (tmp_path / "benchmarks").mkdir()
    return ran


def test_run(toy, tmp_path, capsys):
    assert studies.missing(tmp_path) == ["short", "long"]
    assert "missing: 2 studies, about 14 minutes" in command.listing(tmp_path)
    errors = command.carry_out_all(["short", "long"], 1, tmp_path)
    assert errors == ["long: bad ended with status 1"]
    assert [words[0] for words in toy] == ["tools.first", "tools.second", "tools.third"]
    assert studies.missing(tmp_path) == ["long"]
    assert "short: finished" in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / "benchmarks").iterdir()) == ["findings.md", "toy.json"]
    assert "| short | digits |" in (tmp_path / "benchmarks/findings.md").read_text()
    command.carry_out_all(["short"], 2, tmp_path)  # the first step has written its file
    assert [words[0] for words in toy][3:] == ["tools.second"]


def test_collected_figures_are_reused(toy, tmp_path):
    """One seed of ``a`` is there; a run elsewhere finds its result, and the page does not count it as measured."""
    row = {"setting": "a", "seed": 1, "values": [7.0], "multiply_adds": 1}
    study = dataclasses.replace(studies.STUDIES["short"], folder="{setting}-{seed}")
    studies.STUDIES["short"] = study
    write(tmp_path / study.product, {"results": [row]})
    studies.collect(study, tmp_path)
    assert study.samples(tmp_path)["a"] == Sample((7.0,))
    assert "a" not in study.complete(tmp_path)
    assert not study.finished(tmp_path)
    shutil.rmtree(tmp_path / "work")
    studies.restore(study, tmp_path)
    kept = tmp_path / "work/a-1/result.json"
    assert json.loads(kept.read_text()) == row
    kept.write_text("own")
    studies.restore(study, tmp_path)  # what is there stays
    assert kept.read_text() == "own"
    studies.carry_out("short", tmp_path)
    assert study.finished(tmp_path)


def test_a_study_without_figures_is_an_error(toy, tmp_path):
    (tmp_path / "work").mkdir()
    study = dataclasses.replace(studies.STUDIES["short"], product="work/other.json")
    studies.STUDIES["short"] = study
    with pytest.raises(StudyError, match=r"short: its last command wrote no work/other\.json"):
        studies.carry_out("short", tmp_path)
    assert not list((tmp_path / "benchmarks").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--studies", "translation"], "--studies must be among cross-attention, translation-paddings"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
        (["--list", "--write"], "not allowed with argument"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_it_runs_in_the_repository_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command.main([])
    assert f"studies run in the repository's root, {ROOT}, not in" in capsys.readouterr().err
    assert command.main(["--list"]) == 0
    assert "cross-attention" in capsys.readouterr().out
