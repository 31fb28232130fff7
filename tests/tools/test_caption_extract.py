"""``tools.caption extract``: regions by torchvision and a grid, the same of a new picture, and broken pictures."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import timm
import torch
from torchvision.ops import box_iou

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tests.helpers.captioned_pictures import draw
from tools import files
from tools.caption import extract
from tools.caption.__main__ import main
from tools.caption.backbones import TimmBackbone
from tools.caption.extract import RecordedExtractor
from tools.caption.regions import Selection, TorchvisionRegions
from tools.pictures import open_picture

GRID = ["--grid", "test_resnet", "--no-weights", "--size", "64", "--grid-size", "3"]
TORCHVISION = ["--torchvision", "fasterrcnn_mobilenet_v3_large_fpn", "--no-weights", "--size", "64"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Path:
    return draw(tmp_path_factory.mktemp("pictures") / "set", 8)


def run(drawn: Path, out: Path, *options: str) -> int:
    given = ["extract", drawn / "images", out, "--splits", drawn / "splits.json", "--device", "cpu", *options]
    return main(list(map(str, given)))


@pytest.mark.parametrize("way", ["grid", "torchvision"])
def test_each_way_gives_regions_and_those_of_a_new_picture(way, drawn, tmp_path, monkeypatch):
    if way == "grid":
        torch.save(TimmBackbone("test_resnet").model.state_dict(), tmp_path / "x.pth")
        options = ["--grid", "test_resnet", "--grid-size", "3", "--size", "48", "64", "--dtype", "float32"]
        options += ["--checkpoint", "x.pth"]
    else:
        options = TORCHVISION
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "some/regions.hdf5"
    assert run(drawn, out, *options, "--max-regions", "20", "--batch-size", "1") == 0
    assert list(out.parent.iterdir()) == [out]
    monkeypatch.chdir("/")
    features = RegionFeatures(out)
    assert features.image_ids == list(range(1, 9))
    assert features.feature_dim == dict(grid=TimmBackbone("test_resnet").num_features, torchvision=1024)[way]
    for image_id in features.image_ids:
        size = open_picture(drawn / f"images/00000{image_id}.jpg").size
        with h5py.File(out) as file:
            boxes = file[f"{image_id}_boxes"][()]
        assert len(boxes) == features.count(image_id)
        assert len(boxes) == 9 if way == "grid" else 1 <= len(boxes) <= 20
        assert (boxes >= 0).all()
        assert (boxes <= [*size, *size]).all()
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        if way == "grid":
            np.testing.assert_allclose(boxes[5], np.array([2, 1, 3, 2]) / 3 * [*size, *size], rtol=1e-6)
    assert not np.array_equal(features.features(1), features.features(2))
    extractor = RecordedExtractor(features)
    for image_id in (1, 3):
        computed = extractor(open_picture(drawn / f"images/00000{image_id}.jpg"))
        assert computed.dtype == features.features(image_id).dtype
        np.testing.assert_array_equal(computed, features.features(image_id))


def test_torchvision_features_are_what_the_classifier_reads_of_the_boxes(drawn):
    """Boxes and features of the detections that torchvision's own forward returns, with their scores."""
    torch.manual_seed(0)
    options = argparse.ArgumentParser()
    extract.add_arguments(options)
    thresholds = "--min-regions 1 --max-regions 100 --score-threshold 0.05 --nms 0.5".split()  # torchvision's own
    extractor = TorchvisionRegions(options.parse_args(["in", "out", *TORCHVISION, "96", *thresholds]), "cpu")
    model: Any = extractor.model
    picture = extractor.prepare(open_picture(drawn / "images/000003.jpg"))
    [regions] = extractor([picture])
    h, w = picture.shape[1:]
    with torch.no_grad():
        images, _ = model.transform([picture])
        maps = model.backbone(images.tensors)
        size = images.image_sizes[0]
        boxes = torch.tensor(regions["boxes"]) * torch.tensor([size[1], size[0], size[1], size[0]])
        logits, _ = model.roi_heads.box_predictor(
            model.roi_heads.box_head(model.roi_heads.box_roi_pool(maps, [boxes], [size]))
        )
        found, _ = model.roi_heads.box_predictor(torch.tensor(regions["features"]))
        torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
        model.roi_heads.score_thresh, model.roi_heads.detections_per_img = 0.0, 1000
        [theirs] = model([picture])
    best = torch.tensor(regions["boxes"][0]) * torch.tensor([w, h, w, h])
    assert (theirs["boxes"] - best).abs().amax(1).min() < 1e-2


@pytest.mark.parametrize("suffix", ["safetensors", "pth.tar"])
def test_a_trained_classifiers_weights_are_taken(suffix, drawn, tmp_path):
    """Of safetensors, at the size in their metadata, and of a checkpoint of timm's train.py, with its options."""
    torch.manual_seed(3)
    model, file = timm.create_model("test_resnet", num_classes=2), tmp_path / f"best.{suffix}"
    options = ["--checkpoint", str(file), "--grid-size", "1", "--dtype", "float32"]
    if suffix == "safetensors":
        files.write_weights(file, model, dict(model="test_resnet", input_size=(64, 64)))
    else:
        torch.save(dict(arch="test_resnet", state_dict=model.state_dict(), args=argparse.Namespace(lr=1)), file)
        options += ["--size", "64"]
    assert run(drawn, tmp_path / "regions.hdf5", "--grid", "test_resnet", *options) == 0
    prepared = TimmBackbone("test_resnet", (64, 64)).prepare(open_picture(drawn / "images/000002.jpg"))
    with torch.no_grad():
        expected = model.eval().forward_features(prepared[None]).mean((2, 3))
    stored = RegionFeatures(tmp_path / "regions.hdf5").features(2)
    np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "swin_tiny_patch4_window7_224"])
def test_backbones_of_every_layout_give_maps(name):
    backbone = TimmBackbone(name, (224, 224) if "swin" in name else (96, 96)).eval()
    with torch.no_grad():
        assert backbone(torch.randn(1, 3, *backbone.size)).shape[1] == backbone.num_features


def test_broken_pictures_are_named_and_the_others_are_there(drawn, tmp_path, capsys):
    folder = tmp_path / "set"
    shutil.copytree(drawn, folder)
    cut = folder / "images/000002.jpg"
    cut.write_bytes(cut.read_bytes()[:900])
    (folder / "images/000005.jpg").unlink()
    (folder / "images/000006.jpg").write_text("no picture")
    out = tmp_path / "regions.hdf5"
    assert run(folder, out, *GRID, "--workers", "1") == 1
    assert RegionFeatures(out).image_ids == [1, 3, 4, 7, 8]
    printed = capsys.readouterr().err
    assert re.search(r"skipped image 2: \S+000002.jpg cannot be read as a picture: image file is truncated", printed)
    assert re.search(r"skipped image 5: \S+000005.jpg cannot be read as a picture: .* No such file", printed)
    assert re.search(r"skipped image 6: \S+000006.jpg cannot be read as a picture: cannot identify image", printed)
    assert "3 of 8 pictures were skipped" in printed


def test_weights_that_are_gone_and_options_that_are_missing(drawn, tmp_path):
    state = TimmBackbone("test_resnet").model.state_dict()
    torch.save(state, tmp_path / "x.pth")
    options = ["--grid", "test_resnet", "--grid-size", "2", "--size", "64", "--checkpoint", tmp_path / "x.pth"]
    out = tmp_path / "regions.hdf5"
    assert run(drawn, out, *options) == 0
    moved = (tmp_path / "x.pth").rename(tmp_path / "y.pth")
    with pytest.raises(ValueError, match=r"x\.pth does not exist: .* pass --region-checkpoint"):
        RecordedExtractor(RegionFeatures(out))
    torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"x\.pth is another file: .* pass --region-checkpoint"):
        RecordedExtractor(RegionFeatures(out))
    stored = RegionFeatures(out).features(1)
    again = RecordedExtractor(RegionFeatures(out), checkpoint=moved)(open_picture(drawn / "images/000001.jpg"))
    np.testing.assert_allclose(again, stored, rtol=2e-3, atol=1e-5)
    for recipe in (None, dict(tool="tools.caption extract", options=dict(grid="x"))):
        write_region_features(tmp_path / "bare.hdf5", [(1, dict(features=stored))], recipe=recipe)
        with pytest.raises(ValueError, match=r"bare\.hdf5 lacks the options of tools.caption extract"):
            RecordedExtractor(RegionFeatures(tmp_path / "bare.hdf5"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "no_such_net", "--no-weights"], "must be a model of timm, got 'no_such_net'"),
        ([*GRID[:-1], "0"], "--grid-size must be at least 1, got 0"),
        (["--torchvision", "retinanet_resnet50_fpn"], "must be one of fasterrcnn_"),
        ([*TORCHVISION, "--nms", "2"], "--nms must be from 0 to 1, got 2"),
        ([*GRID, "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ([*GRID, "--splits", "nowhere.json"], "nowhere.json cannot be read"),
        (
            [*GRID, "--size", "64", "64", "64"],
            "--size must be one or two numbers of pixels, at least 1 each, got [64, ",
        ),
        ([*GRID, "--device", "gpu"], "--device must be one that torch finds here, such as cpu, got 'gpu'"),
    ],
)
def test_bad_options_are_reported_before_anything_runs(options, message, drawn, tmp_path, capsys):
    assert run(drawn, tmp_path / "regions.hdf5", *options) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_lists_are_reported(drawn, tmp_path, capsys):
    rows = json.loads((drawn / "splits.json").read_text())["images"][:1]
    for n, images, message in [
        (0, rows * 2, "have the same id, 1"),
        (1, [], "has no pictures"),
        (2, [dict(cocoid=1, filename="gone.jpg", split="train")], "has none of the 1 pictures"),
        (3, [dict(cocoid=1, split="train")], "image 1 has no filename"),
    ]:
        file = tmp_path / f"{n}.json"
        file.write_text(json.dumps(dict(images=images)))
        assert run(drawn, tmp_path / "regions.hdf5", *GRID, "--splits", str(file)) == 2
        assert message in capsys.readouterr().err
    assert run(drawn, tmp_path / "regions.csv", *GRID) == 2
    assert "regions.csv" in capsys.readouterr().err
    assert run(drawn, tmp_path / "0.json/regions.hdf5", *GRID) == 2
    assert capsys.readouterr().err.startswith("extract: [Errno ")


@pytest.mark.parametrize(
    ("minimum", "maximum", "threshold"), [(1, 100, 0.6), (10, 100, 0.99), (2, 4, 0.1), (50, 60, 0)]
)
def test_selection_is_that_of_plain_loops(minimum, maximum, threshold):
    rng = np.random.default_rng(0)
    corners = rng.uniform(-10, 60, (40, 3, 2))
    boxes = np.concatenate([corners, corners + rng.uniform(5, 50, (40, 3, 2))], 2)
    scores = rng.uniform(0, 1, (40, 3)) ** 2
    best = scores.argmax(1)
    own = np.clip(boxes[np.arange(40), best], 0, [80, 50, 80, 50])
    sides = (own[:, 2:] - own[:, :2]).min(1)
    order = [i for i in np.argsort(-scores.max(1)) if sides[i] >= 1]
    overlap = box_iou(*[torch.tensor(own)] * 2)
    kept = []
    for i in order:
        if all(best[i] != best[k] or overlap[i, k] <= 0.3 for k in kept):
            kept.append(i)
    number = np.clip(sum(scores[i].max() >= threshold for i in kept), minimum, maximum)
    expected = kept[:number]
    chosen = Selection(minimum, maximum, threshold)(torch.tensor(boxes), torch.tensor(scores), 50, 80)
    np.testing.assert_allclose(chosen, own[expected], rtol=1e-6)


def test_selection_without_proposals_is_the_whole_picture():
    for scores in (torch.zeros(0, 5), torch.full((2, 5), float("nan"))):
        boxes = Selection()(torch.zeros(len(scores), 5, 4), scores, 30, 40)
        assert boxes.tolist() == [[0, 0, 40, 30]]
    with pytest.raises(ValueError, match="--min-regions must be from 1 to --max-regions, got 5 and 4"):
        Selection(5, 4)
