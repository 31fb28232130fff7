"""tools.study findings: the rules that judge claims, the studies and the page."""

from __future__ import annotations

import json
import shlex
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("yaml")

from tools.study import findings
from tools.study.__main__ import main, parse
from tools.study.commands import ROOT, StudyError
from tools.study.rules import CANNOT, MISSING, NOT, SEEN, Sample, difference, outcome
from tools.study.settings import NAMES, Study

FAR, NEAR = Sample((5.0, 6.0, 7.0)), Sample((5.1, 6.1, 6.9))


def seeded(*values):
    return Sample(values, seeds=tuple(range(len(values))))


@pytest.mark.parametrize(
    ("rule", "one", "other", "p", "verdict", "half"),
    [
        ("above", seeded(5.0, 6.0, 7.0), seeded(1.0, 2.1, 2.9), None, SEEN, 4.303 * 0.1 / 3**0.5),  # 4 ± 0.1
        ("above", seeded(1.0, 2.1, 2.9), seeded(5.0, 6.0, 7.0), None, NOT, 0.25),
        ("above", seeded(5.0, 6.0, 7.0), seeded(4.0, 6.0, 5.0), None, CANNOT, 4.303 / 3**0.5),  # 1, 0, 2
        ("above", FAR, Sample((1.0, 2.0, 3.0)), None, SEEN, 2.776 * (2 / 3) ** 0.5),  # no seeds: Welch, 4 degrees
        ("above", Sample((5.0, 6.0)), Sample((2.0, 4.0)), None, CANNOT, 12.706 * 1.25**0.5),  # one degree of freedom
        ("above", Sample((30.0,)), Sample((10.0, 11.0, 12.0)), None, SEEN, 4.303 * (4 / 3) ** 0.5),
        ("above", Sample((15.0,)), Sample((10.0, 11.0, 12.0)), None, CANNOT, 4.97),
        ("above", Sample((30.0,)), Sample((10.0,)), None, CANNOT, None),  # one seed, whose variation is unknown
        ("above", Sample((30.0,), 3.0), Sample((25.0,), 3.0), None, SEEN, 18**0.5),
        ("above", Sample((30.0,), 3.0), Sample((26.0,), 3.0), None, CANNOT, 18**0.5),
        ("above", Sample((30.0,), 3.0), Sample((26.0,), 3.0), 0.001, SEEN, None),
        ("above", Sample((26.0,), 3.0), Sample((30.0,), 3.0), 0.001, NOT, None),
        ("above", Sample((2.0,), exact=True), Sample((1.9,), exact=True), None, SEEN, None),
        ("as_good", seeded(5.0, 5.1, 5.2), seeded(5.5, 5.6, 5.7), None, SEEN, None),  # behind by 0.5 in each pair
        ("as_good", seeded(5.0, 6.0, 7.0), seeded(5.0, 7.0, 7.0), None, CANNOT, 4.303 / 3),
        ("as_good", seeded(1.0, 2.0, 3.0), seeded(5.0, 6.0, 7.1), None, NOT, 0.14),
        ("as_good", Sample((25.0,), 3.0), Sample((28.0,), 3.0), 0.001, NOT, None),
        ("as_good", Sample((30.0,)), Sample((30.0,)), None, CANNOT, None),
    ],
)
def test_rules(rule, one, other, p, verdict, half):
    judged = outcome({rule: [["a", "b"]], "p": p}, {"a": one, "b": other})
    assert judged.verdict == verdict
    assert f"{one.mean - other.mean:+.1f}" in judged.result
    assert half is None or f"± {half:.1f} of" in judged.why


def test_pairs_are_of_equal_seeds():
    one, other = Sample((1.0, 5.0, 3.0), seeds=(0, 2, 1)), Sample((2.9, 0.9, 9.0), seeds=(1, 0, 7))
    shift, half, _ = difference(one, other)
    assert shift == pytest.approx(0.1)
    assert half == pytest.approx(0, abs=1e-9)


def test_a_margin_of_a_claim():
    samples = {"a": seeded(5.0, 5.1, 5.2), "b": seeded(5.5, 5.6, 5.7)}
    for margin, verdict in ((0.4, NOT), (0.6, SEEN)):
        assert outcome({"as_good": [["a", "b"]], "margin": margin}, samples).verdict == verdict


def test_every_comparison_of_a_claim_counts():
    samples = {"a": FAR, "b": Sample((1.0, 2.0, 3.0)), "c": NEAR}
    for pairs, verdict in (("ab ab", SEEN), ("ab ac", CANNOT), ("ab ac ba", NOT)):
        assert outcome({"above": [list(pair) for pair in pairs.split()]}, samples).verdict == verdict


def test_a_gain_above_another():
    """From a to b 3.0, 3.1, 2.9; from b to c 1.0, 0.9, 1.1: b is above the mean of a and c by half the difference."""
    samples = {"a": seeded(1.0, 2.0, 3.0), "b": seeded(4.0, 5.1, 5.9), "c": seeded(5.0, 6.0, 7.0)}
    samples["c"] = Sample((*samples["c"].values, 9.0), seeds=(*samples["c"].seeds, 99))  # a seed that others lack
    judged = outcome({"above": [["b", ["a", "c"]]]}, samples)
    assert judged.verdict == SEEN
    assert judged.differences[0] == pytest.approx((1.0, 4.303 * 0.1 / 3**0.5), abs=1e-3)
    assert judged.result == "`b` 5.0 ± 1.0, mean of `a` and `c` 4.0 ± 1.0: +1.0"
    assert outcome({"above": [[["a", "c"], "b"]]}, samples).verdict == NOT


def test_differences_of_differences(tmp_path):
    """A study may have several values: of long texts, and how far long ones are behind short ones."""
    rows = [
        {"setting": setting, "seed": seed, "bleu_by_length": {"short": 30 + seed, "long": long + 2 * seed}}
        for setting, long in (("attention", 25), ("fixed", 9))
        for seed in range(3)
    ]
    value = {"/long": "bleu_by_length.long", "/long-short": "long_minus_short"}
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/toy.json").write_text(json.dumps({"results": rows}))
    record = findings.Record("fixed-vector", {"file": "toy.json", "value": value, "steps": []}, tmp_path)
    assert record.samples["attention/long-short"] == Sample((-5, -4, -3), seeds=(0, 1, 2))
    for suffix in value:
        assert outcome({"above": [[f"attention{suffix}", f"fixed{suffix}"]]}, record.samples).verdict == SEEN


def test_claims_and_their_studies():
    """Claims name samples, steps are commands that are understood, and needed samples are the studies' settings."""
    records, claims = findings.load()
    assert {claim["study"] for claim in claims if "study" in claim} == set(records)
    for claim in claims:
        if "study" in claim:
            assert findings.judge(claim, records).verdict != MISSING, claim["claim"]
    for name, record in records.items():
        content = record.content
        assert record.samples
        assert record.again is None or record.again.samples
        for step in content["steps"]:
            command, *words = shlex.split(step["run"])
            if command == "tools.study":
                options, study = parse(words)
                if "product" in content:
                    assert Path(content["product"]) == options.output / f"{study.name}.json"
        if name in NAMES and content.get("resumed"):
            prefix = "crops/" if name == "augmented" else ""
            assert content["needed"] == [f"{prefix}{setting}" for setting in Study(name).settings]


def test_the_page_is_that_of_the_recorded_figures():
    assert findings.page(*findings.load()) == (ROOT / "benchmarks/findings.md").read_text()


def test_the_figure_has_every_tested_claim(tmp_path):
    pytest.importorskip("matplotlib")
    records, claims = findings.load()
    outcomes = [findings.judge(claim, records) for claim in claims]
    findings.draw_claims(claims, outcomes, tmp_path / "claims.svg")
    drawn, kept = (
        [text for text in ElementTree.parse(file).getroot().itertext() if text.strip()]
        for file in (tmp_path / "claims.svg", ROOT / "benchmarks/findings.svg")
    )
    assert drawn == kept
    tested = [claim for claim, judged in zip(claims, outcomes) if judged.differences]
    tested = [claim["claim"].replace("`", "") for claim in tested if "/operations" not in str(claim)]
    assert sum(text.removesuffix(" (other data)") in tested for text in drawn) == len(tested) > 40


def test_samples_measured_by_hand_are_those_of_the_page():
    for record in findings.load()[0].values():
        text = record.file.read_text()
        for values in record.content.get("samples", {}).values():
            assert all(f"{number:g}" in text for number in values)


def test_findings_run_resume_and_collect(tmp_path, monkeypatch, capsys):
    """A step whose product exists is not repeated, results of another machine are, and errors are reported."""
    ran: list[list[str]] = []
    rows = [{"setting": s, "seed": n, "values": [n], "multiply_adds": 1, "options": []} for s in "ab" for n in range(3)]

    def run(command, arguments, log):
        ran.append([command, *arguments])
        if "bad" in arguments:
            raise StudyError("bad ended with status 1")
        (tmp_path / arguments[0]).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / arguments[0]).write_text(json.dumps({"results": rows}))

    steps = [{"run": "tools.datasets.one work/made", "made": "work/made"}, {"run": "tools.study work/sharing.json"}]
    good = {"data": "digits", "file": "toy.json", "minutes": 5, "sample": "{setting}", "value": "values",
            "steps": steps, "product": "work/sharing.json", "needed": ["a", "b"], "resumed": True}  # fmt: skip
    bad = {**good, "file": "bad.json", "steps": [{"run": "tools.study bad"}], "product": "work/no.json"}
    records = {name: findings.Record(name, study, tmp_path) for name, study in (("good", good), ("bad", bad))}
    claim = {"claim": "a beats b", "document": "Thesis", "place": "Table 9", "study": "good", "above": [["a", "b"]]}
    monkeypatch.setattr(findings, "run", run)
    monkeypatch.setattr(findings, "load", lambda root=None: (records, [claim]))
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/toy.json").write_text(json.dumps({"results": rows[:1]}))
    assert not records["good"].finished
    assert records["good"].complete == {"a/operations": Sample((1e-6,), exact=True)}
    assert "python -m tools.study findings --studies good" in findings.judge(claim, records).why
    assert findings.carry_out_all(["good", "bad"], 1, tmp_path) == ["bad: bad ended with status 1"]
    assert json.loads((tmp_path / "work/a-0/result.json").read_text()) == rows[0]
    assert [words[0] for words in ran] == ["tools.datasets.one", "tools.study", "tools.study"]
    assert records["good"].finished
    assert "| a beats b | Thesis, Table 9 |" in (tmp_path / "benchmarks/findings.md").read_text()
    findings.carry_out_all(["good"], 1, tmp_path)
    assert [words[0] for words in ran][3:] == ["tools.study"]
    (tmp_path / "work_dirs/findings/good-1.unfinished").touch()  # by an interrupted run
    findings.carry_out_all(["good"], 1, tmp_path)
    assert [words[0] for words in ran][4:] == ["tools.datasets.one", "tools.study"]
    assert "good: finished" in capsys.readouterr().out
    (tmp_path / "benchmarks/toy-again.json").write_text(
        json.dumps({"results": [{**r, "seed": r["seed"] + 3} for r in rows]})
    )
    again = findings.Record(
        "good", {**good, "again": {"file": "toy-again.json", "run": "tools.study x --seeds 3 4 5"}}, tmp_path
    )
    page = findings.page({"good": again}, [claim])
    assert "**again with other seeds**: +0.0 ± 0.0, cannot be seen at this size |" in page
    assert "<br>again: `python -m tools.study x --seeds 3 4 5` |" in page
    assert "[toy.json](toy.json), [toy-again.json](toy-again.json) |" in page


@pytest.mark.parametrize(("lead", "verdict"), [(4.0, SEEN), (0.0, CANNOT), (-4.0, CANNOT)])
def test_a_claim_is_seen_if_a_repetition_sees_it(lead, verdict, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    for file, a in (("first", 4.0), ("second", lead)):
        rows = [
            {"setting": setting, "seed": seed, "top1": value + seed + 0.1 * seed * (setting == "a")}
            for setting, value in (("a", a), ("b", 0.0))
            for seed in range(3)
        ]
        (tmp_path / f"benchmarks/{file}.json").write_text(json.dumps({"results": rows}))
    content = {"file": "first.json", "value": "top1", "steps": [], "again": {"file": "second.json", "run": "x"}}
    claim = {"study": "toy", "above": [["a", "b"]]}
    judged = findings.judge(claim, {"toy": findings.Record("toy", content, tmp_path)})
    assert judged.verdict == verdict
    assert f"**again with other seeds**: {lead + 0.1:+.1f} ± 0.2, " in judged.why


def test_findings_run_in_the_repository_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["findings"])
    assert f"studies run in the repository's root, {ROOT}, not in" in capsys.readouterr().err
    assert main(["findings", "--list"]) == 0
    assert "cross-attention" in capsys.readouterr().out
