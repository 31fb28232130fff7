"""Region features of a set of images in one file: npz, and the formats of two other projects."""

from __future__ import annotations

import base64
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from attn_plugins.captioning import files
from attn_plugins.captioning.region_features import RegionFeatures, write_region_features

SUFFIXES = [".npz", ".tsv", ".hdf5"]
W, H = 640, 480


def made_up(number: int = 6, D: int = 5, ids: type = int) -> list[tuple]:
    """Return random regions, 0 to 4 per image."""
    draw = np.random.default_rng(0)
    images = []
    for i in range(number):
        n = (i * 3 + 2) % 5
        corners = np.sort(draw.random((n, 2, 2)), 1)
        regions = dict(features=draw.normal(size=(n, D)), boxes=corners.reshape(n, 4), scores=draw.random(n))
        images.append((ids(1000 - i), regions))
    return images


def write(path: Path, images: list[tuple], dtype: str = "float32") -> Path:
    """Write the images in the format of the suffix: of bottom-up-attention, of Meshed-Memory Transformer, or ours."""
    if path.suffix == ".npz":
        write_region_features(path, iter(images), dtype)
    elif path.suffix == ".tsv":
        rows = []
        for image_id, x in images:
            arrays = x["boxes"] * [W, H, W, H], x["features"]
            texts = [base64.b64encode(array.astype(np.float32).tobytes()).decode() for array in arrays]
            rows.append("\t".join([str(image_id), str(W), str(H), str(len(x["boxes"])), *texts]) + "\r\n")
        path.write_text("".join(rows), newline="")
    else:
        h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
        with h5py.File(path, "w") as hdf5:
            for image_id, x in images:
                hdf5[f"{image_id}_features"] = x["features"].astype(dtype)
                hdf5[f"{image_id}_boxes"] = x["boxes"] * [W, H, W, H]
                hdf5[f"{image_id}_cls_prob"] = x["scores"][:, None] * [0.5, 1, 0.25]
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
    for image_id, regions in images:
        assert image_id in read
        assert str(image_id) in read
        assert read.count(image_id) == len(regions["scores"])
        if not read.count(image_id):
            with pytest.raises(ValueError, match=f"regions{suffix}: image {image_id} has no regions"):
                read.regions(image_id)
            continue
        arrays = read.regions(image_id)
        assert arrays["features"].dtype == (np.float32 if suffix == ".tsv" else dtype)
        np.testing.assert_array_equal(arrays["features"], regions["features"].astype(arrays["features"].dtype))
        if suffix == ".hdf5":
            np.testing.assert_allclose(arrays.pop("pixel_boxes"), regions["boxes"] * [W, H, W, H], rtol=1e-6)
        else:
            np.testing.assert_allclose(arrays["boxes"], regions["boxes"], rtol=0, atol=1e-7)
        if suffix != ".tsv":
            np.testing.assert_array_equal(arrays["scores"], regions["scores"].astype(np.float32))
        assert all(array.flags.writeable for array in arrays.values())
        assert all(array.dtype == np.float32 for name, array in arrays.items() if name != "features")


def test_ids_that_are_numbers_and_texts(tmp_path):
    (_, regions), *_ = made_up()
    write_region_features(tmp_path / "regions.npz", [(7, regions), ("image-8", regions)])
    read = RegionFeatures(tmp_path / "regions.npz")
    assert read.image_ids == ["7", "image-8"]
    assert read.count(7) == read.count("image-8") == 2


def test_a_picture_of_one_pixel(tmp_path):
    path = write(tmp_path / "regions.tsv", made_up())
    path.write_text(path.read_text().replace(f"\t{W}\t{H}\t", "\t1\t1\t"))
    boxes = RegionFeatures(path).regions(1000)["boxes"]
    np.testing.assert_allclose(boxes, made_up()[0][1]["boxes"] * [W, H, W, H], rtol=1e-6)


def test_a_recipe_is_kept(tmp_path):
    recipe = dict(options=dict(grid="größer", size=[64, 64], seed=None), long="x" * 100_000)
    write_region_features(tmp_path / "regions.npz", made_up(), recipe=recipe)
    read = RegionFeatures(tmp_path / "regions.npz")
    assert read.recipe == recipe
    assert read.count(1000) == 2
    write_region_features(tmp_path / "regions.npz", made_up())
    assert RegionFeatures(tmp_path / "regions.npz").recipe is None


def test_a_recipe_that_is_no_json_object_raises(tmp_path):
    write_region_features(tmp_path / "regions.npz", made_up(), recipe={})
    arrays = dict(np.load(tmp_path / "regions.npz"))
    for text, message in (("[1]", r"its recipe must be a JSON object, got \[1\]"), ("{", "its recipe is not JSON")):
        np.savez(tmp_path / "bad.npz", **{**arrays, "recipe": np.array(text)})
        assert RegionFeatures(tmp_path / "bad.npz").count(1000) == 2
        with pytest.raises(ValueError, match=rf"bad\.npz: {message}"):
            RegionFeatures(tmp_path / "bad.npz").recipe  # noqa: B018


IMAGES = (1000, 998, 997)


def _sum_of(read: RegionFeatures, image_id: int) -> float:
    return float(read.regions(image_id)["features"].sum())


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
    if file.suffix != ".hdf5":
        assert _same_in_workers(str(file), "spawn")
    read = RegionFeatures(file)
    expected = _sum_of(read, 998)
    copy = pickle.dumps(read)
    assert len(copy) < 1000
    assert _sum_of(pickle.loads(copy), 998) == expected


def test_members_of_an_npz_stay_in_the_file(tmp_path):
    """This also holds for files of plain numpy.savez and for any order of members."""
    write_region_features(tmp_path / "ours.npz", made_up())
    arrays = dict(np.load(tmp_path / "ours.npz"))
    np.savez(tmp_path / "theirs.npz", **dict(reversed(arrays.items())))
    for name in ("ours.npz", "theirs.npz"):
        read = RegionFeatures(tmp_path / name)
        read.count(1000)
        assert all(isinstance(array, np.memmap) for array in read._reader._arrays.values())
        np.testing.assert_array_equal(read.regions(998)["features"], made_up()[2][1]["features"].astype(np.float16))


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
        (lambda rows: [rows[0].replace("640", "0")], "row 1 must have image_id, image_w"),
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
    np.testing.assert_array_equal(read.regions(778)["features"], made_up()[2][1]["features"].astype(np.float32))
    (tmp_path / "bad.tsv").write_text(text.replace("\t640\t480\t2\t", "\t640\t480\t2\t!!!!", 1)[:-4])
    with pytest.raises(ValueError, match="row 1, image 1000, must have 2 boxes"):
        len(RegionFeatures(tmp_path / "bad.tsv"))


def test_an_hdf5_file_of_other_datasets(tmp_path):
    h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
    for name, array, message in (
        ("features", np.ones((3, 2)), "must have a dataset IMAGE_features for each image; it has features"),
        ("7_features", np.ones(3), r"7_features must have shape \(n, D\), got \(3,\)"),
    ):
        with h5py.File(tmp_path / "regions.h5", "w") as hdf5:
            hdf5[name] = array
        with pytest.raises(ValueError, match=message):
            RegionFeatures(tmp_path / "regions.h5").feature_dim  # noqa: B018


def test_an_hdf5_file_of_features_of_other_widths(tmp_path):
    h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
    with h5py.File(tmp_path / "regions.h5", "w") as hdf5:
        hdf5["12_features"], hdf5["7_features"] = np.ones((2, 4)), np.ones((3, 5))
    read = RegionFeatures(tmp_path / "regions.h5")
    assert read.regions(12)["features"].shape == (2, 4)
    with pytest.raises(ValueError, match=r"regions\.h5: image 7 has features of 5 channels, others of 4"):
        read.regions(7)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("features", lambda array: array + np.nan, "bad.npz: image 1000 has features that are NaN"),
        ("offsets", lambda array: array * [1, 1, 0, 1, 1, 1, 1],
         "bad.npz: offsets must start at 0 and increase; they decrease after image 999"),
        ("image_ids", lambda array: np.where(np.arange(6) == 2, 1000, array), "bad.npz: image 1000 appears twice"),
        ("boxes", lambda array: array[:-1], r"bad.npz: boxes must have shape \(12, 4\), got \(11, 4\)"),
        ("features", lambda array: array.astype(np.float64),
         r"bad.npz: features must be .* float16 or float32, got \(12, 5\) float64"),
        ("scores", lambda array: array.astype(object), "bad.npz: scores.npy must hold numbers or text, got object"),
        ("scores", None, "bad.npz lacks scores; it has boxes, features, image_ids, offsets"),
        ("offsets", lambda array: array[1:], "bad.npz: offsets must be 7 integers"),
    ],
)  # fmt: skip
def test_malformed_arrays_raise(tmp_path, name, spoil, message):
    write_region_features(tmp_path / "good.npz", made_up())
    arrays = dict(np.load(tmp_path / "good.npz"))
    array = arrays.pop(name)
    np.savez(tmp_path / "bad.npz", **arrays, **({} if spoil is None else {name: spoil(array)}))
    with pytest.raises(ValueError, match=message):
        RegionFeatures(tmp_path / "bad.npz").regions(1000)


def test_a_member_that_is_shorter_than_its_header_says(tmp_path):
    write_region_features(tmp_path / "regions.npz", made_up(), "float32")
    text = (tmp_path / "regions.npz").read_bytes()
    assert text.count(b"(12, 5)") == 1
    (tmp_path / "regions.npz").write_bytes(text.replace(b"(12, 5)", b"(99, 9)"))
    with pytest.raises(ValueError, match=r"regions\.npz: features\.npy is truncated"):
        len(RegionFeatures(tmp_path / "regions.npz"))


def test_images_that_are_not_there(file):
    with pytest.raises(ValueError, match="has no image 5; it has 6 others"):
        RegionFeatures(file).count(5)


def test_unreadable_files_raise(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz: no such file"):
        RegionFeatures(tmp_path / "nowhere.npz")
    with pytest.raises(ValueError, match=r"regions\.csv: the suffix must be one of \.npz, \.tsv, \.hdf5, \.h5"):
        RegionFeatures(tmp_path / "regions.csv")
    write_region_features(tmp_path / "regions.npz", made_up())
    np.savez_compressed(tmp_path / "packed.npz", **np.load(tmp_path / "regions.npz"))
    with pytest.raises(
        ValueError, match=r"image_ids.npy is compressed and cannot be mapped: write it with numpy.savez"
    ):
        len(RegionFeatures(tmp_path / "packed.npz"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ModuleNotFoundError, match=r"regions\.h5: a \.h5 file needs the package h5py"):
        RegionFeatures(tmp_path / "regions.h5")
    with pytest.raises(ValueError, match=r"region features are written to \.npz, got .*regions\.h5"):
        write_region_features(tmp_path / "regions.h5", made_up())


def test_a_write_that_fails_leaves_the_file_alone(tmp_path):
    def save(partial: Path) -> None:
        partial.write_text("new")
        raise OSError("the disk is full")

    (tmp_path / "regions.npz").write_text("old")
    with pytest.raises(OSError, match="the disk is full"):
        files.write(tmp_path / "regions.npz", save)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_missing_folders_are_made(tmp_path):
    path = tmp_path / "new" / "newer" / "text.txt"
    files.write(path, lambda partial: partial.write_text("new"))
    assert path.read_text() == "new"


def test_rounding_at_the_border(tmp_path):
    boxes = np.array([[-1.2e-7, 0, 0.5, 1 + 1.2e-7], [0.5, 0.25, 0.5 - 6e-8, 1]])
    images = [(7, dict(features=np.ones((2, 5)), boxes=boxes, scores=np.ones(2)))]
    write_region_features(tmp_path / "regions.npz", images)
    stored = RegionFeatures(tmp_path / "regions.npz").regions(7)["boxes"]
    np.testing.assert_array_equal(stored, np.array([[0, 0, 0.5, 1], [0.5, 0.25, 0.5, 1]], np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.zeros((2, 4))}, r"image 7: features must have shape \(n, 5\), got \(2, 4\)"),
        ({"features": np.full((2, 5), np.nan)}, "image 7: features are NaN, infinite or outside the range of float16"),
        ({"features": np.full((2, 5), 1e6)}, "image 7: features are NaN, infinite or outside the range of float16"),
        ({"boxes": np.array([[0, 0, 1, 1], [0, 0, 640, 480]])}, "image 7: boxes must be"),
        ({"boxes": np.array([[0.5, 0, 0.2, 1]] * 2)}, "image 7: boxes must be x0 <= x1"),
        ({"boxes": np.array([[0, 0, 1.001, 1]] * 2)}, "image 7: boxes must be x0 <= x1"),
        ({"scores": np.zeros(3)}, r"image 7: scores must have shape \(2,\), got \(3,\)"),
        ({"scores": None}, "image 7: scores"),
    ],
)
def test_malformed_images_raise_and_leave_no_file(tmp_path, change, message):
    good = dict(features=np.ones((2, 5)), boxes=np.array([[0, 0, 1, 1]] * 2), scores=np.ones(2))
    with pytest.raises(ValueError, match=message):
        write_region_features(tmp_path / "regions.npz", [*made_up(2), (7, {**good, **change})])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="image 1000 was already added"):
        write_region_features(tmp_path / "regions.npz", [*made_up(2), (1000, good)])
    with pytest.raises(ValueError, match="there is no image to write"):
        write_region_features(tmp_path / "regions.npz", [])
    with pytest.raises(ValueError, match="dtype must be 'float16' or 'float32', got 'int8'"):
        write_region_features(tmp_path / "regions.npz", [(1, good)], "int8")
    assert list(tmp_path.iterdir()) == []
