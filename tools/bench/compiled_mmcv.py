"""mmcv's compiled operators as a peer, and only those: where mmcv is not compiled, ours stand in for them."""

from __future__ import annotations

import sys
from types import ModuleType

NOT_COMPILED = "mmcv is not compiled here: make env-peers"


def is_compiled() -> bool:
    """Return False where this package's operators stand in for mmcv's.

    Raises:
        ImportError: mmcv is not installed, or its operators are not.
    """
    import mmcv._ext

    from attn_plugins import mmcv_ext

    return mmcv._ext.get_compiler_version() != mmcv_ext.NOT_COMPILED


def extension() -> ModuleType:
    """Return mmcv's compiled extension, which ``mmcv.ops`` then calls.

    Raises:
        ImportError: mmcv is not installed or not compiled.
    """
    if not is_compiled():
        raise ImportError(NOT_COMPILED)
    return sys.modules["mmcv._ext"]
