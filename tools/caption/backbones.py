"""Backbone of grid regions: any timm model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from tools import files
from tools.model_names import check_model_name


class TimmBackbone(nn.Module):
    """A timm model without its classifier.

    Args:
        name: Model name in timm.
        size: (H, W) of the images in pixels; None: the model's own.

    Attributes:
        num_features: C.
        size: (H, W).
    """

    def __init__(self, name: str, size: tuple[int, int] | None = None) -> None:
        super().__init__()
        if (wrong := check_model_name(name)) is not None:
            raise ValueError(f"the backbone must be a model of timm, got {wrong}")
        try:
            self.model = self._built(name, size)
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise ValueError(f"backbone {name} cannot be built for pictures of {size}: {error}") from error
        self.name = name
        data = timm.data.resolve_model_data_config(self.model)
        self.size = size or tuple(data["input_size"][1:])
        self.num_features: int = self.model.num_features
        self.mean, self.std = (np.array(data[key], np.float32) for key in ("mean", "std"))

    @staticmethod
    def _built(name: str, size: tuple[int, int] | None) -> Any:
        if size is not None:
            with contextlib.suppress(TypeError):  # most convolutional networks take any size without this argument
                return timm.create_model(name, num_classes=0, img_size=size)
        return timm.create_model(name, num_classes=0)

    def load(self, path: Path | None, hint: str = "") -> None:
        """Load a file of timm's training, of ``tools.train``, or of another dict of tensors.

        None stands for timm's own weights, downloaded if they are not cached; the error without them has ``hint``.

        Raises:
            ValueError: The weights are unavailable, cannot be read, or belong to another network.
        """
        if path is None:
            try:
                weights, metadata = timm.create_model(self.name, pretrained=True, num_classes=0).state_dict(), {}
            except Exception as error:
                raise ValueError(f"timm's weights of {self.name} are unavailable: {error}; {hint}") from error
        else:
            weights, metadata = read_weights(path)
        if metadata.get("model", self.name) != self.name:
            raise ValueError(f"{path} holds a {metadata['model']}, but the backbone is a {self.name}")
        wanted = self.model.state_dict()
        bad = [key for key, value in wanted.items() if key not in weights or weights[key].shape != value.shape]
        if bad:
            what = path or "timm's"
            raise ValueError(f"{what} does not fit {self.name}: {len(bad)} of {len(wanted)} weights, such as {bad[0]}")
        self.model.load_state_dict({key: weights[key] for key in wanted})

    def prepare(self, picture: Image.Image) -> Tensor:
        """Stretch the whole picture, in RGB, to ``size`` and normalize it: (3, H, W)."""
        H, W = self.size
        array = np.asarray(picture.resize((W, H), Image.Resampling.BICUBIC), np.float32) / 255
        return torch.from_numpy(((array - self.mean) / self.std).transpose(2, 0, 1).copy())

    def forward(self, images: Tensor) -> Tensor:
        """Compute the feature map, (Tensor[B, C, h, w]), of normalized images, (Tensor[B, 3, H, W])."""
        x = self.model.forward_features(images)
        C = self.num_features
        if x.ndim == 4:
            return x if x.shape[1] == C else x.permute(0, 3, 1, 2).contiguous()
        if x.ndim != 3:
            raise ValueError(f"backbone {self.name} must return a feature map, got shape {tuple(x.shape)}")
        x = x[:, getattr(self.model, "num_prefix_tokens", 0) :]
        h, w = getattr(getattr(self.model, "patch_embed", None), "grid_size", None) or (round(x.shape[1] ** 0.5),) * 2
        return x.transpose(1, 2).unflatten(2, (h, w))


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read weights and, for safetensors, metadata; raise a ValueError if the file cannot be read as weights."""
    if not path.is_file():
        raise ValueError(f"weights {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return files.read_weights(path)
        content = timm.models.load_state_dict(str(path), use_ema=False, weights_only=True)
    except Exception as error:  # from zip, pickle and timm, also for another content
        raise ValueError(f"weights {path} cannot be read as tensors alone: {error!r:.300}") from error
    return content, {}
