"""Region features of a set of images in one file: npz, HDF5 or LMDB."""

from __future__ import annotations

import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from attn_plugins.captioning.region_features import RegionFeatures, RegionFeaturesWriter, write_region_features

SUFFIXES = [".npz", ".h5", ".lmdb"]


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


def needs(suffix: str) -> None:
    package = {".npz": "numpy", ".lmdb": "lmdb"}.get(suffix, "h5py")
    pytest.importorskip(package, reason=f"{suffix} files need {package}")


@pytest.fixture(params=SUFFIXES)
def file(request, tmp_path) -> Path:
    needs(request.param)
    path = tmp_path / f"regions{request.param}"
    write_region_features(path, iter(made_up()), "float32")
    assert list(tmp_path.iterdir()) == [path]
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("ids", [int, str])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_was_written_is_read(tmp_path, suffix, ids, dtype):
    needs(suffix)
    images = made_up(ids=ids)
    write_region_features(tmp_path / f"regions{suffix}", iter(images), dtype)
    read = RegionFeatures(tmp_path / f"regions{suffix}")
    assert (len(read), read.feature_dim) == (len(images), 5)
    assert read.image_ids == [image_id for image_id, _ in images]
    for image_id, regions in images:
        assert image_id in read
        assert str(image_id) in read
        assert read.count(image_id) == len(regions["scores"])
        if not read.count(image_id):
            with pytest.raises(ValueError, match=f"regions{suffix}: image {image_id} has no regions"):
                read.regions(image_id)
            continue
        arrays = read.regions(image_id)
        assert [arrays[name].dtype for name in ("features", "boxes", "scores")] == [dtype, np.float32, np.float32]
        np.testing.assert_array_equal(arrays["features"], regions["features"].astype(dtype))
        for name in ("boxes", "scores"):
            np.testing.assert_array_equal(arrays[name], regions[name].astype(np.float32))
            assert arrays[name].flags.writeable


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_recipe_is_kept(tmp_path, suffix):
    needs(suffix)
    recipe = dict(options=dict(grid="größer", size=[64, 64], seed=None), long="x" * 100_000)
    write_region_features(tmp_path / f"regions{suffix}", made_up(), recipe=recipe)
    read = RegionFeatures(tmp_path / f"regions{suffix}")
    assert read.recipe == recipe
    assert read.count(1000) == 2
    write_region_features(tmp_path / f"regions{suffix}", made_up())
    assert RegionFeatures(tmp_path / f"regions{suffix}").recipe is None


def test_a_recipe_that_is_none(tmp_path):
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
    if file.suffix == ".npz":
        assert _same_in_workers(str(file), "spawn")
    read = RegionFeatures(file)
    expected = _sum_of(read, 998)
    copy = pickle.dumps(read)
    assert len(copy) < 500
    assert _sum_of(pickle.loads(copy), 998) == expected


def test_members_of_an_npz_stay_in_the_file(tmp_path):
    """This also holds for files of plain numpy.savez and for any order of members."""
    write_region_features(tmp_path / "ours.npz", made_up())
    arrays = dict(np.load(tmp_path / "ours.npz"))
    np.savez(tmp_path / "theirs.npz", **dict(reversed(arrays.items())))
    for name in ("ours.npz", "theirs.npz"):
        read = RegionFeatures(tmp_path / name)
        read.count(1000)
        assert all(isinstance(read._arrays[part], np.memmap) for part in ("features", "boxes", "scores"))
        np.testing.assert_array_equal(read.regions(998)["features"], made_up()[2][1]["features"].astype(np.float16))


def test_a_file_that_is_cut_off(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=rf"regions\{file.suffix}.* truncated"):
        len(RegionFeatures(file))


def test_another_kind_of_file(file):
    file.write_bytes(b"x" * 5000)
    with pytest.raises(ValueError, match=r"regions.* is not an "):
        len(RegionFeatures(file))


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
        ("scores", None, "bad.npz lacks scores; it has boxes, features, image_ids, offsets"),
        ("offsets", lambda array: array[1:], "bad.npz: offsets must be 7 integers"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit(tmp_path, name, spoil, message):
    write_region_features(tmp_path / "good.npz", made_up())
    arrays = dict(np.load(tmp_path / "good.npz"))
    array = arrays.pop(name)
    np.savez(tmp_path / "bad.npz", **arrays, **({} if spoil is None else {name: spoil(array)}))
    with pytest.raises(ValueError, match=message):
        RegionFeatures(tmp_path / "bad.npz").regions(1000)


def test_images_that_are_not_there(file):
    with pytest.raises(ValueError, match="has no image 5; it has 6 others"):
        RegionFeatures(file).count(5)


def test_files_that_cannot_be(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.npz: no such file"):
        RegionFeatures(tmp_path / "nowhere.npz")
    with pytest.raises(ValueError, match=r"regions\.csv: the suffix must be one of \.npz, \.h5"):
        RegionFeatures(tmp_path / "regions.csv")
    write_region_features(tmp_path / "regions.npz", made_up())
    np.savez_compressed(tmp_path / "packed.npz", **np.load(tmp_path / "regions.npz"))
    with pytest.raises(
        ValueError, match=r"image_ids.npy is compressed and cannot be mapped: write it with numpy.savez"
    ):
        len(RegionFeatures(tmp_path / "packed.npz"))
    monkeypatch.setitem(sys.modules, "h5py", None)
    for use in (RegionFeatures, lambda path: write_region_features(path, made_up())):
        with pytest.raises(ModuleNotFoundError, match=r"regions\.h5: a \.h5 file needs the package h5py"):
            use(tmp_path / "regions.h5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": np.zeros((2, 4))}, r"image 7: features must have shape \(n, 5\), got \(2, 4\)"),
        ({"features": np.full((2, 5), np.nan)}, "image 7: features are NaN, infinite or outside the range of float16"),
        ({"features": np.full((2, 5), 1e6)}, "image 7: features are NaN, infinite or outside the range of float16"),
        ({"boxes": np.array([[0, 0, 1, 1], [0, 0, 640, 480]])}, "image 7: boxes must be"),
        ({"boxes": np.array([[0.5, 0, 0.2, 1]] * 2)}, "image 7: boxes must be x0 <= x1"),
        ({"scores": np.zeros(3)}, r"image 7: scores must have shape \(2,\), got \(3,\)"),
        ({"scores": None}, "image 7: scores"),
    ],
)
def test_images_that_cannot_be_written(tmp_path, change, message):
    good = dict(features=np.ones((2, 5)), boxes=np.array([[0, 0, 1, 1]] * 2), scores=np.ones(2))
    with pytest.raises(ValueError, match=message):
        write_region_features(tmp_path / "regions.npz", [*made_up(2), (7, {**good, **change})])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="image 1000 was already added"):
        write_region_features(tmp_path / "regions.npz", [*made_up(2), (1000, good)])
    with pytest.raises(ValueError, match="there is no image to write"):
        write_region_features(tmp_path / "regions.npz", [])


def test_an_interrupted_run_resumes(tmp_path):
    images = made_up()
    write_region_features(tmp_path / "whole.npz", images)
    with RegionFeaturesWriter(tmp_path / "parts") as writer:
        for image_id, regions in images[:3]:
            writer.append(image_id, regions)
    for name in ("features", "scores", "images.jsonl"):  # as if the run had ended within the fourth image
        with tmp_path.joinpath("parts", name).open("ab") as part:
            part.write(b"[123")
    with RegionFeaturesWriter(tmp_path / "parts") as writer:
        assert writer.image_ids == [1000, 999, 998]
        for image_id, regions in images[3:]:
            writer.append(image_id, regions)
    writer.assemble(tmp_path / "again.npz")
    whole, again = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("whole", "again"))
    for name in whole:
        np.testing.assert_array_equal(whole[name], again[name])
    with pytest.raises(ValueError, match="was started with float16, not float32"):
        RegionFeaturesWriter(tmp_path / "parts", "float32")
