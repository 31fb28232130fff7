"""Regions from any of mmdet's two-stage detectors, with or without our attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmdet.models.roi_heads import CascadeRoIHead, SparseRoIHead, StandardRoIHead
from mmdet.registry import MODELS
from mmdet.structures.bbox import bbox2roi, get_box_tensor
from mmdet.utils import get_test_pipeline_cfg
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint
from PIL import Image
from torch import Tensor

from tools.caption.regions import Regions, Selection, as_regions


class MmdetRegions:
    """Extractor that detects boxes, refines them, and pools the features of the refined boxes.

    Args:
        config: A config file with an RPN and a box head.
        selection: Selection of the regions to keep.
        checkpoint: Checkpoint; None: random weights by ``seed``.
        feature: ``"classifier"``: the input of the last stage's classifier (for a head without ``fc_cls`` and for
            ``"map"``: the mean of the RoI-aligned map).
    """

    def __init__(
        self,
        config: str | Path,
        selection: Selection,
        checkpoint: str | Path | None = None,
        feature: str = "classifier",
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        try:
            loaded = Config.fromfile(str(config))
        except Exception as error:  # a config is a program
            raise ValueError(f"--mmdet {config} cannot be read as a config: {error}") from error
        scope = loaded.get("default_scope", "mmdet")
        torch.manual_seed(seed)
        with DefaultScope.overwrite_default_scope(scope):
            model: Any = MODELS.build(loaded.model)
        head = getattr(model, "roi_head", None)
        if not isinstance(head, (StandardRoIHead, CascadeRoIHead)) or isinstance(head, SparseRoIHead):
            raise ValueError(
                f"--mmdet {config} must be a two-stage detector (an RPN and a standard or cascade RoI head), got "
                f"{type(model).__name__}{f' with {type(head).__name__}' if head is not None else ''}"
            )
        if getattr(head, "with_semantic", False):
            raise ValueError(f"--mmdet {config}: a RoI head with a semantic branch is not supported")
        if checkpoint is not None:
            try:
                load_checkpoint(model, str(checkpoint), map_location="cpu", strict=True, logger="silent")
            except Exception as error:
                raise ValueError(f"{checkpoint} does not fit {config} or cannot be read: {error}"[:500]) from error
        self.model = model.to(device).eval()
        self.cascade = isinstance(head, CascadeRoIHead)
        self.selection, self.feature = selection, feature
        steps = [copy.deepcopy(step) for step in get_test_pipeline_cfg(loaded)]
        steps = [step for step in steps if "Annotations" not in step["type"]]
        if "LoadImage" not in steps[0]["type"]:
            raise ValueError(f"--mmdet {config}: its test pipeline must begin with loading an image, got {steps[0]}")
        steps[0] = dict(type="mmdet.LoadImageFromNDArray")
        with DefaultScope.overwrite_default_scope(scope):
            self.pipeline = Compose(steps)

    def prepare(self, picture: Image.Image) -> Any:
        """Run the config's test pipeline on a picture."""
        return self.pipeline(dict(img=np.asarray(picture)[:, :, ::-1].copy(), img_id=0))  # configs expect BGR

    @torch.inference_mode()
    def __call__(self, batch: list[Any]) -> list[Regions]:
        model = self.model
        data = {key: [one[key] for one in batch] for key in ("inputs", "data_samples")}
        data = model.data_preprocessor(data, False)
        samples = data["data_samples"]
        maps = model.extract_feat(data["inputs"])
        proposals = model.rpn_head.predict(maps, samples, rescale=False)
        metas = [sample.metainfo for sample in samples]
        # No test configuration: returns the boxes and scores of all classes, before suppression.
        detections = model.roi_head.predict_bbox(maps, metas, proposals, None, rescale=False)
        sizes = [meta["img_shape"][:2] for meta in metas]
        chosen = []
        for own, size in zip(detections, sizes):
            P = len(own.scores)
            boxes = get_box_tensor(own.bboxes).reshape(P, -1, 4) if P else own.scores.new_zeros(0, 1, 4)
            classes = own.scores[:, :-1] if own.scores.ndim == 2 else own.scores[:, None]
            chosen.append(self.selection(boxes, classes, *size))
        features = self._features(maps, bbox2roi([own for own, _ in chosen]))
        split = features.split([len(own) for own, _ in chosen])
        return [as_regions(f, *own, *size) for f, own, size in zip(split, chosen, sizes)]

    def _features(self, maps: tuple[Tensor, ...], rois: Tensor) -> Tensor:
        """Return the features (n, D) of the last stage."""
        head = self.model.roi_head
        box_head = head.bbox_head[-1] if self.cascade else head.bbox_head
        classifier, read = getattr(box_head, "fc_cls", None), list[Tensor]()
        hook = None
        if self.feature == "classifier" and classifier is not None:
            hook = classifier.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
        try:
            stage = (head.num_stages - 1,) if self.cascade else ()
            pooled = head._bbox_forward(*stage, maps, rois)["bbox_feats"]
        finally:
            if hook is not None:
                hook.remove()
        return read[-1] if read else pooled.mean((2, 3))
