"""Operation counts of this package's operators in the counters of fvcore and mmengine.

Both trace a model and look up a handle for every node of the graph, in tables of defaults. They count one
multiply-add as one operation, where ``torch.utils.flop_counter`` counts two. The activations of an operator are its
output: it keeps no weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from ..import_hooks import after_import
from .operator import NAMESPACE, OPERATORS

logger = logging.getLogger("attn_plugins")

Values = Sequence[Any]  # torch._C.Value: inputs or outputs of a node


def register() -> None:
    """Add handles for the operators to each counter now, or when its module is imported."""
    for name, table, count in COUNTERS:
        after_import(name, partial(_register, table=table, count=count))


def _register(module: ModuleType, table: str, count: Callable[[str, Values, Values], int]) -> None:
    handles = getattr(module, table, None)
    if handles is None:
        logger.warning("%s has no %s: it will not count this package's operators", module.__name__, table)
    else:
        handles.update({f"{NAMESPACE}::{name}": partial(count, name) for name in OPERATORS})


def _multiply_adds(name: str, inputs: Values, outputs: Values) -> int:
    return OPERATORS[name].flops(*map(_argument, inputs)) // 2


def _activations(name: str, inputs: Values, outputs: Values) -> int:
    return math.prod(outputs[0].type().sizes())


def _argument(value: Any) -> Any:
    """Return a tensor's shape, and the Python value of anything else."""
    if value.isCompleteTensor():
        return value.type().sizes()
    node = value.node()
    return list(map(_argument, node.inputs())) if node.kind() == "prim::ListConstruct" else value.toIValue()


COUNTERS = (
    ("fvcore.nn.flop_count", "_DEFAULT_SUPPORTED_OPS", _multiply_adds),
    ("fvcore.nn.activation_count", "_DEFAULT_SUPPORTED_OPS", _activations),
    ("mmengine.analysis.complexity_analysis", "_DEFAULT_SUPPORTED_FLOP_OPS", _multiply_adds),
    ("mmengine.analysis.complexity_analysis", "_DEFAULT_SUPPORTED_ACT_OPS", _activations),
)
