"""The documented ``fairseq-interactive`` on a corpus in pieces: plain text in, plain text out."""

from __future__ import annotations

import re

import pytest

from tests.fairseq.fairseq_helpers import ROOT, fairseq
from tests.helpers.made_up_catalogues import folder, po, sentences

pytest.importorskip("fairseq")
pytest.importorskip("polib", reason="polib is not installed")
pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")

from tools.datasets import gettext_corpus

README = (ROOT / "configs/fairseq/README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_plain_text_goes_in_and_comes_out(tmp_path):
    source = folder(tmp_path / "in", {"de/LC_MESSAGES/a.po": po(sentences())})
    corpus, save = tmp_path / "gettext", tmp_path / "checkpoints"
    assert gettext_corpus.main([str(corpus), str(source), "--bpe", "120"]) == 0
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
