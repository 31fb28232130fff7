"""Compile the Triton kernels of main shapes ahead of time: registers, spills, shared memory.

::

    python -m tools.triton_report                               # every operator, sm_80, sm_90 and sm_100
    python -m tools.triton_report --only global --targets 90
    python -m tools.triton_report --write                       # to benchmarks/triton-kernels.md as well

No device is needed: operators are called with meta tensors, their launches are recorded instead of executed, and each
variant of a kernel is compiled as it would be on a device. ``TRITON_INTERPRET`` must not be set.

The exit status is 1 if a kernel spills within a loop where its blocks were chosen not to, or takes too long to compile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_plugins.ops import backends, triton_launch
from attn_plugins.ops.operator import Operator
from attn_plugins.ops.triton_launch import Launch

from .benchmark import report
from .cuda_report import sass
from .files import write_text
from .triton_cases import CASES

TARGETS = (80, 90, 100)
TIMED = 90  # the target whose blocks were chosen by times, though some spill
LONGEST = 15.0  # seconds of a compilation
PAGE = Path("benchmarks/triton-kernels.md")
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
          torch.bool: "i1", torch.uint8: "u8"}  # fmt: skip
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_MEASURES = {"registers": "registers", "stack": "stack", "spills": "in loops", "shared": "shared"}
_ABOUT = (
    "Compiled for compute capabilities 8.0, 9.0 and 10.0; a single number holds for all three. Registers and stack "
    "(bytes of spilled registers) are per thread; *in loops* counts the instructions that load or store spills within "
    "any loop; shared memory (bytes) is per block. Kernels that compile to the same numbers are listed once, under "
    "the first shape."
)


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


def launches(
    operator: Operator, terms: Any, options: Any, passes: str = "both", capability: int = TARGETS[0]
) -> list[Launch]:
    """Record the launches of Triton's backend in a forward pass, a backward pass, or both.

    Args:
        operator: The operator.
        terms: Its terms, as ``meta`` tensors.
        options: Its options.
        passes: ``forward``, ``backward`` or ``both``.
        capability: Of the device, 80 for 8.0: tiles may depend on it.
    """
    results = operator.fake(terms, options)
    serving = next(each for each in operator.table if each.name == triton_launch.NAME)
    needs = [term is not None for term in terms]
    device = divmod(capability, 10)
    with backends.backend(triton_launch.NAME), triton_launch.recorded((device[0], device[1])) as found:
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
    """Compile for ``sm_<capability>``.

    Returns:
        Its kernel and dtype; ``registers`` and bytes of ``stack`` per thread; ``spills``, the number of instructions
        in loops that load or store spilled registers; bytes of ``shared`` memory per block; ``seconds`` of a core
        that Triton's compilation takes.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hints = {(number,): [["tt.divisibility", 16]] for number in each.divisible}
    source = ASTSource(kernel, dict(each.signature), dict(each.constants), hints)
    begin = _seconds()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(each.options))
    seconds = _seconds() - begin
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, code = (_dump(option, file.name) for option in ("-res-usage", "-sass"))
    (used,) = sass.resources(usage).values()
    ((_, _, body),) = sass.functions(code)
    loops = sass.loops(body)
    within = [at for at in body if any(loop.first <= at.address <= loop.last for loop in loops)]
    counts = sass.count(within)
    return {
        "kernel": each.kernel, "dtype": each.dtype, "registers": used["registers"], "stack": used["stack"],
        "spills": counts.get("LDL", 0) + counts.get("STL", 0), "shared": binary.metadata.shared,
        "seconds": round(seconds, 2),
    }  # fmt: skip


def _seconds() -> float:
    """Return the processors' time of this process and those that it started, ptxas among them."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _dump(option: str, cubin: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout


def labels(found: Iterable[Variant]) -> dict[Variant, str]:
    """Return names of a call's variants: the kernel's, with the switches that only some of its variants have on."""
    switches = {each: {name for name, value in each.constants if value is True} for each in found}
    names = {}
    for each, mine in switches.items():
        alike = [theirs for other, theirs in switches.items() if other.kernel == each.kernel]
        own = sorted(mine - set.intersection(*alike))
        names[each] = f"{each.kernel} ({', '.join(own)})" if own else each.kernel
    return names


def rows(cases: dict[str, Callable[[], tuple[Operator, Any, Any]]], targets: Iterable[int]) -> list[dict[str, Any]]:
    """Return what :func:`compiled` does for each case, variant and target, with the name of the case and the target."""
    found = []
    for name, make in cases.items():
        for target in targets:
            calls = variants(launches(*make(), capability=target))
            names = labels(calls)
            for each, kernel in calls.items():
                row = {"case": name, "target": target, **compiled(each, kernel, target), "kernel": names[each]}
                print("  ".join(map(str, row.values())), flush=True)
                found.append(row)
    return found


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of an operator's rows: a line for the targets of a kernel, and for all that is alike."""
    lines: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in found:
        shape, dtype = row["case"].split(", ", 1)[1].rsplit(", ", 1)
        lines.setdefault((shape, row["kernel"]), {}).setdefault(dtype, []).append(row)
    listed: set[tuple[str, ...]] = set()
    head = ["shape", "kernel", "dtype", *_MEASURES.values()]
    text = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for (shape, kernel), dtypes in lines.items():
        cells: dict[tuple[str, ...], list[str]] = {}
        for dtype, targets in dtypes.items():
            cells.setdefault(tuple(_cell([row[name] for row in targets]) for name in _MEASURES), []).append(dtype)
        for measures, alike in cells.items():
            line = kernel, ", ".join(alike), *measures
            if line not in listed:
                text.append(f"| {' | '.join((shape, *line))} |")
            listed.add(line)
    return text


def _cell(numbers: Sequence[int]) -> str:
    return " / ".join(map(str, numbers if len(set(numbers)) > 1 else numbers[:1]))


def _spills(found: Sequence[dict[str, Any]]) -> str:
    """Describe where kernels spill."""
    within = sorted({f"{row['kernel']} of {row['case']} for sm_{row['target']}" for row in found if row["spills"]})
    outside = [row["stack"] for row in found if row["stack"] and not row["spills"]]
    text = (
        f"Spills within loops: {'; '.join(within)} (blocks for 9.0 were chosen by times on an H100)."
        if within
        else "No kernel spills within a loop."
    )
    if not outside:
        return text
    return (
        f"{text} Outside of loops, where a program loads and stores once, {len(outside)} of {len(found)} compilations "
        f"spill up to {max(outside)} bytes."
    )


def _times(found: Sequence[dict[str, Any]]) -> str:
    """Describe how long Triton compiles: a variant, and all variants of a call with its backward."""
    single = sorted(row["seconds"] for row in found)
    calls: dict[tuple[str, int], float] = {}
    for row in found:
        calls[row["case"], row["target"]] = calls.get((row["case"], row["target"]), 0.0) + row["seconds"]
    cpu = report.machine("cpu")["cpu"].split(",")[0]
    (case, _), longest = max(calls.items(), key=lambda item: item[1])
    return (
        f"A kernel compiles in {single[len(single) // 2]:.1f} s of a core (median; at most {single[-1]:.1f} s; {cpu}), "
        f"all kernels of a call with its backward in at most {longest:.1f} s ({case}). The command fails where one "
        f"takes more than {LONGEST:g} s. Triton keeps the binaries in `TRITON_CACHE_DIR` for later processes, and "
        "other sizes of maps compile nothing."
    )


def faults(found: Iterable[dict[str, Any]]) -> list[str]:
    """Return which kernels spill within a loop where blocks were chosen not to, and which take long to compile."""
    text = []
    for row in found:
        name = f"{row['kernel']} of {row['case']} for sm_{row['target']}"
        if row["spills"] and row["target"] != TIMED:
            text.append(f"{name} spills within a loop, in {row['spills']} instructions")
        if row["seconds"] > LONGEST:
            text.append(f"{name} takes {row['seconds']} s to compile, more than {LONGEST:g}")
    return text


def _page(found: Sequence[dict[str, Any]]) -> str:
    import triton

    facts = report.machine("cpu")
    text = [
        "# Triton kernels, compiled ahead of time", "", "`python -m tools.triton_report --write`", "",
        f"Triton {triton.__version__}, torch {facts['torch']}, {facts['date']}. {_ABOUT}", "", f"**{_spills(found)}**",
        "", _times(found),
    ]  # fmt: skip
    for operator in dict.fromkeys(row["case"].split(",")[0] for row in found):
        text += ["", f"## {operator}", "", *table([row for row in found if row["case"].split(",")[0] == operator])]
    return "\n".join(text) + "\n"


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
    wrong = faults(found)
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
