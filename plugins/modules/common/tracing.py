"""How torch.fx and ``torch.jit.script`` take modules of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch.fx import Proxy

Forward = TypeVar("Forward", bound=Callable[..., Any])


def one_node(forward: Forward) -> Forward:
    """Decorate a module's ``forward`` so that torch.fx traces a call of the module as one node.

    The checks and sizes of our modules need tensors, and torch.fx passes proxies through every module that is not one
    of torch's own.
    """

    @functools.wraps(forward)
    def traced_as_one(self: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Proxy):
            tracer: Any = x.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return forward(self, *args, **kwargs)

    return traced_as_one  # type: ignore[return-value]


class Unscriptable:
    """Mixin of modules that ``torch.jit.script`` cannot compile: one error before it reads any source."""

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(
            f"torch.jit.script is not supported by {type(self).__name__} of attn_plugins: use torch.jit.trace, "
            "torch.export or torch.compile"
        )
