"""Attention of timm's vision transformers, stock or with our layers, and its rollout over the layers.

Shapes: B batch, M heads, T tokens: P class tokens and registers, then H * W patches, row by row.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attn_plugins.modules.common.capture import softmax_over_keys

from .maps import CLS, Handle, Keep, Maps, Query, Weights


@dataclass(kw_only=True)
class Patches(Maps):
    """An attention layer of a vision transformer, or the rollout of all (Abnar and Zuidema 2020, section 3).

    A rollout is the product of all layers' weights: for every layer, heads are averaged, the identity is added, rows
    are normalised to a sum of 1, and the matrix is multiplied from the left with that of the layers before.
    """

    layer: Any
    given: dict[str, Any]  # further arguments of its forward
    x: Tensor  # its input, (B, T, C)
    layers: Sequence[Patches] = ()  # of a rollout, from the first to the last
    mean_first = True

    @torch.no_grad()
    def weights(self, x: Tensor | None = None) -> Tensor:
        """Return the weights (B, M, T, T) as the layer used them, or for another input."""
        if self.layers:
            one = torch.eye(self.x.shape[1], device=self.x.device)
            return self._rolled(one) if x is None else torch.ones_like(one)[None, None]  # all tokens are keys
        x = self.x if x is None else x
        if self.part:
            return softmax_over_keys(self.layer.token_logits(x, **self.given)[self.part])
        weigh = getattr(self.layer, "token_weights", None) or partial(stock_weights, self.layer)
        return weigh(x, **self.given)

    def _rolled(self, one: Tensor) -> Tensor:
        product = one
        for layer in self.layers:
            mixed = layer.weights().float().mean(1, keepdim=True) + one
            product = mixed / mixed.sum(-1, keepdim=True) @ product
        return product

    def weigh(self, queries: Sequence[Query], blank: bool = False) -> Weights:
        """See :meth:`.Maps.weigh`."""
        x = torch.zeros_like(self.x) if blank else None
        if x is not None and getattr(self.layer, "places", None) is not None:
            self.layer.places.share_grid(self.x, x)
        return self.rows(self.weights(x)[0], queries)

    def rows(self, weights: Tensor, queries: Sequence[Query]) -> Weights:
        """Take the queries' rows from weights (M, T, T)."""
        P, W = len(self.prefix), self.size[1]
        numbers = [0 if n == CLS else P + n[0] * W + n[1] for n in queries]
        rows = weights[:, torch.tensor(numbers)]
        return rows[..., P:].unflatten(-1, self.size), rows[..., :P] if P else None

    def terms(self) -> tuple[Any, Iterable[str]]:
        """See :meth:`.Maps.terms`."""
        return self.layer, self.layer.token_logits(self.x, **self.given) if hasattr(self.layer, "token_logits") else ()


def vision_transformers(model: nn.Module) -> dict[str, Any]:
    """Return timm's ``VisionTransformer`` and ``NaFlexVit`` in ``model`` by name; ``''`` is the model itself."""
    # Modules that no model has imported are not needed, and timm may be missing.
    modules = [sys.modules.get(f"timm.models.{name}") for name in ("vision_transformer", "naflexvit")]
    names = ("VisionTransformer", "NaFlexVit")
    classes = tuple(getattr(module, name) for module, name in zip(modules, names) if module is not None)
    return {name: module for name, module in model.named_modules() if isinstance(module, classes)}


def path(start: str, name: str) -> str:
    """Return the name of a module of the submodule ``start``."""
    return f"{start}.{name}" if start else name


def in_blocks(model: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Yield name and module of every vision transformer with name and module of everything in its blocks."""
    for start, vit in vision_transformers(model).items():
        for name, module in vit.blocks.named_modules(prefix=path(start, "blocks")):
            yield start, vit, name, module


def patches(model: nn.Module) -> dict[str, str]:
    """Return the attention layers of vision transformers, timm's ``Attention`` and ours, by name."""
    return {
        name: "pixels to pixels"
        for *_, name, module in in_blocks(model)
        if callable(getattr(module, "token_weights", None)) or _is_stock(module)
    }


def _is_stock(module: nn.Module) -> bool:
    return type(module).__name__ == "Attention" and type(module).__module__ in (
        "timm.layers.attention",
        "timm.models.vision_transformer",  # before timm 1.0.20
    )


def stock_weights(attention: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Return the weights (B, M, T, T) of timm's ``Attention``, fused or not, without dropout, for its arguments."""
    q, k, _ = attention.qkv(x).unflatten(2, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    logits = (attention.q_norm(q) * attention.scale) @ attention.k_norm(k).mT
    if is_causal:
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).tril()
    if attn_mask is not None:
        logits = logits.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else logits + attn_mask
    return logits.softmax(-1)


def prefix_names(vit: Any) -> list[str]:
    """Return the names of the tokens before a vision transformer's patches: cls, dist and registers."""
    holder = getattr(vit, "embeds", vit)  # NaFlexVit has `embeds`
    named = [name for name in (CLS, "dist") if getattr(holder, f"{name}_token", None) is not None]
    return named + ["registers"] * (vit.num_prefix_tokens - len(named))


def has_cls(model: nn.Module) -> bool:
    """Return whether a vision transformer in ``model`` has a cls token."""
    return any(prefix_names(vit)[:1] == [CLS] for vit in vision_transformers(model).values())


def watch_patches(model: nn.Module, names: Iterable[str], keep: Keep) -> Iterator[Handle]:
    """See :data:`.Watch`."""
    grids: dict[Any, tuple[int, int]] = {}

    def note(vit: Any, embed: Any, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple):  # from NaFlexVit
            grids[vit] = tuple(output[1])
        else:  # (B, H, W, C), or (B, H * W, C) for the model's own size
            grids[vit] = tuple(output.shape[1:3] if output.dim() == 4 else embed.grid_size)

    def record(name: str, vit: Any, layer: Any, arguments: Any, keywords: Any) -> None:
        given = dict(inspect.signature(layer.forward).bind(*arguments, **keywords).arguments)
        x = given.pop("x")
        keep(Patches(name=name, size=grids[vit], prefix=prefix_names(vit), layer=layer, given=given, x=x))

    for vit in vision_transformers(model).values():
        embed = vit.embeds if hasattr(vit, "embeds") else vit.patch_embed
        yield embed.register_forward_hook(partial(note, vit))
    for _, vit, name, layer in in_blocks(model):
        if name in names:
            yield layer.register_forward_pre_hook(partial(record, name, vit), with_kwargs=True)


def rollouts(model: nn.Module, captured: dict[str, Any]) -> dict[str, Maps]:
    """Return the rollout of every vision transformer over all its layers that ran."""
    vits, known, rolled = vision_transformers(model), list(patches(model)), dict[str, Maps]()
    if not vits:
        raise ValueError(f"--rollout needs a vision transformer of timm, and {type(model).__name__} has none")
    for start, vit in vits.items():
        own = [[name for name in known if name.startswith(path(start, f"blocks.{n}."))] for n in range(len(vit.blocks))]
        for number, names in enumerate(own):
            if len(names) != 1:
                raise ValueError(
                    f"--rollout needs blocks of one attention layer that can be shown, blocks.{number} has {len(names)}"
                )
        layers = [captured[name] for (name,) in own if name in captured]
        if not layers:
            raise ValueError(f"--rollout needs a vision transformer that runs, and {start or 'the model'} did not")
        name = path(start, "rollout")
        rolled[name] = replace(layers[-1], name=name, rolled=True, layer=None, layers=layers)
    return rolled
