"""Alignment of HELEN's faces by their annotated landmarks, for :mod:`tools.datasets.face_parsing`.

HELEN's ``annotation`` (Le et al. 2012) is a text file for each face: its name, then 194 lines ``x , y`` with points on
the chin, nose, lips, eyes and brows. The similarity (rotation, one scale and translation) that fits a face's points
best to the training faces' mean shape warps its image and its labels.

Points are (x, y) in pixels, and the centre of the first pixel is (0, 0). A similarity is a (2, 3) matrix [A | t],
p ↦ A p + t.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

POINTS = 194
IGNORED = 255  # label outside the photograph, which mmseg's losses and scores ignore
FACE = 0.5  # the longer side of the mean shape's box, as a share of the aligned image's side
CENTRE = (0.5, 0.6)  # centre of that box, likewise: hair needs more room than the neck
FACE_LABELS = range(1, 10)  # skin, brows, eyes, nose and mouth


def read_landmarks(folder: Path) -> dict[str, np.ndarray]:
    """Read the points of every face by its name: (194, 2) float64.

    Raises:
        ValueError: The folder is missing or has no text files, or a file does not have HELEN's format.
    """
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        raise ValueError(f"landmarks: {folder} has no *.txt; name the folder that HELEN's annotation.zip unpacks")
    faces: dict[str, np.ndarray] = {}
    for file in files:
        try:
            name, _, rows = file.read_text().partition("\n")
            points = np.loadtxt(rows.splitlines(), delimiter=",", ndmin=2)
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} must hold a name and {POINTS} lines like '565.86 , 758.98': {error}") from error
        name = name.strip().removesuffix(".jpg")
        if points.shape != (POINTS, 2) or not np.isfinite(points).all() or not np.ptp(points, axis=0).all():
            raise ValueError(f"{file} must hold {POINTS} finite points that are not in one row or column")
        if not name or "," in name or name in faces:
            raise ValueError(f"{file}, line 1: expected the name of another face, such as '100032540_1', got {name!r}")
        faces[name] = points
    return faces


def similarity(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return the similarity (2, 3) without reflection from ``source`` to ``target``, (P, 2), by least squares."""
    from skimage.transform import estimate_transform

    return estimate_transform("similarity", source, target).params[:2]


def mean_shape(shapes: Iterable[np.ndarray]) -> np.ndarray:
    """Compute the full Procrustes mean of shapes: (P, 2), centred, of norm 1.

    It is the leading eigenvector of Σ z z* over the centred shapes of norm 1 as complex vectors (Kent 1994), rotated to
    match their plain average, which is as upright as the faces in their pictures.
    """
    z = np.stack([shape @ [1, 1j] for shape in shapes])
    z -= z.mean(1, keepdims=True)
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    mean = np.linalg.eigh(z.T @ z.conj())[1][:, -1]
    turn = np.vdot(mean, z.mean(0))
    mean *= turn / abs(turn)
    return np.stack((mean.real, mean.imag), 1)


def on_canvas(shape: np.ndarray, size: int) -> np.ndarray:
    """Place a shape in an aligned image of ``size`` pixels per side: (P, 2)."""
    low, high = shape.min(0), shape.max(0)
    scale = FACE * size / (high - low).max()
    return (shape - (low + high) / 2) * scale + np.array(CENTRE) * size - 0.5


def warp(image: Image.Image, matrix: np.ndarray, size: int, nearest: bool = False, fill: int = 0) -> Image.Image:
    """Warp an image, in RGB or of labels, by the similarity ``matrix`` (2, 3) to ``size`` pixels per side.

    ``nearest`` takes the nearest pixel, as for labels; otherwise interpolation is linear, on means of blocks if
    the image shrinks to half or less. Pixels outside the image are ``fill`` in every channel.
    """
    back = np.linalg.inv(matrix[:, :2])
    shift = -back @ matrix[:, 2]
    # the origin of PIL's coordinates is the first pixel's corner
    shift += 0.5 - back @ [0.5, 0.5]
    block = 1 if nearest else max(1, int(np.sqrt(abs(np.linalg.det(back))) + 1e-6))
    if block > 1:
        image, back, shift = image.reduce(block), back / block, shift / block
    data = (*back[0], shift[0], *back[1], shift[1])
    resample = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    color = fill if len(image.getbands()) == 1 else (fill,) * len(image.getbands())
    return image.transform((size, size), Image.Transform.AFFINE, data, resample, fillcolor=color)


class Alignment:
    """Similarities that align the faces ``names`` by the annotation in ``folder``; ``training`` ones define the mean.

    Attributes:
        size: Side of the aligned images.
        shape: (194, 2), the mean shape in their pixels.
        matrices: (2, 3) of each face, from its picture to the aligned one.

    Raises:
        ValueError: A face has no landmarks.
    """

    def __init__(self, folder: Path, names: Sequence[str], training: Sequence[str], size: int) -> None:
        landmarks = read_landmarks(folder)
        if missing := [name for name in names if name not in landmarks]:
            raise ValueError(f"landmarks: {folder} lacks {len(missing)} of {len(names)} faces, such as {missing[0]}")
        self.size = size
        self.points = {name: landmarks[name] for name in names}
        self.shape = on_canvas(mean_shape(self.points[name] for name in training), size)
        self.matrices = {name: similarity(points, self.shape) for name, points in self.points.items()}

    def align(self, name: str, image: Image.Image, labels: np.ndarray) -> tuple[Image.Image, np.ndarray]:
        """Align an image in RGB and HELEN's labels (H, W) uint8; pixels outside the photograph are :data:`IGNORED`.

        Raises:
            ValueError: Most landmarks are not on the face.
        """
        H, W = labels.shape
        columns, rows = np.rint(self.points[name]).astype(int).T
        inside = (columns >= 0) & (columns < W) & (rows >= 0) & (rows < H)
        hits = np.isin(labels[rows[inside], columns[inside]], FACE_LABELS).sum()
        if 2 * hits < POINTS:
            raise ValueError(
                f"{hits} of the {POINTS} landmarks of {name} are on its face: they must belong to a picture of {H}x{W} "
                f"pixels (HELEN's own belong to the pictures of SmithCVPR2013_dataset_original, not to resized ones)"
            )
        matrix = self.matrices[name]
        seen = warp(Image.fromarray(labels), matrix, self.size, nearest=True, fill=IGNORED)
        return warp(image, matrix, self.size), np.asarray(seen)
