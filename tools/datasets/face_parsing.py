r"""Create mmsegmentation's folders from the published archives of HELEN and LFW Part Labels.

::

    python -m tools.datasets.face_parsing helen SmithCVPR2013_dataset_resized data/helen
    python -m tools.datasets.face_parsing lfw_pl lfw data/lfw_pl
    python -m tools.datasets.face_parsing helen SmithCVPR2013_dataset_original data/helen_aligned --landmarks annotation

HELEN (Smith et al. 2013; 2,000 + 230 + 100 faces) is read from one folder, the unpacked archive::

    exemplars.txt, tuning.txt, testing.txt      lines "1 , 100032540_1": train, val and test
    images/NAME.jpg
    labels/NAME/NAME_lbl00.png ... _lbl10.png   probability of each label, 0 to 255

LFW-PL (Kae et al. 2013; 1,500 + 500 + 927 faces) from a folder with two archives and three lists::

    parts_train.txt, parts_validation.txt, parts_test.txt     lines "Aaron_Eckhart 1"
    lfw_funneled/PERSON/PERSON_0001.jpg
    parts_lfw_funneled_gt_images/PERSON_0001.ppm              red hair, green skin, blue background

The output is ``images/{train,val,test}/NAME.jpg``, with the published pixels unchanged, and
``labels/{train,val,test}/NAME.png`` with one number per pixel. HELEN: 0 background, 1 skin, 2 and 3 left and right
brow, 4 and 5 left and right eye, 6 nose, 7 upper lip, 8 inner mouth, 9 lower lip, 10 hair, by the greatest
probability, the first of equal ones. LFW-PL: 0 background, 1 skin, 2 hair.

Faces are aligned only with ``--landmarks``, the folder of HELEN's own annotation (Le et al. 2012: 1.txt to 2330.txt,
each with a name and 194 lines "565.86 , 758.98"): images and labels are then rotated, scaled and shifted onto the
training faces' mean shape, in squares of 512 pixels. Labels are taken from the nearest pixel; outside the
photograph they are 255, which is not scored. The annotation belongs to HELEN's own pictures, so SOURCE must not have
resized ones.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tools import command_parser, need
from tools.datasets.face_alignment import Alignment
from tools.datasets.folders import Show, check_free, new_folder, show_progress

SPLITS = ("train", "val", "test")
HELEN_MAPS = 11
HELEN_PALETTE = (
    (0, 0, 0), (230, 190, 140), (120, 60, 20), (190, 110, 40), (40, 90, 220), (90, 200, 250), (250, 210, 40),
    (220, 40, 60), (110, 10, 60), (250, 120, 150), (60, 150, 70),
)  # fmt: skip
LFW_PL_COLORS = ((0, 0, 255), (0, 255, 0), (255, 0, 0))  # background, skin, hair


@dataclass(frozen=True)
class Face:
    """One image and the files its labels come from."""

    name: str
    image: Path
    labels: tuple[Path, ...]


@dataclass(frozen=True)
class Layout:
    """Format of a published data set, and the way to read its labels."""

    lists: tuple[tuple[str, int], ...]  # file and published number of faces, in the order of SPLITS
    folders: tuple[str, ...]
    line: re.Pattern[str]
    example: str
    face: Callable[[Path, re.Match[str]], Face]
    read_labels: Callable[[Face], np.ndarray]
    palette: tuple[tuple[int, int, int], ...]


def load(path: Path, mode: str) -> np.ndarray:
    """Read the pixels of an image, which must be of ``mode``."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
            stored = image.mode
    except OSError as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    if stored != mode:
        raise ValueError(f"{path} must be an 8-bit {mode} image, got {stored}")
    return pixels


def helen_face(source: Path, line: re.Match[str]) -> Face:
    name = line["name"]
    labels = tuple(source / "labels" / name / f"{name}_lbl{number:02d}.png" for number in range(HELEN_MAPS))
    return Face(name, source / "images" / f"{name}.jpg", labels)


def helen_labels(face: Face) -> np.ndarray:
    """Return labels (H, W) uint8: the index of the highest of the eleven probability maps."""
    maps = [load(path, "L") for path in face.labels]
    if len({pixels.shape for pixels in maps}) > 1:
        raise ValueError(f"{face.labels[0].parent}: the maps of a face must have the same size")
    return np.argmax(maps, 0).astype(np.uint8)


def lfw_pl_face(source: Path, line: re.Match[str]) -> Face:
    name = f"{line['person']}_{int(line['number']):04d}"
    labels = (source / "parts_lfw_funneled_gt_images" / f"{name}.ppm",)
    return Face(name, source / "lfw_funneled" / line["person"] / f"{name}.jpg", labels)


def lfw_pl_labels(face: Face) -> np.ndarray:
    """Return labels (H, W) uint8: the index of each pixel's color among the three."""
    pixels = load(face.labels[0], "RGB")
    labels = np.full(pixels.shape[:2], 255, np.uint8)
    for label, color in enumerate(LFW_PL_COLORS):
        labels[(pixels == color).all(2)] = label
    if (labels == 255).any():
        row, column = np.argwhere(labels == 255)[0]
        raise ValueError(
            f"{face.labels[0]} must be pure red (hair), green (skin) and blue (background), "
            f"got {tuple(pixels[row, column].tolist())} at row {row}, column {column}"
        )
    return labels


LAYOUTS = {
    "helen": Layout(
        lists=(("exemplars.txt", 2000), ("tuning.txt", 230), ("testing.txt", 100)),
        folders=("images", "labels"),
        line=re.compile(r"\s*\d+\s*,\s*(?P<name>[^\s,/\\]+)\s*"),
        example="1 , 100032540_1",
        face=helen_face,
        read_labels=helen_labels,
        palette=HELEN_PALETTE,
    ),
    "lfw_pl": Layout(
        lists=(("parts_train.txt", 1500), ("parts_validation.txt", 500), ("parts_test.txt", 927)),
        folders=("lfw_funneled", "parts_lfw_funneled_gt_images"),
        line=re.compile(r"\s*(?P<person>[^\s/\\]+)\s+(?P<number>\d+)\s*"),
        example="Aaron_Eckhart 1",
        face=lfw_pl_face,
        read_labels=lfw_pl_labels,
        palette=LFW_PL_COLORS,
    ),
}


def size(pixels: np.ndarray) -> str:
    return f"{pixels.shape[0]}x{pixels.shape[1]}"


def read_lists(layout: Layout, source: Path) -> dict[str, list[Face]]:
    """Read the faces of every split.

    Raises:
        ValueError: A list is missing, empty or has an invalid line, or a face is listed twice.
    """
    lacking = [name for name, _ in layout.lists if not (source / name).is_file()]
    lacking += [f"{name}/" for name in layout.folders if not (source / name).is_dir()]
    if lacking:
        raise ValueError(f"{source} lacks {', '.join(lacking)}: name the folder that holds what the archives unpack")
    seen: dict[str, str] = {}
    faces: dict[str, list[Face]] = {}
    for split, (name, _) in zip(SPLITS, layout.lists):
        faces[split] = []
        for number, text in enumerate((source / name).read_text().splitlines(), 1):
            if not text.strip():
                continue
            line, place = layout.line.fullmatch(text), f"{name}, line {number}"
            if line is None:
                raise ValueError(f"{source / name}, line {number}: expected one like {layout.example!r}, got {text!r}")
            face = layout.face(source, line)
            if face.name in seen:
                raise ValueError(f"{face.name} is listed twice: {seen[face.name]} and {place}")
            seen[face.name] = place
            faces[split].append(face)
        if not faces[split]:
            raise ValueError(f"{source / name} lists no face")
    return faces


def check_files(faces: Iterable[Face]) -> None:
    """Raise one ValueError that lists all missing files, before anything is written."""
    missing = [path for face in faces for path in (face.image, *face.labels) if not path.is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{len(missing)} listed files are missing: {', '.join(map(str, missing[:3]))}{more}")


def image_size(face: Face) -> tuple[int, int]:
    """Return the (H, W) of the image as it is stored, which the labels follow, whatever its EXIF orientation."""
    try:
        with Image.open(face.image, formats=["JPEG"]) as image:
            image.load()
            return image.height, image.width
    except OSError as error:
        raise ValueError(f"{face.image} cannot be read as a JPEG image: {error}") from error


def write_face(layout: Layout, face: Face, folder: Path, split: str, alignment: Alignment | None) -> None:
    target = folder / "images" / split / f"{face.name}.jpg"
    shape, labels = image_size(face), layout.read_labels(face)
    if labels.shape != shape:
        raise ValueError(f"{face.image} has {shape[0]}x{shape[1]} pixels, its labels {face.labels[0]} {size(labels)}")
    if alignment is None:
        shutil.copyfile(face.image, target)
    else:
        with Image.open(face.image) as photograph:
            aligned, labels = alignment.align(face.name, photograph.convert("RGB"), labels)
        aligned.save(target, quality=95, subsampling=0)
    image = Image.fromarray(labels)
    # With fewer colors than labels, PIL would write fewer bits and cut off 255
    unused = [(0, 0, 0)] * (0 if alignment is None else 256 - len(layout.palette))
    image.putpalette([channel for color in (*layout.palette, *unused) for channel in color])
    image.save(folder / "labels" / split / f"{face.name}.png")


def build(
    name: str,
    source: Path,
    output: Path,
    show: Show = lambda line: None,
    landmarks: Path | None = None,
    side: int = 512,
) -> dict[str, int]:
    """Write the set, for a folder of ``landmarks`` with aligned faces; return the number of faces of each split.

    Raises:
        ValueError: ``output`` is not empty, ``source`` is not as published, or the faces cannot be aligned.
    """
    layout = LAYOUTS[name]
    if landmarks is not None and name != "helen":
        raise ValueError(f"landmarks are HELEN's: {name} cannot be aligned by them")
    check_free(output)
    faces = read_lists(layout, source)
    check_files(face for split in SPLITS for face in faces[split])
    alignment = None
    if landmarks is not None:
        names = [face.name for split in SPLITS for face in faces[split]]
        alignment = Alignment(landmarks, names, [face.name for face in faces["train"]], side)
    with new_folder(output) as partial:
        for split in SPLITS:
            for kind in ("images", "labels"):
                (partial / kind / split).mkdir(parents=True)
            for done, face in enumerate(faces[split], 1):
                write_face(layout, face, partial, split, alignment)
                show(f"{split}: {done}/{len(faces[split])} faces")
    return {split: len(faces[split]) for split in SPLITS}


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("datasets.face_parsing", __doc__)
    parser.add_argument("set", choices=tuple(LAYOUTS))
    parser.add_argument("source", type=Path, help="folder of the published files")
    parser.add_argument("output", type=Path, help="output folder")
    parser.add_argument("--landmarks", type=Path, metavar="DIR", help="align HELEN's faces by its annotation")
    options = parser.parse_args(arguments)
    if options.landmarks is not None:
        need("skimage")
    try:
        counts = build(options.set, options.source, options.output, show_progress, options.landmarks)
    except (ValueError, OSError) as error:
        parser.exit(2, f"face_parsing: {error}\n")
    for split, (name, published) in zip(SPLITS, LAYOUTS[options.set].lists):
        if counts[split] != published:
            print(f"{name} lists {counts[split]} faces, the published one {published}")
    print(", ".join(f"{count} {split}" for split, count in counts.items()), f"faces in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
