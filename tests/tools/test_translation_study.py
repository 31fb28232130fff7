"""tools.translation_study with fairseq's commands on a toy language: German is English spelled backwards."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

import pytest

pytest.importorskip("fairseq")
pytest.importorskip("sacrebleu")
pytest.importorskip("sentencepiece")

from attn_plugins.modules.alignment_attention import ALIGNMENT_SCORES
from tools import translation_study as study
from tools.datasets import gettext_corpus
from tools.datasets.gettext_corpus import write_lines, write_pieces

WORDS = "the a cat dog bird sees likes finds red blue small big house tree book on in under".split()
COUNTS = {"train": 120, "valid": 10, "test": 9}
SETTINGS = ("cross-0111", "none")
SHORT = "--max-update 6 --warmup-updates 2 --max-tokens 300"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "corpus"
    folder.mkdir()
    draw = random.Random(0)
    for part, count in COUNTS.items():
        english = [draw.choices(WORDS, k=2 + i % 6) for i in range(count)]
        write_lines(folder / f"{part}.en", (" ".join(line) for line in english))
        write_lines(folder / f"{part}.de", (" ".join(word[::-1] for word in line) for line in english))
    recipe = {"languages": ["en", "de"], "pairs": COUNTS, "bpe": write_pieces(folder, ("en", "de"), 70)}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="module")
def output(corpus, tmp_path_factory) -> Path:
    """Run two settings, one of them after an interruption."""
    folder = tmp_path_factory.mktemp("study") / "out"
    (folder / "none").mkdir(parents=True)
    (folder / "none" / "checkpoint_last.pt").write_text("half a file")
    assert study.main([str(corpus), str(folder), "--train", SHORT, "--settings", *SETTINGS]) == 0
    return folder


def again(corpus: Path, output: Path, *arguments: str) -> int:
    return study.main([str(corpus), str(output), *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_setting(output, corpus, name):
    result = json.loads((output / name / "result.json").read_text())
    assert result["updates"] == 6
    assert result["tokens"] > 6 * 50
    assert result["valid_ppl"] > 1
    assert 0 <= result["bleu"] <= 100
    assert 0 <= result["chrf"] <= 100
    assert result["options"][-2:] == study.STUDIES["attention"].settings[name].split()[-2:]
    hypotheses = (output / name / "hypotheses.txt").read_text().split("\n")[:-1]
    assert len(hypotheses) == COUNTS["test"]
    assert not any("▁" in line for line in hypotheses)
    references = (corpus / "test.de").read_text().split("\n")[:-1]
    assert study.score(hypotheses, references)["chrf"] == result["chrf"]


@pytest.mark.slow
def test_options_reach_the_model(output):
    full, without = (json.loads((output / name / "result.json").read_text())["parameters"] for name in SETTINGS)
    bits_1111 = 5 * 64 * 64 + 4 * 64  # query, key, value, position and output; u, v and the biases of the last two
    assert full - without == 4 * (bits_1111 + 2 * 64)  # in 4 layers, pre-norm


@pytest.mark.slow
def test_table(output):
    table = (output / "attention.md").read_text()
    rows = [line.split(" | ") for line in table.split("\n") if line.startswith(("| cross", "| none"))]
    assert [row[0].strip("| ") for row in rows] == list(SETTINGS)
    assert all(re.fullmatch(r"\d+\.\d ± \d+\.\d", row[4]) for row in rows)
    raw = json.loads((output / "attention.json").read_text())
    assert [row["setting"] for row in raw["results"]] == list(SETTINGS)
    assert "torch" in raw["facts"]
    assert "--max-update 6" in raw["common"]
    assert "version:" in raw["results"][0]["signatures"]["BLEU"]


@pytest.mark.slow
def test_finished_settings_are_kept(output, corpus, capsys):
    files = [file for name in SETTINGS for file in (output / name).iterdir()]
    times = [file.stat().st_mtime_ns for file in files]
    (output / "attention.md").unlink()
    assert again(corpus, output, "--train", SHORT, "--settings", "none") == 0
    assert "none: already done" in capsys.readouterr().out
    assert [file.stat().st_mtime_ns for file in files] == times
    assert (output / "attention.md").read_text().count("\n| ") == 3  # header and both settings


@pytest.mark.slow
def test_other_options_are_refused(output, corpus, capsys):
    assert again(corpus, output, "--settings", "none") == 2
    assert "obtained with other options" in capsys.readouterr().err
    assert (output / "attention.md").read_text().count("\n| ") == 3


def test_failing_command_is_named(corpus, tmp_path, capsys):
    shutil.copytree(corpus, tmp_path / "corpus")
    (tmp_path / "corpus" / "bpe" / "train.de").unlink()
    output = tmp_path / "out"
    assert again(tmp_path / "corpus", output) == 2
    message = capsys.readouterr().err
    assert "bin/fairseq-preprocess --source-lang=en" in message
    assert f"see {output / 'preprocess.log'}" in message
    assert "train.de" in message.split("last line is")[1]
    assert not (output / "bin").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "none", "1112"], "--settings must be among 1111, cross-1000"),
        (["--study", "alignment", "--settings", "none"], "--settings must be among additive, general"),
        (["--add", "bin=--deformable"], "--add must be NAME=OPTIONS"),
        (["--add", "none=--deformable"], "--add must be NAME=OPTIONS"),
        (["--add", "../up=--deformable"], "--add must be NAME=OPTIONS"),
        (["--add", "more"], "--add must be NAME=OPTIONS"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
    ],
)
def test_bad_setting(corpus, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as error:
        again(corpus, tmp_path / "out", *arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_corpus(corpus, tmp_path, capsys):
    assert again(tmp_path / "nowhere", tmp_path / "out") == 2
    assert "has no recipe.json: make it with" in capsys.readouterr().err
    (tmp_path / "recipe.json").write_text((corpus / "recipe.json").read_text())
    assert again(tmp_path, tmp_path / "out") == 2
    assert "has no bpe/: make it with" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_corpus_is_refused(output, corpus, tmp_path, capsys):
    other = tmp_path / "other"
    (other / "bpe").mkdir(parents=True)
    (other / "recipe.json").write_text(json.dumps({"languages": ["en", "de"], "pairs": {"train": 1}}))
    assert again(other, output, "--settings", "none") == 2
    assert "of another corpus" in capsys.readouterr().err


def test_left_out_sentence():
    log = "S-1\tb\nD-1\t-0.5\tnah .\nH-1\t-0.5\tn ah .\nD-0\t-0.25\tweit\tweg\n"
    assert study.read_translations(log, 2) == ["weit\tweg", "nah ."]
    with pytest.raises(study.StudyError, match="left out 1 of 3 sentences, the first is 2"):
        study.read_translations(log, 3)


def test_score():
    lines = ["Die Datei wurde gespeichert.", "Bitte eine andere Farbe wählen!", "Seite nicht gefunden"]
    assert study.score(lines, lines)["bleu"] == pytest.approx(100)
    assert study.score(lines, lines)["chrf"] == 100
    shuffled = study.score(lines[1:] + lines[:1], lines)
    assert shuffled["bleu"] < 10
    assert shuffled["chrf"] < 40


def test_every_alignment_score_is_studied():
    assert set(study.STUDIES["alignment"].settings) == {*ALIGNMENT_SCORES, "additive+bahdanau"}


def test_settings_are_compared_with_like_positions():
    """Settings of Zhu et al. (2019) have no absolute positions unless named so; those of the thesis keep them."""
    for name, options in study.STUDIES["attention"].settings.items():
        positions = "absolute" if "absolute" in name or name == "bilateral" else "none"
        words = options.split()
        assert [words[words.index(f"--{side}-positions") + 1] for side in ("encoder", "decoder")] == [positions] * 2


@pytest.mark.slow
def test_seeds(output, corpus, capsys):
    first = json.loads((output / "none" / "result.json").read_text())
    assert first["seed"] == 1
    second = {**first, "seed": 2, "options": [*first["options"], "--seed", "2"], "bleu": first["bleu"] + 2}
    (output / "none-seed2").mkdir()
    (output / "none-seed2" / "result.json").write_text(json.dumps(second))
    assert again(corpus, output, "--train", SHORT, "--settings", "none", "--seeds", "1", "2") == 0
    assert "2/2 none-seed2: already done" in capsys.readouterr().out
    (row,) = [line for line in (output / "attention.md").read_text().splitlines() if line.startswith("| none")]
    assert f"| {first['bleu'] + 1:.1f} ± 1.4 (2 seeds) |" in row
    assert len(json.loads((output / "attention.json").read_text())["results"]) == 3
    assert again(corpus, output, "--train", SHORT, "--settings", "none", "--seeds", "2") == 0  # without seed 1
    assert "1/1 none-seed2: already done" in capsys.readouterr().out


def test_characters_are_scored_where_there_are_no_spaces(corpus):
    found = study.Corpus(corpus, "en", "ja", {}), study.Corpus(corpus, "en", "zh_Hans", {}), study.Corpus.open(corpus)
    assert [one.tokens for one in found] == ["char", "zh", "13a"]
    near = study.score(["日本語の文章です"], ["日本語の文です"], "char")
    assert 0 < near["bleu"] < 100
    assert "tok:char" in near["signatures"]["BLEU"]
    assert study.score(["日本語の文章です"], ["日本語の文です"])["bleu"] < near["bleu"]


def test_the_corpus_of_a_target_language(corpus, tmp_path, monkeypatch, capsys):
    given = []

    def main(arguments):
        given.append(arguments)
        return 2

    monkeypatch.setattr(gettext_corpus, "main", main)
    arguments = [str(tmp_path / "new"), str(tmp_path / "out"), "--study", "cross", "--target"]
    assert study.main([*arguments, "ja"]) == 2
    assert "cannot be made, see above" in capsys.readouterr().err
    assert study.main([*arguments, "fr"]) == 2
    folder = str((tmp_path / "new").resolve())
    common = [folder, "--download", "--language"]
    assert given == [[*common, "ja", *study.PIECES, "--coverage", "0.9995"], [*common, "fr", *study.PIECES]]
    assert again(corpus, tmp_path / "out", "--target", "ja") == 2
    assert f"--target ja: CORPUS {corpus} is of de" in capsys.readouterr().err
