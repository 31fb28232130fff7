"""tools.score_compounds: BLEU by its definition, perl's substitution, and the output of fairseq-generate."""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
from collections import Counter

import pytest

pytest.importorskip("sacrebleu")

from tools import score_compounds as tool

SENTENCES = [
    ("das Ost-West-Projekt begann .", "das Ost-West-Projekt begann heute ."),
    ("ein a-b-c - und ein Satz , der lang genug ist", "ein a-b-d - und ein Satz , der lang genug war"),
    ("kein Kompositum hier , nur Wörter", "kein Kompositum hier , nur die Wörter"),
]


def generated(*, detokenised=False, done=True, nbest=1) -> str:
    """Format output like fairseq-generate: sentences out of order, the best hypothesis first."""
    lines = ["2026-01-01 | INFO | fairseq_cli.generate | loading"]
    for number in (2, 0, 1):
        hypothesis, reference = SENTENCES[number]
        plain = [
            text.replace(" .", ".").replace(" ,", ",") if detokenised else text for text in (hypothesis, reference)
        ]
        lines += [f"S-{number}\ta source", f"T-{number}\t{plain[1]}"]
        for rank in range(nbest):
            wrong = " falsch" * rank
            lines += [f"H-{number}\t-0.5\t{hypothesis}{wrong}", f"D-{number}\t-0.5\t{plain[0]}{wrong}"]
            lines += [f"P-{number}\t-0.1 -0.2"]
    lines += ["Generate test with beam=5: BLEU4 = 1.00, 2/3/4/5 (BP=1)"] if done else []
    return "\n".join(lines) + "\n"


def by_definition(hypotheses: list[str], references: list[str]) -> float:
    """Compute the BLEU of Papineni et al. (2002) over tokens, in percent."""
    matched, total = [0] * 4, [0] * 4
    for hypothesis, reference in zip(hypotheses, references):
        h, r = hypothesis.split(), reference.split()
        for n in range(4):
            ours, theirs = (Counter(tuple(x[i : i + n + 1]) for i in range(len(x) - n)) for x in (h, r))
            matched[n] += sum(min(count, theirs[gram]) for gram, count in ours.items())
            total[n] += sum(ours.values())
    if 0 in matched:
        return 0.0
    lengths = [sum(len(line.split()) for line in lines) for lines in (hypotheses, references)]
    penalty = min(0.0, 1 - lengths[1] / lengths[0])
    return 100 * math.exp(penalty + sum(math.log(m / t) for m, t in zip(matched, total)) / 4)


def test_both_figures_are_bleu_by_its_definition():
    hypotheses, references = map(list, zip(*SENTENCES))
    figures = tool.scores(tool.read(generated()))
    assert figures["bleu"] == pytest.approx(by_definition(hypotheses, references))
    split = [[tool.split_compounds(line) for line in lines] for lines in (hypotheses, references)]
    assert figures["bleu_compounds_split"] == pytest.approx(by_definition(*split))
    assert figures["bleu_compounds_split"] != pytest.approx(figures["bleu"], abs=0.5)
    assert figures["sentences"] == 3
    assert "tok:13a" in figures["signature"]
    assert not figures["detokenised"]


def test_without_a_common_word_of_four_the_figure_is_0():
    """There is no smoothing."""
    assert tool.token_bleu(["ein Satz ohne Ende"], ["ein Satz mit Ende"]).score == 0


@pytest.mark.parametrize(
    "line, expected",
    [
        ("Ost-West-Projekt", "Ost ##AT##-##AT## West ##AT##-##AT## Projekt"),
        ("a-b-c", "a ##AT##-##AT## b-c"),
        ("a - b", "a - b"),
        ("-x y-", "-x y-"),
        ("a--b", "a ##AT##-##AT## -b"),
        ("a @-@ b c-d", "a @-@ b c ##AT##-##AT## d"),
        ("a ##AT##-##AT## b", "a ##AT##-##AT## b"),
        ("über-all", "über ##AT##-##AT## all"),
        ("", ""),
    ],
)
def test_compounds(line, expected):
    assert tool.split_compounds(line) == expected


@pytest.mark.skipif(shutil.which("perl") is None, reason="perl is not installed")
def test_the_rule_is_perls():
    draw = random.Random(0)
    lines = ["".join(draw.choices("ab--  .ü", k=20)) for _ in range(200)]
    script = r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"
    command = ["perl", "-CSD", "-ple", script]
    result = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    assert [tool.split_compounds(line) for line in lines] == result.stdout.removesuffix("\n").split("\n")


def test_the_best_of_several_hypotheses():
    assert tool.read(generated(nbest=3)) == tool.read(generated())


def test_the_command(tmp_path, capsys):
    log, scores = tmp_path / "generate.txt", tmp_path / "scores.json"
    log.write_text(generated(), encoding="utf-8")
    assert tool.main([str(log), "--json", str(scores)]) == 0
    printed = capsys.readouterr().out
    figures = json.loads(scores.read_text(encoding="utf-8"))
    for figure in (figures["bleu"], figures["bleu_compounds_split"], figures["sacrebleu"]):
        assert f"{figure:.2f}" in printed
    assert "3 sentences" in printed
    assert "not detokenised" in printed


def test_detokenised_text_needs_tokens_to_compare_with(tmp_path, capsys):
    log, reference = tmp_path / "generate.txt", tmp_path / "test.de"
    log.write_text(generated(detokenised=True), encoding="utf-8")
    reference.write_text("".join(f"{line}\n" for _, line in SENTENCES), encoding="utf-8")
    assert tool.main([str(log)]) == 0
    printed = capsys.readouterr().out
    assert "need --reference" in printed
    assert "not detokenised" not in printed
    assert tool.main([str(log), "--reference", str(reference)]) == 0
    expected = tool.scores(tool.read(generated()))
    assert f"{expected['bleu_compounds_split']:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no line H-"),
        (generated(done=False), "does not end with the line 'Generate .* with beam='"),
        (generated().replace("H-1\t", "X-1\t"), "lacks 1 of 3 sentences, the first is H-1"),
        (generated().replace("T-", "X-"), "has no line T-"),
        (generated().replace("Wörter", "Wör@@ ter"), "fairseq-generate needs --remove-bpe; got 'kein"),
    ],
)
def test_bad_output(text, message, tmp_path, capsys):
    log = tmp_path / "generate.txt"
    log.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        tool.read(text)
    assert tool.main([str(log)]) == 2
    assert capsys.readouterr().err.startswith("score_compounds: ")


def test_bad_files(tmp_path, capsys):
    assert tool.main([str(tmp_path / "nowhere.txt")]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    log, reference = tmp_path / "generate.txt", tmp_path / "test.de"
    log.write_text(generated(), encoding="utf-8")
    reference.write_text("one\n", encoding="utf-8")
    assert tool.main([str(log), "--reference", str(reference)]) == 2
    assert "must have a line for each of the 3 sentences, got 1" in capsys.readouterr().err
