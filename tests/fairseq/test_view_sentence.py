"""``python -m tools.view --fairseq`` on checkpoints of the stock ``fairseq-train``: PNGs and the page in a browser."""

from __future__ import annotations

import base64
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fairseq")

from tests.fairseq.console_helpers import in_one_process
from tests.tools.conftest import browser  # noqa: F401
from tests.tools.view_helpers import choose, page_data
from tools.view.__main__ import main
from tools.view.maps import ViewError
from tools.view.sentences import ALIGNMENT, DECODER, ENCODER, capture, load, read

SENTENCE = "the cat sees a house"
MODELS = {
    "terms": ["--arch=spatial_transformer_tiny", "--encoder-attention=1111", "--decoder-attention=bilateral"],
    "content": ["--arch=spatial_transformer_tiny", "--encoder-attention=dynamic", "--decoder-attention=none"],
    "luong": ["--arch=aligned_lstm_tiny"],
    "bahdanau": ["--arch=aligned_lstm_tiny", "--recurrence=bahdanau", "--alignment=general"],
    "stock": ["--arch=transformer_tiny"],
    "bare": ["--arch=lstm", "--decoder-attention=0", "--encoder-embed-dim=8", "--encoder-hidden-size=8"],
}
MODELS["content"].append("--cross-attention=1000")
MODELS["bare"] += ["--decoder-embed-dim=8", "--decoder-hidden-size=8", "--decoder-out-embed-dim=8"]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> dict[str, Path]:
    """Return checkpoints that the stock command trained for one step."""
    root = tmp_path_factory.mktemp("trained")
    common = [data, "--user-dir", "plugins/fairseq", "--optimizer=adam", "--lr=0.01", "--max-tokens=400", "--cpu"]
    common += ["--max-update=1", "--num-workers=0", "--no-epoch-checkpoints", "--no-progress-bar"]
    common += ["--disable-validation", "--source-lang=en", "--target-lang=de"]
    commands = [["train", *common, *options, "--save-dir", root / name] for name, options in MODELS.items()]
    words = [part for split in ("train", "valid") for part in (f"--{split}pref", data.parent / f"{split}.en")]
    commands.append(["preprocess", "--only-source", *words, "--destdir", root / "bin"])
    lm = ["--task=language_modeling", "--arch=spatial_transformer_lm_tiny", "--tokens-per-sample=16"]
    commands.append(["train", root / "bin", *common[1:-2], *lm, "--save-dir", root / "lm"])
    in_one_process(*commands)
    return {name: root / name / "checkpoint_last.pt" for name in (*MODELS, "lm")}


def seen(checkpoint: Path, text: str = SENTENCE, target: str | None = None, parts: bool = True):
    return read(load(checkpoint, None, None), text, target, 2, parts)


# --- weights ------------------------------------------------------------------------------------------------------


def test_what_is_shown_is_what_the_layers_of_a_transformer_use(trained):
    reader = load(trained["terms"], None, None)
    task, given, outputs = reader.task, {}, {}
    source = reader.encoded("", SENTENCE, task.source_dictionary)[0]
    previous = torch.tensor([[2, 7, 5, 6]])
    ours = {name: m for name, m in reader.model.named_modules() if hasattr(m, "attention_maps")}
    for name, module in ours.items():

        def keep(module, arguments, keywords, output, name=name):
            given[name], outputs[name] = arguments, output

        module.register_forward_hook(keep, with_kwargs=True)
    with capture(reader.model) as captured, torch.no_grad():
        reader.model(source[None], torch.tensor([len(source)]), previous)
    assert len(captured) == len(ours) == 6
    for name, weights in captured.items():
        layer, arguments = ours[f"{name}.attention"], given[f"{name}.attention"]
        whole, parts = weights()
        torch.testing.assert_close(whole.sum(-1), torch.ones(whole.shape[:2]))
        keys = arguments[1] if len(arguments) > 1 else arguments[0]
        value = layer.v_proj(keys)[0].unflatten(1, (layer.num_heads, -1)).transpose(0, 1)  # (M, S, d)
        output = layer.out_proj((whole @ value).transpose(0, 1).flatten(1))
        torch.testing.assert_close(output, outputs[f"{name}.attention"][0], rtol=1e-4, atol=1e-5)
        assert len(parts) == (2 if "decoder" in name and "self_attn" in name else 4)
        product = torch.stack(list(parts.values())).prod(0)
        torch.testing.assert_close(product / product.sum(-1, keepdim=True), whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["luong", "bahdanau"])
def test_the_alignment_of_an_lstm_is_the_decoder_s(trained, name):
    reader = load(trained[name], None, None)
    sentence = read(reader, SENTENCE, "eht tac cat", 2, True)
    (layer,) = sentence.maps
    assert (layer.name, layer.kind, layer.parts) == ("decoder.attention", ALIGNMENT, {})
    source = reader.encoded("", SENTENCE, reader.task.source_dictionary)[0]
    target = reader.encoded("", "eht tac cat", reader.task.target_dictionary)[0]
    with torch.no_grad():
        _, more = reader.model(source[None], torch.tensor([len(source)]), target.roll(1)[None])
    torch.testing.assert_close(layer.weights, more)
    assert sentence.words[ALIGNMENT] == (["eht", "tac", "cat <unk>", "</s>"], [*SENTENCE.split(), "</s>"])
    assert sentence.unknown == ["cat"]


def test_layers_of_fairseq_s_own_transformer(trained):
    reader = load(trained["stock"], None, None)
    sentence = read(reader, SENTENCE, "eht tac", 2, True)
    assert [layer.kind for layer in sentence.maps] == [ENCODER] * 2 + [DECODER, ALIGNMENT] * 2
    assert all(layer.weights.shape[0] == 2 and not layer.parts for layer in sentence.maps)
    source = reader.encoded("", SENTENCE, reader.task.source_dictionary)[0]
    target = reader.encoded("", "eht tac", reader.task.target_dictionary)[0]
    with torch.no_grad():  # fairseq's own alignment is the mean over the heads of the last layer
        _, more = reader.model(source[None], torch.tensor([len(source)]), target.roll(1)[None])
    torch.testing.assert_close(sentence.maps[-1].weights.mean(0), more["attn"][0][0])
    assert all((layer.weights.triu(1) == 0).all() for layer in sentence.maps if layer.kind == DECODER)


def test_the_model_s_own_translation_and_kernels_of_dynamic_convolution(trained):
    sentence = seen(trained["content"])
    assert [layer.kind for layer in sentence.maps] == [ENCODER, ENCODER, ALIGNMENT, ALIGNMENT]
    assert sentence.maps[0].weights.shape == (16, 6, 6)
    assert not any(layer.parts for layer in sentence.maps)
    queries, keys = sentence.words[ALIGNMENT]
    assert queries[-1] == keys[-1] == "</s>"
    assert 1 <= len(queries) <= 2 * len(keys) + 11
    assert sentence.maps[2].weights.shape == (4, len(queries), len(keys))


def test_a_language_model_reads_the_sentence_itself(trained):
    sentence = seen(trained["lm"])
    assert {layer.kind for layer in sentence.maps} == {DECODER}
    assert sentence.words[DECODER] == ([*SENTENCE.split(), "</s>"], ["</s>", *SENTENCE.split()])
    assert all((layer.weights.triu(1) == 0).all() and layer.weights.shape[1:] == (6, 6) for layer in sentence.maps)
    with pytest.raises(ViewError, match="--target is for a translation"):
        seen(trained["lm"], target="the")


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shown(trained, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("shown")
    arguments = ["--fairseq", str(trained["terms"]), "the $cat sees </script> house", "--target", "eht tac"]
    level = logging.getLogger().level
    assert main([*arguments, "--parts", "--output", str(output), "--layers", "*.1.*"]) == 0
    assert logging.getLogger().level == level
    return output


def test_pictures_of_every_layer_and_the_page(shown):
    layers = ["encoder.layers.1.self_attn", "decoder.layers.1.self_attn", "decoder.layers.1.encoder_attn"]
    names = {f"{name}{more}.png" for name in layers for more in ("", ".parts")}
    assert {f.name for f in shown.iterdir()} == {*names, "attention.html"}
    assert np.asarray(Image.open(shown / f"{layers[2]}.png").convert("RGB")).std() > 10
    text = (shown / "attention.html").read_text()
    assert text.count("</script>") == 1
    kinds = page_data(shown / "attention.html")["kinds"]
    assert [[layer["name"] for layer in kind["layers"]] for kind in kinds] == [[layers[2]], [layers[0]], [layers[1]]]
    assert kinds[2]["queries"] == ["eht", "tac", "</s>"]
    assert kinds[2]["keys"] == ["</s>", "eht", "tac"]
    assert kinds[1]["keys"][3] == "</script> <unk>"
    assert [part["name"] for part in kinds[2]["layers"][0]["parts"]] == ["all terms", "content", "position"]


def decoded(kind: dict, part: dict) -> np.ndarray:
    T, S = len(kind["queries"]), len(kind["keys"])
    maps = np.frombuffer(base64.b64decode(part["maps"]), "<u2").reshape(-1, T, S) / 65535
    return maps * np.frombuffer(base64.b64decode(part["peaks"]), "<f4").reshape(-1, T)[..., None]


def test_a_word_a_head_and_a_part_are_chosen_on_the_page(shown, browser):  # noqa: F811
    file = shown / "attention.html"
    browser.open(file)
    kind = page_data(file)["kinds"][0]

    def shares() -> list[float]:
        return [
            float(text.split()[0]) for text in browser.run("[...keysPlace.children].map(n => n.lastChild.textContent)")
        ]

    def expected(part: int, head: int, query: int) -> np.ndarray:
        return 100 * decoded(kind, kind["layers"][0]["parts"][part])[head, query]

    np.testing.assert_allclose(shares(), expected(0, 0, 0), rtol=0.06, atol=1e-3)
    browser.run("queriesPlace.children[1].click()")
    np.testing.assert_allclose(shares(), expected(0, 0, 1), rtol=0.06, atol=1e-3)
    assert browser.run("document.activeElement.textContent") == "tac"
    browser.key("ArrowRight")
    choose(browser, "headSelect", 3)
    choose(browser, "partSelect", 2)
    np.testing.assert_allclose(shares(), expected(2, 3, 2), rtol=0.06, atol=1e-3)
    assert browser.run("all.children.length") == 5
    browser.run("all.children[1].click()")
    np.testing.assert_allclose(shares(), expected(2, 1, 2), rtol=0.06, atol=1e-3)
    choose(browser, "kindSelect", 2)
    assert browser.run("[...keysPlace.children].map(n => n.firstChild.textContent)") == ["</s>", "eht", "tac"]
    assert browser.run("[...partSelect.options].map(o => o.text)") == ["all terms", "content", "position"]
    assert "decoder.layers.1.self_attn, head 1" in browser.run("document.getElementById('where').textContent")
    box = browser.run("(() => { const b = matrix.getBoundingClientRect(); return [b.right, b.bottom]; })()")
    browser.run("scrollTo(0, 0)")
    browser.click(box[0] - 8, box[1] - 8)
    assert browser.run("now.query") == 2
    assert browser.requests == [file.as_uri()]


def test_a_folder_for_every_sentence_and_the_list(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["--fairseq", str(trained["luong"]), "--target", "eht"]
    assert main([*arguments, "the cat!"]) == main([*arguments, "the cat?"]) == 0
    folders = sorted(file.parent.name for file in tmp_path.glob("work_dirs/attention/*/*/attention.html"))
    assert folders == ["the-cat", "the-cat-2"]
    assert "not in the dictionary, read as unknown: cat?; is the corpus in pieces?" in capsys.readouterr().out
    assert main(["--fairseq", str(trained["content"]), SENTENCE, "--list"]) == 0
    names = [f"encoder.layers.{n}.self_attn  (encoder)" for n in range(2)]
    names += [f"decoder.layers.{n}.encoder_attn  (alignment)" for n in range(2)]
    assert capsys.readouterr().out.splitlines() == names


def test_pieces_of_sentencepiece(trained, tmp_path):
    spm = pytest.importorskip("sentencepiece")
    text = tmp_path / "text"
    text.write_text("the cat sees a house\nthe dog sees the cat\n" * 20)
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "pieces"), vocab_size=24, minloglevel=2, hard_vocab_limit=False
    )
    reader = load(trained["luong"], None, tmp_path / "pieces.model")
    sentence = read(reader, "the cat", "eht", 1, False)
    pieces = [piece.removesuffix(" <unk>") for piece in sentence.words[ALIGNMENT][1][:-1]]
    assert "".join(pieces).replace("▁", " ").strip() == "the cat"
    assert len(pieces) >= 2
    with pytest.raises(ViewError, match=r"--sentencepiece-model .*text cannot be loaded"):
        load(trained["luong"], None, text)


def test_bad_input(trained, data, tmp_path, capsys):
    def error(*arguments) -> str:
        assert main([str(n) for n in arguments]) == 2
        return capsys.readouterr().err

    good = ["--fairseq", trained["luong"]]
    assert "has no attention that can be shown" in error("--fairseq", trained["bare"], SENTENCE)
    assert "--fairseq must be a checkpoint file" in error("--fairseq", tmp_path / "none.pt", SENTENCE)
    (tmp_path / "text.pt").write_text("no checkpoint")
    assert "text.pt is not a fairseq checkpoint" in error("--fairseq", tmp_path / "text.pt", SENTENCE)
    torch.save({"model": {}}, tmp_path / "other.pt")
    assert "other.pt is not a fairseq checkpoint" in error("--fairseq", tmp_path / "other.pt", SENTENCE)
    assert re.search(
        r"--data \S+ must be .* lacks dict.en.txt, dict.de.txt", error(*good, SENTENCE, "--data", tmp_path)
    )
    assert "is no folder; --data DIR names another" in error(*good, SENTENCE, "--data", tmp_path / "none")
    shutil.copy(data / "dict.en.txt", tmp_path)
    assert "lacks dict.de.txt;" in error(*good, SENTENCE, "--data", tmp_path)
    (tmp_path / "dict.de.txt").write_text("word 1\n")
    assert "cannot be loaded with" in error(*good, SENTENCE, "--data", tmp_path)
    assert "the sentence must have a word" in error(*good, " ")
    assert "the sentence must have at most 256 pieces, got 300" in error(*good, "cat " * 300)
    assert "the sentence must be one argument, in quotes, got 'the'" in error(*good, "the", "cat")
    assert "none is called 'encoder*': decoder.attention" in error(*good, SENTENCE, "--layers", "encoder*")
    assert "--pixels is for pictures" in error(*good, SENTENCE, "--pixels", "cls")
    assert "--target is for sentences: it needs --fairseq" in error("resnet50", "x.png", "--target", "a")
    assert "--beam must be at least 1, got 0" in error(*good, SENTENCE, "--beam", "0")
