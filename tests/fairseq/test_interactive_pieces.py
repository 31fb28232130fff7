"""The corpus of ``docs/start/fairseq.md``, ``fairseq-interactive`` on it as documented, and BLEU of split compounds."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fairseq.fairseq_helpers import ROOT, fairseq

pytest.importorskip("fairseq")
polib = pytest.importorskip("polib", reason="polib is not installed")
pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

README = (ROOT / "configs/fairseq/README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs/start/fairseq.md").read_text(encoding="utf-8")
NOUNS = {"file": "Die Datei", "page": "Die Seite", "list": "Die Liste", "task": "Die Aufgabe", "card": "Die Karte"}
NOUNS |= {"line": "Die Zeile", "group": "Die Gruppe", "table": "Die Tabelle", "message": "Die Nachricht"}
VERBS = {"deleted": "gelöscht", "moved": "verschoben", "opened": "geöffnet", "found": "gefunden", "copied": "kopiert"}
VERBS |= {"saved": "gesichert", "closed": "geschlossen", "changed": "geändert"}
PLACES = {"": "", " by %(user)s": " von %(user)s", " at {time}": " um {time}"}
PAIRS = {
    f"The {noun} was {verb}{place}.": f"{NOUNS[noun]} wurde{PLACES[place]} {VERBS[verb]}."
    for noun, verb, place in itertools.product(NOUNS, VERBS, PLACES)
}


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Run the page's script, with fewer pieces, on two catalogues that share entries."""
    for name, pairs in (("one", list(PAIRS.items())[:120]), ("two", list(PAIRS.items())[90:])):
        catalogue = polib.POFile()
        for source, target in [*pairs, ("Untranslated", "")]:
            catalogue.append(polib.POEntry(msgid=source, msgstr=target))
        folder = tmp_path / f"data/gettext/packages/{name}/locale/de/LC_MESSAGES"
        folder.mkdir(parents=True)
        catalogue.save_as_mofile(str(folder / "django.mo"))
    [script] = re.findall(r"^python - <<'SCRIPT'\n(.*?)^SCRIPT$", PAGE, re.M | re.S)
    assert "vocab_size=4000" in script
    script = script.replace("vocab_size=4000", "vocab_size=100")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True)
    return tmp_path / "data/gettext"


def test_the_corpus_has_every_pair_once(corpus):
    pairs = []
    for part in ("train", "valid", "test"):
        source, target = ((corpus / f"{part}.{n}").read_text(encoding="utf-8").splitlines() for n in ("en", "de"))
        pairs += zip(source, target, strict=True)
        pieces = (corpus / f"bpe/{part}.de").read_text(encoding="utf-8").splitlines()
        assert [line.replace(" ", "").replace("▁", " ").strip() for line in pieces] == target
    assert sorted(pairs) == sorted(PAIRS.items())


@pytest.mark.slow
def test_plain_text_goes_in_and_comes_out(corpus, tmp_path):
    save = tmp_path / "checkpoints"
    prefixes = [f"--{part}pref={corpus / 'bpe' / part}" for part in ("train", "valid", "test")]
    fairseq("preprocess", "-s=en", "-t=de", *prefixes, "--joined-dictionary", f"--destdir={corpus / 'bin'}")
    ours = [corpus / "bin", "--user-dir=plugins/fairseq", "--cpu"]
    model = ["--arch=spatial_transformer_tiny", "--share-all-embeddings", "--optimizer=adam", "--lr=0.005"]
    fairseq("train", *ours, *model, "--max-tokens=2000", "--max-update=30", f"--save-dir={save}", "--num-workers=0")

    [command] = re.findall(r"\| fairseq-interactive data/gettext/bin (.*?)\n\n?```", README.replace("\\\n", ""), re.S)
    words = command.replace("data/gettext", str(corpus)).split()
    words[words.index("--path") + 1] = str(save / "checkpoint_last.pt")
    assert words[-4:-1] == ["--bpe", "sentencepiece", "--sentencepiece-model"]
    sentence = "The card was copied."
    printed = fairseq("interactive", corpus / "bin", *words, "--max-len-b=20", text=f"{sentence}\n")
    [pieces] = re.findall(r"^S-0\t(.*)$", printed, re.M)
    assert "▁" in pieces
    assert "<unk>" not in pieces
    assert pieces.replace(" ", "").replace("▁", " ").strip() == sentence
    [(hypothesis, text)] = re.findall(r"^H-0\t\S+\t(.*)\nD-0\t\S+\t(.*)$", printed, re.M)
    assert text == hypothesis.replace(" ", "").replace("▁", " ").strip() != ""


def test_bleu_with_compounds_split(tmp_path):
    """By the lines of the thesis' recipe: tokens in the order of the test set, hyphens as tokens of their own."""
    [lines] = re.findall(r"> generate\.txt\n(for part .*?)```", README, re.S)
    truth = [f"der Ost-West-Handel {n} der Staaten wächst - heute" for n in range(12)]
    guess = [line.replace("Ost-West", "Ost-Süd") for line in truth]
    printed = []
    for n in (10, 2, 0, 11, 1, *range(3, 10)):  # as batches of similar lengths come
        printed += [f"S-{n}\tsource", f"T-{n}\t{truth[n]}", f"H-{n}\t-0.5\t{guess[n]}", f"D-{n}\t-0.5\t{guess[n]}"]
    (tmp_path / "generate.txt").write_text("\n".join([*printed, "Generate test with beam=5: BLEU4 = 1"]) + "\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", lines], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    split = [line.replace("t-W", "t ##AT##-##AT## W").replace("t-H", "t ##AT##-##AT## H") for line in truth]
    assert (tmp_path / "generate.T").read_text().splitlines() == split
    from sacrebleu.metrics import BLEU

    hypotheses = (tmp_path / "generate.H").read_text().splitlines()
    bleu = BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(hypotheses, [split])
    assert 40 < bleu.score < 90
    assert f'"score": {bleu.score:.1f}' in done.stdout
