"""File formats of :mod:`attn_plugins.captioning.region_features`: reading and writing npz, HDF5 and LMDB.

Every error names the file.
"""

from __future__ import annotations

import functools
import importlib
import io
import os
import struct
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

ARRAYS = ("image_ids", "offsets", "features", "boxes", "scores")
PACKAGES = {".npz": None, ".h5": "h5py", ".hdf5": "h5py", ".lmdb": "lmdb"}
RECIPE = "recipe"
BLOCK = 1 << 24  # bytes of an LMDB transaction


def open_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of the file, the large ones not loaded, and the text of its ``recipe`` or None.

    For LMDB, the ``environment`` replaces boxes and scores.
    """
    return {".npz": _open_npz, ".lmdb": _open_lmdb}.get(path.suffix, _open_hdf5)(path)


def save_arrays(
    path: Path, ids: np.ndarray, offsets: np.ndarray, regions: dict[str, list[np.ndarray]], recipe: str | None = None
) -> None:
    """Write all five arrays and the recipe; the output is deterministic.

    ``regions`` are features, boxes and scores by image, such as views of mapped files, which are written one by one.
    """
    save = {".npz": _save_npz, ".lmdb": _save_lmdb}.get(path.suffix, _save_hdf5)
    save(path, {"image_ids": [ids], "offsets": [offsets], **regions}, recipe)


def package_of(path: Path) -> Any:
    """Import and return the package that the format of ``path`` needs, or return None."""
    if path.suffix not in PACKAGES:
        raise ValueError(f"region features {path}: the suffix must be one of {', '.join(PACKAGES)}")
    name = PACKAGES[path.suffix]
    try:
        return None if name is None else importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"region features {path}: a {path.suffix} file needs the package {name}") from error


def _open_npz(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = {Path(info.filename).stem: info for info in archive.infolist()}
            _check_names(path, members)
            arrays: dict[str, Any] = {name: _mapped(path, file, members[name]) for name in ARRAYS}
            recipe = None
            if RECIPE in members:
                with archive.open(members[RECIPE]) as member:
                    recipe = str(npy.read_array(member, allow_pickle=False))
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not an npz file or is truncated: {error}") from error
    arrays.update(image_ids=np.array(arrays["image_ids"]), offsets=np.array(arrays["offsets"]), recipe=recipe)
    return arrays


def _mapped(path: Path, file: Any, info: zipfile.ZipInfo) -> np.ndarray:
    """Map an uncompressed member of a zip file into memory."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{path}: {info.filename} is compressed and cannot be mapped: write it with numpy.savez")
    file.seek(info.header_offset)
    name, extra = struct.unpack("<HH", file.read(30)[26:])  # lengths that only the local header stores
    file.seek(name + extra, os.SEEK_CUR)
    read = npy.read_array_header_1_0 if npy.read_magic(file) == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{path}: {info.filename} must hold numbers or text, got {dtype}")
    start = file.tell()
    if start + int(np.prod(shape)) * dtype.itemsize > path.stat().st_size:
        raise ValueError(f"{path}: {info.filename} is truncated")
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def _save_npz(path: Path, arrays: dict[str, list[np.ndarray]], recipe: str | None) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, pieces in arrays.items():
            with archive.open(_member(name), "w", force_zip64=True) as member:
                descr = npy.dtype_to_descr(pieces[0].dtype)
                npy.write_array_header_1_0(member, dict(descr=descr, fortran_order=False, shape=_shape(pieces)))
                for piece in pieces:
                    member.write(piece.tobytes())
        if recipe is not None:
            with archive.open(_member(RECIPE), "w") as member:
                npy.write_array(member, np.array(recipe), allow_pickle=False)


def _member(name: str) -> zipfile.ZipInfo:
    """Return a member entry with a fixed time stamp."""
    return zipfile.ZipInfo(f"{name}.npy")


def _shape(pieces: list[np.ndarray]) -> tuple[int, ...]:
    return sum(map(len, pieces)), *pieces[0].shape[1:]


def _open_hdf5(path: Path) -> dict[str, Any]:
    try:
        file = package_of(path).File(path, "r")
        _check_names(path, file)
        arrays: dict[str, Any] = {name: file[name] for name in ARRAYS}
        ids, offsets = arrays["image_ids"][:], arrays["offsets"][:]
        recipe = file[RECIPE].asstr()[()] if RECIPE in file else None
    except OSError as error:
        raise ValueError(f"{path} is not an HDF5 file or is truncated: {error}") from error
    return {**arrays, "image_ids": ids, "offsets": offsets, "recipe": recipe}


def _save_hdf5(path: Path, arrays: dict[str, list[np.ndarray]], recipe: str | None) -> None:
    with package_of(path).File(path, "w") as file:
        for name, pieces in arrays.items():
            dataset, start = file.create_dataset(name, _shape(pieces), pieces[0].dtype), 0
            for piece in pieces:
                dataset[start : start + len(piece)] = piece
                start += len(piece)
        if recipe is not None:
            file.create_dataset(RECIPE, data=recipe)


def _open_lmdb(path: Path) -> dict[str, Any]:
    lmdb = package_of(path)
    try:
        environment = _environment(path.resolve(), path.stat().st_ino, path.stat().st_mtime_ns)
        with environment.begin() as transaction:
            records = {name: transaction.get(f"__{name}__".encode()) for name in ARRAYS[:3]}
            recipe = transaction.get(f"__{RECIPE}__".encode())
    except lmdb.Error as error:
        raise ValueError(f"{path} is not an LMDB file or is truncated: {error}") from error
    _check_names(path, [name for name, record in records.items() if record is not None], ARRAYS[:3])
    arrays = {name: np.load(io.BytesIO(record), allow_pickle=False) for name, record in records.items()}
    return {**arrays, "environment": environment, "recipe": None if recipe is None else recipe.decode()}


@functools.cache
def _environment(path: Path, *_: int) -> Any:
    """Open one environment per file and process. Read-only and without locks, it also works in forked processes."""
    environment = package_of(path).open(
        str(path), subdir=False, readonly=True, lock=False, readahead=False, meminit=False
    )
    pages, page, size = environment.info()["last_pgno"] + 1, environment.stat()["psize"], path.stat().st_size
    if pages * page > size:  # reading a missing page would kill the process
        environment.close()
        raise ValueError(f"{path} is truncated: {size} bytes of {pages * page}")
    return environment


def _save_lmdb(path: Path, arrays: dict[str, list[np.ndarray]], recipe: str | None) -> None:
    [ids] = arrays["image_ids"]
    # An upper bound for the map: the data, one page per record, and the pages of the tree.
    size = 2 * sum(piece.nbytes for pieces in arrays.values() for piece in pieces) + 16384 * (len(ids) + 64)
    size += 4 * len(recipe or "")
    environment = package_of(path).open(str(path), subdir=False, map_size=size, lock=False, sync=False)
    transaction, kept = environment.begin(write=True), 0
    for image_id, *record in zip(ids.tolist(), arrays["boxes"], arrays["scores"], arrays["features"]):
        value = b"".join(piece.tobytes() for piece in record)
        if value:
            transaction.put(image_id if isinstance(image_id, bytes) else str(image_id).encode(), value)
        kept += len(value)
        if kept > BLOCK:  # uncommitted data stays in memory
            transaction.commit()
            transaction, kept = environment.begin(write=True), 0
    for name in ARRAYS[:3]:
        buffer = io.BytesIO()
        np.save(buffer, arrays[name][0][:0] if name == "features" else arrays[name][0])
        transaction.put(f"__{name}__".encode(), buffer.getvalue())
    if recipe is not None:
        transaction.put(f"__{RECIPE}__".encode(), recipe.encode())
    transaction.commit()
    environment.sync(True)
    environment.close()


def _check_names(path: Path, names: Iterable[str], wanted: Sequence[str] = ARRAYS) -> None:
    names = set(names)
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(names)) or 'nothing'}")
