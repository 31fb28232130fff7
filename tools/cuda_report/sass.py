"""Parse the output of ``cuobjdump``: resources, instructions and loops of kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

ARCHITECTURE = re.compile(r"^arch = (sm_\w+)")
FUNCTION = re.compile(r"^\s+Function\s*:?\s*(\S+?):?$")
RESOURCES = re.compile(r"\b([A-Z]+)(?:\[\d\])?:(\d+)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z]\w*(?:\.\w+)*)([^;]*);")
TARGET = re.compile(r"0x([0-9a-f]+)")

# Expensive instructions, by the first part of their names; loads of global memory are also counted by width.
COUNTED = {
    "HMMA": ("HMMA", "HGMMA"), "MATCH": ("MATCH",), "REDUX": ("REDUX", "CREDUX"), "VOTE": ("VOTE", "VOTEU"),
    "SHFL": ("SHFL",), "MUFU": ("MUFU",), "LDS": ("LDS", "LDSM"), "STS": ("STS",), "LDL": ("LDL",), "STL": ("STL",),
    "ATOM": ("ATOM", "ATOMG", "ATOMS", "RED", "REDG"), "BAR": ("BAR",),
}  # fmt: skip
KINDS = {name: kind for kind, names in COUNTED.items() for name in names}
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
# A nested loop shorter than this share of the outer one may count as part of it, such as a compare-and-swap addition.
SMALL = 0.25


class Instruction(NamedTuple):
    """Instruction: address, name with all suffixes, operands, and whether it is predicated."""

    address: int
    name: str
    operands: str
    guarded: bool = False


class Loop(NamedTuple):
    """Addresses of a loop's first instruction and of its last, the branch back."""

    first: int
    last: int


def resources(text: str) -> dict[tuple[str, str], dict[str, int]]:
    """Parse the output of ``cuobjdump -res-usage``, by mangled name and architecture."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    architecture = function = ""
    for line in text.splitlines():
        if match := ARCHITECTURE.match(line):
            architecture = match[1]
        elif match := FUNCTION.match(line):
            function = match[1]
        elif function and "REG:" in line:
            usage = dict(RESOURCES.findall(line))
            found[function, architecture] = {
                "registers": int(usage["REG"]),
                "stack": int(usage.get("STACK", 0)) + int(usage.get("LOCAL", 0)),
                "shared": int(usage.get("SHARED", 0)),
            }
            function = ""
    return found


def functions(text: str) -> Iterator[tuple[str, str, list[Instruction]]]:
    """Yield mangled name, architecture and instructions of each kernel in the output of ``cuobjdump -sass``."""
    architecture = function = ""
    body: list[Instruction] = []
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            body.append(Instruction(int(match[1], 16), match[3], match[4].strip(), match[2] is not None))
        elif match := FUNCTION.match(line):
            if function:
                yield function, architecture, body
            function, body = match[1], []
        elif match := ARCHITECTURE.match(line):
            if function:
                yield function, architecture, body
            function, architecture, body = "", match[1], []
    if function:
        yield function, architecture, body


def loops(body: Sequence[Instruction]) -> list[Loop]:
    """Find the loops, each from the target of a backward branch to the branch; the longest if several share a start.

    A branch to itself, which pads the end of a kernel, is not a loop. Neither is a branch with an unconditional
    ``EXIT`` between its target and itself: it returns from a rare case that the compiler moved behind the kernel's end.
    """
    addresses = {each.address for each in body}
    exits = [each.address for each in body if each.name.split(".")[0] == "EXIT" and not each.guarded]
    ends: dict[int, int] = {}
    for each in body:
        match = TARGET.search(each.operands) if each.name.split(".")[0] == "BRA" else None
        target = int(match[1], 16) if match else each.address
        if target not in addresses or target >= each.address:
            continue
        if not any(target < address < each.address for address in exits):
            ends[target] = max(ends.get(target, 0), each.address)
    return sorted(Loop(first, last) for first, last in ends.items())


def within(body: Sequence[Instruction], loop: Loop) -> list[Instruction]:
    """Return the instructions of a loop."""
    return [each for each in body if loop.first <= each.address <= loop.last]


def hottest(body: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions of the loop in which a kernel presumably spends its time; none without a loop.

    Of the innermost loops, it is the one with the most matrix products, then with the most loads of global memory,
    then the longest. A loop also counts as innermost if a loop nested in it has less than a quarter of its
    instructions and either adds atomically or does not load.
    """
    every = loops(body)
    counts = {loop: count(within(body, loop)) for loop in every}
    works = {loop: any(counts[loop].get(kind) for kind in ("HMMA", "LDG", "LDS")) for loop in every}

    def part_of(inner: Loop, outer: Loop) -> bool:
        adds = any("CAS" in each.name or each.name.split(".")[0] in ("RED", "REDG") for each in within(body, inner))
        small = counts[inner]["instructions"] < SMALL * counts[outer]["instructions"]
        return small and (adds or not works[inner])

    def innermost(loop: Loop) -> bool:
        inner = (each for each in every if each != loop and loop.first <= each.first and each.last <= loop.last)
        return all(part_of(each, loop) for each in inner)

    def rank(loop: Loop) -> tuple[int, ...]:
        return works[loop], *(counts[loop].get(kind, 0) for kind in ("HMMA", "LDG", "instructions"))

    chosen = max(filter(innermost, every), key=rank, default=None)
    return [] if chosen is None else within(body, chosen)


def count(body: Sequence[Instruction]) -> dict[str, int]:
    """Count all instructions, and those of each expensive kind that occurs."""
    found: Counter[str] = Counter(instructions=sum(each.name != "NOP" for each in body))
    for each in body:
        name, *suffixes = each.name.split(".")
        if name in KINDS:
            found[KINDS[name]] += 1
        elif name in ("MOV", "UMOV") or (name == "IMAD" and suffixes[:1] == ["MOV"]):
            found["MOV"] += 1
        elif name in ("LDG", "LD"):
            found["LDG"] += 1
            found[f"LDG{next((WIDTHS[s] for s in suffixes if s in WIDTHS), 32)}"] += 1
    return dict(found)


def kernels(usage: str, code: str) -> list[dict[str, Any]]:
    """Return a row for each kernel and architecture from the output of ``-res-usage`` and ``-sass``."""
    used = resources(usage)
    return [
        {
            "kernel": name,
            "architecture": architecture,
            **used.get((name, architecture), {}),
            "all": count(body),
            "loop": count(hottest(body)),
        }
        for name, architecture, body in functions(code)
    ]
