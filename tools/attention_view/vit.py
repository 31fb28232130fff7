"""Attention of timm's vision transformers: from patches, from the cls token, and its rollout over the layers.

Shapes: B batch, M heads, T tokens: P class tokens and registers, then H * W patches, row by row.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

Cell = Sequence[int] | Literal["cls"]  # row and column on a map, or the cls token
CLS: Literal["cls"] = "cls"


@dataclass
class QueryMaps:
    """Attention maps of a layer for some queries of the first picture.

    Attributes:
        names: Names of the maps, in order.
        maps: (len(names), Q, Hk, Wk).
        uniform: (Q,), 1 / number of a query's keys.
        elsewhere: (len(names), Q), the weight of keys that have no place on the map; None if there are none.
    """

    names: list[str]
    maps: Tensor
    uniform: Tensor
    elsewhere: Tensor | None = None


@dataclass
class PatchMaps:
    """An attention layer of a vision transformer, or its rollout, for one picture.

    Attributes:
        name: Name of the layer in its model.
        weigh: Computes (B, M, T, T) from ``x``.
        x: Input of the layer, (B, T, C); None for the rollout.
        size: (H, W), the grid of patches, which are queries and keys.
        prefix: Names of the tokens before the patches.
        logits: Computes the logits of every term by name, (B, M, T, T), from ``x``; None for a single term.
    """

    name: str
    weigh: Callable[[Tensor | None], Tensor]
    x: Tensor | None
    size: tuple[int, int]
    prefix: list[str]
    logits: Callable[[Tensor], dict[str, Tensor]] | None = None

    @property
    def keys(self) -> tuple[int, int]:
        """The same as ``size``."""
        return self.size

    @property
    def cls(self) -> bool:
        """Whether the first token is the cls token."""
        return self.prefix[:1] == [CLS]

    @torch.no_grad()
    def weights(self) -> Tensor:
        """Return the weights (B, M, T, T), as the layer used them."""
        return self.weigh(self.x)

    @property
    def prefix_words(self) -> str:
        """Return the names of the tokens before the patches as text."""
        return " and ".join(dict.fromkeys(self.prefix))

    def maps(self, queries: Tensor) -> Tensor:
        """Return the maps (B, M, Q, H, W) of the patches ``queries``, (Q, 2), rows and columns."""
        numbers = len(self.prefix) + queries[:, 0] * self.size[1] + queries[:, 1]
        return self.weights()[:, :, numbers, len(self.prefix) :].unflatten(-1, self.size)

    def look(self, cells: Sequence[Cell]) -> QueryMaps:
        """Return the mean of all heads, then every head, for patches and the cls token.

        Raises:
            ValueError: the layer has no cls token.
        """
        if CLS in cells and not self.cls:
            raise ValueError(f"{self.name} has no cls token")
        P = len(self.prefix)
        numbers = torch.tensor([0 if isinstance(n, str) else P + n[0] * self.size[1] + n[1] for n in cells])
        weights = self.weights()[0, :, numbers].float()  # (M, Q, T)
        names = [f"head {n + 1}" for n in range(len(weights))]
        if self.x is None:
            names = ["rollout"]
        elif len(weights) > 1:
            weights, names = torch.cat((weights.mean(0, keepdim=True), weights)), ["mean of heads", *names]
        elsewhere = weights[..., :P].sum(-1) if P else None
        return QueryMaps(names, weights[..., P:].unflatten(-1, self.size), self._uniform(numbers), elsewhere)

    @torch.no_grad()
    def _uniform(self, numbers: Tensor) -> Tensor:
        if self.x is None:  # all tokens
            return torch.full((len(numbers),), 1 / (len(self.prefix) + self.size[0] * self.size[1]))
        # For tokens of zeros all keys have equal weights, so a weight of 0 means a token that is not a key.
        blank = self.weigh(torch.zeros_like(self.x))[0, :, numbers]
        return 1 / (blank != 0).any(0).sum(-1).clamp(min=1)


def vision_transformers(model: nn.Module) -> dict[str, Any]:
    """Return timm's ``VisionTransformer`` and ``NaFlexVit`` in ``model`` by name; ``''`` is the model itself."""
    # Modules that no model has imported are not needed, and timm may be missing.
    modules = [sys.modules.get(f"timm.models.{name}") for name in ("vision_transformer", "naflexvit")]
    names = ("VisionTransformer", "NaFlexVit")
    classes = tuple(getattr(module, name) for module, name in zip(modules, names) if module is not None)
    return {name: module for name, module in model.named_modules() if isinstance(module, classes)}


def vit_layers(model: nn.Module) -> dict[str, Any]:
    """Return the attention layers of vision transformers, timm's ``Attention`` and ours, by name."""
    found = {}
    for start, vit in vision_transformers(model).items():
        for name, module in vit.blocks.named_modules(prefix=f"{start}.blocks" if start else "blocks"):
            if callable(getattr(module, "token_weights", None)) or _is_stock(module):
                found[name] = module
    return found


def _is_stock(module: nn.Module) -> bool:
    return type(module).__name__ == "Attention" and type(module).__module__ in (
        "timm.layers.attention",
        "timm.models.vision_transformer",  # before timm 1.0.20
    )


def stock_weights(attention: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """Return the weights of timm's ``Attention``, fused or not, without dropout.

    Args:
        attention: The layer.
        x: (B, T, C).
        attn_mask: As for the layer's forward.
        is_causal: Likewise.

    Returns:
        (B, M, T, T).
    """
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


@contextmanager
def capture_vit(model: nn.Module) -> Iterator[dict[str, PatchMaps]]:
    """Record the inputs of all layers of :func:`vit_layers` in a forward pass.

    Weights are computed on demand, and all hooks are removed afterwards. Compute them before the next forward pass of
    the model.

    Yields:
        The captured layers by name, in the order of the calls.
    """
    captured: dict[str, PatchMaps] = {}
    layers = vit_layers(model)

    def keep(name: str, vit: Any, grid: dict[str, Any]) -> Callable[..., None]:
        prefix = prefix_names(vit)

        def hook(layer: Any, arguments: Any, keywords: dict[str, Any]) -> None:
            given = dict(inspect.signature(layer.forward).bind(*arguments, **keywords).arguments)
            x = given.pop("x")
            weights = getattr(layer, "token_weights", None) or partial(stock_weights, layer)
            captured.pop(name, None)
            terms = getattr(layer, "token_logits", None)
            logits = None if terms is None else partial(_weigh, terms, given)
            captured[name] = PatchMaps(name, partial(_weigh, weights, given), x, grid["size"], prefix, logits)

        return hook

    with ExitStack() as stack:
        for start, vit in vision_transformers(model).items():
            grid: dict[str, Any] = {}
            embed = vit.embeds if hasattr(vit, "embeds") else vit.patch_embed
            stack.callback(embed.register_forward_hook(partial(_note_grid, grid)).remove)
            for name, layer in layers.items():
                if name.startswith(f"{start}.blocks" if start else "blocks"):
                    handle = layer.register_forward_pre_hook(keep(name, vit, grid), with_kwargs=True)
                    stack.callback(handle.remove)
        yield captured


def _note_grid(grid: dict[str, Any], embed: Any, inputs: Any, output: Any) -> None:
    if isinstance(output, tuple):  # from NaFlexVit
        grid["size"] = tuple(output[1])
    else:  # (B, H, W, C), or (B, H * W, C) for the model's own size
        grid["size"] = tuple(output.shape[1:3] if output.dim() == 4 else embed.grid_size)


def _weigh(weights: Callable[..., Any], given: Mapping[str, Any], x: Tensor) -> Any:
    return weights(x, **given)


def rollout(layers: Sequence[Callable[[], Tensor]]) -> Tensor:
    """Compute attention rollout: the product of all layers' weights and residual connections.

    For every layer, heads are averaged, the identity is added, rows are normalised to a sum of 1, and the matrix is
    multiplied from the left with that of the layers before. Abnar and Zuidema (2020): Quantifying Attention Flow in
    Transformers, section 3.

    Args:
        layers: Functions that return weights (B, M, T, T), from the first layer to the last.

    Returns:
        (B, T, T): row t is the share of every input token in token t.
    """
    product: Tensor | None = None
    for weights in layers:
        mixed = weights().float().mean(1)
        mixed = mixed + torch.eye(mixed.shape[-1], device=mixed.device)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        product = mixed if product is None else mixed @ product
    assert product is not None
    return product


def rollouts(model: nn.Module, captured: Mapping[str, PatchMaps]) -> dict[str, PatchMaps]:
    """Return the rollout of every vision transformer over all its layers that ran.

    Args:
        model: The model.
        captured: Result of :func:`capture_vit`.

    Raises:
        ValueError: the model has no vision transformer, or has blocks with other attention.
    """
    vits = vision_transformers(model)
    if not vits:
        raise ValueError(f"--rollout needs a vision transformer of timm, and {type(model).__name__} has none")
    found = {}
    for start, vit in vits.items():
        chosen: list[PatchMaps] = []
        for number in range(len(vit.blocks)):
            own = [name for name in vit_layers(vit) if name.startswith(f"blocks.{number}.")]
            if len(own) != 1:
                raise ValueError(
                    f"--rollout needs blocks of one attention layer that can be shown, blocks.{number} has {len(own)}"
                )
            whole = f"{start}.{own[0]}" if start else own[0]
            chosen += [captured[whole]] if whole in captured else []
        if not chosen:
            raise ValueError(f"--rollout needs a vision transformer that runs, and {start or 'the model'} did not")
        product = rollout([layer.weights for layer in chosen])[:, None]
        name = f"{start}.rollout" if start else "rollout"
        found[name] = PatchMaps(name, lambda _, product=product: product, None, chosen[0].size, chosen[0].prefix)
    return found
