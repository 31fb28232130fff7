"""Tell whether a third-party submodule can be bypassed without visible effect: no hooks, no overridden forward.

Code that replaces a stock layer does not call some of its modules. Where a user has registered hooks on them, replaced
them or their ``forward``, or switched their dropout on, the stock code must run instead.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as _module

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def untouched(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether ``module`` is of exactly this class, with its class's ``forward`` and without hooks."""
    return type(module) is kind and "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Return whether a forward or backward hook of any kind is registered on ``module``."""
    return any(getattr(module, name) for name in _HOOKS)


def has_global_hooks() -> bool:
    """Return whether hooks on all modules are registered, as by ``register_module_forward_hook``."""
    return any(getattr(_module, f"_global{name}") for name in _HOOKS)


def called_dropout(dropout: nn.Module) -> nn.Module | float:
    """Return ``dropout`` if it must be called with attention weights, as it acts or somebody uses it, otherwise 0."""
    return dropout if drops(dropout) or not untouched(dropout, nn.Dropout) else 0.0


def drops(dropout: nn.Module) -> bool:
    """Return whether ``dropout`` changes its input now; a model in eval mode may contain active dropout."""
    return dropout.training and getattr(dropout, "p", 1.0) > 0
