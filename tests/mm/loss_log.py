"""An mmengine hook for the training tests: it writes one line per iteration with the loss averaged over processes.

mmengine's own log holds only the first process's share of the loss. If the environment variable ``KILL_AFTER`` is set,
the process kills itself after writing the line of that iteration, as a power cut would.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from mmengine.dist import all_reduce, is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class LossLog(Hook):
    priority = "VERY_LOW"

    def __init__(self, file: str):
        self.file = Path(file)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss = outputs["loss"].detach().clone()
        all_reduce(loss, "mean")
        if is_main_process():
            with self.file.open("a") as lines:
                lines.write(json.dumps(dict(iteration=runner.iter + 1, loss=loss.item())) + "\n")
        if os.environ.get("KILL_AFTER") == str(runner.iter + 1):
            os.kill(os.getpid(), signal.SIGKILL)
