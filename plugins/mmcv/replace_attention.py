"""Replacement of attention in upstream transformers: ``model=dict(type='Attended', of='DETR', attention={...})``."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from mmcv import ops
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmengine.registry import MODELS
from torch import Tensor, nn

from .. import modules
from ..modules.common.storage_state import backward_pass, keep, kept
from ..modules.common.tracing import one_node
from ..modules.common.weights import weights_of
from ..modules.tokens.deformable_attention import SampledAttention
from .places import deformable

Grid = tuple[int, int]
# The class that each layer replaces.
STOCK: dict[str, Any] = {
    "SpatialSelfAttention": MultiheadAttention,
    "MultiScaleDeformableAttention": ops.MultiScaleDeformableAttention,
}
_QUERIES = re.compile(r"(^|\.)(transformer_)?decoder\.layers\.")  # decoder layers of object queries in mmdet and mmseg


def Attended(of: str, attention: Mapping[str, Mapping[str, Any]], **model: Any) -> nn.Module:
    """Build an upstream model and replace attention layers in it, selected by their module paths.

    ::

        _base_ = "mmdet::detr/detr_r50_8xb2-150e_coco.py"
        custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
        model = dict(type="Attended", of="DETR", attention={
            "encoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1111")})

    ``SpatialSelfAttention`` replaces mmcv's ``MultiheadAttention``, and ``MultiScaleDeformableAttention`` replaces
    mmcv's layer of that name. The model keeps its upstream class and parameter names. Added parameters have new names,
    which a stock checkpoint may lack, and a gate initialized to zero: if the attention type has the content term, the
    model initially computes the same as upstream.

    Args:
        of: The upstream model's ``type``.
        attention: Layers (``type`` and options) by module path pattern, in which ``*`` matches anything.
        **model: The upstream model's config.

    Raises:
        ValueError: A pattern matches no module that the layer can replace, or the layer is unknown.
    """
    built = MODELS.build(dict(type=of, **model))
    exchange(built, attention)
    return built


def exchange(model: nn.Module, attention: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace attention layers of a built model as :func:`Attended` does; on an error, none is replaced."""
    replacements: dict[str, nn.Module] = {}
    grids = Grids()
    for pattern, options in attention.items():
        options = dict(options)
        kind = options.pop("type", None)
        if kind not in STOCK:
            raise ValueError(f"attention[{pattern!r}]: type must be one of {', '.join(STOCK)}, got {kind!r}")
        matched = {path: module for path, module in model.named_modules() if fnmatchcase(path, pattern)}
        layers = {path: module for path, module in matched.items() if isinstance(module, STOCK[kind])}
        if not layers:
            raise ValueError(_no_match(model, pattern, matched, STOCK[kind]))
        for path, module in layers.items():
            if kind == "SpatialSelfAttention":
                replacements[f"{path}.attn"] = _spatial(module.attn, options, path, grids)
            else:
                replacements[path] = _deformable(module, options, path)
    if any(_needs_grid(layer) for layer in replacements.values()):
        grids.watch(model)
    for path, layer in replacements.items():
        owner, _, name = path.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, name, layer)
        if _needs_grid(layer):
            grids.find_again(parent)


def _needs_grid(layer: nn.Module) -> bool:
    return isinstance(layer, TokenAttention) and layer.needs_grid


def _no_match(model: nn.Module, pattern: str, matched: Mapping[str, nn.Module], stock: type) -> str:
    there = [path for path, module in model.named_modules() if isinstance(module, stock)]
    what = "no module" if not matched else ", ".join(sorted({type(m).__name__ for m in matched.values()}))
    return (
        f"attention[{pattern!r}] matches {what}; only mmcv's {stock.__name__} can be replaced, found at: "
        f"{', '.join(there) or 'no path'}"
    )


def _spatial(stock: nn.MultiheadAttention, options: Mapping[str, Any], path: str, grids: Grids) -> TokenAttention:
    """Return a :class:`TokenAttention` with the weights of torch's layer."""
    if stock.in_proj_weight is None or stock.bias_k is not None or stock.add_zero_attn:
        raise ValueError(f"{path}: keys or values of another width, and added keys, are not supported")
    weight = stock.in_proj_weight
    _check_options(path, options, "attention_type", "spatial_range", "kernel_size", "outside", "smoothing", "dropout")
    ours = TokenAttention(
        embed_dim=stock.embed_dim,
        num_heads=stock.num_heads,
        bias=stock.in_proj_bias is not None,
        device=weight.device,
        dtype=weight.dtype,
        **{"dropout": stock.dropout, **options},
    )
    if ours.needs_grid and _QUERIES.search(path):
        raise ValueError(
            f"{path}: object queries have no positions, which {ours.described()} needs; use the content terms, "
            "such as '1010'"
        )
    ours.load_state_dict(stock.state_dict(), strict=True)
    ours.find_grid(grids, path)
    return ours


def _deformable(
    stock: ops.MultiScaleDeformableAttention, options: Mapping[str, Any], path: str
) -> MultiScaleDeformableAttention:
    """Return a :class:`MultiScaleDeformableAttention` with the weights and settings of mmcv's layer."""
    _check_options(path, options, "key_saliency")
    ours = MultiScaleDeformableAttention(
        embed_dims=stock.embed_dims,
        num_heads=stock.num_heads,
        num_levels=stock.num_levels,
        num_points=stock.num_points,
        im2col_step=stock.im2col_step,
        dropout=stock.dropout.p,
        batch_first=stock.batch_first,
        norm_cfg=stock.norm_cfg,
        value_proj_ratio=stock.value_proj.out_features / stock.embed_dims,
        **options,
    )
    ours.to(stock.value_proj.weight)
    ours.load_state_dict(stock.state_dict(), strict=True)
    return ours


def _check_options(path: str, options: Mapping[str, Any], *names: str) -> None:
    for name in options:
        if name not in names:
            raise ValueError(
                f"{path}: unknown option {name!r}; supported: {', '.join(names)} (everything else is taken from the "
                "stock layer)"
            )


class _Calls(threading.local):
    """Maps of the calls that run in a thread, by their number of pixels, the innermost call's last."""

    def __init__(self) -> None:
        self.running: list[dict[int, Grid]] = []
        self.last: dict[int, Grid] = {}  # of the call that ended last


class Grids:
    """Sizes of the maps whose positions a call of a model encoded, to locate their tokens.

    Transformers pass tokens to their layers without the size of the map, but all of them encode the map's positions
    first. Gradient checkpointing repeats a layer in the backward pass, after other calls and perhaps in a thread of
    autograd; therefore a layer's inputs keep the maps of their call.
    """

    def __init__(self) -> None:
        self._calls = _Calls()
        self._compiled: dict[int, Grid] = {}  # of the call that torch.compile traces

    def __reduce__(self) -> Any:  # the calls of a copied model are its own
        return Grids, ()

    def watch(self, model: nn.Module) -> None:
        """Record the output sizes of the model's position encodings from now on.

        Raises:
            ValueError: The model has no position encoding.
        """
        encodings = [module for module in model.modules() if type(module).__name__.endswith("PositionalEncoding")]
        if not encodings:
            raise ValueError(f"{type(model).__name__} has no module named ...PositionalEncoding to locate tokens by")
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        for module in encodings:
            module.register_forward_hook(self._note)

    def find_again(self, layer: nn.Module) -> None:
        """Keep a call's maps with the inputs of ``layer``, which contains an attention layer."""
        layer.register_forward_pre_hook(self._enter, with_kwargs=True)
        layer.register_forward_hook(self._leave, always_call=True)

    @property
    def seen(self) -> dict[int, Grid]:
        """Maps of the present call by their number of pixels, or those of the last one."""
        if torch.compiler.is_compiling():
            return self._compiled
        return self._calls.running[-1] if self._calls.running else self._calls.last

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiled.clear()
        else:
            self._calls.running.append({})

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._calls.last = self._calls.running.pop()

    def _note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        H, W = output.shape[-2:]
        if torch.compiler.is_compiling():
            self._compiled[H * W] = (H, W)
            return
        tokens = int(H * W)  # H and W are tensors in torch.jit.trace, which FLOP counters run
        seen = {**self.seen, tokens: (H, W)}  # not changed in place: inputs of earlier layers keep theirs
        if self._calls.running:
            self._calls.running[-1] = seen
        else:  # a method of the model, such as ``loss``, was called instead of the model
            self._calls.last = seen

    def _enter(self, layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        tensors = [*inputs, *keywords.values()]
        repeated = backward_pass() != -1
        seen = next(filter(None, (kept(x, "maps") for x in tensors if repeated)), self.seen)
        for x in tensors:
            keep(x, "maps", seen)
        self._calls.running.append(seen)

    def _leave(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._calls.running.pop()


class TokenAttention(modules.SpatialSelfAttention):
    """:class:`attn_plugins.modules.SpatialSelfAttention` with the interface of ``nn.MultiheadAttention``."""

    _grids: Grids
    _path = ""

    def find_grid(self, grids: Grids, path: str) -> None:
        """Set the source of token grids; ``path`` is the path of this layer for error messages."""
        self._grids, self._path = grids, path

    @one_node
    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend from (N, B, C) to (S, B, C); the returned weights are None.

        ``is_causal`` says that ``attn_mask`` is causal and changes nothing, as in torch's layer.

        Raises:
            ValueError: A term needs positions, but the tokens have none; ``is_causal`` without ``attn_mask``.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal describes attn_mask, which must be given with it, got attn_mask=None")
        grid = self._grid(query, key, self._grids.seen)
        if self.needs_grid and not torch.compiler.is_compiling():
            keep(query, "maps", self._grids.seen)  # for token_weights and token_logits
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return super().forward(query, key, value, grid, key_padding_mask, attn_mask).transpose(0, 1), None

    def token_weights(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> Tensor:
        """Compute the attention weights (B, M, N, S), for the inputs of :meth:`forward`."""
        grid = self._grid(query, key, kept(query, "maps") or self._grids.seen)
        x, key = query.transpose(0, 1), key.transpose(0, 1)
        q, k, v, places, P, mask = self._prepared(x, key, None, grid, key_padding_mask, attn_mask, 0)
        weights = weights_of(self.written_out(x, q, k, v, places, P, key_padding_mask, mask))
        return weights.expand(len(x), self.num_heads, len(query), -1)

    def token_logits(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the logits (B, M, N, S) of every term, for the inputs of :meth:`forward`."""
        grid = self._grid(query, key, kept(query, "maps") or self._grids.seen)
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        return self.attention_logits(query, key, None, grid, key_padding_mask, attn_mask)

    def _grid(self, query: Tensor, key: Tensor, maps: Mapping[int, Grid]) -> Grid | None:
        """Return the grid of the tokens among ``maps``, or None if no term needs it.

        Raises:
            ValueError: A term needs positions, but the tokens have none.
        """
        grid = maps.get(len(query)) if self.needs_grid else None
        if self.needs_grid and (grid is None or len(key) != len(query)):
            raise ValueError(
                f"{self._path}: {self.described()} needs tokens with positions, but these {len(query)} queries and "
                f"{len(key)} keys are not a map of this image; for tokens without positions use the content terms, "
                "such as '1010'"
            )
        return grid


class MultiScaleDeformableAttention(SampledAttention, ops.MultiScaleDeformableAttention):
    """mmcv's ``MultiScaleDeformableAttention`` on this package's operator, with ε3 as an option.

    It derives from mmcv's class, because detectors call that class's initialization.
    """

    def __init__(self, *, key_saliency: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.make_saliency(key_saliency)
        self.reset_saliency()

    @functools.wraps(ops.MultiScaleDeformableAttention.forward)  # for its signature
    def forward(self, query: Tensor, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]
        return deformable(super().forward, self, query, *args, **options)
