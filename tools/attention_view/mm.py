"""OpenMMLab models: views of a picture by a detector or segmentor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules.capture import attention_layers, capture_attention
from tools import need
from tools.attention_view.objects import Objects, found, watch_head
from tools.attention_view.transformer import OBJECTS, PIXELS, SAMPLED_OBJECTS, capture_transformer, transformer_layers
from tools.attention_view.view import Layer, View, ViewError, chosen_layers, default_layers, one_line
from tools.attention_view.vit import capture_vit, rollouts, vit_layers


def mm_layers(model: nn.Module) -> dict[str, str]:
    """Return our and the transformer's attention layers by name, each with its kinds of queries and keys."""
    kinds = transformer_layers(model) | dict.fromkeys(vit_layers(model), PIXELS)
    own = {name: PIXELS for name in attention_layers(model) if name.removesuffix(".attn") not in kinds}
    return {name: (own | kinds)[name] for name, _ in model.named_modules() if name in own or name in kinds}


def load_mm(name: str, checkpoint: Path | None) -> nn.Module:
    """Load an OpenMMLab detector or segmentor on the CPU, with the weights of ``checkpoint``.

    Raises:
        ViewError: the config cannot be read, the model cannot be built, or the weights cannot be loaded.
    """
    need("mmengine", "mmcv")
    from mmengine.config import Config

    import attn_plugins.mmcv  # noqa: F401

    if checkpoint is not None and not checkpoint.is_file():
        raise ViewError(f"--checkpoint must be a file, got {checkpoint}")
    try:
        if "::" in name:
            from mmengine.hub import get_config

            config: Any = get_config(name)
        else:
            config = Config.fromfile(name)
    except Exception as error:
        raise ViewError(f"MODEL {name} cannot be read as a config: {one_line(error)}") from error
    weights = None if checkpoint is None else str(checkpoint)
    segmentor = config.get("default_scope") == "mmseg"
    need("mmseg" if segmentor else "mmdet")
    if segmentor:
        from mmseg.apis import init_model as build
    else:
        from mmdet.apis import init_detector as build
    try:
        model = build(config, weights, device="cpu")
        if checkpoint is None:
            _draw(model)
        return model
    except Exception as error:
        which = "" if checkpoint is None else f" with --checkpoint {checkpoint}"
        raise ViewError(f"MODEL {name}{which} cannot be built: {one_line(error)}") from error


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


def view_mm(
    model: Any,
    file: Path,
    layers: Sequence[str],
    most_objects: int = 8,
    least_score: float = 0.3,
    with_rollout: bool = False,
) -> View:
    """Run an OpenMMLab model on the picture with its config's own test pipeline.

    Args:
        model: Result of :func:`load_mm`.
        file: The picture.
        layers: Name patterns; empty for the last layer of every stage.
        most_objects: Maximum number of objects, by falling score.
        least_score: Minimum score of an object; if no object reaches it, only the best one is used.
        with_rollout: Whether to add the rollout of a timm vision transformer.

    Raises:
        ValueError: a pattern matches no layer, or a layer's keys are not a map.
    """
    known = mm_layers(model)
    named = chosen_layers(model, list(known), layers)
    kinds, patches = transformer_layers(model), vit_layers(model)
    tokens = [name for name in named if name in kinds]
    own = [name for name in named if name not in kinds and name not in patches]
    crossed = any(kind in (OBJECTS, SAMPLED_OBJECTS) for kind in kinds.values())
    seen: dict[str, Any] = {}

    def remember(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen["input"] = inputs[0]

    with ExitStack() as stack:
        stack.callback(model.backbone.register_forward_pre_hook(remember).remove)
        captured: dict[str, Layer] = {}
        first = stack.enter_context(capture_attention(model, own)) if own else {}
        second = stack.enter_context(capture_transformer(model, tokens))
        head = stack.enter_context(watch_head(model)) if crossed else {}
        third = stack.enter_context(capture_vit(model))
        try:
            result = infer(model, file)
        except AssertionError as error:  # raised by timm for a wrong size
            raise ViewError(f"the model does not accept the picture: {one_line(error)}") from error
        captured = {**first, **second, **{name: layer for name, layer in third.items() if name in named}}
    missing = [name for name in named if name not in captured]
    if layers and missing:
        raise ValueError(f"{missing[0]} cannot be shown: its keys are no map of encoded positions, or it did not run")
    shown = [name for name in known if name in captured] if layers else default_layers(captured)
    picture = picture_of(model, seen["input"][0])
    facts = result.metainfo
    (h, w), (H, W) = facts["img_shape"][:2], facts["ori_shape"][:2]
    view = View(picture, (h / H, w / W), (H, W), {name: captured[name] for name in shown})
    if with_rollout:
        view.captured.update(rollouts(model, third))
    if crossed:
        view.objects = found(head, view.size, view.inside, _classes(model)).surest(most_objects, least_score)
    return view


def view_objects(model: Any, file: Path) -> tuple[Objects, tuple[int, int]]:
    """Return what all object queries find in a picture, and the size (h, w) in whose pixels their boxes are.

    Raises:
        ValueError: the model has no object queries.
    """
    if not any(kind in (OBJECTS, SAMPLED_OBJECTS) for kind in transformer_layers(model).values()):
        raise ValueError(f"--slots needs a model with object queries, and {type(model).__name__} has none")
    seen: dict[str, Any] = {}
    handle = model.backbone.register_forward_pre_hook(lambda _, inputs: seen.update(input=inputs[0]))
    try:
        with watch_head(model) as head:
            facts = infer(model, file).metainfo
    finally:
        handle.remove()
    inside = tuple(facts["img_shape"][:2])
    return found(head, seen["input"].shape[-2:], inside, _classes(model)), inside


def infer(model: Any, file: Path) -> Any:
    """Return the model's result for a picture, from its toolkit's own function."""
    if model.cfg.get("default_scope") == "mmseg":
        from mmseg.apis import inference_model
    else:
        from mmdet.apis import inference_detector as inference_model
    with torch.no_grad():
        return inference_model(model, str(file))


def picture_of(model: Any, pixels: Tensor) -> Any:
    """Convert the model's input (3, H, W) to a picture, (H, W, 3) uint8."""
    preprocessor = model.data_preprocessor
    if hasattr(preprocessor, "mean"):
        pixels = pixels * preprocessor.std.view(-1, 1, 1) + preprocessor.mean.view(-1, 1, 1)
    if not model.cfg.model.get("data_preprocessor", {}).get("bgr_to_rgb", False):
        pixels = pixels.flip(0)
    return pixels.permute(1, 2, 0).round().clamp(0, 255).byte().numpy()


def _classes(model: Any) -> Sequence[str]:
    return (getattr(model, "dataset_meta", None) or {}).get("classes") or ()
