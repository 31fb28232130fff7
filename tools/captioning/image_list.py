"""List of pictures with their ids in caption files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tools.captioning.json_files import BadFile, ImageId, items, read_json


@dataclass(frozen=True)
class ListedImage:
    """A picture.

    Attributes:
        id: COCO's id, or the file's stem.
        path: The file, which need not exist.
        part: ``train``, ``val``, ...; empty without a split file.
    """

    id: ImageId
    path: Path
    part: str = ""


def listed_images(folder: Path, captions: Path | None = None, splits: Path | None = None) -> list[ListedImage]:
    """Return the pictures listed in a split file, else those of a caption file, else all of the folder.

    Args:
        folder: Folder of pictures; those of a split file may also be in the folders of its ``filepath``.
        captions: COCO's format: ``images`` have ``id`` and ``file_name``.
        splits: Karpathy's format: ``images`` have ``cocoid`` (or ``imgid``), ``split`` and ``filename``; a missing
            ``filename`` is looked up in ``captions``.

    Raises:
        BadFile: the folder is missing, a file is invalid, an id or a stem is repeated, or there are no pictures.
    """
    if not folder.is_dir():
        raise BadFile(f"IMAGES {folder}: no such folder")
    if captions is None and splits is None:
        found = _of_folder(folder)
    else:
        names = {} if captions is None else _file_names(captions)
        found = _of_captions(folder, names) if splits is None else _of_splits(folder, splits, names)
    source = splits or captions or folder
    if not found:
        raise BadFile(f"{source} has no pictures")
    first: dict[str, ListedImage] = {}
    for image in found:
        other = first.setdefault(str(image.id), image)
        if other is not image:
            raise BadFile(f"{source}: {other.path.name} and {image.path.name} have the same id, {image.id}")
    if not any(image.path.is_file() for image in found):
        raise BadFile(f"{folder} has none of the {len(found)} pictures of {source}, such as {found[0].path.name}")
    return found


def _of_folder(folder: Path) -> list[ListedImage]:
    known = Image.registered_extensions()
    return [ListedImage(path.stem, path) for path in sorted(folder.iterdir()) if path.suffix.lower() in known]


def _file_names(captions: Path) -> dict[ImageId, str]:
    content = read_json(captions)
    rows = content.get("images") if isinstance(content, dict) else None
    rows = items(captions, rows, "'images'", {"id": (int, str), "file_name": str})
    if len({row["id"] for row in rows}) != len(rows):
        raise BadFile(f"{captions}: an image is there twice")
    return {row["id"]: row["file_name"] for row in rows}


def _of_captions(folder: Path, names: dict[ImageId, str]) -> list[ListedImage]:
    return [ListedImage(image_id, folder / name) for image_id, name in names.items()]


def _of_splits(folder: Path, splits: Path, names: dict[ImageId, str]) -> list[ListedImage]:
    content = read_json(splits)
    rows = content.get("images") if isinstance(content, dict) else None
    names_by_text = {str(image_id): name for image_id, name in names.items()}  # 5 and "5" are the same picture
    found = []
    for row in items(splits, rows, "'images'", {"split": str}):
        image_id = row.get("cocoid", row.get("imgid"))
        if isinstance(image_id, bool) or not isinstance(image_id, (int, str)):
            raise BadFile(f"{splits}: an image has neither cocoid nor imgid, got {row!r:.120}")
        name = row.get("filename", names_by_text.get(str(image_id)))
        if not isinstance(name, str):
            raise BadFile(f"{splits}: image {image_id} has no filename, and no caption file has it")
        nested = folder / str(row.get("filepath", "")) / name
        found.append(ListedImage(image_id, nested if nested.is_file() else folder / name, row["split"]))
    return found
