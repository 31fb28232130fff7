"""Region features that several writers stored in folders, merged into one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attn_plugins.captioning.region_features import RegionFeatures, RegionFeaturesWriter
from attn_plugins.captioning.region_parts import RegionParts
from tests.captioning.test_region_features import made_up


def part(folder: Path, images: list[tuple], dtype: str = "float16") -> Path:
    with RegionFeaturesWriter(folder, dtype) as writer:
        for image_id, regions in images:
            writer.append(image_id, regions)
    return folder


@pytest.mark.parametrize("ids", [int, str])
def test_parts_give_the_bytes_of_one_folder(ids, tmp_path):
    images = made_up(17, ids=ids)
    whole = tmp_path / "whole.npz"
    RegionParts([part(tmp_path / "whole", images)]).save(whole, dict(seed=1))
    folders = [part(tmp_path / f"{n}", images[n::3][::-1]) for n in range(3)]
    part(tmp_path / "empty", [])
    parts = RegionParts([*folders, tmp_path / "empty", tmp_path / "gone"], [image_id for image_id, _ in images])
    parts.save(tmp_path / "of_parts.npz", dict(seed=1))
    assert (tmp_path / "of_parts.npz").read_bytes() == whole.read_bytes()
    read = RegionFeatures(whole)
    assert parts.image_ids == read.image_ids == [image_id for image_id, _ in images]
    assert (parts.rows, parts.feature_dim) == (sum(len(regions["scores"]) for _, regions in images), 5)
    for image_id, regions in images:
        if read.count(image_id):
            expected = regions["features"].astype(np.float16)
            np.testing.assert_array_equal(read.regions(image_id)["features"], expected)


def test_parts_that_do_not_fit(tmp_path):
    images = made_up(6)
    first = part(tmp_path / "first", images[:4])
    with pytest.raises(ValueError, match=r"image 997 is in .*first and in .*again"):
        RegionParts([first, part(tmp_path / "again", images[3:])])
    with pytest.raises(ValueError, match=r"narrow has features of 2 channels in float16, but .*first of 5 in float16"):
        RegionParts([first, part(tmp_path / "narrow", made_up(6, 2)[4:])])
    with pytest.raises(ValueError, match=r"fine has features of 5 channels in float32, but .*first of 5 in float16"):
        RegionParts([first, part(tmp_path / "fine", images[4:], "float32")])
    with pytest.raises(ValueError, match="first has image 997, which is not in the list"):
        RegionParts([first], [1000, 999, 998])
    with pytest.raises(ValueError, match="there is no image to write"):
        RegionParts([tmp_path / "gone"]).save(tmp_path / "regions.npz")
    (first / "boxes").write_bytes(b"")
    with pytest.raises(ValueError, match=r"boxes has 0 bytes, not \d+: delete .*first and start again"):
        RegionParts([first]).save(tmp_path / "regions.npz")
