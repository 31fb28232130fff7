"""From pictures to captions, and the numbers of what each word attended to."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("fairseq")

from fairseq import options as fairseq_options
from fairseq import tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

import attn_plugins.fairseq  # noqa: F401
from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from attn_plugins.modules import MultiheadAttention
from tests.fairseq.fairseq_helpers import fairseq
from tools import caption as tool
from tools.captioning import extract_regions, train_attributes
from tools.captioning.attributes import AttributeDetector, frequent_words, load_detector
from tools.captioning.caption_picture import WIDTH
from tools.captioning.captioner import Captioner, Search
from tools.captioning.timm_backbone import TimmBackbone
from tools.captioning.word_attention import summary, word_attention
from tools.datasets.captioned_scenes import Recipe, build
from tools.pictures import BadPicture, open_picture

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
FUSIONS = {
    "entangled": {"regions", "attributes", "visual_share"},
    "parallel": {"regions", "attributes", "visual_share"},
    "stacked-visual": {"regions", "attributes"},
    "visual": {"regions"},
    "semantic": {"attributes"},
}
CAPTIONERS = {
    "show_attend_tell": {"regions"},
    "lstm_captioner": {"regions", "attributes"},
    "conv_captioner": {"regions", "attributes"},
}
SHOWN = {**FUSIONS, **CAPTIONERS}


def checkpoint(path: Path, data: Path, *options: str, seed: int = 0) -> Path:
    """A model of random weights, large ones so that it has opinions, saved by fairseq's trainer."""
    given = [data, "--task=captioning", "--arch=eta_transformer_tiny", "--min-word-count=1", "--max-attributes=4"]
    given += ["--optimizer=adam", "--lr=0.1", "--cpu", "--max-target-positions=20"]
    given += ["--no-save-optimizer-state", *options]
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), list(map(str, given)))
    cfg = convert_namespace_to_omegaconf(parsed)
    torch.manual_seed(seed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 3
    Trainer(cfg, task, model, task.build_criterion(cfg.criterion)).save_checkpoint(str(path), {})
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data folder of 9 scenes, one of them not square, by the tools; its detector and models beside it."""
    folder = tmp_path_factory.mktemp("captioning")
    data = folder / "data"
    assert build(data, Recipe(train=4, val=1, test=4, size=64, seed=1))
    wide = data / "images/000007.jpg"
    open_picture(wide).crop((0, 10, 64, 50)).save(wide)
    train = [image for image in read(data / "splits.json")["images"] if image["split"] == "train"]
    words = frequent_words([[sentence["tokens"] for sentence in image["sentences"]] for image in train], 12)
    torch.manual_seed(0)
    detector = AttributeDetector(TimmBackbone("test_resnet", (64, 64)), words)
    detector.head.classifier.weight.data *= 20
    detector.save(folder / "best.safetensors")
    assert train_attributes.main([str(data), str(folder), "--predict", "--top", "3", "--device", "cpu"]) == 0
    grid = ["--grid", "test_resnet", "--checkpoint", str(folder / "best.safetensors"), "--grid-size", "3"]
    splits = ["--splits", str(data / "splits.json"), "--device", "cpu"]
    assert extract_regions.main([str(data / "images"), str(data / "regions.npz"), *grid, *splits]) == 0
    for fusion in FUSIONS:
        checkpoint(folder / f"{fusion}.pt", data, "--fusion", fusion)
    for name, seen in CAPTIONERS.items():
        both = ["--fusion", "parallel"] if "attributes" in seen else []
        checkpoint(folder / f"{name}.pt", data, f"--arch={name}_tiny", *both)
    checkpoint(folder / "other.pt", data, "--layers=3", seed=1)
    return data


def run(data: Path, out: Path, *pictures: Any, path: str = "entangled", options: tuple = ()) -> int:
    folder = data.parent
    models = ":".join(str(folder / f"{name}.pt") for name in path.split(":"))
    detector = () if path in ("visual", "show_attend_tell") else ("--detector", folder / "best.safetensors")
    given = [*pictures, "--path", models, *detector, "--out", out, "--device", "cpu", "--max-len", 6, *options]
    return tool.main(list(map(str, given)))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def captioner(data) -> Captioner:
    folder = data.parent
    detector = load_detector(folder / "best.safetensors")
    return Captioner([folder / "entangled.pt"], detector=detector, search=Search(max_len=6))


# --- captions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["entangled", f"entangled:other:{':'.join(CAPTIONERS)}"])
def test_the_caption_is_that_of_fairseq_generate(path, data, tmp_path, capsys):
    names = [f"{i:06}" for i in range(6, 10)]
    assert run(data, tmp_path, *(data / f"images/{name}.jpg" for name in names), path=path) == 0
    printed = capsys.readouterr().out
    models = ":".join(str(data.parent / f"{name}.pt") for name in path.split(":"))
    options = ["--user-dir", "plugins/fairseq", "--task=captioning", "--gen-subset=test", "--path", models, "--beam=3"]
    options += ["--max-len-b=6", "--cpu", "--num-workers=0", "--max-attributes=4", "--batch-size=1"]
    fairseq("generate", data, *options, "--results-json", tmp_path / "expected.json")
    expected = {f"{row['image_id']:06}": row["caption"] for row in read(tmp_path / "expected.json")}
    found = read(tmp_path / "captions.json")
    assert {row["image_id"]: row["caption"] for row in found} == expected
    assert list(expected) == names
    assert len(set(expected.values())) > 1
    for row in found:
        assert row["file_name"] == str(data / f"images/{row['image_id']}.jpg")
        assert f"{row['file_name']}: {row['caption']}\n" in printed
        numbers = read(tmp_path / f"{row['image_id']}.json")
        assert numbers["caption"] == row["caption"] == " ".join(word["word"] for word in numbers["words"])
        assert len(numbers["attributes"]) == 3
        assert numbers["attributes"] == read(data / "attributes.json")[str(int(row["image_id"]))]


@pytest.mark.parametrize("fusion", SHOWN)
def test_every_fusion_shows_what_it_has(fusion, data, tmp_path):
    picture = data / "images/000007.jpg"
    assert run(data, tmp_path, picture, path=fusion, options=("--all-weights", "--layer", "1")) == 0
    numbers = read(tmp_path / "000007.json")
    [model] = numbers["models"]
    assert set(model) - {"regions_injection", "attributes_injection"} == SHOWN[fusion]
    assert ("regions_injection" in model) == (fusion == "entangled")
    assert numbers.keys() & {"regions", "attributes"} == SHOWN[fusion] - {"visual_share"}
    for t, word in enumerate(numbers["words"]):
        assert word.keys() - {"word", "log_probability"} == SHOWN[fusion]
        for name in word.keys() & {"regions", "attributes"}:
            assert len(word[name]) == dict(regions=9, attributes=3)[name]
            assert sum(word[name]) == pytest.approx(1, abs=1e-4)
            heads = np.array(model[name])[0, :, t]
            assert heads.shape[0] == (4 if fusion in FUSIONS else 1)
            np.testing.assert_allclose(word[name], heads.mean(0), atol=2e-5)
        if "visual_share" in word:
            assert word["visual_share"] == pytest.approx(model["visual_share"][0][t], abs=2e-5)
    assert Image.open(tmp_path / "000007.png").width == WIDTH


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", ["entangled", "stacked-visual"])
def test_weights_are_the_softmax_of_the_queries_with_the_keys(fusion, data):
    """By the projections' weights, from what every attention is given while the caption's first words are decoded."""
    folder = data.parent
    captioner = Captioner([folder / f"{fusion}.pt"], detector=load_detector(folder / "best.safetensors"))
    [model] = captioner.models
    regions = captioner.extractor(open_picture(data / "images/000008.jpg"))
    net_input = captioner._sample(regions, [("zero", 0.9), ("two", 0.8)], [5, 6, 7])["net_input"]
    found = word_attention(model, net_input)
    calls: dict[str, tuple] = {}
    for name, module in model.decoder.named_modules():
        if isinstance(module, MultiheadAttention):
            module.register_forward_pre_hook(lambda m, inputs, name=name: calls.update({name: (m, *inputs[:2])}))
    short = captioner._sample(regions, [("zero", 0.9), ("two", 0.8)], [5, 6])["net_input"]
    gates, shares = [block.controller for block in model.decoder.blocks], []
    for gate in filter(None, gates):
        gate.gate.register_forward_hook(lambda module, inputs, output: shares.append(torch.sigmoid(output)))
    with torch.no_grad():
        model(**short)
        for layer in range(2):
            places = dict(regions="visual_attention", attributes="semantic_attention")
            for name, place in places.items():
                key = f"blocks.{layer}.entangled.{place}.attention"
                if fusion != "entangled":
                    key = f"blocks.{layer}.attentions.{place.removesuffix('_attention')}.attention"
                module, query, keys = calls[key]
                q, k = module.q_proj(query)[0].unflatten(1, (4, 16)), module.k_proj(keys)[0].unflatten(1, (4, 16))
                for head in range(4):
                    expected = (q[:, head] @ k[:, head].T / math.sqrt(16)).softmax(1)
                    # A word is told by the row of what comes before it; later words change nothing.
                    torch.testing.assert_close(found.weights[name][layer, head, :2], expected[:2])
    for name, weights in found.weights.items():
        assert weights.shape == (2, 4, 3, 9 if name.startswith("regions") else 2)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    if fusion == "entangled":
        for layer in range(2):
            torch.testing.assert_close(found.visual_share[layer, :2], shares[layer][0].mean(1)[:2])
    else:
        assert found.visual_share is None


def test_rows_of_attention_are_of_the_words_beside_them(captioner, data):
    found = captioner(open_picture(data / "images/000006.jpg"))
    tokens = [captioner.task.dictionary.index(word) for word in found.words]
    net_input = captioner._sample(found.regions, found.attributes, tokens)["net_input"]
    with torch.no_grad():
        logits = captioner.models[0](**net_input)[0][0]
    expected = logits.log_softmax(1)[range(len(tokens)), tokens]
    np.testing.assert_allclose(found.log_probabilities, expected, atol=1e-4)
    [attention] = found.attention
    assert attention.weights["regions"].shape[2] == len(tokens) == len(expected)


@pytest.mark.parametrize("name", CAPTIONERS)
def test_where_a_captioner_without_blocks_looked(name, data):
    """By its decoder, word by word: the row beside a word is that of the step that chose it."""
    folder = data.parent
    captioner = Captioner([folder / f"{name}.pt"], detector=load_detector(folder / "best.safetensors"))
    [model] = captioner.models
    regions = captioner.extractor(open_picture(data / "images/000007.jpg"))
    tokens = [5, 6, 7, 8]
    net_input = captioner._sample(regions, [("zero", 0.9), ("two", 0.8)], tokens)["net_input"]
    found = word_attention(model, net_input)
    assert found.visual_share is None
    assert set(found.weights) == CAPTIONERS[name]
    previous = net_input.pop("prev_output_tokens")
    memory, state = model.encoder(**net_input), {}
    for t in range(len(tokens)):
        told = model.decoder(previous[:, : t + 1], memory, state)[1]["weights"]
        for key, weights in found.weights.items():
            assert weights.shape[:3] == (3 if name == "conv_captioner" else 1, 1, len(tokens))
            torch.testing.assert_close(weights[:, :, t], told[key][:, :, 0], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="model must be a captioner, got Linear"):
        word_attention(torch.nn.Linear(2, 2), net_input)


def test_attributes_that_the_vocabulary_lacks_are_left_out(captioner, data, tmp_path):
    words = ["quark", *captioner.detector.words[:2], "gluon"]
    AttributeDetector(TimmBackbone("test_resnet", (64, 64)), words).save(tmp_path / "some.safetensors")
    assert run(data, tmp_path, data / "images/000006.jpg", options=("--detector", tmp_path / "some.safetensors")) == 0
    numbers = read(tmp_path / "000006.json")
    assert len(numbers["attributes"]) + len(numbers["unknown_attributes"]) == 3
    assert {word for word, _ in numbers["attributes"]} <= set(words[1:3])
    assert set(numbers["unknown_attributes"]) <= {"quark", "gluon"}
    for word in numbers["words"]:
        assert len(word["attributes"]) == len(numbers["attributes"])


def test_models_together_show_their_mean(captioner, data):
    folder = data.parent
    paths = [folder / f"{name}.pt" for name in ("entangled", "other", "visual")]
    picture = open_picture(data / "images/000006.jpg")
    found = Captioner(paths, detector=captioner.detector, search=Search(max_len=6))(picture)
    shown = summary(found.attention)
    last = [attention.weights["regions"][-1].mean(0) for attention in found.attention]
    assert [len(attention.weights["regions"]) for attention in found.attention] == [2, 3, 2]
    torch.testing.assert_close(shown["regions"], (last[0] + last[1] + last[2]) / 3)
    gates = [attention.visual_share[-1] for attention in found.attention[:2]]
    torch.testing.assert_close(shown["visual_share"], (gates[0] + gates[1]) / 2)
    of_all = summary(found.attention[:1], 0)["attributes"]
    torch.testing.assert_close(of_all, found.attention[0].weights["attributes"].mean((0, 1)))
    with pytest.raises(ValueError, match="--layer must be from 1 to 2, the model's blocks, or all, got 3"):
        summary(found.attention, 3)


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_pictures_of_every_kind(data, tmp_path, capsys):
    """Among them broken ones, which are named, and do not keep the others from their captions."""
    given, out = tmp_path / "given", tmp_path / "out"
    (given / "more").mkdir(parents=True)
    picture = open_picture(data / "images/000006.jpg").resize((90, 60))
    picture.save(given / "plain.png")
    turned, exif = picture.transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise
    turned.save(given / "turned.png", exif=exif)
    picture.convert("L").save(given / "grey.jpg")
    picture.convert("CMYK").save(given / "cmyk.jpg")
    clear = picture.convert("RGBA")
    clear.putalpha(0)
    clear.save(given / "clear.png")
    Image.new("RGB", (90, 60), "white").save(given / "white.png")
    picture.convert("P").save(given / "palette.gif")
    picture.resize((300, 7)).save(given / "strip.png")
    picture.resize((1, 1)).save(given / "dot.png")
    picture.save(given / "more/plain.png")
    picture.save(given / "captions.png")
    (given / "text.jpg").write_text("no picture")
    (given / "cut.jpg").write_bytes((data / "images/000006.jpg").read_bytes()[:700])
    pictures = [given, given / "more/plain.png", given / "gone.jpg"]
    assert run(data, out, *pictures) == 1
    printed = capsys.readouterr()
    assert f"skipped {given / 'text.jpg'}: cannot be read as a picture: cannot identify image file" in printed.err
    assert f"skipped {given / 'cut.jpg'}: cannot be read as a picture: image file is truncated" in printed.err
    assert f"skipped {given / 'gone.jpg'}: no such file" in printed.err
    good = ["captions-2", "clear", "cmyk", "dot", "grey", "palette", "plain", "strip", "turned", "white", "plain-2"]
    assert [row["image_id"] for row in read(out / "captions.json")] == good
    assert len(printed.out.splitlines()) == len(good)
    assert {path.name for path in out.iterdir()} == {"captions.json"} | {
        f"{name}.{suffix}" for name in good for suffix in ("png", "json")
    }
    for name, same in (("turned", "plain"), ("plain-2", "plain"), ("clear", "white")):
        for part in ("words", "regions", "attributes"):
            assert read(out / f"{name}.json")[part] == read(out / f"{same}.json")[part]
    assert read(out / "grey.json")["words"] != read(out / "plain.json")["words"]
    for name in good:
        with Image.open(out / f"{name}.png") as drawn:
            assert drawn.width == WIDTH
            assert 300 < drawn.height < 2000


def test_none_of_the_pictures(data, tmp_path, capsys):
    assert run(data, tmp_path / "out", tmp_path / "gone.jpg") == 1
    assert not (tmp_path / "out").exists()
    assert "gone.jpg: no such file" in capsys.readouterr().err


def test_a_broken_orientation_does_not_make_a_broken_picture(tmp_path, monkeypatch):
    Image.new("RGB", (5, 3), "red").save(tmp_path / "x.png")

    def fails(picture):
        raise ValueError("a broken tag")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", fails)
    assert open_picture(tmp_path / "x.png").size == (5, 3)
    (tmp_path / "y.png").write_bytes((tmp_path / "x.png").read_bytes()[:50])
    with pytest.raises(BadPicture, match=r"y\.png cannot be read as a picture"):
        open_picture(tmp_path / "y.png")


# --- several processes ------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from tools import caption

whole, calls = caption.caption_picture, []
def killed(*arguments):
    calls.append(0)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)

caption.caption_picture = killed
sys.exit(caption.main(sys.argv[1:]))
"""


def torchrun(*arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def ended_at(last: str, whole: Any, captioner: Captioner, name: str, *given: Any) -> Any:
    if name == last:
        raise KeyboardInterrupt
    return whole(captioner, name, *given)


def contents(folder: Path) -> dict[str, Any]:
    """Of every file; numbers of JSON files and pixels rather than bytes."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        found[path.name] = read(path) if path.suffix == ".json" else Image.open(path).tobytes()
    return found


@pytest.mark.parametrize("interrupted", ["alone", pytest.param("killed", marks=pytest.mark.slow)])
def test_two_processes_after_an_interruption_write_what_one_writes(interrupted, data, tmp_path, capsys, monkeypatch):
    (tmp_path / "killed.py").write_text(KILLED)
    shutil.copytree(data / "images", tmp_path / "images")
    (tmp_path / "images/000004.jpg").write_text("no picture")
    options = ["--path", data.parent / "visual.pt", "--device", "cpu", "--max-len", 6, "--beam", 1]
    out = tmp_path / "out"
    command = [tmp_path / "images", *options, "--out", out]
    if interrupted == "killed":
        assert torchrun(tmp_path / "killed.py", *command).returncode != 0
        assert len(list((out / ".captions.partial").glob("part-*"))) == 2
    else:
        whole = tool.caption_picture
        with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
            patched.setattr(tool, "caption_picture", lambda *given: ended_at("000006", whole, *given))
            tool.main(list(map(str, command)))
    assert not (out / "captions.json").exists()
    shutil.copytree(out, tmp_path / "alone")

    assert tool.main([*map(str, command), "--max-len", "7"]) == 2
    assert "interrupted run with max_len = 6, not 7: --restart discards it" in capsys.readouterr().err
    ended = torchrun("-m", "tools.caption", *command)
    assert ended.returncode == 1, ended.stderr
    assert "resuming after " in ended.stdout
    assert f"{out / 'captions.json'}: 8 captions, 1 pictures skipped" in ended.stdout
    assert ended.stderr.count("000004.jpg: cannot be read as a picture") == 1

    assert tool.main(list(map(str, [tmp_path / "images", *options, "--out", tmp_path / "one"]))) == 1
    assert "resuming" not in capsys.readouterr().out
    expected = contents(tmp_path / "one")
    assert len(expected) == 17
    assert contents(out) == expected
    assert (out / "captions.json").read_bytes() == (tmp_path / "one/captions.json").read_bytes()
    assert tool.main(list(map(str, [tmp_path / "images", *options, "--out", tmp_path / "alone"]))) == 1
    assert "resuming after " in capsys.readouterr().out
    assert contents(tmp_path / "alone") == expected


# --- what cannot be ---------------------------------------------------------------------------------------------------


def copied(data: Path, tmp_path: Path) -> Path:
    shutil.copytree(data, tmp_path / "data")
    shutil.copy(data.parent / "best.safetensors", tmp_path)
    return tmp_path / "data"


def of_other_task(data: Path, tmp_path: Path) -> list:
    state = torch.load(data.parent / "entangled.pt", weights_only=False)
    state["cfg"]["task"]["_name"] = "translation"
    torch.save(state, tmp_path / "other.pt")
    return ["--path", tmp_path / "other.pt"]


def of_other_file(data: Path, tmp_path: Path) -> list:
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    return ["--path", tmp_path / "other.pt"]


def without_recipe(data: Path, tmp_path: Path) -> list:
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    write_region_features(folder / "regions.npz", [(i, features.regions(i)) for i in features.image_ids])
    return ["--data", folder]


def of_another_width(data: Path, tmp_path: Path) -> list:
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    images = [(1, {**features.regions(1), "features": features.regions(1)["features"][:, :5]})]
    write_region_features(folder / "regions.npz", images, recipe=features.recipe)
    return ["--data", folder]


def of_another_recipe(data: Path, tmp_path: Path) -> list:
    folder, features = copied(data, tmp_path), RegionFeatures(data / "regions.npz")
    recipe = features.recipe
    recipe["options"].update(grid="test_vit")
    images = [(i, features.regions(i)) for i in features.image_ids]
    write_region_features(folder / "regions.npz", images, recipe=recipe)
    vit = TimmBackbone("test_vit")
    torch.save(vit.model.state_dict(), tmp_path / "vit.pth")
    return ["--data", folder, "--region-checkpoint", tmp_path / "vit.pth"]


def without_vocabulary(data: Path, tmp_path: Path) -> list:
    (copied(data, tmp_path) / "dict.txt").unlink()
    return ["--data", tmp_path / "data"]


def of_other_words(data: Path, tmp_path: Path) -> list:
    AttributeDetector(TimmBackbone("test_resnet", (64, 64)), ["quark", "gluon"]).save(tmp_path / "other.safetensors")
    return ["--detector", tmp_path / "other.safetensors"]


def another_vocabulary(data: Path, tmp_path: Path) -> list:
    with (copied(data, tmp_path) / "dict.txt").open("a") as file:
        file.write("quark 9\n")
    return ["--data", tmp_path / "data"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (of_other_task, r"--path: .*other\.pt is of the task translation, not captioning"),
        (of_other_file, r"--path: .*other\.pt cannot be read as a fairseq checkpoint"),
        (["--path", "nowhere.pt"], r"--path: nowhere\.pt does not exist"),
        (["--path", __file__], r"test_caption\.py cannot be read as a fairseq checkpoint"),
        (without_recipe, r"regions\.npz has no recipe.*extract_regions --overwrite creates it again"),
        (of_another_width, r"the checkpoint has \d+ channels per region; those of .*regions\.npz have 5"),
        (of_another_recipe, r"the regions have 64 channels, but those of .*regions\.npz \d+"),
        (without_vocabulary, r"the vocabulary .*dict\.txt does not exist: .*--data takes another folder"),
        (another_vocabulary, r"the checkpoint has \d+ words; the task's dictionary has \d+"),
        (["--data", "nowhere"], r"nowhere.* does not exist: .*--data takes another folder"),
        (["--detector", "nowhere.safetensors"], r"weights nowhere\.safetensors: no such file"),
        (of_other_words, "the detector's words, such as 'quark', are not in the vocabulary"),
        (["--region-checkpoint", "nowhere"], "--region-checkpoint: nowhere does not exist"),
        (["--layer", "3"], "--layer must be from 1 to 2, the model's blocks, or all, got 3"),
        (["--beam", "0"], "--beam must be at least 1, got 0"),
        (["--max-len", "0"], "--max-len must be at least 1, got 0"),
    ],
)
def test_bad_input_is_told_once(options, message, data, tmp_path, capsys):
    given = options(data, tmp_path) if callable(options) else options
    pictures = [data / "images/000006.jpg", data / "images/000007.jpg"]
    assert run(data, tmp_path / "out", *pictures, options=tuple(given)) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("caption: ")
    assert re.search(message, line), line
    assert not (tmp_path / "out").exists()


def test_a_model_of_attributes_needs_a_detector(data, tmp_path, capsys):
    options = [str(data / "images/000006.jpg"), "--path", str(data.parent / "semantic.pt"), "--out", str(tmp_path)]
    assert tool.main(options) == 2
    assert "--detector is needed: the fusion of --path" in capsys.readouterr().err
