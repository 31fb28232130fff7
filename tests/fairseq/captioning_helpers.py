"""A made-up captioned set: the color of an image's regions and one of its attributes determine the caption."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader

from attn_plugins.captioning.region_features import write_region_features

COLORS = ("red", "green", "blue", "black")
THINGS = ("dog", "cat", "bus", "kite", "boat")
SPLITS = ("train", "train", "train", "restval", "val", "test")
D = 6


def write_images(folder: Path, number: int = 24, name: str = "regions.hdf5") -> Path:
    """Write images 100, 101, ...: the largest channel of the regions gives the color, an attribute gives the thing."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    images, annotations, splits, attributes, regions = [], [], [], {}, []
    for i in range(number):
        image_id, color, thing = 100 + i, i % len(COLORS), (i // 2) % len(THINGS)
        n = 1 + i % 3
        features = draw.normal(size=(n, D)).astype(np.float32) * 0.1
        features[:, color] += 3
        regions.append((image_id, dict(features=features)))
        attributes[str(image_id)] = [["A", 0.2], [THINGS[thing], 0.9]]
        images.append({"id": image_id, "file_name": f"{image_id}.jpg"})
        texts = (f"A {COLORS[color]} {THINGS[thing]}.", f"The {THINGS[thing]} is {COLORS[color]}!")
        for k, text in enumerate(texts):
            annotations.append({"id": 2 * i + k, "image_id": image_id, "caption": text})
        splits.append({"cocoid": image_id, "split": SPLITS[i % len(SPLITS)]})
    write_region_features(folder / name, regions)
    write_json(folder / "captions.json", {"images": images, "annotations": annotations})
    write_json(folder / "splits.json", {"images": splits})
    write_json(folder / "attributes.json", attributes)
    return folder


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def change(path: Path, edit: Any) -> None:
    """Edit a JSON file in place."""
    content = json.loads(path.read_text())
    edit(content)
    write_json(path, content)


def spoil_features(folder: Path, *image_ids: int) -> None:
    """Set a feature of each of these images to NaN."""
    with h5py.File(folder / "regions.hdf5", "r+") as file:
        for image_id in image_ids:
            file[f"{image_id}_features"][0, 2] = np.nan


def task_of(folder: Path, **options: Any) -> Any:
    """Return the task with a dictionary of all words."""
    from attn_plugins.fairseq.captioning import CaptioningConfig, CaptioningTask

    return CaptioningTask.setup_task(CaptioningConfig(data=str(folder), **{"min_word_count": 1, **options}))


def batches_of(task: Any, split: str, num_workers: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Return the batches of one pass over a split, three sentences each."""
    task.load_dataset(split)
    dataset = task.dataset(split)
    batches = dataset.batch_by_size(dataset.ordered_indices(), **{"max_sentences": 3, **options})
    # fairseq's own iterator takes five seconds to stop a worker.
    return list(DataLoader(dataset, batch_sampler=batches, collate_fn=dataset.collater, num_workers=num_workers))


CAPTIONERS = {
    "show_attend_tell": {"embed_dim": 12, "hidden_dim": 16, "attention_dim": 8},
    "lstm_captioner": {"embed_dim": 16, "layers": 2},
    "conv_captioner": {"embed_dim": 16, "layers": 2, "kernel_size": 3},
}
SIZES = {**CAPTIONERS, "eta_transformer": {"embed_dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24}}


def captioner_of(task: Any, name: str, **options: Any) -> Any:
    """Build a small captioner without dropout from its options, as fairseq does."""
    from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY

    import attn_plugins.fairseq  # noqa: F401 - registers the captioners

    torch.manual_seed(0)
    args = argparse.Namespace(**{**SIZES[name], "dropout": 0.0, **options})
    return MODEL_REGISTRY[name].build_model(MODEL_DATACLASS_REGISTRY[name].from_namespace(args), task)


def model_of(task: Any, **options: Any) -> Any:
    """Build a small ``eta_transformer`` without dropout."""
    return captioner_of(task, "eta_transformer", **options)
