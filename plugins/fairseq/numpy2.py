"""Repair of fairseq's data sets for numpy 2, which has no ``numpy.compat``.

``--sample-break-mode eos`` and length buckets (``--num-batch-buckets``) use ``numpy.compat.long``, which is Python's
``int``. numpy itself is not modified: the two modules of fairseq that use the name get a proxy of numpy that has it.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
from fairseq.data import language_pair_dataset, token_block_dataset


class _Numpy(ModuleType):
    """Proxy of numpy with the ``compat`` of numpy 1."""

    compat = SimpleNamespace(long=int)

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)


def repair() -> None:
    """Install the proxy in the two modules, unless numpy has ``compat``."""
    if hasattr(numpy, "compat"):
        return
    for module in (token_block_dataset, language_pair_dataset):
        if getattr(module, "np", None) is numpy:
            module.np = _Numpy("numpy")
