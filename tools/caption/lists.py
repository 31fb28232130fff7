"""Lists of pictures, captions and results in JSON files, with errors that name the file and the item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from attn_plugins.captioning.caption_files import ImageId, image_id_of, read_items


def some(images: list[ImageId]) -> str:
    """Return ``image 3``, or ``4 images (3, 5, 8, ...)``."""
    if len(images) == 1:
        return f"image {images[0]}"
    return f"{len(images)} images ({', '.join(map(str, images[:3]))}{', ...' if len(images) > 3 else ''})"


def read_captions(path: Path) -> dict[ImageId, list[str]]:
    """Return the captions of every image of a COCO caption file, which may be none.

    Raises:
        ValueError: the file is invalid, or a caption is of an unknown image.
    """
    captions: dict[ImageId, list[str]] = {row["id"]: [] for row in read_items(path, "images", id=(int, str))}
    known = {str(image): image for image in captions}
    for row in read_items(path, "annotations", image_id=(int, str), caption=str):
        if str(row["image_id"]) not in known:
            raise ValueError(f"{path}: caption {row.get('id')} is of image {row['image_id']}, which 'images' lacks")
        captions[known[str(row["image_id"])]].append(row["caption"])
    return captions


def read_splits(path: Path) -> list[dict[str, Any]]:
    """Return the images of Karpathy's file; ``cocoid`` is set to ``imgid`` where it is missing."""
    rows = read_items(path, "images", split=str)
    for row in rows:
        row["cocoid"] = image_id_of(path, row, "cocoid", "imgid")
    return rows


@dataclass(frozen=True)
class ListedImage:
    """A picture of a list."""

    id: ImageId  # COCO's id, or the file's stem
    path: Path  # need not exist
    part: str = ""  # 'train', 'val', ...; empty without a split file


def listed_images(folder: Path, splits: Path | None = None) -> list[ListedImage]:
    """Return the pictures listed in a split file, else all of the folder.

    Args:
        folder: Folder of pictures; those of a split file may also be in the folders of its ``filepath``.
        splits: Karpathy's format: ``images`` have ``cocoid`` (or ``imgid``), ``split`` and ``filename``.

    Raises:
        ValueError: the folder is missing, a file is invalid, an id or a stem is repeated, or there are no pictures.
    """
    if not folder.is_dir():
        raise ValueError(f"IMAGES {folder}: no such folder")
    if splits is not None:
        images = []
        for row in read_splits(splits):
            if not isinstance(name := row.get("filename"), str):
                raise ValueError(f"{splits}: image {row['cocoid']} has no filename")
            nested = folder / str(row.get("filepath", "")) / name
            images.append(ListedImage(row["cocoid"], nested if nested.is_file() else folder / name, row["split"]))
    else:
        known = Image.registered_extensions()
        images = [ListedImage(path.stem, path) for path in sorted(folder.iterdir()) if path.suffix.lower() in known]
    source = splits or folder
    if not images:
        raise ValueError(f"{source} has no pictures")
    if not any(image.path.is_file() for image in images):
        raise ValueError(f"{folder} has none of the {len(images)} pictures of {source}, such as {images[0].path.name}")
    first: dict[str, ListedImage] = {}
    for image in images:
        other = first.setdefault(str(image.id), image)
        if other is not image:
            raise ValueError(f"{source}: {other.path.name} and {image.path.name} have the same id, {image.id}")
    return images
