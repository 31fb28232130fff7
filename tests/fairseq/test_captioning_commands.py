"""The stock console commands with ``--task captioning``: an ensemble, bad samples, images without captions."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("fairseq")

from tests.fairseq.captioning_helpers import change, spoil_features, write_images
from tests.fairseq.console_helpers import in_one_process


def test_train_and_generate(tmp_path):
    """One image per split has unreadable regions; generation uses two checkpoints together."""
    data = write_images(tmp_path / "data")
    spoil_features(data, 102, 111)
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
