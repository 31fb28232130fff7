"""Random calls of every operator, under compute-sanitizer and in comparison with the reference.

memcheck and synccheck observe only our kernels. initcheck observes all kernels, because it would otherwise treat memory
written by another kernel as uninitialised; its reports on other kernels are ignored.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from attn_plugins.install import toolchain

from .machine import ROOT
from .processes import Budget, Done, run

TOOLS = ("memcheck", "initcheck", "synccheck")
REPORTS = 100_000  # maximum number of reports: those of other libraries must not push out ours
ERRORS = 9  # compute-sanitizer's exit status if it found errors
CALLS = "from tools.gpu_check.calls import main; main()"
NUMBER = 400  # maximum number of calls of an operator
NAMESPACE = "attn_plugins"  # of our C++ kernels
# The kernel that reads cuBLAS's products of halves. It writes them by bulk copies, of which initcheck does not know: it
# reports PyTorch's own addition to such a product as well. Reports do not name the tensor, but reads of products have
# the size of a vector. Only the input is read in such vectors as well, in float32 by the same code.
READS_PRODUCTS = re.compile(
    r"size (\d+) bytes.*\n.*sample_backward_kernel<(?:__half|__nv_bfloat16), (?:\(int\))?(\d+)>"
)
JIT = re.compile(r"^@(?:triton\.jit|jit|_kernel)\b[^\n]*\n(?:@[^\n]*\n|\s[^\n]*\n|\)[^\n]*\n)*def (\w+)\(", re.M)


class Found(NamedTuple):
    """Result of one process: whether it found no fault, and a line that summarises it."""

    name: str
    passed: bool
    line: str


def our_kernels(package: Path = ROOT / "plugins") -> list[str]:
    """Return the namespace of our C++ kernels, and the names of Triton kernels, jitted functions that none calls."""
    found, called = set[str](), set[str]()
    for path in package.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if names := JIT.findall(text):
            found.update(names)
            called.update(re.findall(r"(?<!def )\b(\w+)\(", text))
    return [NAMESPACE, *sorted(found - called)]


def checker() -> str | None:
    """Return the path of compute-sanitizer, from the PATH or nvcc's toolkit; None if there is none."""
    if found := shutil.which("compute-sanitizer"):
        return found
    home = Path(toolchain.cuda_home() or "/usr/local/cuda")
    places = (home / "bin" / "compute-sanitizer", home / "compute-sanitizer" / "compute-sanitizer")
    return next((str(each) for each in places if each.is_file()), None)


def command(program: str, tool: str, operator: str, seconds: float, kernels: Sequence[str]) -> list[str]:
    """Return the command line that runs random calls of an operator under a tool."""
    words = [program, "--tool", tool, "--report-api-errors", "no", "--print-limit", str(REPORTS)]
    if tool != "initcheck":
        words += ["--error-exitcode", str(ERRORS)]
        # Substrings of mangled names, or whole ones: Triton does not mangle its kernels' names.
        filters = [f"{'kns' if name == NAMESPACE else 'kne'}={name}" for name in kernels]
        words += [word for each in filters for word in ("--kernel-name", each)]
    return [*words, sys.executable, "-c", CALLS, operator, str(NUMBER), f"{seconds:g}", "cuda"]


def reports(text: str, kernels: Sequence[str]) -> list[str]:
    """Return the blocks of initcheck's output that name one of ``kernels`` and are not of cuBLAS's products."""
    blocks = re.split(r"(?m)^(?==+ *Uninitialized)", text)[1:]
    heads = ["\n".join(block.splitlines()[:3]) for block in blocks]
    return [head for head in heads if _is_ours(head, kernels) and not _reads_products(head)]


def _is_ours(head: str, kernels: Sequence[str]) -> bool:
    """Return whether the kernel of a report is in our namespace or one of Triton's, by its whole name."""
    line = next((line for line in head.splitlines() if " at " in line), "")
    kernel = line.partition(" at ")[2].split("(")[0].split("+0x")[0].strip()
    return f"{NAMESPACE}::" in kernel or kernel in kernels


def _reads_products(head: str) -> bool:
    found = READS_PRODUCTS.search(head)
    return found is not None and int(found[1]) == 2 * int(found[2])


def judge(tool: str, operator: str, done: Done, text: str, kernels: Sequence[str]) -> Found:
    """Return the result of a process under a tool."""
    name = f"{tool}, {operator}"
    computed = next((line for line in text.splitlines() if line.startswith(f"{operator}: ")), None)
    if tool == "initcheck" and (unwritten := reports(text, kernels)):
        return Found(name, False, f"{len(unwritten)} reads of memory that nothing wrote: {unwritten[0]}")
    if tool != "initcheck" and done.status == ERRORS:
        summary = re.findall(r"=+ (ERROR SUMMARY: .*)", text)
        return Found(name, False, summary[-1] if summary else "errors")
    if done.status is None:
        return Found(name, False, f"not done after {done.seconds:.0f} s")
    if computed is None or done.status != 0:
        errors = re.findall(r"(?m)^\d+ errors: .*", text)
        return Found(name, False, errors[-1] if errors else f"status {done.status}: {done.last_line()}")
    return Found(name, True, computed)


def check_memory(operators: Sequence[str], jobs: int, budget: Budget, log: Path) -> list[Found]:
    """Run calls of each operator under each tool."""
    program = checker()
    if program is None:
        return [Found("compute-sanitizer", False, "not on the PATH, nor in the toolkit: memory was not checked")]
    kernels = our_kernels()
    # Calls stop well before the process would be killed, which would lose the findings.
    seconds = budget.left() * 0.45

    def one(tool: str, operator: str) -> Found:
        part = log.with_name(f"{log.stem}-{tool}-{operator}.log")
        limits = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that the checker knows where each tensor ends
        done = run(command(program, tool, operator, seconds, kernels), budget.left(), part, limits)
        text = part.read_text(errors="replace")
        return judge(tool, operator, done, text, kernels)

    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(one, tool, operator) for tool in TOOLS for operator in operators]
        return [each.result() for each in running]


def fuzz(operators: Sequence[str], jobs: int, budget: Budget, log: Path, device: str = "cuda") -> list[Found]:
    """Compare random calls with the reference; running out of time is not a failure."""

    def one(operator: str) -> Found:
        part = log.with_name(f"{log.stem}-fuzz-{operator}.log")
        words = ["--device", device, "--calls", str(NUMBER), "--workers", str(max(1, jobs // len(operators)))]
        done = run([sys.executable, "-m", "tools.fuzz", operator, *words], budget.left(), part)
        text = part.read_text(errors="replace")
        failures = list(dict.fromkeys(line for line in text.splitlines() if "--only" in line))
        if failures:
            return Found(f"fuzz, {operator}", False, f"{len(failures)} failures: {failures[0][:300]}")
        if done.status is None:
            return Found(f"fuzz, {operator}", True, f"no failure in {done.seconds:.0f} s, not all {NUMBER} calls done")
        return Found(f"fuzz, {operator}", done.status == 0, done.last_line())

    with ThreadPoolExecutor(len(operators)) as pool:
        return list(pool.map(one, operators))
