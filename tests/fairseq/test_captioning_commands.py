"""The stock console commands with ``--task captioning``: both stages, an interruption, ensembles, bad samples."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("fairseq")

from tests.fairseq.bad_sample_helpers import BAD_SAMPLES, spoil_features
from tests.fairseq.captioning_helpers import CAPTIONERS, change, write_images
from tests.fairseq.console_helpers import in_one_process, parameters

TINY = ["--user-dir=plugins/fairseq", "--task=captioning", "--arch=eta_transformer_tiny", "--cpu", "--num-workers=0"]
TINY += ["--criterion=label_smoothed_cross_entropy", "--optimizer=adam", "--lr=0.001", "--batch-size=8"]
TINY += ["--no-epoch-checkpoints", "--no-progress-bar", "--min-word-count=1"]


def test_train_and_generate(tmp_path):
    """One image per split has unreadable regions; generation uses two checkpoints together."""
    data = write_images(tmp_path / "data")
    arrays = {name: np.array(array) for name, array in np.load(data / "regions.npz").items()}
    for image_id in (102, 111):
        arrays["features"][arrays["offsets"][image_id - 100]] = np.inf
    np.savez(data / "regions.npz", **arrays)
    options = [data, "--user-dir", "plugins/fairseq", "--task=captioning", "--skip-invalid-samples", "--cpu"]
    train = ["--arch=eta_transformer_tiny", "--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1"]
    train += ["--min-word-count=1", "--batch-size=4", "--optimizer=adam", "--lr=0.005", "--max-update=30"]
    train += ["--save-interval-updates=15", "--no-epoch-checkpoints", "--no-progress-bar", "--num-workers=0"]
    train = ["train", *options, *train, "--save-dir", tmp_path / "model"]
    results = tmp_path / "results" / "captions.json"
    paths = ":".join(str(tmp_path / "model" / name) for name in ("checkpoint_last.pt", "checkpoint_2_15.pt"))
    generate = ["generate", *options, "--gen-subset=test", "--path", paths, "--beam=3", "--batch-size=2"]
    generate += ["--max-len-b=9", "--results-json", results, "--num-workers=0"]
    bare, test = shutil.copytree(data, tmp_path / "bare"), (105, 111, 117, 123)  # as of COCO's test server
    for part, key in (("images", "id"), ("annotations", "image_id")):
        change(bare / "captions.json", lambda c: c.update({part: [x for x in c[part] if x[key] not in test]}))  # noqa: B023
    unseen = ["generate", bare, *generate[2:], "--dictionary", data / "dict.txt"]
    unseen[unseen.index(results)] = tmp_path / "unseen.json"
    log, generated, captioned = in_one_process(train, generate, unseen)
    losses = [float(loss) for loss in re.findall(r"\| train \|.* nll_loss (\S+)", log)]
    assert "num_updates 30" in log
    assert losses[-1] < losses[0] - 0.5
    assert "skipped: " in log
    assert f"{data / 'dict.txt'}: 12 words" in log

    captions = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", generated, re.M))
    assert [(result["image_id"], result["caption"]) for result in json.loads(results.read_text())] == [
        (image_id, captions[number]) for image_id, number in ((105, "0"), (117, "2"), (123, "3"))
    ]
    assert list(captions) != ["0", "1", "2", "3"]
    assert all(caption.split()[0] in ("a", "the") for caption in captions.values())
    assert list(results.parent.iterdir()) == [results]
    assert f"3 captions are in {results}" in generated
    assert json.loads((tmp_path / "unseen.json").read_text()) == json.loads(results.read_text())
    assert "test: 4 images have no captions: they can only be captioned" in captioned


def _long_caption(folder: Path, image: int) -> None:
    """Append a caption longer than the model's positions."""
    change(folder / "captions.json", lambda c: c["annotations"][2 * (image - 100)].update(caption="a " * 300))


@pytest.mark.slow
def test_a_training_with_every_defect_finishes(tmp_path):
    """With all kinds of bad samples at once, one found only during the run, the run finishes and reports the count."""
    data = write_images(tmp_path / "data", number=48)
    for spoil, image in zip(BAD_SAMPLES, (102, 106, 555, 107, 108, 109, 112, 113, 114), strict=True):
        spoil(data, image)
    spoil_features(data, 100, 104, 110)
    for image in (115, 116):  # of train and of valid
        _long_caption(data, image)
    options = ["--skip-invalid-samples", "--max-epoch=3", "--save-dir", tmp_path / "model"]
    [log] = in_one_process(["train", data, *TINY, *options])
    for message, _ in BAD_SAMPLES.values():
        assert len(re.findall("skipped: .*" + re.sub(r"caption \d|102", r".*", message), log)) == 1
    assert "9 bad samples skipped so far" in log
    assert "train: 28 images, 54 samples" in log
    for image in (115, 116):
        assert f"skipped: 1 samples are too large: image {image} has" in log
    for image in (100, 104, 110):
        assert len(re.findall(rf"skipped: .*regions\.npz: image {image} has features that are NaN", log)) == 1
    assert log.count("train: 1 images skipped so far because their regions cannot be read") == 1
    assert log.count("valid: 2 images skipped so far because their regions cannot be read") == 1
    assert "done training" in log
    assert not re.search(r"loss[ =]nan", log)


OPTIONS = ["--user-dir=plugins/fairseq", "--task=captioning", "--min-word-count=1", "--cpu", "--num-workers=0"]
# One batch holds all samples, because fairseq shuffles samples of equal length by the run's first epoch.
TRAIN = [*OPTIONS, "--optimizer=adam", "--batch-size=40", "--dropout=0", "--no-progress-bar", "--log-format=simple"]
TRAIN += ["--no-epoch-checkpoints", "--embed-dim=32"]


def first_stage(name: str, data: Path, folder: Path, updates: int) -> list:
    """Return a training of 10 updates or of its first ones."""
    kind = "doubly_stochastic" if name == "show_attend_tell" else "label_smoothed"
    options = [f"--arch={name}_tiny", f"--criterion={kind}_cross_entropy", "--label-smoothing=0.1", "--lr=0.02"]
    options += [f"--max-update={updates}", f"--save-dir={folder}", "--disable-validation"]
    return ["train", data, *TRAIN, *options]


@pytest.mark.slow
def test_both_stages_an_interruption_and_captions(tmp_path):
    """A run that was interrupted and resumed ends with the parameters of an uninterrupted run."""
    data, names = write_images(tmp_path / "data"), list(CAPTIONERS)
    commands = [first_stage(name, data, tmp_path / name, 10) for name in names]
    commands += [first_stage(name, data, tmp_path / f"{name}_again", updates) for name in names for updates in (5, 10)]
    for name in names:
        stage = [f"--arch={name}_tiny", "--criterion=self_critical", "--one-caption-per-image"]
        stage += ["--samples=2", "--baseline=mean", "--lr=0.001", "--max-update=2"]
        stage += [f"--finetune-from-model={tmp_path / name / 'checkpoint_last.pt'}", f"--save-dir={tmp_path / name}_sc"]
        commands.append(["train", data, *TRAIN, *stage])
    paths = ":".join(
        str(tmp_path / f"{name}{suffix}" / "checkpoint_last.pt") for name in names for suffix in ("", "_sc")
    )
    results = tmp_path / "captions.json"
    generate = ["--gen-subset=test", "--path", paths, "--beam=3", "--batch-size=2", "--max-len-b=9"]
    commands.append(["generate", data, *OPTIONS, *generate, "--results-json", results])
    logs = in_one_process(*commands)
    for name, log in zip(names, logs[:3]):
        losses = [float(loss) for loss in re.findall(r"\| train \|.* nll_loss (\S+)", log)]
        assert losses[-1] < losses[0] - 1
        assert ("| doubly_stochastic " in log) == (name == "show_attend_tell")
    for name, log in zip(names, logs[4:9:2]):
        assert f"Loaded checkpoint {tmp_path / name}_again/checkpoint_last.pt (epoch 6 @ 5 updates)" in log
        whole, resumed = parameters(tmp_path / name), parameters(tmp_path / f"{name}_again")
        torch.testing.assert_close(resumed, whole, rtol=1e-3, atol=1e-3)
    for name, log in zip(names, logs[9:12]):
        assert re.search(r"\| train \|.*\| reward \d", log)
        begun, ended = parameters(tmp_path / name), parameters(tmp_path / f"{name}_sc")
        assert 0 < max((begun[key] - ended[key]).abs().max() for key in begun) < 0.003
    captions = json.loads(results.read_text())
    assert [result["image_id"] for result in captions] == [105, 111, 117, 123]
    assert all(result["caption"].split()[0] in ("a", "the") for result in captions)
