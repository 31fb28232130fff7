"""Rank of this process, from the environment that ``torchrun`` sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


class BadEnvironment(ValueError):
    """RANK, WORLD_SIZE and LOCAL_RANK are inconsistent, or refer to a missing GPU."""


@dataclass(frozen=True)
class Process:
    """One of ``number`` processes, on one machine or several.

    Attributes:
        rank: From 0 to ``number`` - 1.
        number: Number of processes.
        local_rank: From 0 on each machine.
    """

    rank: int = 0
    number: int = 1
    local_rank: int = 0

    @property
    def note(self) -> str:
        """Suffix of a tool's name, `` (process 1 of 2)``; empty for a single process."""
        return f" (process {self.rank} of {self.number})" if self.number > 1 else ""


def this_process(environment: Mapping[str, str] | None = None) -> Process:
    """Read ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; without them, the process is the only one.

    Raises:
        BadEnvironment: some of the three are missing, one is not a number, or a rank exceeds the number of processes.
    """
    environment = os.environ if environment is None else environment
    found = {name: environment[name] for name in NAMES if name in environment}
    if not found:
        return Process()
    shown = ", ".join(f"{name}={value}" for name, value in found.items())
    missing = [name for name in NAMES if name not in found]
    if missing:
        raise BadEnvironment(
            f"the environment has {shown} but no {' and no '.join(missing)}: torchrun sets all three, a process "
            "alone has none"
        )
    for name, value in found.items():
        if not (value.isascii() and value.isdecimal()):
            raise BadEnvironment(f"{name} must be a number from 0, got {value!r}")
    rank, number, local_rank = (int(found[name]) for name in NAMES)
    if not local_rank <= rank < number:
        raise BadEnvironment(f"RANK must be below WORLD_SIZE, and LOCAL_RANK not above RANK, got {shown}")
    return Process(rank, number, local_rank)


def device_of(process: Process, device: str | None) -> str:
    """Return the device of ``--device``; for ``cuda``, or by default if there is a GPU, that of ``local_rank``.

    Raises:
        BadEnvironment: there are too few GPUs.
    """
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cuda" or process.number == 1:
        return device
    if process.local_rank >= torch.cuda.device_count():
        raise BadEnvironment(
            f"LOCAL_RANK is {process.local_rank}, but there are {torch.cuda.device_count()} GPUs: one process a GPU "
            "(--nproc-per-node gpu), or --device cpu"
        )
    torch.cuda.set_device(process.local_rank)
    return f"cuda:{process.local_rank}"
