"""Triton's kernels compiled ahead of time, without a device: launches are recorded from meta tensors, not executed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attn_plugins.core import backends, triton_launch
from attn_plugins.core.operator import Operator
from attn_plugins.core.triton_launch import Launch, Target

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


NVIDIA, AMD = (Target("cuda", (8, 0)), Target("cuda", (9, 0))), {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}  # lanes


def launches(
    operator: Operator, terms: Any, options: Any, passes: str = "both", target: Target = NVIDIA[0]
) -> list[Launch]:
    """Record the launches of Triton's backend in a forward pass, a backward pass, or both.

    Args:
        operator: The operator.
        terms: Its terms, as ``meta`` tensors.
        options: Its options.
        passes: ``forward``, ``backward`` or ``both``.
        target: The device, on which tiles and precision depend.
    """
    results = operator.fake(terms, options)
    serving = next(backend for backend in operator.table if backend.name == triton_launch.NAME)
    needs = [term is not None for term in terms]
    with backends.backend(triton_launch.NAME), triton_launch.recorded(target) as recorded:
        if reason := serving.refusal(terms, options, backward=passes != "forward", forced=True):
            raise ValueError(f"{operator.name}: {reason}")
        if passes != "backward":
            serving.forward(terms, options)
        if passes != "forward":
            kept = [results[n] for n in operator._kept]
            grad = torch.empty_like(results[0])
            serving.backward(grad, terms, options, *kept, dict(zip(terms._fields, needs)))
    return recorded


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


def variants(recorded: Iterable[Launch]) -> dict[Variant, Any]:
    """Return the distinct variants and their kernels."""
    return {variant(launch): launch.kernel for launch in recorded}


def compiled_variants(make: Callable[[], tuple[Operator, Any, Any]]) -> set[Variant]:
    """Return the variants that a call compiles."""
    return set(variants(launches(*make())))


def compiled(compilation: Variant, kernel: Any, target: Target) -> dict[str, int]:
    """Compile for a device of NVIDIA.

    Returns:
        Bytes of ``stack`` per thread and of ``shared`` memory per block, and ``spills``, the instructions within
        innermost loops that load or store spilled registers.
    """
    major, minor = target.capability
    binary = _binary(compilation, kernel, ("cuda", 10 * major + minor, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        (stack,) = stacks(file.name).values()
        spills = _spills_in_loops(_cuobjdump("-sass", file.name))
    return {"stack": stack, "shared": binary.metadata.shared, "spills": spills}


def compiled_for_amd(compilation: Variant, kernel: Any, architecture: str) -> dict[str, int]:
    """Compile for a device of :data:`AMD`.

    Returns:
        Bytes of ``shared`` memory per block, and how many vector registers it ``spills``, in loops or elsewhere.
    """
    binary = _binary(compilation, kernel, ("hip", architecture, AMD[architecture]))
    (spills,) = re.findall(r"\.vgpr_spill_count:\s+(\d+)", binary.asm["amdgcn"])
    return {"shared": binary.metadata.shared, "spills": int(spills)}


def _binary(compilation: Variant, kernel: Any, target: tuple[Any, ...]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hints = {(number,): [["tt.divisibility", 16]] for number in compilation.divisible}
    source = ASTSource(kernel, dict(compilation.signature), dict(compilation.constants), hints)
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        return triton.compile(source, target=GPUTarget(*target), options=dict(compilation.options))


def _spills_in_loops(code: str) -> int:
    """Return how many instructions of innermost loops, those of a branch back, load or store local memory."""
    lines = [(int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    branches = [(place, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)) for place, text in lines]
    loops = [(int(to[1], 16), place) for place, to in branches if to and int(to[1], 16) < place]
    innermost = [
        (first, last)
        for first, last in loops
        if not any((first, last) != (begin, end) and first <= begin and end <= last for begin, end in loops)
    ]
    return sum(
        bool(re.search(r"\b(LDL|STL)\b", text))
        for place, text in lines
        if any(first <= place <= last for first, last in innermost)
    )


def stacks(binary: str | Path) -> dict[str, int]:
    """Return the bytes of stack per thread of each kernel in a binary, where spilled registers are kept."""
    usage = _cuobjdump("-res-usage", binary)
    largest: dict[str, int] = {}
    for name, size in re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+)", usage):
        largest[name] = max(largest.get(name, 0), int(size))  # of all architectures
    return largest


def spills_in_loops(binary: str | Path) -> dict[str, int]:
    """Return the instructions within innermost loops that load or store spilled registers, of each kernel with any."""
    counts: dict[str, int] = {}
    for code in _cuobjdump("-sass", binary).split("Function : ")[1:]:
        name = code.split(maxsplit=1)[0]
        counts[name] = max(counts.get(name, 0), _spills_in_loops(code))
    return {name: count for name, count in counts.items() if count}


def _cuobjdump(*arguments: str | Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout
