"""Drawn faces in the published layouts of HELEN and LFW-PL."""

from __future__ import annotations

import numpy as np
from PIL import Image

from tools.datasets import face_parsing as tool

HELEN = {"exemplars.txt": ["100032540_1", "1001545525_1"], "tuning.txt": ["11564757_2"], "testing.txt": ["10405146_1"]}
LFW = {
    "parts_train.txt": ["Aaron_Eckhart 1", "Jean-Pierre_Bemba 13"],
    "parts_validation.txt": ["Aaron_Eckhart 2"],
    "parts_test.txt": ["Zico 3"],
}
SPLIT_OF = dict(zip([*HELEN, *LFW], tool.SPLITS * 2))
SWAPPED = [0, 1, 3, 2, 5, 4, 6, 7, 8, 9, 10]  # HELEN's labels after mirroring


def draw_face(rng, H, W):
    """Draw (H, W) labels 0 to 10 of a face with hair, at a random place near the middle."""
    labels = np.zeros((H, W), np.uint8)
    y, x = np.mgrid[:H, :W]
    y, x = y - H / 2 + rng.integers(-2, 3), x - W / 2 + rng.integers(-2, 3)
    labels[(y / (0.45 * H)) ** 2 + (x / (0.4 * W)) ** 2 < 1] = 10
    labels[((y - 2) / (0.38 * H)) ** 2 + (x / (0.3 * W)) ** 2 < 1] = 1
    for label, top, left, height, width in (
        (2, -10, -11, 3, 8),
        (3, -10, 3, 3, 8),
        (4, -6, -10, 3, 6),
        (5, -6, 4, 3, 6),
        (6, -5, -2, 9, 4),
        (7, 6, -6, 2, 12),
        (8, 8, -6, 2, 12),
        (9, 10, -6, 3, 12),
    ):
        labels[(y >= top) & (y < top + height) & (x >= left) & (x < left + width)] = label
    return labels


def photograph(rng, labels, palette):
    """Return the face in the colors of its palette, with noise."""
    pixels = np.asarray(palette)[labels] + rng.normal(0, 12, (*labels.shape, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def soft_maps(rng, labels):
    """Return eleven maps in which the true label leads by at least one grey level."""
    maps = rng.integers(0, 100, (11, *labels.shape))
    np.put_along_axis(maps, labels[None].astype(int), rng.integers(100, 256, (1, *labels.shape)), 0)
    return maps.astype(np.uint8)


def helen_folder(parent):
    """Write a folder like ``SmithCVPR2013_dataset_resized`` and return its true labels by name."""
    rng, folder, truth = np.random.default_rng(0), parent / "SmithCVPR2013_dataset_resized", {}
    (folder / "images").mkdir(parents=True)
    for n, (file, names) in enumerate(HELEN.items()):
        (folder / file).write_text("".join(f"{i} , {name} \r\n" for i, name in enumerate(names, 1)))
        for name in names:
            truth[name] = draw_face(rng, 48 + 2 * n, 64)
            photograph(rng, truth[name], tool.HELEN_PALETTE).save(folder / f"images/{name}.jpg", quality=95)
            (folder / "labels" / name).mkdir(parents=True)
            for label, pixels in enumerate(soft_maps(rng, truth[name])):
                Image.fromarray(pixels).save(folder / f"labels/{name}/{name}_lbl{label:02d}.png")
    return folder, truth


def lfw_folder(parent):
    """Write a folder with LFW-PL's three lists and two archives, and return the true labels by name."""
    rng, folder, truth = np.random.default_rng(1), parent / "lfw", {}
    (folder / "parts_lfw_funneled_gt_images").mkdir(parents=True)
    for file, lines in LFW.items():
        (folder / file).write_text("\n".join(lines) + "\n")
        for person, number in map(str.split, lines):
            name = f"{person}_{int(number):04d}"
            labels = draw_face(rng, 50, 60)
            truth[name] = np.select([labels == 0, labels == 10], [0, 2], 1).astype(np.uint8)
            (folder / "lfw_funneled" / person).mkdir(parents=True, exist_ok=True)
            photograph(rng, labels, tool.HELEN_PALETTE).save(folder / f"lfw_funneled/{person}/{name}.jpg")
            colors = np.asarray([[0, 0, 255], [0, 255, 0], [255, 0, 0]], np.uint8)[truth[name]]
            Image.fromarray(colors).save(folder / f"parts_lfw_funneled_gt_images/{name}.ppm")
    return folder, truth
