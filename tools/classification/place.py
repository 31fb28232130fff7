"""Where a process computes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from timm.utils.distributed import init_distributed_device_so

from .config import Config, ConfigError


@dataclass
class Place:
    """Where a process computes: its device, its rank, and how many there are."""

    device: torch.device
    rank: int
    processes: int
    dtype: torch.dtype | None

    def autocast(self) -> Any:
        """The context in which the model runs."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Added over all processes."""
        if self.processes > 1:
            torch.distributed.all_reduce(values)
        return values


def find_place(device: str | None, config: Config) -> Place:
    """Join the other processes of ``torchrun``, if any, and take this one's device.

    Args:
        device: As the user names it; None: ``cuda`` where there is one, else ``cpu``.
        config: Its ``precision`` is that of the place.

    Raises:
        ConfigError: The device is not there, or cannot compute in this precision.
    """
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    if torch.device(name).type == "cpu" and config.precision == "float16":
        raise ConfigError("precision 'float16' needs a GPU, for its gradients are scaled; on a CPU take 'bfloat16'")
    where = init_distributed_device_so(name)
    dtype = None if config.precision == "float32" else getattr(torch, config.precision)
    return Place(torch.device(where["device"]), where["global_rank"], where["world_size"], dtype)


def check_device(name: str) -> None:
    """Check that torch can compute on the device of ``--device``.

    Raises:
        ConfigError: It cannot.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device must be cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            raise ConfigError(f"--device must be cpu here, got {name!r}: torch {torch.__version__} finds no CUDA GPU")
        if (device.index or 0) >= count:
            raise ConfigError(f"--device must be cpu or one of cuda:0 to cuda:{count - 1}, got {name!r}")
        return
    try:
        torch.zeros(1, device=device)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--device must be one that torch finds here, got {name!r}: {reason}") from error
