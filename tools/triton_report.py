"""Compile the Triton kernels of main shapes ahead of time: registers, spills, shared memory, seconds.

::

    python -m tools.triton_report                               # every operator, sm_80, sm_90 and sm_100
    python -m tools.triton_report --only global --targets 90
    python -m tools.triton_report --write                       # to benchmarks/triton-kernels.md as well

No device is needed: operators are called with meta tensors, their launches are recorded instead of executed, and each
variant of a kernel is compiled as it would be on a device. ``TRITON_INTERPRET`` must not be set.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tools.requires import extras

with extras():
    import torch

    from attn_plugins.ops import backends, triton_launch
    from attn_plugins.ops.operator import Operator
    from attn_plugins.ops.triton_launch import Launch

    from .benchmark import report
    from .files import write_text
    from .triton_cases import CASES

TARGETS = (80, 90, 100)
PAGE = Path("benchmarks/triton-kernels.md")
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
          torch.bool: "i1", torch.uint8: "u8"}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


class Variant(NamedTuple):
    """A compilation: a kernel, its arguments' types, constants and hints, and its options."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def dtype(self) -> str:
        """Return the dtype of the first tensor."""
        return next((kind[1:] for _, kind in self.signature if kind.startswith("*")), "")


def launches(operator: Operator, terms: Any, options: Any, passes: str = "both") -> list[Launch]:
    """Record the launches of Triton's backend in a forward pass, a backward pass, or both.

    Args:
        operator: The operator.
        terms: Its terms, as ``meta`` tensors.
        options: Its options.
        passes: ``forward``, ``backward`` or ``both``.
    """
    results = operator.fake(terms, options)
    serving = next(each for each in operator.table if each.name == triton_launch.NAME)
    needs = [term is not None for term in terms]
    with backends.backend(triton_launch.NAME), triton_launch.recorded() as found:
        if reason := backends.refusal(serving, terms, options, passes != "forward"):
            raise ValueError(f"{operator.name}: {reason}")
        if passes != "backward":
            serving.forward(terms, options) if serving.allocates else serving.forward(terms, options, *results)
        if passes != "forward":
            kept = [results[n] for n in operator._kept]
            grad = torch.empty_like(results[0])
            wanted = needs if serving.allocates else operator._gradients(terms, needs)
            serving.backward(grad, terms, options, *kept, wanted)
    return found


def variant(launch: Launch) -> Variant:
    """Return the variant that a launch compiles, by Triton's specialization of arguments, for aligned tensors."""
    kernel = launch.kernel
    names = list(kernel.arg_names)
    values = dict(zip(names, launch.args))
    values |= {name: value for name, value in launch.constants.items() if name in names}
    constexprs = {names[n] for n in kernel.constexprs}
    plain = {name if isinstance(name, str) else names[name] for name in kernel.do_not_specialize or ()}
    signature, constants, divisible = [], [], []
    for number, name in enumerate(names):
        value = values[name]
        kind = "constexpr"
        if name in constexprs or value is None:
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            kind = f"*{_TYPES[value.dtype]}"
            divisible.append(number)
        elif isinstance(value, float):
            kind = "fp32"
        elif value == 1 and name not in plain:
            constants.append((name, value))
        else:
            kind = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and name not in plain:
                divisible.append(number)
        signature.append((name, kind))
    options = tuple((name, launch.constants[name]) for name in _OPTIONS if name in launch.constants)
    return Variant(kernel.__name__, tuple(signature), tuple(constants), tuple(divisible), options)


def variants(found: Iterable[Launch]) -> dict[Variant, Any]:
    """Return the distinct variants and their kernels."""
    return {variant(launch): launch.kernel for launch in found}


def compiled(each: Variant, kernel: Any, capability: int) -> dict[str, Any]:
    """Compile for ``sm_<capability>``; return registers and stack per thread, shared memory and seconds."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hints = {(number,): [["tt.divisibility", 16]] for number in each.divisible}
    source = ASTSource(kernel, dict(each.signature), dict(each.constants), hints)
    begin = time.perf_counter()
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(each.options))
    elapsed = time.perf_counter() - begin
    usage = _usage(binary.asm["cubin"])
    return {
        "operator": "", "kernel": each.kernel, "dtype": each.dtype, "target": f"sm_{capability}",
        "registers": usage["REG"], "stack": usage["STACK"], "shared": binary.metadata.shared, "seconds": elapsed,
    }  # fmt: skip


def _usage(cubin: bytes) -> dict[str, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK):(\d+)", text)}


def rows(cases: dict[str, Callable[[], tuple[Operator, Any, Any]]], targets: Iterable[int]) -> list[dict[str, Any]]:
    """Return a row for each case, variant and target; a variant in several cases takes time only in the first."""
    import triton

    found = []
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # results of earlier calls would take no time
        for name, make in cases.items():
            for each, kernel in variants(launches(*make())).items():
                for target in targets:
                    found.append({**compiled(each, kernel, target), "operator": name})
                    print(_line(found[-1]), flush=True)
    return found


def _line(row: dict[str, Any]) -> str:
    cells = (f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
    return f"| {' | '.join(cells)} |"


def _page(found: list[dict[str, Any]]) -> str:
    import triton

    facts = report.machine("cpu")
    head = [
        "# Triton kernels, compiled ahead of time", "",
        "`python -m tools.triton_report --write`", "",
        f"Triton {triton.__version__}, torch {facts['torch']}, {facts['date']}. Registers and bytes of stack (spills) "
        "are per thread, bytes of shared memory per block; seconds are those of the compilation, once per machine.",
        "", "| " + " | ".join(found[0]) + " |", "|" + " --- |" * len(found[0]),
    ]  # fmt: skip
    return "\n".join([*head, *map(_line, found)]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.triton_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases whose names contain TEXT")
    parser.add_argument("--targets", nargs="+", type=int, default=TARGETS, metavar="N", help="default: 80 90 100")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    options = parser.parse_args(arguments)
    if triton_launch.interpreted():
        parser.error("TRITON_INTERPRET must not be set: interpreted kernels are not compiled")
    if reason := triton_launch._missing():
        parser.error(reason)
    cases = {name: make for name, make in CASES.items() if options.only in name}
    if not cases:
        parser.error(f"--only must be part of one of {', '.join(CASES)}, got {options.only!r}")
    found = rows(cases, options.targets)
    if options.write:
        write_text(PAGE, _page(found))
        print(f"written: {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
