"""HELEN and LFW-PL: made-up faces in the published layouts through mmseg's pipeline, runner and scores."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS as ROOT_DATASETS
from mmengine.runner import Runner
from mmengine.structures import PixelData
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS, METRICS
from mmseg.structures import SegDataSample

import attn_plugins.mmcv  # noqa: F401
from attn_plugins.mmcv.face_parsing import FaceParsingMetric, HELENDataset, LFWPLDataset
from tests.mm.made_up_faces import HELEN, SWAPPED, draw_face
from tests.mm.mm_helpers import ROOT
from tools.datasets import face_parsing as tool
from tools.datasets.face_alignment import Request


def dataset(kind, root, split="train", pipeline=(), **options):
    prefix = dict(img_path=f"images/{split}", seg_map_path=f"labels/{split}")
    return DATASETS.build(
        dict(type=kind, data_root=str(root), data_prefix=prefix, pipeline=list(pipeline), _scope_="mmseg", **options)
    )


LOAD = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations")]


# The data sets -------------------------------------------------------------------------------------------------------


def test_mmsegs_pipeline_loads_helen_and_a_mirror_swaps_left_and_right(helen, tmp_path):
    source, truth = helen
    tool.build("helen", source, tmp_path / "out")
    mirror = dict(type="RandomFlip", prob=1.0, direction="horizontal", swap_seg_labels=[(2, 3), (4, 5)])
    plain = dataset("HELENDataset", tmp_path / "out", "train", [*LOAD, dict(type="PackSegInputs")])
    mirrored = dataset("HELENDataset", tmp_path / "out", "train", [*LOAD, mirror, dict(type="PackSegInputs")])
    assert isinstance(plain, HELENDataset)
    assert isinstance(plain, BaseSegDataset)
    assert len(plain) == len(mirrored) == 2
    for name, sample, flipped in zip(HELEN["exemplars.txt"], plain, mirrored):
        labels = sample["data_samples"].gt_sem_seg.data
        assert sample["inputs"].shape == (3, *truth[name].shape)
        assert labels.shape == (1, *truth[name].shape)
        assert np.array_equal(labels[0], truth[name])
        assert set(labels.unique().tolist()) == set(range(11))
        expected = np.asarray(SWAPPED)[truth[name]][:, ::-1]
        assert np.array_equal(flipped["data_samples"].gt_sem_seg.data[0], expected)


def test_mmsegs_pipeline_loads_lfw_pl(lfw, tmp_path):
    source, truth = lfw
    tool.build("lfw_pl", source, tmp_path / "out")
    data = dataset("LFWPLDataset", tmp_path / "out", "val", [*LOAD, dict(type="PackSegInputs")], test_mode=True)
    assert isinstance(data, LFWPLDataset)
    assert np.array_equal(data[0]["data_samples"].gt_sem_seg.data[0], truth["Aaron_Eckhart_0002"])


def test_aligned_faces_are_scored_where_the_photograph_is(helen, tmp_path):
    source, truth = helen
    around = np.arange(194) * 2 * math.pi / 194
    (tmp_path / "annotation").mkdir()
    for number, (name, labels) in enumerate(truth.items()):
        H, W = labels.shape
        turned = around + 0.3 * number  # a circle on the face, because every face is rotated by another angle
        lines = [f"{W / 2 + 12 * math.cos(a):.3f} , {H / 2 + 12 * math.sin(a):.3f}" for a in turned]
        (tmp_path / f"annotation/{number}.txt").write_text("\n".join([name, *lines]))
    tool.build("helen", source, tmp_path / "out", align=Request(tmp_path / "annotation", size=64))
    (loaded,) = dataset("HELENDataset", tmp_path / "out", "test", [*LOAD, dict(type="PackSegInputs")])
    labels = loaded["data_samples"].gt_sem_seg.data[0].numpy()
    assert loaded["inputs"].shape == (3, 64, 64)
    assert set(np.unique(labels)) <= {*range(11), 255}
    assert (labels == 255).any()
    scores = evaluate(FaceParsingMetric(), HELENDataset, [np.where(labels == 255, 6, labels).astype(int)], [labels])
    assert scores["face/accuracy"] == scores["face/nose"] == scores["face/overall"] == 100


def test_classes_and_palettes_are_those_of_the_converter():
    assert len(HELENDataset.METAINFO["classes"]) == tool.HELEN_MAPS == len(tool.HELEN_PALETTE)
    assert [tuple(colour) for colour in HELENDataset.METAINFO["palette"]] == list(tool.HELEN_PALETTE)
    assert [tuple(colour) for colour in LFWPLDataset.METAINFO["palette"]] == list(tool.LFW_PL_COLOURS)
    assert LFWPLDataset.METAINFO["classes"] == ("background", "skin", "hair")


def test_some_of_the_classes_by_name(helen, tmp_path):
    source, truth = helen
    tool.build("helen", source, tmp_path / "out")
    data = dataset("HELENDataset", tmp_path / "out", "test", LOAD, metainfo=dict(classes=("nose", "hair")))
    want = np.select([truth["10405146_1"] == 6, truth["10405146_1"] == 10], [0, 1], 255)
    assert np.array_equal(data[0]["gt_seg_map"], want)


def test_a_missing_mask_is_reported_when_the_data_set_is_created(lfw, tmp_path):
    tool.build("lfw_pl", lfw[0], tmp_path / "out")
    (tmp_path / "out/labels/train/Aaron_Eckhart_0001.png").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"1 files of 2 faces are missing, .*Aaron_Eckhart_0001.png first: expected images"
    ):
        dataset("LFWPLDataset", tmp_path / "out")
    images = dataset("LFWPLDataset", tmp_path / "out", seg_map_suffix=".png", lazy_init=True)
    images.data_prefix.pop("seg_map_path")  # inference has no labels
    assert len(images.load_data_list()) == 2
    (tmp_path / "names.txt").write_text("Zico_0003\nZico_0004\n")
    with pytest.raises(FileNotFoundError, match=r"2 files of 2 faces are missing, .*images/test/Zico_0004.jpg first"):
        dataset("LFWPLDataset", tmp_path / "out", "test", ann_file=str(tmp_path / "names.txt"))
    shutil.rmtree(tmp_path / "out/images/val")
    (tmp_path / "out/images/val").mkdir()
    with pytest.raises(FileNotFoundError, match=r"images/val contains no image \*.jpg: expected images \*.jpg and"):
        dataset("LFWPLDataset", tmp_path / "out", "val")


@pytest.mark.slow
def test_names_need_mmseg_only_when_they_are_built(python):
    shown = python(
        "import sys; sys.modules['mmseg'] = None\n"
        "import attn_plugins.mmcv\n"
        "from mmengine.registry import DATASETS, METRICS\n"
        "for name in 'HELENDataset', 'LFWPLDataset', 'FaceParsingMetric':\n"
        "    try: (METRICS if 'Metric' in name else DATASETS).build(dict(type=name))\n"
        "    except ImportError as error: print(error)\n"
    ).stdout
    for name in ("HELENDataset", "LFWPLDataset", "FaceParsingMetric"):
        assert f"{name} belongs to mmsegmentation: pip install" in shown
    shown = python(
        "import sys, attn_plugins.mmcv\n"
        "print('before:', 'mmseg' in sys.modules)\n"
        "from mmseg.registry import METRICS\n"
        "print('built:', METRICS.build(dict(type='FaceParsingMetric', ignore_index=7)).ignore_index)\n"
        "print('then:', METRICS.get('FaceParsingMetric'))\n"
    ).stdout.splitlines()
    assert {"before: False", "built: 7", f"then: {FaceParsingMetric}"} <= set(shown)
    assert ROOT_DATASETS.get("HELENDataset") is HELENDataset


# The scores ----------------------------------------------------------------------------------------------------------


def samples_of(predictions, truths):
    made = []
    for n, (predicted, truth) in enumerate(zip(predictions, truths)):
        sample = SegDataSample(metainfo=dict(img_path=f"face_{n}.jpg"))
        sample.pred_sem_seg = PixelData(data=torch.as_tensor(predicted)[None])
        sample.gt_sem_seg = PixelData(data=torch.as_tensor(truth)[None])
        made.append(sample)
    return made


def evaluate(metric, data, predictions, truths):
    evaluator = Evaluator(metric)
    evaluator.dataset_meta = data.METAINFO
    for sample in samples_of(predictions, truths):
        evaluator.process([sample])
    return evaluator.evaluate(len(predictions))


def f1_by_loops(predictions, truths, members):
    hits = false_alarms = misses = 0
    for predicted, truth in zip(predictions, truths):
        for row, column in np.ndindex(*truth.shape):
            if truth[row, column] == 255:
                continue
            positive, actual = predicted[row, column] in members, truth[row, column] in members
            hits += positive and actual
            false_alarms += positive and not actual
            misses += actual and not positive
    precision, recall = hits / (hits + false_alarms), hits / (hits + misses)
    return 100 * 2 * precision * recall / (precision + recall)


def noisy_faces(count=3, wrong=0.4):
    """Return (predictions, truths): int64 and uint8 (H, W) maps of different sizes, with pixels to ignore."""
    rng = np.random.default_rng(5)
    truths = [draw_face(rng, 40 + n, 44 + 3 * n) for n in range(count)]
    predictions = [np.where(rng.random(t.shape) < wrong, rng.integers(0, 11, t.shape), t) for t in truths]
    for truth in truths:
        truth[rng.random(truth.shape) < 0.1] = 255
    return predictions, truths


def test_scores_of_table_4_3_against_loops():
    predictions, truths = noisy_faces()
    scores = evaluate(METRICS.build(dict(type="FaceParsingMetric", _scope_="mmseg")), HELENDataset, predictions, truths)
    members = {name.replace(" ", "_"): {n} for n, name in enumerate(HELENDataset.METAINFO["classes"])}
    members |= dict(brows={2, 3}, eyes={4, 5}, mouth={7, 8, 9}, overall={2, 3, 4, 5, 6, 7, 8, 9})
    assert set(scores) == {f"face/{name}" for name in members} | {"face/accuracy"}
    for name, labels in members.items():
        assert scores[f"face/{name}"] == pytest.approx(f1_by_loops(predictions, truths, labels)), name
    right = sum(int(((p == t) & (t != 255)).sum()) for p, t in zip(predictions, truths))
    assert scores["face/accuracy"] == pytest.approx(100 * right / sum(int((t != 255).sum()) for t in truths))


def test_a_group_is_one_label():
    truth = draw_face(np.random.default_rng(2), 48, 64)
    swapped = np.asarray(SWAPPED)[truth]  # every left part mistaken for the right one
    scores = evaluate(FaceParsingMetric(), HELENDataset, [swapped], [truth])
    assert scores["face/left_eye"] == scores["face/right_brow"] == 0
    assert scores["face/eyes"] == scores["face/brows"] == scores["face/overall"] == scores["face/nose"] == 100
    assert scores["face/accuracy"] < 100


def test_scores_of_table_4_4_and_own_groups():
    rng = np.random.default_rng(3)
    truths = [rng.integers(0, 3, (9, 13)) for _ in range(2)]
    predictions = [rng.integers(0, 3, (9, 13)) for _ in range(2)]
    scores = evaluate(FaceParsingMetric(), LFWPLDataset, predictions, truths)
    assert set(scores) == {"face/background", "face/skin", "face/hair", "face/accuracy"}
    assert scores["face/hair"] == pytest.approx(f1_by_loops(predictions, truths, {2}))
    metric = FaceParsingMetric(groups=dict(head=["skin", "hair", "hair"]), prefix="test")
    scores = evaluate(metric, LFWPLDataset, predictions, truths)
    assert scores["test/head"] == pytest.approx(f1_by_loops(predictions, truths, {1, 2}))


def test_a_class_that_is_nowhere_has_no_score():
    zeros = np.zeros((3, 4), np.int64)
    scores = evaluate(FaceParsingMetric(), LFWPLDataset, [zeros], [zeros])
    assert scores["face/background"] == scores["face/accuracy"] == 100
    assert math.isnan(scores["face/hair"])
    nothing = evaluate(FaceParsingMetric(), LFWPLDataset, [zeros], [zeros + 255])
    assert all(math.isnan(score) for score in nothing.values())


@pytest.mark.parametrize(
    "predicted, truth, options, message",
    [
        (np.zeros((3, 4), int), np.zeros((4, 3), int), {}, r"\(1, 3, 4\) and truth \(1, 4, 3\) of face_0.jpg differ"),
        (np.zeros((3, 4), int), np.full((3, 4), 3), {}, r"true labels of face_0.jpg must be from 0 to 2, got from 3"),
        (np.full((3, 4), -1), np.zeros((3, 4), int), {}, r"predicted labels of face_0.jpg .* got from -1 to -1"),
        (np.zeros((3, 4), int), np.zeros((3, 4), int), dict(groups=dict(a=["ear"])), r"groups\['a'\] has \['ear'\]"),
        (np.zeros((3, 4), int), np.zeros((3, 4), int), dict(groups=dict(hair=["skin"])), r"groups has 'hair'"),
        (None, None, dict(groups=dict(a=[])), r"groups\['a'\] must be a sequence of class names, got \[\]"),
        (None, None, dict(groups=dict(a="hair")), r"groups\['a'\] must be a sequence of class names, got 'hair'"),
    ],
)
def test_bad_input_to_the_scores(predicted, truth, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(FaceParsingMetric(**options), LFWPLDataset, [predicted], [truth])


def test_the_scores_need_class_names():
    with pytest.raises(ValueError, match="dataset_meta must have 'classes'"):
        FaceParsingMetric().process({}, [])


# The whole pipeline --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mmengines_runner_trains_and_scores_helen(helen, tmp_path):
    """In a config of this package, narrowed to one stage."""
    tool.build("helen", helen[0], tmp_path / "out")
    config = Config.fromfile(ROOT / "configs/mmseg/digits/fcn_narrow-r18_digits.py")
    resize = dict(type="Resize", scale=(64, 48), keep_ratio=False)
    flip = dict(type="RandomFlip", prob=0.5, swap_seg_labels=[(2, 3), (4, 5)])
    pack = dict(type="PackSegInputs")
    for split, loader, pipeline in (
        ("train", config.train_dataloader, [*LOAD, resize, flip, pack]),
        ("val", config.val_dataloader, [LOAD[0], resize, LOAD[1], pack]),
    ):
        prefix = dict(img_path=f"images/{split}", seg_map_path=f"labels/{split}")
        loader.update(batch_size=2, num_workers=0, persistent_workers=False)
        loader.dataset = dict(
            type="HELENDataset", data_root=str(tmp_path / "out"), data_prefix=prefix, pipeline=pipeline
        )
    config.model.data_preprocessor.size = (48, 64)
    config.model.backbone.update(num_stages=1, strides=(1,), dilations=(1,), out_indices=(0,))
    config.model.decode_head.update(in_channels=16, in_index=0, channels=16, dropout_ratio=0.0)
    config.model.decode_head.loss_decode = dict(type="CrossEntropyLoss")
    config.train_cfg.update(max_iters=40, val_interval=40)
    config.optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="Adam", lr=0.01))
    config.val_evaluator = dict(type="FaceParsingMetric")
    config.param_scheduler = config.test_dataloader = config.test_evaluator = config.test_cfg = None
    config.work_dir = str(tmp_path / "work")
    runner = Runner.from_cfg(config)
    before = runner.val()
    runner.train()
    after = runner.val()
    assert after["face/accuracy"] > before["face/accuracy"] + 20
    assert after["face/skin"] > 60
    assert {"face/overall", "face/brows", "face/mouth", "face/upper_lip"} <= set(after)
