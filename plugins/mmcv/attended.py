"""Our attention in any upstream transformer, by config: ``model=dict(type='Attended', of='DETR', attention={...})``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmengine.registry import MODELS
from torch import Tensor, nn

from .. import modules

Grid = tuple[int, int]
_QUERIES = re.compile(r"(^|\.)(transformer_)?decoder\.layers\.")  # where mmdet and mmseg keep what queries attend with


@MODELS.register_module()
def Attended(of: str, attention: Mapping[str, Mapping[str, Any]], **model: Any) -> nn.Module:
    """Build an upstream model and exchange attention layers in it, by the paths of its modules.

    ::

        _base_ = "mmdet::detr/detr_r50_8xb2-150e_coco.py"
        custom_imports = dict(imports=["attn_plugins.mmcv"], allow_failed_imports=False)
        model = dict(type="Attended", of="DETR", attention={
            "encoder.layers.*.self_attn": dict(type="SpatialSelfAttention", attention_type="1111")})

    The model is of the upstream class, with its parameters' names; what is added has names of its own, which a stock
    checkpoint may lack, and a gate of zeros: at the start the model computes what upstream's does, where the attention
    type has the content term.

    Args:
        of: The upstream model's ``type``.
        attention: From a pattern of paths (``*`` stands for anything) to a layer: ``type`` and its own options.
        **model: The upstream model's config.

    Raises:
        ValueError: a pattern matches no module, or none that the layer can take the place of; or the layer is unknown.
    """
    built = MODELS.build(dict(type=of, **model))
    exchange(built, attention)
    return built


def exchange(model: nn.Module, attention: Mapping[str, Mapping[str, Any]]) -> None:
    """Exchange attention layers of a built model, as :func:`Attended` says; all or none."""
    planned: dict[str, nn.Module] = {}
    grids = Grids()
    for pattern, options in attention.items():
        layer = dict(options)
        if (kind := layer.pop("type", None)) != "SpatialSelfAttention":
            raise ValueError(f"attention[{pattern!r}]: type must be SpatialSelfAttention, got {kind!r}")
        matched = {path: module for path, module in model.named_modules() if fnmatchcase(path, pattern)}
        found = {path: module for path, module in matched.items() if isinstance(module, MultiheadAttention)}
        if not found:
            raise ValueError(_no_match(model, pattern, matched))
        for path, module in found.items():
            planned[path] = _spatial(module.attn, layer, path, grids)
    for path, inner in planned.items():
        model.get_submodule(path).attn = inner
    grids.watch(model)


def _no_match(model: nn.Module, pattern: str, matched: Mapping[str, nn.Module]) -> str:
    there = [path for path, module in model.named_modules() if isinstance(module, MultiheadAttention)]
    what = "no module" if not matched else f"{', '.join(sorted({type(m).__name__ for m in matched.values()}))} alone"
    return (
        f"attention[{pattern!r}] matches {what}; what can be exchanged is mmcv's MultiheadAttention, here at: "
        f"{', '.join(there) or 'no place'}"
    )


def _spatial(stock: nn.MultiheadAttention, options: Mapping[str, Any], path: str, grids: Grids) -> TokenAttention:
    """Ours in the place of torch's layer, with its weights."""
    if stock.in_proj_weight is None or stock.bias_k is not None or stock.add_zero_attn:
        raise ValueError(f"{path}: keys or values of another width, and added keys, are not supported")
    weight = stock.in_proj_weight
    ours = TokenAttention(
        stock.embed_dim,
        stock.num_heads,
        **{"dropout": stock.dropout, "bias": stock.in_proj_bias is not None, **options},
        device=weight.device,
        dtype=weight.dtype,
    )
    if ours.needs_grid and _QUERIES.search(path):
        raise ValueError(
            f"{path}: object queries have no places, which attention_type {ours.attention_type!r} with spatial_range "
            f"{ours.spatial_range} needs; they take the content terms, such as '1010'"
        )
    ours.load_state_dict(stock.state_dict(), strict=True)
    ours.find_grid(grids, path)
    return ours


class Grids:
    """Sizes of the maps whose positions a model has encoded in the present pass: where its tokens lie.

    Transformers hand tokens to their layers without the map that they come from, but every one encodes the positions
    of that map before.
    """

    def __init__(self) -> None:
        self.seen: dict[int, Grid] = {}

    def watch(self, model: nn.Module) -> None:
        """Note what the model's position encodings give, from now on.

        Raises:
            ValueError: the model has none.
        """
        encodings = [module for module in model.modules() if type(module).__name__.endswith("PositionalEncoding")]
        if not encodings:
            raise ValueError(f"{type(model).__name__} has no module named ...PositionalEncoding to tell places from")
        model.register_forward_pre_hook(self._forget)
        for module in encodings:
            module.register_forward_hook(self._note)

    def _forget(self, model: nn.Module, inputs: Any) -> None:
        self.seen.clear()

    def _note(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        H, W = output.shape[-2:]
        self.seen[H * W] = (H, W)

    def of(self, tokens: int) -> Grid | None:
        """The latest map of so many pixels, or None."""
        return self.seen.get(tokens)


class TokenAttention(modules.SpatialSelfAttention):
    """:class:`attn_plugins.modules.SpatialSelfAttention` with the call of ``nn.MultiheadAttention``, tokens first."""

    _grids: Grids
    _path = ""

    def find_grid(self, grids: Grids, path: str) -> None:
        """Ask ``grids`` where tokens lie; ``path`` is this layer's, for errors."""
        self._grids, self._path = grids, path

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
        """Attend from (N, B, C) to (S, B, C); there are no weights to return.

        Raises:
            ValueError: tokens have no place where one is needed.
        """
        grid = self._grids.of(len(query)) if self.needs_grid else None
        if self.needs_grid and (grid is None or len(key) != len(query)):
            raise ValueError(
                f"{self._path}: attention_type {self.attention_type!r} with spatial_range {self.spatial_range} needs "
                f"tokens with places, and these {len(query)} queries and {len(key)} keys are no map of this image; "
                "without places use the content terms, such as '1010'"
            )
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return super().forward(query, key, value, grid, key_padding_mask, attn_mask).transpose(0, 1), None
