"""Device and rank of a process."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from timm.utils.distributed import init_distributed_device_so

from .config import Config, ConfigError


@dataclass
class Place:
    """Device and rank of a process, and the number of processes."""

    device: torch.device
    rank: int
    processes: int
    dtype: torch.dtype | None

    def autocast(self) -> Any:
        """Return the context in which the model runs."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over all processes."""
        if self.processes > 1:
            torch.distributed.all_reduce(values)
        return values


def find_place(device: str | None, config: Config) -> Place:
    """Join the other processes of ``torchrun``, if any, and select this one's device: None is a GPU, else the CPU.

    Raises:
        ConfigError: the device is missing, or does not support the precision.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--device must be one that torch finds here, such as cpu, got {name!r}: {reason}") from error
    if torch.device(name).type == "cpu" and config.precision == "float16":
        raise ConfigError("precision 'float16' needs a GPU, because its gradients are scaled; use 'bfloat16' on a CPU")
    where = init_distributed_device_so(name)
    dtype = None if config.precision == "float32" else getattr(torch, config.precision)
    return Place(torch.device(where["device"]), where["global_rank"], where["world_size"], dtype)
