"""Backbones of the attribute detector and of grid regions: any timm model, and VGG up to fc7.

VGG with fc6 and fc7 as convolutions is the network of Fang et al. (2015), Sec. 3. The fully connected layers slide over
the last map, so that each cell of a coarse grid has the features that the network computes for one 224 × 224 window, 32
pixels from its neighbours. The classifier of the words is fc8, and the noisy-OR combines the cells.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors import SafetensorError
from timm.models.vgg import VGG
from torch import Tensor, nn

from tools import files
from tools.model_names import check_model_name

SIZE = (565, 565)  # pixels: Fang et al., Sec. 3
DROPOUT = 0.5  # of fc6 and fc7: Simonyan & Zisserman (2015), Sec. 3.1
PREFIX = "backbone.model."  # prefix of the backbone's weights in a file of the attribute detector


class BadBackbone(ValueError):
    """A backbone or weights that are unavailable or do not fit."""


class TimmBackbone(nn.Module):
    """A timm model without its classifier.

    Args:
        name: Model name in timm.
        size: (H, W) of the images in pixels; None: the model's own.
        output_stride: Pixels per cell, for networks that can change it; None: the model's own.

    Attributes:
        num_features: C.
        size: (H, W).
    """

    def __init__(self, name: str, size: tuple[int, int] | None = None, output_stride: int | None = None) -> None:
        super().__init__()
        if (wrong := check_model_name(name)) is not None:
            raise BadBackbone(f"the backbone must be a model of timm, got {wrong}")
        options: dict[str, Any] = dict(pretrained=False, num_classes=0)
        if output_stride is not None:
            options["output_stride"] = output_stride
        try:
            self.model = self._built(name, options, size)
        except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
            raise BadBackbone(f"backbone {name} cannot be built with {options}: {error}") from error
        self.name, self.output_stride = name, output_stride
        data = timm.data.resolve_model_data_config(self.model)
        self.size = size or tuple(data["input_size"][1:])
        self.num_features: int = self.model.num_features
        self.mean, self.std = (np.array(data[key], np.float32) for key in ("mean", "std"))

    @staticmethod
    def _built(name: str, options: dict[str, Any], size: tuple[int, int] | None) -> Any:
        if size is not None:
            with contextlib.suppress(TypeError):  # most convolutional networks accept any size without this argument
                return timm.create_model(name, img_size=size, **options)
        return timm.create_model(name, **options)

    def load_pretrained(self) -> None:
        """Load timm's own weights, downloading them if they are not cached.

        Raises:
            BadBackbone: the weights are unavailable.
        """
        try:
            pretrained = timm.create_model(self.name, pretrained=True, num_classes=0)
            self.model.load_state_dict(pretrained.state_dict())
        except Exception as error:
            raise BadBackbone(f"timm's weights of {self.name} are unavailable: {error}") from error

    def load(self, path: Path) -> None:
        """Load ``.safetensors`` of ``tools.train`` or of the attribute detector, or a file of torch.

        The weights of a VGG may also be torchvision's (:func:`from_torchvision`).

        Raises:
            ValueError: the file cannot be read.
            BadBackbone: the weights belong to another network.
        """
        weights, metadata = read_weights(path)
        if metadata.get("model", self.name) != self.name:
            raise BadBackbone(f"{path} holds a {metadata['model']}, but the backbone is a {self.name}")
        own = {key.removeprefix(PREFIX): value for key, value in weights.items() if key.startswith(PREFIX)}
        wanted = self.model.state_dict()
        converted = from_torchvision(own or weights, wanted)
        bad = [key for key, value in wanted.items() if key not in converted or converted[key].shape != value.shape]
        if bad:
            raise BadBackbone(f"{path} does not fit {self.name}: {len(bad)} of {len(wanted)} weights, such as {bad[0]}")
        self.model.load_state_dict({key: converted[key] for key in wanted})

    def prepare(self, picture: Image.Image, shift: tuple[float, float] = (0.0, 0.0)) -> Tensor:
        """Stretch the whole picture, in RGB, to ``size`` and normalise it: (3, H, W).

        ``shift`` moves it to the right and down, relative to the sides; the border is repeated.
        """
        return self.normalised(picture, self.size, shift)

    def normalised(self, picture: Image.Image, size: tuple[int, int], shift: tuple[float, float]) -> Tensor:
        """Stretch the picture to ``size`` (H, W), shift it as in :meth:`prepare`, and normalise it: (3, H, W)."""
        H, W = size
        array = np.asarray(picture.resize((W, H), Image.Resampling.BICUBIC), np.float32) / 255
        dx, dy = round(shift[0] * W), round(shift[1] * H)
        if dx or dy:
            rows, columns = np.clip(np.arange(H) - dy, 0, H - 1), np.clip(np.arange(W) - dx, 0, W - 1)
            array = array[rows][:, columns]
        return torch.from_numpy(((array - self.mean) / self.std).transpose(2, 0, 1).copy())

    def forward(self, images: Tensor) -> Tensor:
        """Compute the feature map, (Tensor[B, C, h, w]), of normalised images, (Tensor[B, 3, H, W])."""
        x = self.model.forward_features(images)
        C = self.num_features
        if x.ndim == 4:
            return x if x.shape[1] == C else x.permute(0, 3, 1, 2).contiguous()
        if x.ndim != 3:
            raise BadBackbone(f"backbone {self.name} must return a feature map, got shape {tuple(x.shape)}")
        x = x[:, getattr(self.model, "num_prefix_tokens", 0) :]
        h, w = getattr(getattr(self.model, "patch_embed", None), "grid_size", None) or (round(x.shape[1] ** 0.5),) * 2
        return x.transpose(1, 2).unflatten(2, (h, w))


class VggFc7(TimmBackbone):
    """A timm VGG up to fc7, whose map consists of 7 × 7 windows of the last pooling layer's output.

    The pooling layers round up, as in Fang et al.: 565 pixels give a grid of 12 cells per side. At 224 × 224 pixels,
    one cell, the features equal those of the fully connected layers.

    Its arguments are those of :class:`TimmBackbone`: a name from ``vgg11`` to ``vgg19_bn``, a size of 565 × 565 by
    default, and only 32 as output stride. It raises BadBackbone also for images that are smaller than the window.
    """

    def __init__(self, name: str, size: tuple[int, int] | None = None, output_stride: int | None = None) -> None:
        super().__init__(name, size, output_stride)
        if not isinstance(self.model, VGG):
            raise BadBackbone(f"fc7: the backbone must be a VGG of timm, such as vgg16, got {name}")
        self.size = size or SIZE
        head: Any = self.model.pre_logits
        self.num_features = head.fc2.out_channels
        head.drop.p = DROPOUT
        self.drop = nn.Dropout(DROPOUT)
        pools = [layer for layer in self.model.features if isinstance(layer, nn.MaxPool2d)]
        for pool in pools:
            pool.ceil_mode = True
        window = head.input_kernel_size
        least = (window - 1) * 2 ** len(pools) + 1  # every pooling layer rounds up, which leaves `window` cells
        if min(self.size) < least:
            H, W = self.size
            raise BadBackbone(
                f"fc7: the images of {name} must have at least {least} x {least} pixels, {window} x {window} cells for "
                f"fc6, got {H} x {W}"
            )

    def prepare(self, picture: Image.Image, shift: tuple[float, float] = (0.0, 0.0)) -> Tensor:
        """Scale the whole picture to fit ``size``, with its own aspect ratio, and normalise it: (3, H, W).

        The picture starts at the upper left corner; the rest has the mean colour. ``shift`` is that of TimmBackbone.
        """
        H, W = self.size
        scale = min(H / picture.height, W / picture.width)
        h, w = (max(1, min(most, round(side * scale))) for most, side in ((H, picture.height), (W, picture.width)))
        image = torch.zeros(3, H, W)
        image[:, :h, :w] = self.normalised(picture, (h, w), shift)
        return image

    def forward(self, images: Tensor) -> Tensor:
        """Compute the feature map, (Tensor[B, 4096, h, w]), of normalised images, (Tensor[B, 3, H, W])."""
        return self.drop(self.model.pre_logits(self.model.forward_features(images)))


def make_backbone(
    name: str, size: tuple[int, int] | None = None, output_stride: int | None = None, fc7: bool = False
) -> TimmBackbone:
    """Return a :class:`VggFc7` if ``fc7`` is set, else a :class:`TimmBackbone`; the other arguments are theirs."""
    return (VggFc7 if fc7 else TimmBackbone)(name, size, output_stride)


def from_torchvision(weights: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert torchvision's VGG weights to timm's names and shapes; return any other weights unchanged.

    The first two layers of torchvision's classifier, fc6 and fc7, are convolutions of 7 × 7 and 1 × 1 in timm. Their
    rows are the kernels, channels first, row by row. ``wanted`` are the weights of timm's model.
    """
    converted = dict(weights)
    for theirs, ours in (("classifier.0", "pre_logits.fc1"), ("classifier.3", "pre_logits.fc2")):
        for part in (".weight", ".bias"):
            if theirs + part not in converted or ours + part not in wanted:
                continue
            value, like = converted.pop(theirs + part), wanted[ours + part]
            fits = value.shape[0] == like.shape[0] and value.numel() == like.numel()
            converted[ours + part] = value.reshape(like.shape) if fits else value
    return converted


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read weights and, for safetensors, metadata; raise a ValueError if the file cannot be read as weights."""
    if not path.is_file():
        raise ValueError(f"weights {path}: no such file")
    try:
        if path.suffix == ".safetensors":
            return files.read_weights(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ValueError(f"weights {path} cannot be read: {error}") from error
    except Exception as error:  # from pickle
        raise ValueError(f"weights {path} cannot be read as tensors alone: {error}") from error
    for key in ("state_dict", "model"):
        content = content.get(key, content) if isinstance(content, dict) else content
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"weights {path} must hold a dict of tensors, got {type(content).__name__}")
    return content, {}
