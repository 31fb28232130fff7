"""Attention of timm's Swin and Swin V2, stock or after ``attn_plugins.timm.accelerate``.

Shapes: B batch, M heads, (H, W) the map, N tokens of a window.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from attn_plugins.modules.common.capture import Captured
from attn_plugins.modules.tokens.windows import TableAttention, predicted_logits, project_v2, window_maps, window_parts
from attn_plugins.terms.position_table import table_logits

from .maps import Handle, Keep, Ours

SECOND = "swin_transformer_v2"
KINDS = {"swin_transformer": "SwinTransformer", SECOND: "SwinTransformerV2"}  # timm's modules, and their models


def _versions() -> list[tuple[Any, str]]:
    """Return timm's modules that are imported, as those of any of their models are, and their models' names."""
    files = {sys.modules.get(f"timm.models.{name}"): kind for name, kind in KINDS.items()}
    return [(file, kind) for file, kind in files.items() if file is not None]


def is_swin(model: nn.Module) -> bool:
    """Return whether ``model`` is timm's Swin or Swin V2, with any attention."""
    return isinstance(model, tuple(getattr(file, kind) for file, kind in _versions()))


def swin_blocks(model: nn.Module) -> dict[str, Any]:
    """Return the blocks of timm's Swin with timm's own attention, by the names of the attention layers.

    Blocks with our layers are excluded: :func:`attn_plugins.modules.common.capture.attention_layers` finds them.
    """
    return {
        f"{name}.attn".removeprefix("."): module
        for file, kind in _versions()
        for name, module in model.named_modules()
        if isinstance(module, getattr(file, f"{kind}Block")) and type(module.attn) is file.WindowAttention
    }


def swins(model: nn.Module) -> dict[str, str]:
    """Return the names of :func:`swin_blocks`; kinds are empty."""
    return dict.fromkeys(swin_blocks(model), "")


class StockWindows:
    """The attention of timm's block, of either version, as attn_plugins.modules.common.capture.Captured expects it."""

    map_axes = slice(1, 3)  # of an input

    def __init__(self, block: Any) -> None:
        self.block, self.second = block, type(block.attn).__module__.endswith(SECOND)

    def attention_size(self, size: Sequence[int]) -> tuple[int, int]:
        """Return the size of the map of queries, for an input of ``size`` (H, W)."""
        return size[0], size[1]

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Return the weights for an input (B, H, W, C) of the attention.

        Masks of shifted windows are -inf; timm's -100 is equivalent up to rounding.

        Returns:
            (B, M, H, W, H, W), or (B, M, Q, H, W) for ``queries``.
        """
        return window_maps(x, *self._windows(), self._attention(), queries)

    def attention_parts(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """Return maps of content and of the table alone, as :meth:`attention_maps`: softmax of their own logits."""
        parts = window_parts(x, *self._windows(), self._attention().parts, queries)
        return {"table" if name == "position" else name: part for name, part in parts.items()}

    def _windows(self) -> tuple[Any, ...]:
        block = self.block
        return block.window_size, block.shift_size, block.attn.num_heads, self._project

    def _attention(self) -> TableAttention:
        attn = self.block.attn
        if not self.second:
            return TableAttention(table_logits(attn.relative_position_bias_table, attn.window_size), attn.scale)
        pretrained = attn.pretrained_window_size if attn.pretrained_window_size[0] > 0 else None
        logits = predicted_logits(attn.cpb_mlp, attn.window_size, pretrained, attn.logit_scale)
        return TableAttention(logits, logit_scale=attn.logit_scale)

    def _project(self, tokens: Tensor) -> Tensor:
        attn = self.block.attn
        return project_v2(tokens, attn.qkv, attn.q_bias, attn.v_bias) if self.second else attn.qkv(tokens)


def watch_swin(model: nn.Module, names: Iterable[str], keep: Keep) -> Iterator[Handle]:
    """See :data:`.Watch`."""

    def record(name: str, windows: StockWindows, module: Any, inputs: Any, output: Any = None) -> None:
        call = Captured(name, windows, (inputs[0] if output is None else output,), {})
        keep(Ours(name=name, size=call.size, call=call))

    for name, block in swin_blocks(model).items():
        if name in names:
            windows = StockWindows(block)
            note = partial(record, name, windows)
            # V2 normalises after its attention, V1 before.
            yield block.register_forward_pre_hook(note) if windows.second else block.norm1.register_forward_hook(note)
