"""The interface of every kind of attention after a forward pass: the weights of a query over a map of keys.

Shapes: M heads, Q queries, (Hq, Wq) the map of queries, (Hk, Wk) that of keys, P keys with no place on the map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attn_plugins.modules.common.capture import Captured, attention_layers

CLS: Literal["cls"] = "cls"
Keep = Callable[[Any], None]
Handle = Any  # has a method `remove`
# Makes every named layer of a model pass itself, with its inputs, to a function when it is called; yields the hooks.
Watch = Callable[[nn.Module, Iterable[str], Keep], Iterator[Handle]]
Query = Sequence[int] | int | str  # row and column on the map of queries, the number of an object, or the cls token
Weights = tuple[Tensor, Tensor | None]  # (M, Q, Hk, Wk), and (M, Q, P) of keys with no place
WHOLE = "all terms"
EXPLAINED = "each part is the softmax of its own logits; all terms: of their sum"
# Titles of the four terms of Zhu et al. (2019) and of terms added to them; other terms keep their names.
FOUR_TERMS = dict(
    content="ε1: query and key content",
    content_position="ε2: query content and position",
    saliency="ε3: key content",
    position="ε4: position",
    predicted="predicted position",
    table="position table",
    positions="positions",
)


class ViewError(ValueError):
    """A model, a picture or a query that cannot be shown."""


@dataclass
class Looked:
    """Attention of some queries, by map: each head, or their mean and each head."""

    names: list[str]  # of the N maps
    maps: Tensor  # (N, Q, Hk, Wk)
    keys: Tensor  # (Q, Hk, Wk), True at a query's keys
    uniform: Tensor  # (Q,), 1 / number of a query's keys
    elsewhere: Tensor | None = None  # (N, Q), the weight of keys that have no place on the map, if there are any


@dataclass(kw_only=True)
class Maps:
    """An attention layer and its inputs in the last forward pass; weights are computed on demand."""

    name: str  # in its model
    size: tuple[int, int] | None = None  # (Hq, Wq); None if the queries are objects
    prefix: list[str] = field(default_factory=list)  # names of the keys before the map's, such as the cls token
    part: str = ""  # the only term of the logits to take; empty for all terms
    rolled: bool = False  # whether this is a rollout over layers
    mean_first = False

    def weigh(self, queries: Sequence[Query], blank: bool = False) -> Weights:
        """Return the weights in the first picture; with ``blank`` for inputs of zeros, where only non-keys have 0."""
        raise NotImplementedError

    def terms(self) -> tuple[Any, Iterable[str]]:
        """Return the layer and the names of the terms of its logits."""
        return None, ()

    @torch.no_grad()
    def parts(self) -> dict[str, Maps]:
        """Return the terms of the logits by title, each as a layer of its own; empty for fewer than two terms."""
        layer, names = (None, ()) if self.part else self.terms()
        parts = {title_of(layer, name): replace(self, part=name) for name in names}
        return parts if len(parts) > 1 else {}

    @property
    def cls(self) -> bool:
        """Whether the cls token may be a query."""
        return self.prefix[:1] == [CLS]

    @property
    def prefix_words(self) -> str:
        """Return the names of the tokens before the map's as text."""
        return " and ".join(dict.fromkeys(self.prefix))

    @torch.no_grad()
    def look(self, queries: Sequence[Query]) -> Looked:
        """Return the attention of queries.

        Raises:
            ValueError: the layer has no cls token.
        """
        if CLS in queries and not self.cls:
            raise ValueError(f"{self.name} has no cls token")
        maps, before = self.weigh(queries)
        blank, more = self.weigh(queries, blank=True)
        keys = (blank != 0).any(0)
        count = keys.flatten(1).sum(1) + (0 if more is None else (more != 0).any(0).sum(1))
        names = head_names(len(maps), self.mean_first) if not self.rolled else ["rollout"]
        maps, uniform = maps.float(), 1 / count.clamp(min=1)
        elsewhere = None if before is None else before.float().sum(2)
        if len(names) > len(maps):
            maps, elsewhere = with_mean(maps), None if elsewhere is None else with_mean(elsewhere)
        return Looked(names, maps, keys, uniform, elsewhere)


def head_names(heads: int, mean_first: bool = True) -> list[str]:
    """Return the names of the maps of all heads, with their mean first."""
    names = [f"head {n + 1}" for n in range(heads)]
    return ["mean of heads", *names] if mean_first and heads > 1 else names


def with_mean(weights: Tensor) -> Tensor:
    """Prepend the mean of several heads to weights (M, ...)."""
    return weights if len(weights) == 1 else torch.cat((weights.mean(0, keepdim=True), weights))


def title_of(module: Any, name: str) -> str:
    """Return the title of a term, given its name in a layer's ``attention_logits``."""
    return FOUR_TERMS[name] if hasattr(getattr(module, "terms", None), "_fields") else name


@dataclass(kw_only=True)
class Ours(Maps):
    """A layer with our interface: ``attention_maps`` and, for several terms, its parts."""

    call: Captured

    def weigh(self, queries: Sequence[Query], blank: bool = False) -> Weights:
        """See :meth:`Maps.weigh`."""
        call, chosen = self.call, torch.tensor(queries)
        if blank:
            given = tree_map_only(Tensor, torch.zeros_like, (call.arguments, call.keywords))
            call = Captured(call.name, call.layer, *given)
        elif self.part:
            return call.parts(chosen)[self.part][0], None
        return call.maps(chosen)[0], None

    def terms(self) -> tuple[Any, Iterable[str]]:
        """See :meth:`Maps.terms`."""
        return self.call.layer, self.call.parts(torch.zeros(1, 2, dtype=torch.long))


def ours(model: nn.Module) -> dict[str, str]:
    """Return the layers with our interface by name; kinds are empty."""
    return dict.fromkeys(attention_layers(model), "")


def watch_ours(model: nn.Module, names: Iterable[str], keep: Keep) -> Iterator[Handle]:
    """See :data:`Watch`."""

    def record(name: str, *call: Any) -> None:
        captured = Captured(name, *call)
        keep(Ours(name=name, size=captured.size, call=captured))

    for name in names:
        yield model.get_submodule(name).register_forward_pre_hook(partial(record, name), with_kwargs=True)
