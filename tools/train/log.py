"""Log of a training: a line on the terminal, a CSV file, TensorBoard."""

from __future__ import annotations

import csv
import io
import sys
import time
from pathlib import Path
from typing import Any

from tools.files import write_text


class Log:
    """Log with one row per epoch, which also shows progress; a ``silent`` one prints and writes nothing.

    ``folder`` gets ``log.csv`` and TensorBoard's files; ``rows`` are the earlier ones of a resumed training.
    """

    def __init__(self, folder: Path, tensorboard: bool = False, rows: list[dict] | None = None, silent: bool = False):
        self.folder, self.rows, self.silent = folder, list(rows or []), silent
        self.began = time.monotonic()
        self.writer: Any = None
        if tensorboard and not silent:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=len(self.rows))

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self.silent:
            print(text, flush=True)

    def progress(self, epoch: int, epochs: int, step: int, steps: int, loss: float, lr: float, images: float) -> None:
        """Print a line that the next one replaces; without a terminal, five lines per epoch."""
        if self.silent:
            return
        line = (
            f"epoch {epoch + 1}/{epochs}  step {step + 1}/{steps}  loss {loss:.4f}  lr {lr:.2g}  {images:.0f} images/s"
        )
        if sys.stdout.isatty():
            print(f"\r{line:<78}", end="" if step + 1 < steps else "\n", flush=True)
        elif (step + 1) % max(1, steps // 5) == 0:
            print(line, flush=True)

    def row(self, **values: Any) -> None:
        """Add the row of an epoch."""
        self.rows.append(values)
        if self.silent:
            return
        text = io.StringIO()
        table = csv.DictWriter(text, list(values), lineterminator="\n")
        table.writeheader()
        table.writerows(self.rows)
        write_text(self.folder / "log.csv", text.getvalue())
        if self.writer is not None:
            for name, value in values.items():
                if name != "epoch":
                    self.writer.add_scalar(name, value, values["epoch"])
            self.writer.flush()

    def close(self) -> None:
        """Close TensorBoard's file."""
        if self.writer is not None:
            self.writer.close()
