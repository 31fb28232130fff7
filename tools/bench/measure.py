"""Measurement of a case: ours and its peers in turns, call by call, in rounds, repeated if a row is noisy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from attn_plugins import ops
from attn_plugins.core import backends, plans
from attn_plugins.core.operator import Operator

from . import roofline
from .case import OWN, Case, Run, tensors
from .load import LOADED, Watch
from .memory import peak_memory
from .results import compared, summarize
from .timing import Contestant, Settings, race

UNUSABLE = 71  # exit status of a process whose device fails after an error


def measure(
    case: Case,
    device: str,
    settings: Settings,
    *,
    details: bool = False,
    ceilings: Mapping[str, float] | None = None,
    crashed: Mapping[str, str] | None = None,
    begin: Callable[[str], None] = lambda name: None,
    timer: Callable[..., dict[str, list[float]]] = race,
) -> dict[str, Any]:
    """Return one row: statistics and memory of each, and the ratios of the better peer to ours.

    Ratios are of minima, of eager calls of medians.

    Args:
        case: The case to measure.
        device: ``cpu`` or ``cuda``.
        settings: Rounds and attempts.
        details: Measure our other backends and count operations and bytes as well.
        ceilings: Speeds that the device reaches, for the share of the roofline.
        crashed: Contestants that ended an earlier process, with the reasons: they are left out.
        begin: Called with the name of each contestant before it runs.
        timer: Function that takes the times.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    _reset()
    try:
        # By graph, gradients of CUDA tensors are computed in this thread; for eager calls in autograd's, as users do.
        with torch.autograd.set_multithreading_enabled(case.timing != "graph"):
            return _measure(case, device, settings, details, ceilings, crashed or {}, begin, timer)
    finally:
        torch.set_num_threads(threads)


def _reset() -> None:
    """Reset what the last row changed: flags, compiled code and its limits, memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def _measure(
    case: Case, device: str, settings: Settings, details: bool, ceilings: Any, crashed: Any, begin: Any, timer: Any
) -> dict[str, Any]:
    if "ours" in crashed:
        raise RuntimeError(crashed["ours"])
    begin("ours")
    ours = case.ours()
    facts: dict[str, Any] = {}
    prepared: dict[str, Callable[[], Run]] = {"ours": lambda: ours}
    whole = case.timing == "whole"
    details = details and not whole
    if not whole:
        facts = {"kind": case.kind, "work": roofline.work_of(ours)._asdict()}
    if details:
        facts |= {"served_by": served_by(ours), "refusals": {}, "differences": {}}
        expected = ours()
        prepared |= {
            f"{OWN}{name}": lambda name=name: forced(ours, name) for name in other_backends(facts["served_by"])
        }
    contestants: dict[str, Contestant] = {}
    memory: dict[str, dict[str, int]] = {}
    errors = {name: {"error": f"cannot run: {reason}"} for name, reason in crashed.items()}
    for name, prepare in {**prepared, **case.peers}.items():
        if name in errors:
            continue
        begin(name)
        try:
            run = prepare()
            if name in prepared and name != "ours":
                facts["differences"][name.removeprefix(OWN)] = difference(run(), expected)
            memory[name] = {"memory": peak_memory(run, device)}  # it also warms up
            contestants[name] = Contestant(run, device, case.calls, case.timing)
        except Exception as error:
            fatal(device, error)
            if name == "ours":
                raise
            if isinstance(error, ValueError) and name in prepared:
                facts["refusals"][name.removeprefix(OWN)] = str(error).splitlines()[0]
            else:
                errors[name] = {"error": f"cannot run: {first_line(error)}"}
    if case.heavy:
        settings = replace(settings, min_rounds=min(3, settings.min_rounds))
    begin("all in turns")
    attempts, is_noisy = 0, True
    while is_noisy and attempts < settings.attempts:
        attempts += 1
        watch = Watch()
        times = timer(contestants, device, settings)
        others = watch.read()
        results = {
            name: summarize(times[name]) | memory[name] | contestant.how for name, contestant in contestants.items()
        }
        mine, peers = results["ours"], {n: results.get(n) or errors[n] for n in case.peers if not n.startswith(OWN)}
        by = "min" if case.timing == "graph" else "median"
        row = compared(case.name, mine, peers, by, attempts=attempts, load={"others": others})
        is_noisy = row["noisy"]
    if details:
        facts["backends"] = {n.removeprefix(OWN): e for n, e in (results | errors).items() if n.startswith(OWN)}
    if ceilings and not whole:
        facts["share"] = roofline.floor(facts["work"], case.kind, ceilings) / mine["min"]
    row["loaded"] = device == "cpu" and (others or 0) > LOADED
    return row | {"threads": torch.get_num_threads(), **facts}


def other_backends(served: Mapping[str, list[str]]) -> list[str]:
    """Return the backends of the operators that ran, but for the only one that served."""
    serving = {name for names in served.values() for name in names}
    candidates = dict.fromkeys(name for operator in served for name in backends_of(operator))
    return [name for name in candidates if serving != {name}]


def forced(run: Run, backend: str) -> Run:
    """Return ``run`` with one backend for all operators."""

    def by_backend() -> object:
        with ops.backend(backend):
            return run()

    return by_backend


def difference(result: Any, expected: Any) -> float:
    """Return the relative norm of the difference between the first tensors of two results."""
    a, b = (tensors(values)[0].double() for values in (result, expected))
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with its type where it is an unusual one."""
    line = (str(error).strip().splitlines() or [""])[0][:120]
    return line if line and isinstance(error, (ImportError, RuntimeError)) else f"{type(error).__name__}: {line}"


def fatal(device: str, error: BaseException) -> None:
    """End the process if ``error`` left the device unusable.

    Raises:
        SystemExit: The device is unusable.
    """
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise SystemExit(UNUSABLE) from error


# --- backends -----------------------------------------------------------------------------------------------------


def operators() -> dict[str, Operator]:
    """Return all operators that the package defines, by name."""
    modules = [module for name, module in sys.modules.items() if name.startswith("attn_plugins.ops.")]
    return {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Operator)}


def backends_of(operator: str) -> list[str]:
    """Return the backends in an operator's table, preferred ones first; empty for a functional without a table."""
    defined = operators().get(operator)
    return [] if defined is None else [backend.name for backend in defined.table]


def served_by(run: Callable[[], Any]) -> dict[str, list[str]]:
    """Run once, and return the backends that computed each operator, forward and backward, in order of use."""
    served: dict[str, list[str]] = {}
    choose = backends.choose

    def watched(operator: str, table: Any, terms: Any, options: Any, backward: bool = False) -> Any:
        chosen = choose(operator, table, terms, options, backward)
        names = served.setdefault(operator, [])
        if chosen.name not in names:
            names.append(chosen.name)
        return chosen

    plans.forget()  # a repeated call chooses nothing
    backends.choose = watched
    try:
        run()
    finally:
        backends.choose = choose
    return served
