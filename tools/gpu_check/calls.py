"""Random calls of one operator on a device with every backend that accepts them, to be run under a memory checker.

Run by :mod:`.memory` as ``python -c "from tools.gpu_check.calls import main; main()" OPERATOR CALLS SECONDS DEVICE``.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from tools.fuzz import check
from tools.fuzz.operators import legal_call

from .backends import backends_of, calling_thread


def compute(operator: str, count: int, seconds: float, device: str) -> tuple[Counter[str], list[str]]:
    """Compute up to ``count`` calls within ``seconds``, forward and backward.

    Returns:
        The number of calls that each backend computed, and the first line of every error.
    """
    names = backends_of(operator)
    done: Counter[str] = Counter()
    errors: list[str] = []
    begin = time.monotonic()
    for number in range(count):
        if time.monotonic() - begin > seconds:
            break
        _, call, grad = legal_call(operator, 0, number, device)
        for name in names:
            try:
                with check.mode_of(call), calling_thread():
                    check.compute(call, grad, name)
                    if device == "cuda":
                        torch.cuda.synchronize()
            except ValueError:  # the backend refuses this call
                continue
            except Exception as error:
                errors.append(
                    f"call {number} by {name}: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
                )
                if device == "cuda" and "CUDA error" in str(error):  # every later call would fail
                    return done, errors
                continue
            done[name] += 1
    return done, errors


def main() -> None:
    """Compute the calls that the arguments request, and print a summary."""
    operator, count, seconds, device = sys.argv[1:]
    done, errors = compute(operator, int(count), float(seconds), device)
    words = ", ".join(f"{n} calls by {name}" for name, n in done.items()) or "no call"
    print(f"{operator}: {words}", flush=True)
    if errors:
        print(f"{len(errors)} errors: {errors[0]}", flush=True)
        raise SystemExit(1)
