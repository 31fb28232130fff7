"""Lets ``--launcher pytorch`` work on a machine without a GPU.

mmengine's launcher calls ``torch.cuda.set_device`` whatever the backend, which fails there, but it leaves
alone a process group that exists. Importing this module makes one (gloo) where ``torch.distributed.run``
started the process and CUDA is absent; everywhere else it does nothing. In a config::

    custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch"])
    model_wrapper_cfg = dict(device_ids=None)  # the default names a GPU
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def join() -> bool:
    """Join the launcher's gloo group; True where that was for us to do."""
    if torch.cuda.is_available() or dist.is_initialized() or not dist.is_torchelastic_launched():
        return False
    dist.init_process_group("gloo")
    return True


join()
