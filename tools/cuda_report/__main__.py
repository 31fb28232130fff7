"""Report registers, spills and the instructions of the hottest loop of the compiled CUDA kernels.

python -m tools.cuda_report                                      the binary of this checkout
python -m tools.cuda_report path/to/_C_cuda.abi3.so -k window    another one; kernels that match a regular expression
python -m tools.cuda_report --out benchmarks/cuda-sass.md        write a page, and its rows as .json next to it
python -m tools.cuda_report --compare before.json                show before → after for each kernel; on the page also
                                                                 the main kernels' instructions for a tap or a tile

Needs the compiled binary (ATTN_PLUGINS_BUILD=cuda), and cuobjdump and nvdisasm, from the CUDA toolkit or the triton
package. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attn_plugins.install import toolchain
from tools.files import write_text

from . import sass, work
from .table import EXPLANATION, short, table

ROOT = Path(__file__).parents[2]
BINARY = ROOT / "plugins" / "_C_cuda.abi3.so"
FORMAT = 1


class Failed(Exception):
    """Reason why there is no report, in one line."""


def disassembler() -> Path | None:
    """Return the path of cuobjdump: from nvcc's toolkit, the PATH or the triton package; None if there is none."""
    home, path = toolchain.cuda_home(), shutil.which("cuobjdump")
    found = [Path(home) / "bin" / "cuobjdump"] if home else []
    found += [Path(path)] if path else []
    if spec := find_spec("triton"):
        found += [Path(folder) / "backends/nvidia/bin/cuobjdump" for folder in spec.submodule_search_locations or ()]
    return next((each for each in found if each.is_file()), None)


def version(program: str | Path) -> str:
    """Return a tool's release, such as ``13.0, V13.0.88``, or "none" without the tool."""
    try:
        printed = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return "none"
    match = re.search(r"release (.+)", printed)
    return match[1].strip() if match else "unknown"


def revision(binary: Path) -> str | None:
    """Return the commit of this checkout if the binary belongs to it; None otherwise or without git."""
    if binary.resolve() != BINARY.resolve():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def readable(names: list[str]) -> list[str]:
    """Return demangled and shortened names; unchanged names without c++filt."""
    filter_ = shutil.which("c++filt")
    if filter_ is None or not names:
        return names
    done = subprocess.run([filter_], input="\n".join(names), capture_output=True, text=True)
    return [short(line) for line in done.stdout.splitlines()] if done.returncode == 0 else names


def rows_of(binary: Path) -> list[dict[str, Any]]:
    """Return a row for each kernel and architecture in a binary.

    Raises:
        Failed: there is no binary or no disassembler, or the binary contains no kernel.
    """
    if not binary.is_file():
        raise Failed(f"{binary} does not exist: run ATTN_PLUGINS_BUILD=cuda python setup.py build_ext --inplace")
    tool = disassembler()
    if tool is None:
        raise Failed("cuobjdump was not found on the PATH, next to nvcc or in a triton package")
    printed = []
    for option in ("-res-usage", "-sass"):
        done = subprocess.run([tool, option, binary], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"cuobjdump {option} ended with status {done.returncode}: {last_line(done.stderr)}")
        printed.append(done.stdout)
    rows = sass.kernels(*printed)
    if not rows:
        raise Failed(f"{binary} contains no kernel")
    for row, name in zip(rows, readable([row["kernel"] for row in rows])):
        row["kernel"] = name
    return list({(row["kernel"], row["architecture"]): row for row in reversed(rows)}.values())[::-1]  # drop duplicates


def last_line(text: str) -> str:
    """Return the last non-empty line."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def select(rows: list[dict[str, Any]], pattern: str, architecture: str | None) -> list[dict[str, Any]]:
    """Return the kernels that match a regular expression, for one architecture or for all."""
    wanted = re.compile(pattern)
    return [row for row in rows if wanted.search(row["kernel"]) and architecture in (None, row["architecture"])]


def page(data: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return the whole page."""
    lines = ["# CUDA kernels as compiled", "", f"`{data['command']}`", ""]
    lines.append(f"{described(data)}, cuobjdump {data['cuobjdump']}.")
    if before is not None:
        lines += [
            f"Arrows: from {described(before)} (`{before['command']}`) to this one.",
            "",
            "## For a tap or a tile",
            "",
            work.EXPLANATION,
        ]
        lines += [
            "",
            work.spilling(data["rows"]),
            "",
            *work.summary(data["rows"], before["rows"]),
            "",
            "## Every kernel",
        ]
    lines += ["", EXPLANATION, "", *table(data["rows"], before and before["rows"])]
    return "\n".join(lines) + "\n"


def described(data: dict[str, Any]) -> str:
    """Describe the binary of a report."""
    commit = f"commit {data['revision']}, " if data.get("revision") else ""
    return f"{commit}nvcc {data['nvcc']}, {data['date']}"


def read(path: Path) -> dict[str, Any]:
    """Read an earlier report.

    Raises:
        Failed: the file is not a report.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        assert data["format"] == FORMAT
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise Failed(f"--compare {path} is not a report of this tool ({type(error).__name__})") from error
    return data


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.cuda_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("binary", nargs="?", type=Path, default=BINARY, help="default: plugins/_C_cuda.abi3.so")
    parser.add_argument("-k", default="", metavar="REGEX", help="only kernels whose names match")
    parser.add_argument("--architecture", metavar="SM", help="only this architecture, such as sm_90")
    parser.add_argument("--out", type=Path, metavar="PAGE.md", help="write a page, and PAGE.json")
    parser.add_argument("--commit", metavar="NAME", help="of the binary, where it is not this checkout's")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="show changes since that report")
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(arguments)
    try:
        re.compile(options.k)
    except re.error as error:
        parser.error(f"-k must be a regular expression, got {options.k!r} ({error})")
    if options.out is not None and options.out.suffix != ".md":
        parser.error(f"--out must end with .md, got {options.out}")
    try:
        before = None if options.compare is None else read(options.compare)
        rows = select(rows_of(options.binary), options.k, options.architecture)
        if not rows:
            raise Failed(f"no kernel fits -k {options.k!r} and --architecture {options.architecture}")
    except Failed as error:
        print(f"cuda_report: {error}", file=sys.stderr)
        return 1
    if before is not None:
        before["rows"] = select(before["rows"], options.k, options.architecture)
    home, tool = toolchain.cuda_home(), disassembler()
    data = {
        "format": FORMAT,
        "command": shlex.join(["python", "-m", "tools.cuda_report", *given]),
        "nvcc": version(f"{home}/bin/nvcc") if home else "none",
        "cuobjdump": version(tool) if tool else "none",
        "date": date.today().isoformat(),
        "revision": options.commit or revision(options.binary),
        "rows": rows,
    }
    text = page(data, before)
    if options.out is None:
        print("\n".join(table(rows, before and before["rows"])))
        return 0
    head = {name: value for name, value in data.items() if name != "rows"}
    lines = ",\n".join(" " + json.dumps(row, ensure_ascii=False) for row in rows)  # one kernel per line
    write_text(options.out.with_suffix(".json"), json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n]}\n")
    write_text(options.out, text)
    print(f"{len(rows)} kernels: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
