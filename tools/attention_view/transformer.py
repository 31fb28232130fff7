"""Attention layers of mmdet's and mmseg's transformers, and their inputs in a forward pass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from attn_plugins.modules import SpatialSelfAttention
from tools.attention_view.sampling import Samples
from tools.attention_view.tokens import TokenMaps, probed_weights, product_weights, stock_weights

PIXELS, OBJECTS = "pixels to pixels", "objects to pixels"
SAMPLED_PIXELS, SAMPLED_OBJECTS = "pixels to sampled points", "objects to sampled points"
_DECODER = re.compile(r"(^|\.)(transformer_)?decoder\.layers\.")  # layers with object queries in mmdet and mmseg

Seen = TokenMaps | Samples


def transformer_layers(model: nn.Module) -> dict[str, str]:
    """Return the attention layers whose keys are the picture, by name, each with its kinds of queries and keys.

    Attention among object queries is left out.
    """
    found = {}
    for name, module in model.named_modules():
        objects = bool(_DECODER.search(name))
        if _deformable(module):
            found[name] = SAMPLED_OBJECTS if objects else SAMPLED_PIXELS
        elif (_inner(module) is not None or _conditional(module)) and not (objects and name.endswith("self_attn")):
            found[name] = OBJECTS if objects else PIXELS
    return found


def _deformable(module: nn.Module) -> bool:
    return all(hasattr(module, part) for part in ("sampling_offsets", "attention_weights", "value_proj", "num_points"))


def _inner(module: nn.Module) -> nn.Module | None:
    """Return the attention inside mmcv's ``MultiheadAttention``, torch's or ours."""
    inner = getattr(module, "attn", None) if type(module).__name__ == "MultiheadAttention" else None
    return inner if isinstance(inner, (nn.MultiheadAttention, SpatialSelfAttention)) else None


def _conditional(module: nn.Module) -> bool:
    return hasattr(module, "qcontent_proj") and hasattr(module, "forward_attn")


@contextmanager
def capture_transformer(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Seen]]:
    """Record the inputs of layers of :func:`transformer_layers` in a forward pass.

    Weights and points are computed on demand, and all hooks are removed afterwards. Compute them before the next
    forward pass of the model.

    Args:
        model: A model of mmdet or mmseg.
        layers: Names.

    Yields:
        The captured layers by name, in the order of the calls, without layers whose keys are not a map of encoded
        positions.
    """
    kinds = transformer_layers(model)
    captured: dict[str, Seen] = {}
    grids: dict[int, tuple[int, int]] = {}  # by number of pixels

    def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
        H, W = output.shape[-2:]
        grids[H * W] = (H, W)

    def keep(name: str, weigh: Callable[..., Tensor], attention: nn.Module, batch_first: bool, given: Any) -> None:
        captured.pop(name, None)
        query, key = given["query"], given["key"]
        axis = 1 if batch_first else 0
        grid = grids.get(key.shape[axis])
        size = grid if kinds[name] == PIXELS else None
        if grid is not None and (size is None or query.shape[axis] == key.shape[axis]):
            masks = {mask: given.get(mask) for mask in ("key_padding_mask", "attn_mask")}
            captured[name] = TokenMaps(name, weigh, attention, query, key, masks, grid, size)

    def keep_samples(name: str, attention: nn.Module, given: dict[str, Any]) -> None:
        captured.pop(name, None)
        captured[name] = Samples(name, attention, given, kinds[name] == SAMPLED_OBJECTS)

    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__.endswith("PositionalEncoding"):
                stack.callback(module.register_forward_hook(note).remove)
        for name in layers:
            layer = model.get_submodule(name)
            inner = _inner(layer)
            if _deformable(layer):
                _watch(stack, layer, partial(keep_samples, name, layer))
            elif inner is not None:
                weigh = stock_weights if isinstance(inner, nn.MultiheadAttention) else probed_weights
                _watch(stack, inner, partial(keep, name, weigh, inner, getattr(inner, "batch_first", False)))
            else:
                stack.enter_context(_watch_method(layer, partial(keep, name, product_weights, layer, True)))
        yield captured


def _watch(stack: ExitStack, module: nn.Module, keep: Callable[[dict[str, Any]], None]) -> None:
    """Pass the arguments of every call of a module, by name, to ``keep``."""
    signature = inspect.signature(module.forward)

    def hook(_: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        keep(_named(signature, arguments, keywords))

    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _named(signature: inspect.Signature, arguments: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    given = dict(signature.bind(*arguments, **keywords).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(name, {})
    return given


@contextmanager
def _watch_method(layer: Any, keep: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Watch the method ``forward_attn``, which hooks do not reach, like :func:`_watch`."""
    method = layer.forward_attn
    signature = inspect.signature(method)

    def watched(*arguments: Any, **keywords: Any) -> Any:
        keep(_named(signature, arguments, keywords))
        return method(*arguments, **keywords)

    layer.forward_attn = watched
    try:
        yield
    finally:
        del layer.forward_attn
