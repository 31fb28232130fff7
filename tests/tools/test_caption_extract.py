"""``tools.caption extract``: regions by mmdet, torchvision and a grid, their recipes, and pictures that are broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch.nn import functional
from torchvision.ops import box_iou

from attn_plugins.captioning.region_features import RegionFeatures, write_region_features
from tools.caption.__main__ import main
from tools.caption.backbones import TimmBackbone
from tools.caption.recipe import RecordedExtractor
from tools.caption.regions import Selection
from tools.datasets.captioned_scenes import Recipe, build
from tools.pictures import open_picture
from tools.train.checkpoint import save_weights
from tools.train.config import Config

ROOT = Path(__file__).parents[2]
GRID = ["--grid", "test_resnet", "--no-weights", "--size", "64", "--grid-size", "3"]
TORCHVISION = ["--torchvision", "fasterrcnn_resnet50_fpn", "--no-weights", "--size", "64"]
CONFIG = ROOT / "configs/mmdet/scenes/faster-rcnn_narrow-r50_fpn_scenes.py"
CASCADE = """
_base_ = "mmdet::cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py"
model = dict(
    backbone=dict(base_channels=8, init_cfg=None),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=16),
    rpn_head=dict(in_channels=16, feat_channels=16),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=16),
        bbox_head=[dict(h, in_channels=16, fc_out_channels=24) for h in _base_.model.roi_head.bbox_head],
    ),
)
test_pipeline = [
    dict(type="LoadImageFromFile"), dict(type="Resize", scale=(128, 128), keep_ratio=True), dict(type="PackDetInputs"),
]
test_dataloader = dict(dataset=dict(pipeline=test_pipeline))
"""


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Create 8 scenes, one of them of another shape."""
    folder = tmp_path_factory.mktemp("scenes") / "set"
    assert build(folder, Recipe(train=4, val=2, test=2, size=64, seed=1))
    wide = folder / "images/000003.jpg"
    open_picture(wide).crop((0, 10, 64, 50)).save(wide)
    return folder


def run(scenes: Path, out: Path, *options: str) -> int:
    ids = [] if {"--splits", "--captions"} & set(options) else ["--splits", scenes / "splits.json"]
    given = ["extract", scenes / "images", out, *ids, "--device", "cpu", *options]
    return main(list(map(str, given)))


def content(path: Path) -> list[tuple]:
    features = RegionFeatures(path)
    return [(i, {name: array.tobytes() for name, array in features.regions(i).items()}) for i in features.image_ids]


@pytest.mark.parametrize("way", ["grid", "torchvision", "mmdet"])
def test_every_way_gives_regions_which_its_recipe_gives_again(way, scenes, tmp_path, capsys, monkeypatch):
    weights = tmp_path / "weights"
    weights.mkdir()
    if way == "grid":
        torch.save(TimmBackbone("test_resnet").model.state_dict(), weights / "x.pth")
        options = ["--grid", "test_resnet", "--grid-size", "3", "--size", "48", "64", "--dtype", "float32"]
        options += ["--checkpoint", weights / "x.pth"]
    elif way == "torchvision":
        options = [*TORCHVISION, "--feature", "map"]
    else:
        from tools.caption.mmdet_regions import MmdetRegions

        torch.save(MmdetRegions(CONFIG, Selection(), seed=7).model.state_dict(), weights / "x.pth")
        options = ["--mmdet", CONFIG, weights / "x.pth"]
    out = tmp_path / "regions.npz"
    assert run(scenes, out, *options, "--max-regions", "20", "--batch-size", "1") == 0
    assert "8/8" in capsys.readouterr().err
    assert not (tmp_path / ".regions.npz.partial").exists()
    (tmp_path / "moved").mkdir()
    out, weights = out.rename(tmp_path / "moved/regions.npz"), weights.rename(tmp_path / "moved/weights")
    monkeypatch.chdir(tmp_path)
    features = RegionFeatures(out)
    assert features.image_ids == list(range(1, 9))
    assert features.feature_dim == dict(grid=TimmBackbone("test_resnet").num_features, torchvision=256, mmdet=256)[way]
    for image_id in features.image_ids:
        boxes, scores = (features.regions(image_id)[name] for name in ("boxes", "scores"))
        assert len(boxes) == 9 if way == "grid" else 10 <= len(boxes) <= 20
        assert (boxes >= 0).all()
        assert (boxes <= 1).all()
        assert (boxes[:, :2] < boxes[:, 2:]).all()
        assert (np.diff(scores) <= 0).all()
        assert (scores == 1).all() if way == "grid" else (scores < 1).all()
    assert not np.array_equal(features.regions(1)["features"], features.regions(2)["features"])
    extractor = RecordedExtractor(features)
    for image_id in (1, 3):
        computed = extractor(open_picture(scenes / f"images/00000{image_id}.jpg"))
        for name, array in features.regions(image_id).items():
            assert computed[name].dtype == array.dtype
            np.testing.assert_array_equal(computed[name], array)


def test_grid_cells_are_pooled_from_the_part_of_the_picture_that_their_boxes_name(scenes, tmp_path):
    out = tmp_path / "regions.npz"
    assert run(scenes, out, *GRID, "--dtype", "float32") == 0
    torch.manual_seed(0)
    backbone = TimmBackbone("test_resnet", (64, 64)).eval()
    picture = open_picture(scenes / "images/000001.jpg")
    with torch.no_grad():
        pooled = functional.adaptive_avg_pool2d(backbone(backbone.prepare(picture)[None]), 3)[0]
    stored = RegionFeatures(out).regions(1)
    for row in range(3):
        for column in range(3):
            cell = 3 * row + column
            np.testing.assert_allclose(stored["features"][cell], pooled[:, row, column], atol=1e-5)
            box = np.array([column, row, column + 1, row + 1]) / 3
            np.testing.assert_allclose(stored["boxes"][cell], box, atol=1e-6)


def test_a_trained_classifiers_weights_are_taken(scenes, tmp_path):
    torch.manual_seed(3)
    model = timm.create_model("test_resnet", num_classes=2)
    save_weights(tmp_path / "best.safetensors", model, Config("test_resnet", input_size=(64, 64)), ["cat", "dog"])
    weights = ["--checkpoint", str(tmp_path / "best.safetensors"), "--grid-size", "1", "--dtype", "float32"]
    assert run(scenes, tmp_path / "regions.npz", "--grid", "test_resnet", *weights) == 0
    prepared = TimmBackbone("test_resnet", (64, 64)).prepare(open_picture(scenes / "images/000002.jpg"))
    with torch.no_grad():
        expected = model.eval().forward_features(prepared[None]).mean((2, 3))
    stored = RegionFeatures(tmp_path / "regions.npz").regions(2)["features"]
    np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["test_vit", "test_convnext", "swin_tiny_patch4_window7_224"])
def test_backbones_of_every_layout_give_maps(name):
    backbone = TimmBackbone(name, (224, 224) if "swin" in name else (96, 96)).eval()
    with torch.no_grad():
        assert backbone(torch.randn(1, 3, *backbone.size)).shape[1] == backbone.num_features


@pytest.mark.parametrize("kind", ["faster", "cascade"])
def test_mmdet_features_are_what_the_classifier_reads_of_the_boxes(kind, scenes, tmp_path):
    from mmdet.structures.bbox import bbox2roi

    from tools.caption.mmdet_regions import MmdetRegions

    cascade = tmp_path / "cascade.py"
    cascade.write_text(CASCADE)
    extractor = MmdetRegions(cascade if kind == "cascade" else CONFIG, Selection(maximum=15))
    pictures = [open_picture(scenes / f"images/00000{n}.jpg") for n in (1, 3)]
    prepared = [extractor.prepare(picture) for picture in pictures]
    extracted = extractor(prepared)
    head = extractor.model.roi_head
    box_head = head.bbox_head[-1] if kind == "cascade" else head.bbox_head
    with torch.no_grad():
        data = extractor.model.data_preprocessor({k: [p[k] for p in prepared] for k in prepared[0]}, False)
        maps = extractor.model.extract_feat(data["inputs"])
        sizes = [sample.img_shape for sample in data["data_samples"]]
        assert sizes == [(128, 128), (80, 128)]
        boxes = [torch.tensor(f["boxes"]) * torch.tensor([w, h, w, h]) for f, (h, w) in zip(extracted, sizes)]
        stage = (2,) if kind == "cascade" else ()
        result = head._bbox_forward(*stage, maps, bbox2roi([b.float() for b in boxes]))
        features = torch.cat([torch.from_numpy(f["features"]) for f in extracted])
        torch.testing.assert_close(box_head.fc_cls(features), result["cls_score"], atol=1e-4, rtol=1e-4)
    extractor.feature = "map"
    for own, map_features in zip(extracted, extractor(prepared)):
        np.testing.assert_array_equal(own["boxes"], map_features["boxes"])
        assert map_features["features"].shape == (len(own["boxes"]), dict(faster=64, cascade=16)[kind])


def test_mmdet_takes_its_checkpoint_and_no_other(scenes, tmp_path, capsys):
    from tools.caption.mmdet_regions import MmdetRegions

    trained = MmdetRegions(CONFIG, Selection(), seed=7).model.state_dict()
    torch.save(dict(state_dict=trained), tmp_path / "trained.pth")
    assert run(scenes, tmp_path / "a.npz", "--mmdet", CONFIG, tmp_path / "trained.pth") == 0
    assert run(scenes, tmp_path / "b.npz", "--mmdet", CONFIG, "--no-weights", "--seed", "7") == 0
    assert run(scenes, tmp_path / "c.npz", "--mmdet", CONFIG, "--no-weights", "--seed", "8") == 0
    assert content(tmp_path / "a.npz") == content(tmp_path / "b.npz") != content(tmp_path / "c.npz")
    trained.popitem()
    torch.save(dict(state_dict=trained), tmp_path / "lacking.pth")
    capsys.readouterr()
    assert run(scenes, tmp_path / "d.npz", "--mmdet", CONFIG, tmp_path / "lacking.pth") == 2
    assert "lacking.pth does not fit" in capsys.readouterr().err
    one_stage = ROOT / "configs/mmdet/digits/atss_narrow-r50_fpn_digits.py"
    assert run(scenes, tmp_path / "d.npz", "--mmdet", one_stage, "--no-weights") == 2
    assert "must be a two-stage detector" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_pictures_are_named_and_the_others_are_there(workers, scenes, tmp_path, capsys):
    folder = tmp_path / "set"
    shutil.copytree(scenes, folder)
    cut = folder / "images/000002.jpg"
    cut.write_bytes(cut.read_bytes()[:900])
    (folder / "images/000005.jpg").unlink()
    (folder / "images/000006.jpg").write_text("no picture")
    out = tmp_path / "regions.npz"
    assert run(folder, out, *GRID, "--workers", str(workers)) == 1
    assert RegionFeatures(out).image_ids == [1, 3, 4, 7, 8]
    printed = capsys.readouterr().err
    assert "000002.jpg (image 2): cannot be read as a picture: image file is truncated" in printed
    assert "000005.jpg (image 5): no such file" in printed
    assert "000006.jpg (image 6): cannot be read as a picture: cannot identify image file" in printed
    assert "3 pictures were skipped" in printed


def test_a_picture_that_fails_in_the_network_does_not_take_its_batch_along(scenes, tmp_path, capsys, monkeypatch):
    from tools.caption.grid_regions import GridRegions

    network = GridRegions.__call__
    odd = GridRegions("test_resnet", 3, "none", size=(64, 64)).prepare(open_picture(scenes / "images/000006.jpg"))

    def fails(self, batch):
        if any(torch.equal(one, odd) for one in batch):
            raise RuntimeError("too odd")
        return network(self, batch)

    monkeypatch.setattr(GridRegions, "__call__", fails)
    assert run(scenes, tmp_path / "regions.npz", *GRID) == 1
    assert RegionFeatures(tmp_path / "regions.npz").image_ids == [1, 2, 3, 4, 5, 7, 8]
    assert "image 6: RuntimeError: too odd" in capsys.readouterr().err


def test_weights_that_the_recipe_names_and_that_are_gone(scenes, tmp_path):
    state = TimmBackbone("test_resnet").model.state_dict()
    torch.save(state, tmp_path / "x.pth")
    options = ["--grid", "test_resnet", "--grid-size", "2", "--size", "64", "--checkpoint", tmp_path / "x.pth"]
    out = tmp_path / "regions.npz"
    assert run(scenes, out, *options) == 0
    (tmp_path / "x.pth").rename(tmp_path / "y.pth")
    with pytest.raises(ValueError, match=r"checkpoint .*x\.pth, which is neither .*x\.pth: pass --region-checkp"):
        RecordedExtractor(RegionFeatures(out))
    torch.save({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "x.pth")
    with pytest.raises(ValueError, match=r"x\.pth has changed: pass --region-checkpoint"):
        RecordedExtractor(RegionFeatures(out))
    with pytest.raises(ValueError, match="--region-checkpoint: nowhere does not exist"):
        RecordedExtractor(RegionFeatures(out), checkpoint=Path("nowhere"))
    recipe = {**RegionFeatures(out).recipe, "tool": "tools.captioning.extract_regions"}  # of an older file
    write_region_features(tmp_path / "old.npz", [(1, RegionFeatures(out).regions(1))], recipe=recipe)
    recorded = RecordedExtractor(RegionFeatures(tmp_path / "old.npz"), checkpoint=tmp_path / "y.pth")
    picture = open_picture(scenes / "images/000001.jpg")
    expected = RegionFeatures(out).regions(1)["features"].astype(np.float32)
    np.testing.assert_allclose(recorded(picture)["features"].astype(np.float32), expected, atol=2e-3, rtol=2e-3)


def test_recipes_that_are_none(tmp_path):
    regions = dict(features=np.ones((1, 2)), boxes=np.array([[0, 0, 1, 1]]), scores=np.ones(1))
    partial = dict(tool="tools.caption extract", options=dict(grid="x"))
    for recipe, lacks in (
        (None, "no recipe of"),
        (dict(tool="x"), "no recipe of"),
        (partial, "a recipe without mmdet"),
    ):
        write_region_features(tmp_path / "regions.npz", [(1, regions)], recipe=recipe)
        with pytest.raises(ValueError, match=f"has {lacks}.*extract --overwrite writes it"):
            RecordedExtractor(RegionFeatures(tmp_path / "regions.npz"))


def test_without_captions_the_names_are_the_ids(scenes, tmp_path):
    shutil.copy(scenes / "images/000001.jpg", tmp_path / "cat.jpg")
    Image.new("L", (70, 30), 99).save(tmp_path / "grey.PNG")
    (tmp_path / "notes.txt").write_text("not a picture")
    out = tmp_path / "regions.npz"
    assert main(["extract", str(tmp_path), str(out), *GRID]) == 0
    assert RegionFeatures(out).image_ids == ["cat", "grey"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "no_such_net", "--no-weights"], "must be a model of timm, got 'no_such_net'"),
        ([*GRID[:-1], "0"], "--grid-size must be at least 1, got 0"),
        (["--torchvision", "retinanet_resnet50_fpn"], "must be one of fasterrcnn_"),
        (["--mmdet", "nowhere.py", "--no-weights"], "--mmdet nowhere.py cannot be read as a config"),
        (["--mmdet", "x.py"], "--mmdet CONFIG needs a CHECKPOINT, or --no-weights"),
        ([*TORCHVISION, "--nms", "2"], "--nms must be from 0 to 1, got 2"),
        ([*GRID, "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ([*GRID, "--splits", "nowhere.json"], "nowhere.json cannot be read"),
        (["--grid", "test_resnet", "--checkpoint", "nowhere.pth"], "weights nowhere.pth: no such file"),
    ],
)
def test_bad_options_are_reported_before_anything_runs(options, message, scenes, tmp_path, capsys):
    assert run(scenes, tmp_path / "regions.npz", *options) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_bad_lists_are_reported(scenes, tmp_path, capsys):
    captions = json.loads((scenes / "captions.json").read_text())
    for n, change, message in [
        (0, dict(images=captions["images"][:1] * 2), "image 1 is repeated"),
        (1, dict(images=[]), "has no pictures"),
        (2, dict(images=[dict(id=1, file_name="gone.jpg")]), "has none of the 1 pictures"),
    ]:
        file = tmp_path / f"{n}.json"
        file.write_text(json.dumps({**captions, **change}))
        assert run(scenes, tmp_path / "regions.npz", *GRID, "--captions", str(file)) == 2
        assert message in capsys.readouterr().err
    assert main(["extract", str(tmp_path), str(tmp_path / "regions.csv"), *GRID]) == 2
    assert "regions.csv" in capsys.readouterr().err


def test_a_network_that_fails_is_not_the_pictures_fault(scenes, tmp_path, monkeypatch):
    from tools.caption.grid_regions import GridRegions

    def broken(self, batch):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(GridRegions, "__call__", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        run(scenes, tmp_path / "regions.npz", *GRID)
    assert not list(tmp_path.iterdir())


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
    expected = sorted((kept + [i for i in order if i not in kept])[:number], key=lambda i: -scores[i].max())
    chosen, confidence = Selection(minimum, maximum, threshold)(torch.tensor(boxes), torch.tensor(scores), 50, 80)
    np.testing.assert_allclose(chosen, own[expected], rtol=1e-6)
    np.testing.assert_allclose(confidence, scores.max(1)[expected], rtol=1e-6)


def test_selection_without_proposals_is_the_whole_picture():
    for scores in (torch.zeros(0, 5), torch.full((2, 5), float("nan"))):
        boxes, confidence = Selection()(torch.zeros(len(scores), 5, 4), scores, 30, 40)
        assert boxes.tolist() == [[0, 0, 40, 30]]
        assert confidence.tolist() == [0]
    with pytest.raises(ValueError, match="--min-regions must be from 1 to --max-regions, got 5 and 4"):
        Selection(5, 4)
