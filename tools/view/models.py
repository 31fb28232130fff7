"""Models of timm, mmdet and mmseg: loading one, and running it on a picture with its attention recorded."""

from __future__ import annotations

import argparse
import pickle
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from attn_plugins.modules.common.capture import Captured
from tools import need
from tools.model_names import check_model_name
from tools.pictures import open_picture

from .layers import ViewError, capture, is_deformable


@dataclass
class View:
    """A picture as a model sees it, and the calls of its attention layers."""

    picture: np.ndarray  # (H, W, 3) uint8, resized, and padded below and to the right
    inside: tuple[int, int]  # (h, w), its size without the padding
    file_size: tuple[int, int]  # (rows, columns)
    layers: list[Captured]  # in the order of their calls

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of ``picture``."""
        return self.picture.shape[0], self.picture.shape[1]

    def places(self, pixels: Sequence[Sequence[int]]) -> Tensor:
        """Return the places (Q, 2), y and x on ``picture``, of pixels (y, x) of the file."""
        return (torch.tensor(pixels) + 0.5) * torch.tensor(self.inside) / torch.tensor(self.file_size)

    def cells(self, size: Sequence[int], pixels: Sequence[Sequence[int]]) -> Tensor:
        """Return the cells (Q, 2) of a map of ``size`` that contain pixels (y, x) of the file."""
        grid = torch.tensor(size)
        return (self.places(pixels) * grid / torch.tensor(self.size)).long().minimum(grid - 1)


def view_of(image: Image.Image, inside: Sequence[int], size: Sequence[int], layers: list[Captured]) -> View:
    """Return the view of a model that resizes ``image`` to ``inside`` and pads it to ``size``."""
    (h, w), picture = inside, np.zeros((*size, 3), np.uint8)
    picture[:h, :w] = np.asarray(image.resize((w, h), Image.Resampling.BICUBIC))
    return View(picture, (h, w), (image.height, image.width), layers)


def is_mm(model: str) -> bool:
    """Return whether ``model`` is an OpenMMLab config, as a file or as ``'mmdet::…'``."""
    return model.endswith(".py") or "::" in model


@contextmanager
def refusing(words: str, kinds: Any = Exception) -> Iterator[None]:
    """Raise errors of these kinds as a ViewError that starts with ``words``."""
    try:
        yield
    except kinds as error:
        shown = textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")
        raise ViewError(f"{words}: {shown}") from error


@dataclass
class Training:
    """What a checkpoint stores: the name of a timm model, the model's arguments, and (H, W) of the pictures."""

    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None


def training_of(checkpoint: Path | None) -> Training:
    """Return what a checkpoint of ``tools.train`` or of timm's ``train.py`` stores; other files store nothing."""
    from tools.train.checkpoint import model_options, read_weights, trained_size

    if checkpoint is None:
        return Training()
    if checkpoint.suffix == ".safetensors":
        metadata = read_weights(checkpoint, "--checkpoint")[1]
        return Training(metadata.get("model"), model_options(metadata), trained_size(metadata))
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, AttributeError):
        return Training()  # of another format, which timm's load_checkpoint reads or refuses; or torch is before 2.5
    if not isinstance(content, dict) or not isinstance(content.get("args"), argparse.Namespace):
        return Training()
    given = vars(content["args"])
    options = dict(num_classes=given.get("num_classes"), global_pool=given.get("gp"))
    options |= given.get("model_kwargs") or {}
    sides = (given.get("input_size") or [0, given.get("img_size"), given.get("img_size")])[-2:]
    size = None if sides[0] is None else (sides[0], sides[1])
    return Training(content.get("arch"), {key: value for key, value in options.items() if value is not None}, size)


def load_timm(name: str, checkpoint: Path | None, options: dict[str, Any]) -> tuple[nn.Module, Training]:
    """Return a model of timm in evaluation mode, and what its checkpoint stores, which brings its own options."""
    need("timm", "safetensors")
    import timm
    from timm.models import load_checkpoint

    if (wrong := check_model_name(name)) is not None:
        raise ViewError(f"MODEL must be a model of timm or a config file (*.py) of mmdet or mmseg, got {wrong}")
    training = training_of(checkpoint)
    if training.model is not None and training.model.partition(".")[0] != name.partition(".")[0]:
        raise ViewError(f"--checkpoint must be weights of {name}, but {checkpoint} holds those of {training.model}")
    options = {**training.options, **options}
    with refusing(f"MODEL {name} with {options}", (TypeError, ValueError, RuntimeError, AssertionError)):
        model = timm.create_model(name, **options).eval()
    if checkpoint is not None:
        with refusing(f"--checkpoint {checkpoint} does not fit {name} {options}"):  # torch, pickle or safetensors
            load_checkpoint(model, str(checkpoint))
    return model, training


def load_mm(name: str, checkpoint: Path | None, device: str = "cpu") -> nn.Module:
    """Load a model of mmdet or mmseg; without a checkpoint its weights are arbitrary."""
    need("mmengine", "mmcv")
    from mmengine.config import Config
    from mmengine.hub import get_config

    import attn_plugins.mmcv  # noqa: F401

    with refusing(f"MODEL {name} cannot be read as a config"):
        config: Any = get_config(name) if "::" in name else Config.fromfile(name)
    if config.get("default_scope") == "mmseg":
        need("mmseg")
        from mmseg.apis import init_model as build
    else:
        need("mmdet")
        from mmdet.apis import init_detector as build
    with refusing(f"MODEL {name} with --checkpoint {checkpoint} cannot be built"):
        return build(config, None if checkpoint is None else str(checkpoint), device=device)


def timm_size(model: nn.Module, training: Training, given: Sequence[int] | None) -> tuple[tuple[int, int], str]:
    """Return (H, W) of a timm model's input, and the reason: given, that of its training, or its own."""
    from timm.data import resolve_model_data_config

    if given is not None:
        return (given[0], given[1]), "as given"
    if training.size is not None:
        return training.size, "at which the checkpoint was trained"
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    return tuple(built or resolve_model_data_config(model)["input_size"][1:]), "the model's own"


def view_timm(model: nn.Module, image: Image.Image, patterns: Sequence[str], size: tuple[int, int]) -> View:
    """Run a timm model on the whole picture, resized to (H, W)."""
    from timm.data import resolve_model_data_config

    config, (H, W) = resolve_model_data_config(model), size
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    x = torch.from_numpy(view_of(image, size, size, []).picture).permute(2, 0, 1) / 255
    hint = "a ViT accepts any with --model-args dynamic_img_size=true --model-args dynamic_img_pad=true"
    refused = refusing(f"{type(model).__name__} does not accept {H}×{W} pixels; {hint}", AssertionError)
    with capture(model, patterns) as captured, torch.no_grad(), refused:
        model(((x - mean) / std).unsqueeze(0))
    patch = next((m.patch_size for m in model.modules() if getattr(m, "dynamic_img_pad", False)), (1, 1))
    padded = [-(-n // whole) * whole for n, whole in zip(size, patch)]  # timm pads to whole patches
    return view_of(image, size, padded, shown(captured, patterns))


def view_mm(model: Any, file: Path, patterns: Sequence[str]) -> View:
    """Run a model of mmdet or mmseg on a picture, by its toolkit's own function and its config's test pipeline."""
    if model.cfg.get("default_scope") == "mmseg":
        from mmseg.apis import inference_model
    else:
        from mmdet.apis import inference_detector as inference_model
    sizes: list[Any] = []
    handle = model.backbone.register_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[-2:]))
    try:
        with capture(model, patterns) as captured, refusing("the model does not accept the picture", AssertionError):
            inside = inference_model(model, str(file)).metainfo["img_shape"][:2]
    finally:
        handle.remove()
    return view_of(open_picture(file), inside, sizes[0], shown(captured, patterns))


def shown(captured: dict[str, Captured], patterns: Sequence[str]) -> list[Captured]:
    """Return all calls for given patterns, else the last of every stage: each name up to a number, and map size."""
    if not captured:
        raise ViewError("--layers must name layers that the model runs, and none of these did")
    stages = {
        name if patterns else (re.split(r"\.\d+(?:\.|$)", name)[0], not is_deformable(call.layer) and call.size): call
        for name, call in captured.items()
    }
    return list(stages.values())
