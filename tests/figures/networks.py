"""Whole networks of mmdetection, mmsegmentation and fairseq, counted at inference."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.figures.conventions import Call, calls, parameters

CONFIGS = Path(__file__).parents[2] / "configs"
PROPOSALS = 1000  # inputs of Faster R-CNN's second stage, in the paper and in mmdet


class _Detector(nn.Module):
    """All layers of a detector, without the processing of boxes between its stages."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, image: Tensor) -> Tensor:
        maps = self.detector.neck(self.detector.backbone(image))
        if not hasattr(self.detector, "roi_head"):
            return self.detector.bbox_head(maps)[0][0]
        scores, _ = self.detector.rpn_head(maps)
        self.detector.roi_head.bbox_head(image.new_empty(PROPOSALS, maps[0].shape[1], 7, 7))
        return scores[0]


def detector(config: str, height: int = 800, width: int = 1344) -> tuple[int, list[Call]]:
    """Count the parameters of a detector in ``configs/mmdet``, and record its calls for one image.

    800×1333 pixels are padded to 800×1344.
    """
    from mmdet.registry import MODELS
    from mmengine.config import Config

    model = Config.fromfile(CONFIGS / "mmdet" / config).model
    model.backbone.init_cfg = None
    with torch.device("meta"):
        network = _Detector(MODELS.build(model))
    return parameters(network), calls(network, 1, 3, height, width)


def segmentor(config: str, height: int = 768, width: int = 768) -> list[Call]:
    """Record the calls of a segmentor in ``configs/mmseg`` for one image."""
    from mmengine.config import Config
    from mmseg.registry import MODELS

    model = Config.fromfile(CONFIGS / "mmseg" / config).model
    model.update(pretrained=None, auxiliary_head=None, data_preprocessor=None)  # unused at inference
    model.backbone.norm_cfg = model.decode_head.norm_cfg = dict(type="BN")  # SyncBN runs only on GPUs
    with torch.device("meta"):
        network = MODELS.build(model)
    return calls(network, 1, 3, height, width)


@contextmanager
def _quiet() -> Iterator[None]:
    """Preserve the logging configuration while fairseq is imported, which turns on debug output of all libraries."""
    root, silent = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(silent)  # with a handler present, fairseq adds none
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(silent)


class _Translator(nn.Module):
    """All layers of a translation model, called with the shapes (B, T) of source and target."""

    def __init__(self, model: nn.Module, word: int) -> None:
        super().__init__()
        self.model, self.word = model, word

    def forward(self, shape: Tensor) -> Tensor:
        words = torch.full(shape.shape, self.word)
        lengths = torch.full(shape.shape[:1], shape.shape[1])
        return self.model(words, lengths, words)[0]


def translator(tokens: int, arch: str = "spatial_transformer_wmt_en_de", **options: Any) -> list[Call]:
    """Record the calls of a Transformer for a sentence and its translation, except those of the output layer.

    ``options`` are those of ``spatial_transformer``, such as ``encoder_attention='0110'``.
    """
    from argparse import Namespace

    with _quiet():
        from fairseq.data import Dictionary
        from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

        import attn_plugins.fairseq  # noqa: F401  registers the model

    dictionary = Dictionary()
    word = dictionary.add_symbol("word")
    args = Namespace(**options)
    ARCH_CONFIG_REGISTRY[arch](args)
    # Not on the meta device: fairseq reads the masks. With a vocabulary of one word the model has 0.2 GB.
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task)
    model.make_generation_fast_()  # otherwise the last layer returns its weights
    recorded = calls(_Translator(model, word), 1, tokens)
    return [call for call in recorded if not call.module.endswith(".output_projection")]
