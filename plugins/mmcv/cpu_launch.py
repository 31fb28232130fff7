"""Support for ``--launcher pytorch`` on machines without a GPU.

mmengine's launcher calls ``torch.cuda.set_device`` for every backend, which fails without a GPU, but it skips the
setup if a process group exists. Importing this module creates a gloo group if ``torch.distributed.run`` started the
process and CUDA is absent; otherwise it does nothing. In a config::

    custom_imports = dict(imports=["attn_plugins.mmcv", "attn_plugins.mmcv.cpu_launch"])
    model_wrapper_cfg = dict(device_ids=None)  # the default names a GPU
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def join() -> bool:
    """Join the launcher's gloo group if this process needs it; return whether it did."""
    if torch.cuda.is_available() or dist.is_initialized() or not dist.is_torchelastic_launched():
        return False
    dist.init_process_group("gloo")
    return True


join()
