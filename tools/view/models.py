"""Models of timm, mmdet and mmseg: loading one, running it on a picture or clip, and what it attends to there."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tools import need
from tools.clips import is_clip, open_clip
from tools.model_names import check_model_name
from tools.pictures import open_picture

from .clips import clip_rollouts, layout, mosaic, steps, watch_steps
from .maps import Maps, ViewError, Watch, ours, watch_ours
from .objects import Objects, objects_of, watch_head
from .patches import patches, rollouts, vision_transformers, watch_patches
from .points import Points
from .swin import is_swin, swins, watch_swin
from .tokens import OBJECTS, SAMPLED_OBJECTS, Tokens, tokens, watch_tokens

Layer = Maps | Points
# How each kind of attention lists its layers and watches them; the first kind that knows a layer takes it.
KINDS: tuple[tuple[Callable[[nn.Module], dict[str, str]], Watch], ...] = (
    (steps, watch_steps), (patches, watch_patches), (swins, watch_swin), (tokens, watch_tokens), (ours, watch_ours)
)  # fmt: skip


@dataclass
class View:
    """A model's view of a picture, or of a clip as a mosaic of its frames."""

    picture: np.ndarray  # (H, W, 3) uint8, the model's input, padding included
    scale: tuple[float, float]  # rows and columns of `picture` per row and column of the file
    file_size: tuple[int, int]  # (H, W)
    layers: list[Layer]  # in the order of their calls
    objects: Objects | None = None  # if the model's queries are objects
    frames: tuple[int, int] | None = None  # rows and columns of the frames of a clip

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
    def maps(self) -> list[Maps]:
        """The layers with a map for every pixel."""
        return [layer for layer in self.layers if isinstance(layer, Maps) and layer.size is not None]

    @property
    def object_maps(self) -> list[Tokens]:
        """The layers with a map for every object."""
        return [layer for layer in self.layers if isinstance(layer, Tokens) and layer.size is None]

    def points(self, objects: bool) -> list[Points]:
        """Return the layers with sampling points for every object, or for every pixel."""
        return [layer for layer in self.layers if isinstance(layer, Points) and layer.objects == objects]

    def sampled(self, layer: Points, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the points (Q, M, L, K, 2) that queries read, in pixels of ``picture``, and their weights."""
        locations, weights = layer.points(chosen)
        return layer.in_pixels(locations[0], self.size, self.inside), weights[0]

    def references(self, layer: Points) -> Tensor:
        """Return the objects' reference points (N, 2) or boxes (N, 4), (x, y, w, h), in pixels of ``picture``."""
        return layer.in_pixels(layer.references[0, self.objects.queries].float(), self.size, self.inside)[:, 0]

    def cell(self, size: Sequence[int], pixel: Sequence[int]) -> tuple[int, int]:
        """Return the cell of a map of ``size`` that contains a pixel (y, x) of the file."""
        y, x = (
            min(int((n + 0.5) * scale * cells / whole), cells - 1)
            for n, scale, whole, cells in zip(pixel, self.scale, self.size, size)
        )
        return y, x


def known_layers(model: nn.Module) -> dict[str, str]:
    """Return all attention layers that can be shown by name, in the model's order, with their queries and keys."""
    known = {name: kind for own in _by_kind(model) for name, kind in own.items()}
    return {name: known[name] for name, _ in model.named_modules() if name in known}


def _by_kind(model: nn.Module) -> list[dict[str, str]]:
    kinds: list[dict[str, str]] = []
    for names, _ in KINDS:
        # Our layer inside mmcv's MultiheadAttention is named `attn`.
        taken = {name for own in kinds for name in own}
        kinds.append({n: kind for n, kind in names(model).items() if not {n, n.removesuffix(".attn")} & taken})
    return kinds


@contextmanager
def capture(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the inputs of all attention layers in a forward pass.

    Weights are computed on demand, and all hooks are removed afterwards. Compute them before the next forward pass.

    Yields:
        The layers by name, in the order of the calls.
    """
    captured: dict[str, Layer] = {}

    def keep(layer: Layer) -> None:
        captured.pop(layer.name, None)
        captured[layer.name] = layer

    with ExitStack() as stack:
        for (_, watch), names in zip(KINDS, _by_kind(model)):
            for handle in watch(model, names, keep) if names else ():
                stack.callback(handle.remove)
        yield captured


def chosen_layers(known: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the names among ``known`` that match a pattern; all names if there is no pattern."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise ViewError(f"layers must name attention layers, and none is called {pattern!r}: {', '.join(known)}")
    return [name for name in known if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def _known(model: nn.Module) -> list[str]:
    known = list(known_layers(model))
    if not known:
        raise ViewError(f"model must hold an attention layer that can be shown, and {type(model).__name__} has none")
    return known


def _last_of_stages(captured: dict[str, Layer]) -> list[str]:
    """Return the last layer of every stage: of every name up to the first number, and every map size."""

    def extent(layer: Layer) -> Any:
        return None if isinstance(layer, Points) else layer.size or (isinstance(layer, Tokens) and layer.keys)

    stages = {(re.split(r"\.\d+(?:\.|$)", name)[0], extent(layer)): name for name, layer in captured.items()}
    return list(stages.values())


def is_mm(model: str) -> bool:
    """Return whether ``model`` is an OpenMMLab config, as a file or as ``'mmdet::…'``."""
    return model.endswith(".py") or "::" in model


def one_line(error: Exception) -> str:
    """Return an error's message in a line of bounded length."""
    return textwrap.shorten(str(error) or type(error).__name__, 300, placeholder=" …")


@contextmanager
def refusing(words: str, kinds: Any = Exception) -> Iterator[None]:
    """Raise errors of these kinds as a ViewError that starts with ``words``."""
    try:
        yield
    except kinds as error:
        raise ViewError(f"{words}: {one_line(error)}") from error


def load(name: str, checkpoint: Path | None, options: dict[str, Any], device: str = "cpu") -> Any:
    """Load a model in evaluation mode, with the weights of ``checkpoint``."""
    if checkpoint is not None and not checkpoint.is_file():
        raise ViewError(f"--checkpoint must be a file, got {checkpoint}")
    return load_mm(name, checkpoint, device) if is_mm(name) else load_timm(name, checkpoint, options)


def load_timm(name: str, checkpoint: Path | None, options: dict[str, Any]) -> nn.Module:
    """See :func:`load`, for timm."""
    need("timm", "safetensors")
    import timm
    from timm.models import load_checkpoint

    from tools.train.checkpoint import model_options, read_weights
    from tools.train.config import ConfigError

    if (wrong := check_model_name(name)) is not None:
        raise ViewError(f"MODEL must be a model of timm or a config file (*.py) of mmdet or mmseg, got {wrong}")
    if checkpoint is not None and checkpoint.suffix == ".safetensors":
        try:
            named = read_weights(checkpoint, "--checkpoint")[1].get("model", name)
            options = {**model_options(checkpoint), **options}
        except ConfigError as error:
            raise ViewError(str(error)) from error
        if named.partition(".")[0] != name.partition(".")[0]:
            raise ViewError(f"--checkpoint must be weights of {name}, but {checkpoint} holds those of {named}")
    with refusing(f"MODEL {name} with {options}", (TypeError, ValueError, RuntimeError)):
        model = timm.create_model(name, **options).eval()
    if checkpoint is not None:
        with refusing(f"--checkpoint {checkpoint} does not fit {name} {options}"):  # torch, pickle or safetensors
            load_checkpoint(model, str(checkpoint))
    return model


def load_mm(name: str, checkpoint: Path | None, device: str = "cpu") -> nn.Module:
    """See :func:`load`, for mmdet and mmseg."""
    need("mmengine", "mmcv")
    from mmengine.config import Config
    from mmengine.hub import get_config

    import attn_plugins.mmcv  # noqa: F401

    with refusing(f"MODEL {name} cannot be read as a config"):
        config: Any = get_config(name) if "::" in name else Config.fromfile(name)
    segmentor = config.get("default_scope") == "mmseg"
    need("mmseg" if segmentor else "mmdet")
    if segmentor:
        from mmseg.apis import init_model as build
    else:
        from mmdet.apis import init_detector as build
    which = "" if checkpoint is None else f" with --checkpoint {checkpoint}"
    with refusing(f"MODEL {name}{which} cannot be built"):
        model = build(config, None if checkpoint is None else str(checkpoint), device=device)
        if checkpoint is None:
            _draw(model)
    return model


def _draw(model: Any) -> None:
    """Initialise a model's weights as for training, except those loaded from a file: some are created empty."""
    from mmengine.logging import MMLogger

    for module in model.modules():
        given = getattr(module, "init_cfg", None)
        if any(rule.get("type") == "Pretrained" for rule in (given if isinstance(given, list) else [given or {}])):
            module.init_cfg = None
    logger = MMLogger.get_current_instance()
    level = logger.level
    logger.setLevel("WARNING")  # it logs every parameter
    try:
        model.init_weights()
    finally:
        logger.setLevel(level)


def open_input(model: Any, file: Path, name: str) -> list[Image.Image]:
    """Open a picture, or as many frames of a clip as a TimeSformer expects; a picture is a clip of one frame."""
    clip = is_clip(file)
    if steps(model) and (clip or file.is_dir()):
        return open_clip(file, model.num_frames)
    if clip:
        raise ViewError(f"IMAGE must be a picture, for {name} sees no clips, got {file}")
    return [open_picture(file)]


def timm_size(model: nn.Module, checkpoint: Path | None, given: Sequence[int] | None) -> tuple[tuple[int, int], str]:
    """Return (H, W) of a timm model's input, and the reason: given, that of the checkpoint's training, or its own."""
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


def view_timm(
    model: Any, frames: Sequence[Image.Image], patterns: Sequence[str], size: tuple[int, int], rollout: bool = False
) -> View:
    """Run a timm model on the whole picture, or a TimeSformer on whole frames, resized to (H, W).

    Without patterns the last layer of every stage is shown, or the steps of a clip's last block.
    """
    from timm.data import resolve_model_data_config

    config, (H, W), clip = resolve_model_data_config(model), size, bool(steps(model))
    pictures = np.stack([np.array(frame.resize((W, H), Image.Resampling.BICUBIC)) for frame in frames])
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("mean", "std"))
    x = (torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255 - mean) / std
    known = _known(model)
    named = chosen_layers(known, patterns)
    if clip and not patterns:
        named = [name for name in known if name.startswith(known[-1].rpartition(".")[0] + ".")]
    with capture(model) as captured, torch.no_grad():
        try:
            model(x.unsqueeze(0) if clip else x)
        except AssertionError as error:  # raised by timm for a wrong size
            what, more, pad = "an input", "size", " --model-args dynamic_img_pad=true"
            if clip:
                what, more, pad = "frames", "whole number of patches", ""
            raise ViewError(
                f"{type(model).__name__} does not accept {what} of {H}×{W} pixels: {one_line(error)} "
                f"With --model-args dynamic_img_size=true{pad} it accepts any {more}"
            ) from error
    ran = {name: layer for name, layer in captured.items() if name in named}
    shown = list(ran.values()) if patterns or clip else [ran[name] for name in _last_of_stages(ran)]
    if rollout:
        shown += (clip_rollouts if clip else rollouts)(model, captured).values()
    (down, across), (width, height) = layout(len(frames)), frames[0].size
    picture = mosaic(torch.from_numpy(pictures).permute(3, 0, 1, 2)).permute(1, 2, 0).numpy()
    if not clip and vision_transformers(model):
        picture = _padded(picture, model, next(captured[name] for name in patches(model) if name in captured).size)
    file_size = down * height, across * width
    return View(picture, (H / height, W / width), file_size, shown, frames=(down, across) if clip else None)


def _padded(picture: np.ndarray, model: Any, grid: tuple[int, int]) -> np.ndarray:
    """Pad the picture to whole patches, as timm does with ``dynamic_img_pad``."""
    embed = getattr(model, "embeds", None) or model.patch_embed
    if not getattr(embed, "dynamic_img_pad", False):
        return picture
    more = [n * cells - size for n, cells, size in zip(embed.patch_size, grid, picture.shape)]
    return np.pad(picture, ((0, more[0]), (0, more[1]), (0, 0)))


def infer(model: Any, file: Path) -> tuple[Tensor, dict[str, Any], Objects | None, dict[str, Any]]:
    """Run an OpenMMLab model on a picture by its toolkit's own function, with its config's own test pipeline.

    Returns:
        Its input (3, H, W), its result's facts, what all object queries found, if it has any, and its layers.
    """
    if model.cfg.get("default_scope") == "mmseg":
        from mmseg.apis import inference_model
    else:
        from mmdet.apis import inference_detector as inference_model
    inputs: list[Tensor] = []
    with ExitStack() as stack:
        stack.callback(model.backbone.register_forward_pre_hook(lambda _, given: inputs.append(given[0])).remove)
        captured = stack.enter_context(capture(model))
        head = stack.enter_context(watch_head(model)) if has_objects(model) else None
        stack.enter_context(torch.no_grad())
        with refusing("the model does not accept the picture", AssertionError):  # from timm for a wrong size
            facts = inference_model(model, str(file)).metainfo
    x, classes = inputs[0][0], (getattr(model, "dataset_meta", None) or {}).get("classes") or ()
    return x, facts, head and objects_of(head, x.shape[-2:], facts["img_shape"][:2], classes), captured


def has_objects(model: Any) -> bool:
    """Return whether a model has object queries."""
    return any(kind in (OBJECTS, SAMPLED_OBJECTS) for kind in tokens(model).values())


def view_mm(
    model: Any, file: Path, patterns: Sequence[str], most_objects: int = 8, least: float = 0.3, rollout: bool = False
) -> View:
    """Run an OpenMMLab model on the picture.

    Without patterns the last layer of every stage is shown, and without an object of the ``least`` score the best one.
    """
    named = chosen_layers(_known(model), patterns)
    x, facts, objects, ran = infer(model, file)
    captured = {name: layer for name, layer in ran.items() if name in named}
    missing = [name for name in named if name not in captured]
    if patterns and missing:
        raise ViewError(f"{missing[0]} cannot be shown: its keys are no map of encoded positions, or it did not run")
    shown = [captured[name] for name in (named if patterns else _last_of_stages(captured))]
    if rollout:
        shown += rollouts(model, ran).values()
    (h, w), (H, W) = facts["img_shape"][:2], facts["ori_shape"][:2]
    objects = objects and objects.surest(most_objects, least)
    return View(picture_of(model, x), (h / H, w / W), (H, W), shown, objects)


def view_objects(model: Any, file: Path) -> tuple[Objects, tuple[int, int]]:
    """Return what all object queries find in a picture, and the size (h, w) in whose pixels their boxes are."""
    if not has_objects(model):
        raise ViewError(f"--slots needs a model with object queries, and {type(model).__name__} has none")
    _, facts, objects, _ = infer(model, file)
    return objects, facts["img_shape"][:2]


def picture_of(model: Any, pixels: Tensor) -> Any:
    """Convert the model's input (3, H, W) to a picture, (H, W, 3) uint8."""
    preprocessor = model.data_preprocessor
    if hasattr(preprocessor, "mean"):
        pixels = pixels * preprocessor.std.view(-1, 1, 1) + preprocessor.mean.view(-1, 1, 1)
    if not model.cfg.model.get("data_preprocessor", {}).get("bgr_to_rgb", False):
        pixels = pixels.flip(0)
    return pixels.permute(1, 2, 0).round().clamp(0, 255).byte().numpy()
