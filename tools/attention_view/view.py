"""A model's view of a picture; views by timm models."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from attn_plugins.modules.capture import Captured, attention_layers, capture_attention
from tools import need
from tools.attention_view.objects import Objects
from tools.attention_view.sampling import Samples
from tools.attention_view.space_time import step_layers
from tools.attention_view.swin import capture_swin, is_swin, swin_layers
from tools.attention_view.tokens import TokenMaps
from tools.attention_view.vit import (
    CLS,
    Cell,
    PatchMaps,
    QueryMaps,
    capture_vit,
    rollouts,
    vision_transformers,
    vit_layers,
)
from tools.model_names import check_model_name

PixelMaps = Captured | TokenMaps | PatchMaps
Layer = PixelMaps | Samples


class ViewError(ValueError):
    """A model, a picture or a pixel that cannot be shown."""


@dataclass
class View:
    """A model's view of a picture.

    Attributes:
        picture: (H, W, 3) uint8, the model's input, padding included.
        scale: Rows and columns of ``picture`` per row and column of the file.
        file_size: (H, W) of the file.
        captured: The attention layers, in the order of their calls.
        objects: Detected objects, if the model's queries are objects.
    """

    picture: np.ndarray
    scale: tuple[float, float]
    file_size: tuple[int, int]
    captured: dict[str, Layer]
    objects: Objects | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of ``picture``."""
        return self.picture.shape[0], self.picture.shape[1]

    @property
    def inside(self) -> tuple[int, int]:
        """(h, w), the size of ``picture`` without padding."""
        h, w = (min(round(n * scale), size) for n, scale, size in zip(self.file_size, self.scale, self.size))
        return h, w

    @property
    def maps(self) -> list[PixelMaps]:
        """The layers with a map for every pixel."""
        return [layer for layer in self.captured.values() if not isinstance(layer, Samples) and layer.size is not None]

    @property
    def object_maps(self) -> list[TokenMaps]:
        """The layers with a map for every object."""
        return [layer for layer in self.captured.values() if isinstance(layer, TokenMaps) and layer.size is None]

    def samples(self, objects: bool) -> list[Samples]:
        """Return the layers with sampling points for every object, or for every pixel."""
        return [n for n in self.captured.values() if isinstance(n, Samples) and n.objects == objects]

    def cell(self, size: Sequence[int], pixel: Sequence[int]) -> tuple[int, int]:
        """Return the cell of a map of ``size`` that contains a pixel (y, x) of the file."""
        found = []
        for n, scale, whole, cells in zip(pixel, self.scale, self.size, size):
            found.append(min(int((n + 0.5) * scale * cells / whole), cells - 1))
        return found[0], found[1]


def is_mm(model: str) -> bool:
    """Return whether ``model`` is an OpenMMLab config, as a file or as ``'mmdet::…'``."""
    return model.endswith(".py") or "::" in model


def default_layers(captured: Mapping[str, Layer]) -> list[str]:
    """Return the last attention layer of every stage: of every name up to the first number, and every map size."""
    stages = {(re.split(r"\.\d+(?:\.|$)", name)[0], _extent(layer)): name for name, layer in captured.items()}
    return list(stages.values())


def _extent(layer: Layer) -> Any:
    if isinstance(layer, Samples):
        return None
    return layer.keys if isinstance(layer, TokenMaps) and layer.size is None else layer.size


def query_maps(layer: PixelMaps, cells: Sequence[Cell]) -> QueryMaps:
    """Return a layer's maps for cells of its map of queries, or for the cls token."""
    if isinstance(layer, PatchMaps):
        return layer.look(cells)
    queries = torch.tensor(cells)
    maps = layer.maps(queries)[0].float()
    return QueryMaps([f"head {n + 1}" for n in range(len(maps))], maps, uniform_weights(layer, queries))


def uniform_weights(layer: Captured | TokenMaps, queries: Tensor) -> Tensor:
    """Return the weight of a query's keys under uniform attention: 1 / their number.

    Args:
        layer: Any attention layer.
        queries: (Q, 2), rows and columns on its map of queries.

    Returns:
        (Q,).
    """

    if isinstance(layer, TokenMaps):
        return layer.uniform(layer.numbers(queries))

    def blank(value: Any) -> Any:
        return torch.zeros_like(value) if isinstance(value, Tensor) else value

    # For an input of zeros all keys have equal weights, so a weight of 0 means a position that is not a key.
    keywords = {key: blank(value) for key, value in layer.keywords.items()}
    maps = Captured(layer.name, layer.layer, tuple(map(blank, layer.arguments)), keywords).maps(queries)[0]
    return 1 / (maps != 0).any(0).sum((-2, -1)).clamp(min=1)


def load_timm(name: str, checkpoint: Path | None, options: dict[str, Any]) -> nn.Module:
    """Load a timm model in evaluation mode, with the weights of ``checkpoint``.

    Raises:
        ViewError: timm has no such model, or the weights belong to another model.
    """
    need("timm", "safetensors")
    import timm
    from timm.models import load_checkpoint

    from tools.train.checkpoint import model_options, read_weights
    from tools.train.config import ConfigError

    if (wrong := check_model_name(name)) is not None:
        raise ViewError(f"MODEL must be a model of timm or a config file (*.py) of mmdet or mmseg, got {wrong}")
    if checkpoint is not None and not checkpoint.is_file():
        raise ViewError(f"--checkpoint must be a file, got {checkpoint}")
    if checkpoint is not None and checkpoint.suffix == ".safetensors":
        try:
            named = read_weights(checkpoint, "--checkpoint")[1].get("model", name)
            options = {**model_options(checkpoint), **options}
        except ConfigError as error:
            raise ViewError(str(error)) from error
        if named.partition(".")[0] != name.partition(".")[0]:
            raise ViewError(f"--checkpoint must be weights of {name}, but {checkpoint} holds those of {named}")
    try:
        model = timm.create_model(name, **options).eval()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ViewError(f"MODEL {name} with {options}: {error}") from error
    if checkpoint is not None:
        try:
            load_checkpoint(model, str(checkpoint))
        except Exception as error:  # from torch, pickle or safetensors
            raise ViewError(f"--checkpoint {checkpoint} does not fit {name} {options}: {one_line(error)}") from error
    return model


def timm_size(model: nn.Module, checkpoint: Path | None, given: Sequence[int] | None) -> tuple[tuple[int, int], str]:
    """Return (H, W) of a timm model's input, and the reason for it.

    Args:
        model: The model, whose own size is the default.
        checkpoint: A checkpoint, which may store the size of its training by ``tools.train``.
        given: Size given by the user, which takes precedence.
    """
    from timm.data import resolve_model_data_config

    from tools.train.checkpoint import trained_size

    if given is not None:
        return (given[0], given[1]), "as given"
    trained = trained_size(checkpoint) if checkpoint is not None and checkpoint.suffix == ".safetensors" else None
    if trained is not None:
        return trained, "at which the checkpoint was trained"
    size = tuple(resolve_model_data_config(model)["input_size"][1:])
    if model in vision_transformers(model).values() or is_swin(model):
        size = tuple(getattr(getattr(model, "patch_embed", None), "img_size", None) or size)  # as it was built
    return size, "the model's own; --input-size H W takes another"


def one_line(error: Exception) -> str:
    """Return an error's message in a line of bounded length."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")


def chosen_layers(model: nn.Module, known: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names among ``known`` that match a pattern; all names if there is no pattern.

    Raises:
        ValueError: the model has no attention layer, or a pattern matches none.
    """
    if not known:
        raise ValueError(f"model must hold an attention layer that can be shown, and {type(model).__name__} has none")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ValueError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(known)}")
    return [name for name in known if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def timm_layers(model: nn.Module) -> list[str]:
    """Return the names of the attention layers of ours and of timm's vision transformers and Swins."""
    known = {**attention_layers(model), **vit_layers(model), **step_layers(model), **swin_layers(model)}
    return [name for name, _ in model.named_modules() if name in known]


def view_timm(
    model: Any, image: Image.Image, layers: Sequence[str], size: tuple[int, int], with_rollout: bool = False
) -> View:
    """Run a timm model on the whole picture, resized to (H, W).

    Args:
        model: The model.
        image: The picture.
        layers: Name patterns; empty for the last layer of every stage.
        size: (H, W).
        with_rollout: Whether to add the rollout of a vision transformer.

    Raises:
        ValueError: a pattern matches no layer, the model does not accept this size, or it has no rollout.
    """
    from timm.data import resolve_model_data_config

    config, (H, W) = resolve_model_data_config(model), size
    picture = np.array(image.resize((W, H), Image.Resampling.BICUBIC))
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    x = ((torch.from_numpy(picture).permute(2, 0, 1) / 255 - mean) / std).unsqueeze(0)

    named, patches = chosen_layers(model, timm_layers(model), layers), vit_layers(model)
    own = [name for name in named if name not in patches and name not in swin_layers(model)]
    with ExitStack() as stack:
        second = stack.enter_context(capture_vit(model))
        first = stack.enter_context(capture_attention(model, own)) if own else {}
        windows = stack.enter_context(capture_swin(model, named))
        try:
            with torch.no_grad():
                model(x)
        except AssertionError as error:  # raised by timm for a wrong size
            raise ViewError(
                f"{type(model).__name__} does not accept an input of {H}×{W} pixels: {one_line(error)} "
                "With --model-args dynamic_img_size=true --model-args dynamic_img_pad=true it accepts any size"
            ) from error
    captured: dict[str, Layer] = {**first, **windows}
    captured.update({name: layer for name, layer in second.items() if name in named})
    chosen = list(captured) if layers else default_layers(captured)
    shown: dict[str, Layer] = {name: captured[name] for name in chosen}
    if with_rollout:
        shown.update(rollouts(model, second))
    if second:
        picture = _padded(picture, model, next(iter(second.values())).size)
    return View(picture, (H / image.height, W / image.width), (image.height, image.width), shown)


def _padded(picture: np.ndarray, model: Any, grid: tuple[int, int]) -> np.ndarray:
    """Pad the picture to whole patches, as timm does with ``dynamic_img_pad``."""
    embed = getattr(model, "embeds", None) or model.patch_embed
    if not getattr(embed, "dynamic_img_pad", False):
        return picture
    more = [n * cells - size for n, cells, size in zip(embed.patch_size, grid, picture.shape)]
    return np.pad(picture, ((0, more[0]), (0, more[1]), (0, 0)))


def parse_pixels(texts: Sequence[str], size: tuple[int, int], cls: bool = False) -> list[Cell]:
    """Parse ``'y,x'`` texts as pixels of a file of ``size``, and ``'cls'``.

    Args:
        texts: Texts; empty for the cls token, if any, and four pixels spread over the picture.
        size: (H, W).
        cls: Whether the model has a cls token.

    Raises:
        ViewError: a text is invalid, or there is no such pixel or token.
    """
    H, W = size
    if not texts:
        return ([CLS] if cls else []) + [(H * i // 3, W * j // 3) for i in (1, 2) for j in (1, 2)]
    found: list[Cell] = []
    for text in texts:
        if text == CLS:
            if not cls:
                raise ViewError("--pixels cls needs a vision transformer of timm with a cls token: this model has none")
            found.append(CLS)
            continue
        match = re.fullmatch(r"(\d+),(\d+)", text)
        if match is None:
            raise ViewError(f"--pixels must be Y,X in pixels of the picture, got {text!r}")
        y, x = int(match[1]), int(match[2])
        if y >= H or x >= W:
            raise ViewError(f"--pixels must lie in the picture of {H} rows and {W} columns, got {text!r}")
        found.append((y, x))
    return found
