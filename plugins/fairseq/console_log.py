"""Repair of the log of fairseq's console scripts where iopath is installed, which detectron2 and fvcore bring.

``fairseq.file_io`` then logs while it is imported. This sets up the root logger for warnings alone, so that the set-up
of ``fairseq-generate`` and others has no effect.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path


def repair() -> None:
    """Remove the handler of that import, in a console script only: elsewhere it may be the user's."""
    handlers = logging.getLogger().handlers
    formats = [getattr(handler.formatter, "_fmt", None) for handler in handlers]
    if Path(sys.argv[0]).name.startswith("fairseq-") and formats == [logging.BASIC_FORMAT]:
        handlers.clear()
