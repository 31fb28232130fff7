"""What the mm tests share: paths, mmdet's own training tool, configs without downloads."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRAIN_TOOL = Path(importlib.util.find_spec("mmdet").origin).parent / ".mim/tools/train.py"


def without_downloads(config: Any) -> Any:
    """Let no part of ``config.model`` ask for pretrained weights; returns ``config``."""

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            init = node.get("init_cfg")
            if isinstance(init, dict) and init.get("type") == "Pretrained":
                node["init_cfg"] = None
            for value in node.values():
                visit(value)
        elif isinstance(node, (list, tuple)):
            for value in node:
                visit(value)

    visit(config.model)
    return config
