"""Lists of pictures, with errors that name the file and the item."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from attn_plugins.captioning.caption_files import ImageId, image_id_of, read_items


@dataclass(frozen=True)
class ListedImage:
    """A picture of a list."""

    id: ImageId  # COCO's id, or the file's stem
    path: Path  # need not exist


def listed_images(folder: Path, splits: Path | None = None) -> list[ListedImage]:
    """Return the pictures listed in a split file, else all of the folder.

    Args:
        folder: Folder of pictures; those of a split file may also be in the folders of its ``filepath``.
        splits: Karpathy's format: ``images`` have ``cocoid`` (or ``imgid``) and ``filename``.

    Raises:
        ValueError: The folder is missing, a file is invalid, an id or a stem is repeated, or there are no pictures.
    """
    if not folder.is_dir():
        raise ValueError(f"IMAGES {folder}: no such folder")
    if splits is not None:
        images = []
        for row in read_items(splits, "images"):
            image_id = image_id_of(splits, row, "cocoid", "imgid")
            if not isinstance(name := row.get("filename"), str):
                raise ValueError(f"{splits}: image {image_id} has no filename")
            nested = folder / str(row.get("filepath", "")) / name
            images.append(ListedImage(image_id, nested if nested.is_file() else folder / name))
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
