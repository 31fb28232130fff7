"""Alignment of HELEN's faces: a mean by repeated alignment, and drawn faces of known rotation and scale."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from tools.datasets import face_parsing
from tools.datasets.face_alignment import Alignment, mean_shape, similarity

SIZE = 96
FACES = {"train": ["1_1", "2_1", "3_1"], "val": ["4_1"], "test": ["5_1"]}
LISTS = {"train": "exemplars.txt", "val": "tuning.txt", "test": "testing.txt"}
# Label, centre and half axes of ellipses in face coordinates; later ones are on top.
PARTS = [(10, 0, -8, 46, 54), (1, 0, 0, 34, 44), (2, -15, -16, 9, 3), (3, 15, -16, 9, 3), (4, -14, -8, 7, 3)]
PARTS += [(5, 14, -8, 7, 3), (6, 0, 6, 6, 10), (7, 0, 21, 12, 3), (8, 0, 24, 11, 2), (9, 0, 28, 12, 4)]


def own_points():
    """Return 194 points on the chin, half an ellipse, and around brows, eyes, nose and mouth."""
    chin = np.linspace(0, math.pi, 41)
    rows = [np.stack((34 * np.cos(chin), 44 * np.sin(chin)), 1)]
    for (_, x, y, a, b), count in zip([*PARTS[2:7], PARTS[7], PARTS[9]], (20, 20, 20, 20, 17, 28, 28)):
        around = np.arange(count) * 2 * math.pi / count
        rows.append(np.stack((x + a * np.cos(around), y + b * np.sin(around)), 1))
    return np.concatenate(rows)


def turned(degrees, scale, x, y):
    """Return the (2, 3) matrix from face coordinates to the pixels of a picture."""
    c, s = scale * math.cos(math.radians(degrees)), scale * math.sin(math.radians(degrees))
    return np.array([[c, -s, x], [s, c, y]])


def applied(matrix, points):
    return points @ matrix[:, :2].T + matrix[:, 2]


def sources(matrix, H, W):
    """Return the points (2, H * W), x and y, that a similarity maps to the pixels of a picture."""
    y, x = np.mgrid[:H, :W]
    return np.linalg.inv(matrix[:, :2]) @ (np.stack((x.ravel(), y.ravel())) - matrix[:, 2:])


def drawn(matrix, H, W):
    """Draw (H, W) labels of the face under a similarity."""
    own = sources(matrix, H, W)
    labels = np.zeros(H * W, np.uint8)
    for label, cx, cy, a, b in PARTS:
        labels[((own[0] - cx) / a) ** 2 + ((own[1] - cy) / b) ** 2 < 1] = label
    return labels.reshape(H, W)


PLACES = {
    "1_1": turned(0, 1, 70, 80),
    "2_1": turned(25, 1.3, 80, 75),
    "3_1": turned(-25, 0.8, 90, 70),
    "4_1": turned(40, 0.7, 66, 90),
    "5_1": turned(-14, 2.6, 160, 150),
}
SHAPES = {"5_1": (290, 330)}  # (H, W), of the others (150, 170)


def write_points(folder, number, name, points):
    folder.mkdir(exist_ok=True)
    lines = "".join(f"{x:.2f} , {y:.2f} \r\n" for x, y in points)
    (folder / f"{number}.txt").write_text(f"{name}\r\n{lines}")


@pytest.fixture
def faces(tmp_path):
    """Write a folder like HELEN's with rotated faces and their annotation."""
    source = tmp_path / "SmithCVPR2013_dataset_original"
    (source / "images").mkdir(parents=True)
    palette = np.asarray(face_parsing.HELEN_PALETTE)
    for split, names in FACES.items():
        (source / LISTS[split]).write_text("".join(f"{i} , {name}\n" for i, name in enumerate(names, 1)))
        for name in names:
            labels = drawn(PLACES[name], *SHAPES.get(name, (150, 170)))
            Image.fromarray(palette[labels].astype(np.uint8)).save(source / f"images/{name}.jpg", quality=95)
            (source / "labels" / name).mkdir(parents=True)
            for label in range(11):
                pixels = np.where(labels == label, 200, 20).astype(np.uint8)
                Image.fromarray(pixels).save(source / f"labels/{name}/{name}_lbl{label:02d}.png")
            write_points(tmp_path / "annotation", name[0], name, applied(PLACES[name], own_points()))
    return source, tmp_path / "annotation"


def test_mean_is_that_of_repeated_alignment():
    rng = np.random.default_rng(3)
    shapes = []
    for _ in range(12):
        matrix = turned(rng.normal() * 15, rng.uniform(0.5, 3), *rng.normal(size=2) * 99)
        shapes.append(applied(matrix, own_points() + rng.normal(size=(194, 2)) * 4))
    normal = [(shape - shape.mean(0)) / np.linalg.norm(shape - shape.mean(0)) for shape in shapes]
    mean = np.mean(normal, 0)
    for _ in range(60):
        mean = np.mean([applied(similarity(shape, mean), shape) for shape in normal], 0)
        mean /= np.linalg.norm(mean)
    np.testing.assert_allclose(mean_shape(shapes), mean, atol=1e-9)


def test_turned_faces_become_one(faces, tmp_path):
    source, annotation = faces
    out = tmp_path / "out"
    assert face_parsing.build("helen", source, out, landmarks=annotation, side=SIZE) == dict(train=3, val=1, test=1)
    names = [name for own in FACES.values() for name in own]
    alignment = Alignment(annotation, names, FACES["train"], SIZE)
    shape = alignment.shape
    low, high = shape.min(0) + 0.5, shape.max(0) + 0.5  # from the corner on
    assert (high - low).max() == pytest.approx(0.5 * SIZE)
    np.testing.assert_allclose((low + high) / 2, [0.5 * SIZE, 0.6 * SIZE])
    canonical = similarity(own_points(), shape)
    expected = drawn(canonical, SIZE, SIZE)
    palette = np.asarray(face_parsing.HELEN_PALETTE)
    for split, names in FACES.items():
        for name in names:
            matrix = alignment.matrices[name]
            np.testing.assert_allclose(applied(matrix, applied(PLACES[name], own_points())), shape, atol=0.02)
            image = Image.open(out / f"labels/{split}/{name}.png")
            labels = np.asarray(image)
            assert image.mode == "P"
            assert labels.shape == (SIZE, SIZE)
            assert set(np.unique(labels)) <= {*range(11), 255}
            seen = labels != 255
            assert (labels == expected)[seen].mean() > 0.97  # except for pixels on contours
            photograph = np.asarray(Image.open(out / f"images/{split}/{name}.jpg"), float)
            assert photograph.shape == (SIZE, SIZE, 3)
            assert np.median(abs(photograph - palette[np.where(seen, labels, 0)])[seen]) < 12
            columns, rows = sources(matrix, SIZE, SIZE)
            H, W = SHAPES.get(name, (150, 170))
            shown = (columns > -0.5) & (columns < W - 0.5) & (rows > -0.5) & (rows < H - 0.5)
            assert np.array_equal(seen, shown.reshape(SIZE, SIZE))
            assert seen.mean() > 0.7
    assert not seen.all()


def edited(change):
    def apply(annotation):
        lines = (annotation / "2.txt").read_text().splitlines()
        (annotation / "2.txt").write_text("\n".join(change(lines)))

    return apply


@pytest.mark.parametrize(
    "spoil, message",
    [
        (shutil.rmtree, r"annotation has no \*.txt; name the fol"),
        (lambda folder: (folder / "4.txt").unlink(), r"annotation lacks 1 of 5 faces, such as 4_1"),
        (lambda folder: shutil.copy(folder / "2.txt", folder / "9.txt"), "9.txt, line 1: .* got '2_1'"),
        (edited(lambda lines: [*lines[:7], "12.5 13.5", *lines[8:]]), "2.txt must hold a name and .*: the number"),
        (edited(lambda lines: [lines[0], *["5 , 5"] * 194]), "2.txt must hold 194 finite points that are not in one"),
        (
            edited(lambda lines: [lines[0], *lines[45:125], *["-9 , 3", "-8 , 4"] * 57]),
            "80 of the 194 landmarks of 2_1 are on its face",
        ),
    ],
)
def test_bad_annotation_is_named_and_leaves_nothing(spoil, message, faces, tmp_path):
    source, annotation = faces
    spoil(annotation)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=message):
        face_parsing.build("helen", source, tmp_path / "out", landmarks=annotation, side=SIZE)
    assert sorted(tmp_path.iterdir()) == before


def test_command_line(faces, tmp_path, capsys):
    source, annotation = faces
    arguments = ["helen", str(source), str(tmp_path / "out"), "--landmarks", str(annotation)]
    assert face_parsing.main(arguments) == 0
    assert "3 train, 1 val, 1 test faces in" in capsys.readouterr().out
    assert Image.open(tmp_path / "out/labels/val/4_1.png").size == (512, 512)
    with pytest.raises(ValueError, match="landmarks are HELEN's: lfw_pl cannot be aligned by them"):
        face_parsing.build("lfw_pl", source, tmp_path / "other", landmarks=annotation)
