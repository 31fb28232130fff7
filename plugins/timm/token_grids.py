"""Positions of the tokens of timm's vision transformers.

timm passes only tokens to an attention layer: neither the grid that they come from nor the number of preceding class
tokens and registers. Therefore each layer of this package gets a :class:`Places` once its model is built, by wrapping
the constructors of ``VisionTransformer`` and ``NaFlexVit``, which are otherwise unchanged.

If the grid depends on the image, it belongs to a call, not to the model, which may run in several threads, or again
before its first call has ended. Hooks pass it from the patch embedding to the blocks through a record of the thread. It
is also kept with the storage of each block's input, from which gradient checkpointing repeats the block, after other
calls and perhaps in a thread of autograd.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

import torch
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..core.gradients import is_compiling
from ..modules.common.storage_state import backward_pass, keep, kept
from ..modules.tokens.parts.grid_terms import Grid

SEVERAL = (0, 0)  # in place of a grid, if every image of the batch has its own


class _Record(threading.local):
    """Grids of the calls that run in a thread.

    Attributes:
        entries: (step, backward pass, grid), the innermost call's last. Step -1 follows the patch embedding, step 2 n
            is within block n, and 2 n + 1 follows it. Calls that end between blocks leave entries, so their number has
            a limit.
        latest: Backward pass and grid of the call that began last.
    """

    def __init__(self) -> None:
        self.entries: deque[tuple[int, int, Grid | None]] = deque(maxlen=64)
        self.latest: tuple[int, Grid | None] = (-1, None)

    def find(self, step: int) -> Grid | None:
        """Return the innermost grid at this step in the current backward pass, or outside of any."""
        key = step, backward_pass()
        return next((entry[2] for entry in reversed(self.entries) if entry[:2] == key), None)

    def take(self, step: int) -> Grid | None:
        """Remove what :meth:`find` finds, with the entries of inner calls, and return it."""
        key = step, backward_pass()
        if any(entry[:2] == key for entry in self.entries):
            while self.entries:
                entry = self.entries.pop()
                if entry[:2] == key:
                    return entry[2]
        return None

    def add(self, step: int, grid: Grid | None) -> None:
        self.entries.append((step, backward_pass(), grid))


_record = _Record()


# Functions of hooks are single steps in a graph of torch.fx; they return their first argument, so that it needs them.


@torch.fx.wrap
def _begin(embedded: Any) -> Any:
    """Note the grid of a map of patches (B, H, W, C), or of NaFlexVit's tokens and their grid."""
    if isinstance(embedded, tuple):
        grid = SEVERAL if embedded[1] is None else (embedded[1][0], embedded[1][1])
    else:
        grid = (embedded.shape[1], embedded.shape[2])
    if is_compiling():
        _record.latest = -1, grid
    else:
        _record.latest = backward_pass(), grid
        _record.add(-1, grid)
    return embedded


@torch.fx.wrap
def _enter(x: Any, block: int) -> Any:
    handed, own = _record.take(2 * block - 1), kept(x, "grid")
    if own is None and handed is None and _record.latest[0] == backward_pass():
        handed = _record.latest[1]  # blocks were left out, or compiled
    grid = handed if own is None else own
    keep(x, "grid", grid)
    _record.add(2 * block, grid)
    return x


@torch.fx.wrap
def _leave(output: Any, block: int, last: bool) -> Any:
    grid = _record.take(2 * block)
    keep(output, "grid", grid)
    if output is not None and not last and backward_pass() == -1:  # None: the block has raised an error
        _record.add(2 * block + 1, grid)
    return output


def _embed_hook(module: nn.Module, inputs: Any, output: Any) -> Any:
    return _begin(output)


class _BlockHooks:
    """Hooks around block number ``block`` of ``blocks``."""

    def __init__(self, block: int, blocks: int) -> None:
        self.block, self.last = block, block + 1 == blocks

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        # torch.compile does not allow changes of outer state under gradient checkpointing.
        return None if is_compiling() else (_enter(inputs[0], self.block), *inputs[1:])

    def leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return None if is_compiling() else _leave(output, self.block, self.last)


class Places:
    """Where the tokens of a layer in a model come from.

    Args:
        model: The model.
        block: Number of the block that contains the layer.
    """

    def __init__(self, model: nn.Module, block: int) -> None:
        self.model, self.block = model, block

    @property
    def prefix(self) -> int:
        """Number of class tokens and registers."""
        return self.model.num_prefix_tokens  # type: ignore[return-value]

    def grid(self, x: Tensor) -> Grid | None:
        """Return (H, W) of the layer's input ``x``, :data:`SEVERAL`, or None if it is unknown."""
        if not _is_dynamic(self.model):
            H, W = self.model.patch_embed.grid_size  # type: ignore[union-attr, misc]
            return H, W
        if is_compiling():
            return _record.latest[1]
        grid = kept(x, "grid")
        if grid is None:
            grid = _record.find(2 * self.block)
            keep(x, "grid", grid)  # for later inspection
        return grid

    def share_grid(self, x: Tensor, other: Tensor) -> None:
        """Give another tensor the grid of the layer's input ``x``."""
        keep(other, "grid", self.grid(x))


def _is_dynamic(model: Any) -> bool:
    """Return whether the grid depends on the image."""
    return isinstance(model, NaFlexVit) or model.dynamic_img_size


def set_places(model: Any) -> None:
    """Set the ``places`` of those layers of ``model`` that need the positions of tokens."""
    found = False
    for number, block in enumerate(model.blocks):
        for layer in block.modules():
            if hasattr(layer, "places"):
                layer.places, found = Places(model, number), True
    if found and _is_dynamic(model):
        (model.embeds if isinstance(model, NaFlexVit) else model.patch_embed).register_forward_hook(_embed_hook)
        for number, block in enumerate(model.blocks):
            hooks = _BlockHooks(number, len(model.blocks))
            block.register_forward_pre_hook(hooks.enter)
            block.register_forward_hook(hooks.leave, always_call=True)


def _wrap(model_class: Any) -> None:
    original = model_class.__init__
    if hasattr(original, "_attn_plugins"):
        return

    @functools.wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        set_places(self)

    __init__._attn_plugins = True  # type: ignore[attr-defined]
    model_class.__init__ = __init__


_wrap(VisionTransformer)
_wrap(NaFlexVit)
