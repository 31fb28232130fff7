"""The stock console commands with ``--task captioning --arch eta_transformer_tiny``."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("fairseq")

from captioning_helpers import write_images
from fairseq_helpers import fairseq


def test_train_and_generate(tmp_path):
    """With one image of each split whose regions cannot be read, and two checkpoints together."""
    data = write_images(tmp_path / "data")
    arrays = {name: np.array(array) for name, array in np.load(data / "regions.npz").items()}
    for image_id in (102, 111):
        arrays["features"][arrays["offsets"][image_id - 100]] = np.inf
    np.savez(data / "regions.npz", **arrays)
    options = [data, "--user-dir", "plugins/fairseq", "--task=captioning", "--skip-invalid-samples", "--cpu"]
    train = ["--arch=eta_transformer_tiny", "--criterion=label_smoothed_cross_entropy", "--label-smoothing=0.1"]
    train += ["--min-word-count=1", "--batch-size=4", "--optimizer=adam", "--lr=0.005", "--max-update=30"]
    train += ["--save-interval-updates=15", "--no-epoch-checkpoints", "--no-progress-bar", "--num-workers=1"]
    log = fairseq("train", *options, *train, "--save-dir", tmp_path / "model")
    losses = [float(loss) for loss in re.findall(r"\| train \|.* nll_loss (\S+)", log)]
    assert "num_updates 30" in log
    assert losses[-1] < losses[0] - 0.5
    assert "skipped: " in log
    assert f"{data / 'dict.txt'}: 12 words" in log

    results = tmp_path / "results" / "captions.json"
    checkpoints = [next((tmp_path / "model").glob(name)) for name in ("checkpoint_last.pt", "checkpoint_*_15.pt")]
    paths = ":".join(map(str, checkpoints))
    generate = ["--gen-subset=test", "--path", paths, "--beam=3", "--batch-size=2", "--max-len-b=9"]
    log = fairseq("generate", *options, *generate, "--results-json", results, "--num-workers=0")
    captions = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", log, re.M))
    found = json.loads(results.read_text())
    assert [(result["image_id"], result["caption"]) for result in found] == [
        (image_id, captions[number]) for image_id, number in ((105, "0"), (117, "2"), (123, "3"))
    ]
    assert list(captions) != ["0", "1", "2", "3"]
    assert all(caption.split()[0] in ("a", "the") for caption in captions.values())
    assert list(results.parent.iterdir()) == [results]
    assert f"3 captions are in {results}" in log
