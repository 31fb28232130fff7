"""HELEN and LFW-PL: made-up faces in the published layouts through mmseg's pipeline, runner and scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS as ROOT_DATASETS
from mmengine.structures import PixelData
from mmseg.datasets import BaseSegDataset
from mmseg.registry import DATASETS, METRICS
from mmseg.structures import SegDataSample
from PIL import Image

import attn_plugins.mmcv  # noqa: F401
from attn_plugins.mmcv.face_parsing import FaceParsingMetric, HELENDataset, LFWPLDataset
from tests.mm.made_up_faces import HELEN, SWAPPED, draw_face
from tools.datasets import face_parsing as tool


def dataset(kind, root, split="train", pipeline=(), **options):
    prefix = dict(img_path=f"images/{split}", seg_map_path=f"labels/{split}")
    config = dict(type=kind, data_root=str(root), data_prefix=prefix, pipeline=list(pipeline), _scope_="mmseg")
    return DATASETS.build({**config, **options})


LOAD = [dict(type="LoadImageFromFile", color_type="color_ignore_orientation"), dict(type="LoadAnnotations")]


# The data sets -------------------------------------------------------------------------------------------------------


def test_the_pipeline_loads_helen_and_a_mirror_swaps_left_and_right(helen, tmp_path):
    """The labels are of the stored pixels, even of an image that viewers turn."""
    source, truth = helen
    turned, exif = Image.open(source / f"images/{HELEN['exemplars.txt'][0]}.jpg"), Image.Exif()
    exif[0x0112] = 6
    turned.save(turned.filename, exif=exif)
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


def test_classes_and_palettes_are_those_of_the_converter():
    assert len(HELENDataset.METAINFO["classes"]) == tool.HELEN_MAPS == len(tool.HELEN_PALETTE)
    assert [tuple(color) for color in HELENDataset.METAINFO["palette"]] == list(tool.HELEN_PALETTE)
    assert [tuple(color) for color in LFWPLDataset.METAINFO["palette"]] == list(tool.LFW_PL_COLORS)
    assert LFWPLDataset.METAINFO["classes"] == ("background", "skin", "hair")


@pytest.mark.slow
def test_names_need_mmseg_only_when_they_are_built(python):
    shown = python(
        "import sys, attn_plugins.mmcv\n"
        "print('before:', 'mmseg' in sys.modules)\n"
        "sys.modules['mmseg'] = None\n"
        "from mmengine.registry import DATASETS, METRICS\n"
        "for name in 'HELENDataset', 'LFWPLDataset', 'FaceParsingMetric':\n"
        "    try: (METRICS if 'Metric' in name else DATASETS).build(dict(type=name))\n"
        "    except ImportError as error: print(error)\n"
    ).stdout
    assert "before: False" in shown
    for name in ("HELENDataset", "LFWPLDataset", "FaceParsingMetric"):
        assert f"{name} belongs to mmsegmentation: pip install" in shown
    assert ROOT_DATASETS.get("HELENDataset") is HELENDataset


# The scores ----------------------------------------------------------------------------------------------------------


def evaluate(metric, data, predictions, truths):
    evaluator = Evaluator(metric)
    evaluator.dataset_meta = data.METAINFO
    for n, (predicted, truth) in enumerate(zip(predictions, truths)):
        sample = SegDataSample(metainfo=dict(img_path=f"face_{n}.jpg"))
        sample.pred_sem_seg = PixelData(data=torch.as_tensor(predicted)[None])
        sample.gt_sem_seg = PixelData(data=torch.as_tensor(truth)[None])
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


def test_scores_of_table_4_4():
    rng = np.random.default_rng(3)
    truths = [rng.integers(0, 3, (9, 13)) for _ in range(2)]
    predictions = [rng.integers(0, 3, (9, 13)) for _ in range(2)]
    scores = evaluate(FaceParsingMetric(), LFWPLDataset, predictions, truths)
    assert set(scores) == {"face/background", "face/skin", "face/hair", "face/accuracy"}
    assert scores["face/hair"] == pytest.approx(f1_by_loops(predictions, truths, {2}))


def test_a_class_that_is_nowhere_has_no_score():
    zeros = np.zeros((3, 4), np.int64)
    scores = evaluate(FaceParsingMetric(), LFWPLDataset, [zeros], [zeros])
    assert scores["face/background"] == scores["face/accuracy"] == 100
    assert math.isnan(scores["face/hair"])
    assert all(map(math.isnan, evaluate(FaceParsingMetric(), LFWPLDataset, [zeros], [zeros + 255]).values()))


@pytest.mark.parametrize(
    "predicted, truth, message",
    [
        (np.zeros((3, 4), int), np.zeros((4, 3), int), r"\(1, 3, 4\) and truth \(1, 4, 3\) of face_0.jpg differ"),
        (np.zeros((3, 4), int), np.full((3, 4), 3), r"true labels of face_0.jpg must be from 0 to 2, got from 3"),
        (np.full((3, 4), -1), np.zeros((3, 4), int), r"predicted labels of face_0.jpg .* got from -1 to -1"),
    ],
)
def test_bad_input_to_the_scores(predicted, truth, message):
    with pytest.raises(ValueError, match=message):
        evaluate(FaceParsingMetric(), LFWPLDataset, [predicted], [truth])
    with pytest.raises(ValueError, match="dataset_meta must have 'classes'"):
        FaceParsingMetric().process({}, [])
