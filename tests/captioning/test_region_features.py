"""Region features of a set of images in one file: of Meshed-Memory Transformer and of bottom-up-attention."""

from __future__ import annotations

import base64
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import h5py
import numpy as np
import pytest

from attn_plugins.captioning import files
from attn_plugins.captioning.region_features import RegionFeatures, write_region_features

SUFFIXES = [".hdf5", ".tsv"]
BOX = (1.5, 0, 640, 480)


def made_up(number: int = 6, D: int = 5, ids: type = int) -> list[tuple]:
    """Return random features, of 0 to 4 regions per image."""
    draw = np.random.default_rng(0)
    return [(ids(1000 - i), draw.normal(size=((i * 3 + 2) % 5, D))) for i in range(number)]


def regions_of(images: list[tuple]) -> list[tuple]:
    return [(image_id, dict(features=x, boxes=np.array([BOX] * len(x)).reshape(-1, 4))) for image_id, x in images]


def write(path: Path, images: list[tuple], dtype: str = "float32") -> Path:
    """Write the images by our function, or as bottom-up-attention does."""
    if path.suffix != ".tsv":
        write_region_features(path, iter(regions_of(images)), dtype)
        return path
    rows = []
    for image_id, x in images:
        arrays = np.array([BOX] * len(x)), x
        texts = [base64.b64encode(array.astype(np.float32).tobytes()).decode() for array in arrays]
        rows.append("\t".join([str(image_id), "640", "480", str(len(x)), *texts]) + "\r\n")
    path.write_text("".join(rows), newline="")
    return path


@pytest.fixture(params=SUFFIXES)
def file(request, tmp_path) -> Path:
    path = write(tmp_path / f"regions{request.param}", made_up())
    assert list(tmp_path.iterdir()) == [path]
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("ids", [int, str, np.int64, "image-{}".format, "{:06}".format])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_was_written_is_read(tmp_path, suffix, ids, dtype):
    images = made_up(ids=ids)
    read = RegionFeatures(write(tmp_path / f"regions{suffix}", images, dtype))
    assert (len(read), read.feature_dim) == (len(images), 5)
    assert sorted(map(str, read.image_ids)) == sorted(str(image_id) for image_id, _ in images)
    if ids in (int, np.int64):
        assert all(type(image_id) is int for image_id in read.image_ids)
    for image_id, expected in images:
        assert image_id in read
        assert str(image_id) in read
        assert read.count(image_id) == len(expected)
        if not len(expected):
            with pytest.raises(ValueError, match=f"regions{suffix}: image {image_id} has no regions"):
                read.features(image_id)
            continue
        features = read.features(image_id)
        assert features.dtype == (np.float32 if suffix == ".tsv" else dtype)
        assert features.flags.writeable
        np.testing.assert_array_equal(features, expected.astype(features.dtype))


def test_a_file_of_meshed_memory_transformer(tmp_path):
    with h5py.File(tmp_path / "coco_detections.hdf5", "w") as hdf5:
        hdf5["12_features"], hdf5["12_boxes"] = np.ones((2, 4)), np.ones((2, 4))
        hdf5["12_cls_prob"] = np.ones((2, 1601))
    read = RegionFeatures(tmp_path / "coco_detections.hdf5")
    assert (read.image_ids, read.feature_dim, read.recipe) == ([12], 4, None)
    assert read.features(12).dtype == np.float32


def test_boxes_and_ids_in_the_written_file(tmp_path):
    images = [*regions_of(made_up(1)), ("image-8", dict(features=np.ones((2, 5))))]
    write_region_features(tmp_path / "regions.h5", images)
    assert RegionFeatures(tmp_path / "regions.h5").image_ids == [1000, "image-8"]
    with h5py.File(tmp_path / "regions.h5") as hdf5:
        assert list(hdf5) == ["1000_boxes", "1000_features", "image-8_features"]
        assert hdf5["1000_boxes"][()].tolist() == [list(BOX)] * 2


def test_a_recipe_is_kept(tmp_path):
    recipe = dict(options=dict(grid="größer", size=[64, 64], seed=None), long="x" * 100_000)
    write_region_features(tmp_path / "regions.hdf5", regions_of(made_up()), recipe=recipe)
    read = RegionFeatures(tmp_path / "regions.hdf5")
    assert read.recipe == recipe
    assert len(read) == 6
    write_region_features(tmp_path / "regions.hdf5", regions_of(made_up()))
    assert RegionFeatures(tmp_path / "regions.hdf5").recipe is None


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", r"its recipe must be a JSON object, got \[1\]"), ("{", "its recipe is not JSON")]
)
def test_a_recipe_that_is_no_json_object_raises(tmp_path, text, message):
    path = write(tmp_path / "bad.hdf5", made_up())
    with h5py.File(path, "r+") as hdf5:
        hdf5["recipe"] = text
    assert RegionFeatures(path).count(1000) == 2
    with pytest.raises(ValueError, match=rf"bad\.hdf5: {message}"):
        RegionFeatures(path).recipe  # noqa: B018


IMAGES = (1000, 998, 997)


def _sum_of(read: RegionFeatures, image_id: int) -> float:
    return float(read.features(image_id).sum())


def _same_in_workers(path: str, method: str) -> bool:
    read = RegionFeatures(path)
    expected = [_sum_of(read, image_id) for image_id in IMAGES]
    with ProcessPoolExecutor(1, get_context(method)) as pool:
        sums = list(pool.map(_sum_of, [read] * len(IMAGES), IMAGES))
    return sums == expected == [_sum_of(read, image_id) for image_id in IMAGES]


def test_an_open_file_goes_into_workers(file, python):
    # In a separate process: forking is unsafe with threads, and earlier tests have started some.
    code = f"from tests.captioning.test_region_features import _same_in_workers as same; assert same({str(file)!r}, "
    python(f"{code}'fork')", PYTHONPATH=str(Path(__file__).parents[2]))
    if file.suffix == ".tsv":
        assert _same_in_workers(str(file), "spawn")
    read = RegionFeatures(file)
    expected = _sum_of(read, 998)
    copy = pickle.dumps(read)
    assert len(copy) < 1000
    assert _sum_of(pickle.loads(copy), 998) == expected


def test_a_file_that_is_cut_off(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"regions\{file.suffix}.* truncated"):
        len(RegionFeatures(file))


def test_a_file_of_another_format_raises(file):
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match=r"regions.* is not an |row 1 must have image_id, image_w, image_h, num_boxes"):
        len(RegionFeatures(file))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: [*rows[:2], rows[2].split("\t", 1)[0]], "row 3 must have image_id, .* separated by tabs"),
        (lambda rows: [*rows[:3], rows[3][:-9]], "truncated in row 4, image 997"),
        (lambda rows: [rows[0][:-9]], r"row 1, image 1000, must have 2 boxes and 2 x 4 features.* truncated"),
        (lambda rows: [rows[0][:60]], "truncated in row 1, image 1000"),
        (
            lambda rows: [rows[0], rows[2].replace("\t3\t", "\t2\t")],
            "row 2, image 998, must have 2 boxes and 2 x 5 fea",
        ),
        (lambda rows: [rows[0], rows[0]], "image 1000 appears twice"),
        (lambda rows: [rows[0].replace("\t2\t", "\t-2\t")], "row 1 must have image_id, image_w"),
        (lambda rows: [], r"regions\.tsv is empty"),
    ],
)
def test_malformed_rows_raise(tmp_path, spoil, message):
    path = write(tmp_path / "regions.tsv", made_up())
    path.write_text("".join(spoil(path.read_text().replace("\r", "").splitlines(keepends=True))))
    with pytest.raises(ValueError, match=message):
        len(RegionFeatures(path))


def test_rows_of_joined_files_and_a_header(tmp_path):
    text = write(tmp_path / "regions.tsv", made_up()).read_text()
    header = "image_id\timage_w\timage_h\tnum_boxes\tboxes\tfeatures\n"
    (tmp_path / "joined.tsv").write_text(header + text.rstrip() + "\n" + text.replace("100", "200").replace("99", "77"))
    read = RegionFeatures(tmp_path / "joined.tsv")
    assert len(read) == 12
    np.testing.assert_array_equal(read.features(778), made_up()[2][1].astype(np.float32))
    (tmp_path / "bad.tsv").write_text(text.replace("\t640\t480\t2\t", "\t640\t480\t2\t!!!!", 1)[:-4])
    with pytest.raises(ValueError, match="row 1, image 1000, must have 2 boxes"):
        len(RegionFeatures(tmp_path / "bad.tsv"))


def test_an_hdf5_file_of_other_datasets(tmp_path):
    for name, array, message in (
        ("features", np.ones((3, 2)), "must have a dataset IMAGE_features for each image; it has features"),
        ("7_features", np.ones(3), r"7_features must have shape \(n, D\), got \(3,\)"),
    ):
        with h5py.File(tmp_path / "regions.h5", "w") as hdf5:
            hdf5[name] = array
        with pytest.raises(ValueError, match=message):
            RegionFeatures(tmp_path / "regions.h5").feature_dim  # noqa: B018


def test_features_of_other_widths_or_not_finite(tmp_path):
    with h5py.File(tmp_path / "regions.h5", "w") as hdf5:
        hdf5["12_features"], hdf5["7_features"], hdf5["8_features"] = (
            np.ones((2, 4)), np.ones((3, 5)), np.full((1, 4), np.inf)
        )  # fmt: skip
    read = RegionFeatures(tmp_path / "regions.h5")
    assert read.features(12).shape == (2, 4)
    with pytest.raises(ValueError, match=r"regions\.h5: image 7 has features of 5 channels, others of 4"):
        read.features(7)
    with pytest.raises(ValueError, match=r"regions\.h5: image 8 has features that are NaN or infinite"):
        read.features(8)


def test_images_that_are_not_there(file):
    with pytest.raises(ValueError, match="has no image 5; it has 6 others"):
        RegionFeatures(file).count(5)


def test_unreadable_files_raise(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.hdf5: no such file"):
        RegionFeatures(tmp_path / "nowhere.hdf5")
    with pytest.raises(ValueError, match=r"regions\.csv: the suffix must be one of \.hdf5, \.h5, \.tsv$"):
        RegionFeatures(tmp_path / "regions.csv")
    with pytest.raises(ValueError, match=r"\.npz, which version 0\.2 wrote, is no longer read: extract again"):
        RegionFeatures(tmp_path / "regions.npz")
    with pytest.raises(ValueError, match=r"region features are written to \.hdf5 or \.h5, got .*regions\.tsv"):
        write_region_features(tmp_path / "regions.tsv", regions_of(made_up()))
    monkeypatch.setitem(sys.modules, "h5py", None)
    for function in (RegionFeatures, lambda path: write_region_features(path, [])):
        with pytest.raises(ModuleNotFoundError, match=r"regions\.h5: a \.h5 file needs the package h5py"):
            function(tmp_path / "regions.h5")


def test_a_write_that_fails_leaves_the_file_alone(tmp_path):
    def save(partial: Path) -> None:
        partial.write_text("new")
        raise OSError("the disk is full")

    (tmp_path / "regions.hdf5").write_text("old")
    with pytest.raises(OSError, match="the disk is full"):
        files.write(tmp_path / "regions.hdf5", save)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "new" / "newer" / "text.txt"
    files.write(path, lambda partial: partial.write_text("new"))
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.zeros((2, 4))}, r"image 7: features must have shape \(n, 5\), got \(2, 4\)"),
        ({"features": np.full((2, 5), np.nan)}, "image 7: features are NaN, infinite or outside the range of float16"),
        ({"features": np.full((2, 5), 1e6)}, "image 7: features are NaN, infinite or outside the range of float16"),
        ({"boxes": np.full((2, 4), np.inf)}, "image 7: boxes are NaN"),
        ({"boxes": np.zeros((3, 4))}, r"image 7: boxes must have shape \(2, 4\), got \(3, 4\)"),
    ],
)
def test_malformed_images_raise_and_leave_no_file(tmp_path, change, message):
    path, first, good = tmp_path / "regions.hdf5", regions_of(made_up(2)), dict(features=np.ones((2, 5)))
    for images, what in (
        ([*first, (7, {**good, **change})], message),
        ([*first, (7, {})], "image 7 has no features"),
        ([*first, (1000, good)], "image 1000 was already added"),
        ([("a/b", good)], "an image id must be an int or a str without /, got 'a/b'"),
        ([], "there is no image to write"),
    ):
        with pytest.raises(ValueError, match=what):
            write_region_features(path, images)
    with pytest.raises(ValueError, match="dtype must be 'float16' or 'float32', got 'int8'"):
        write_region_features(path, [(1, good)], "int8")
    assert list(tmp_path.iterdir()) == []
