"""Half an hour on a rented GPU: four calls, each of which ends by itself within 480 seconds.

python -m tools.bench gpu 1             # tests and rows of what has not run on a GPU; kernels of four workloads
python -m tools.bench gpu 2             # blocks of kernels: the best ones go to plugins/ops/common/tuned.json
python -m tools.bench gpu 3             # more of them
python -m tools.bench gpu 4             # every operator and module beside its peers, to gpu.json and gpu.md
python -m tools.bench gpu --dry-run     # without a device, all calls: every step up to the first launch

Every result is appended to OUT/STEP.jsonl as it comes. The same call again resumes: it skips the steps that
OUT/done.jsonl names and the rows that were measured. The steps are those of gpu.yaml. tools/check_gpu.sh call1 also
sets up the environment.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from attn_plugins import ops
from attn_plugins.ops.common import triton_launch, tuned
from tools import command_parser
from tools.files import write_text

from . import worker
from .case import prepared_on
from .cases import NAMES, cases, variants
from .cases.variants import SWITCH, candidates, trying
from .timing import Settings

SECONDS = 470  # of a call
ROW_SECONDS, VARIANTS_SECONDS = 60, 150  # of a row, which no longer starts so long before the end; kernels are compiled
TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--all-cases", "--timeout", "60", "-rfE", "-m", "cuda")
BETTER = 0.97  # of the default's time: what is not faster by more is left as it is
RUNS = 10  # that are profiled
AS_WITH_A_DEVICE = (
    "import sys, pytest, torch; torch.cuda.is_available = lambda: True; sys.exit(pytest.main(sys.argv[1:]))"
)


class Call:
    """One call: its steps, where results go, and when it ends."""

    def __init__(self, number: int, out: Path, end: float, device: str = "cuda") -> None:
        self.steps, self.out, self.end, self.device = variants.plan()["calls"][number], out, end, device

    def carry_out(self) -> int:
        """Carry out the steps that are not done, and return 1 if one failed or was not finished."""
        done, status = self.out / "done.jsonl", 0
        finished = {line["step"] for line in worker.read(done)}
        for step in (step for step in self.steps if step["name"] not in finished):
            left = min(self.end - time.time(), step.get("seconds", SECONDS))
            if left < ROW_SECONDS / 4:
                print(f"{step['name']}: no time is left; the same call again resumes")
                status = 1
                continue
            print(f"=== {step['name']}", flush=True)
            begin = time.time()
            kind = next(kind for kind in ("run", "tests", "rows", "profile") if kind in step)
            try:
                result = getattr(self, kind)(step, left)
            except RuntimeError as error:  # a worker that ended before its first row
                print(f"{step['name']}: {error}")
                status = 1
                continue
            if result.get("over"):
                print(f"{step['name']}: its time is over; the same call again resumes")
            else:
                worker.append(done, {"step": step["name"], "seconds": round(time.time() - begin), **result})
            status |= bool(result.get("status") or result.get("over"))
        return status

    def record(self, step: dict[str, Any]) -> Path:
        return self.out / f"{step['name'].replace(' ', '-')}.jsonl"

    def run(self, step: dict[str, Any], left: float) -> dict[str, Any]:
        """Run a command."""
        return command(shlex.split(step["run"]), left)

    def tests(self, step: dict[str, Any], left: float) -> dict[str, Any]:
        """Run the tests of a step that are marked cuda."""
        words = [sys.executable, *TESTS, "-n", "6", "--max-worker-restart", "20", *shlex.split(step["tests"])]
        return command(words, left)

    def rows(self, step: dict[str, Any], left: float) -> dict[str, Any]:
        """Measure rows; of variants, choose the best."""
        if step["rows"] == "all":
            from .__main__ import main

            minutes = (left - ROW_SECONDS) / 60
            options = ["--name", step["name"], "--minutes", f"{minutes:.2f}", "--row-seconds", str(ROW_SECONDS)]
            options += [] if self.record(step).exists() else ["--warm", "8"]  # compiles in as many processes first
            status = main(["--device", self.device, "--out", str(self.out), "--resume", "--wait", "0", *options])
            return {"status": status, "over": self.record(step).exists()}  # kept where rows are missing
        of_blocks = step["rows"] == ["variants"]
        row_seconds = VARIANTS_SECONDS if of_blocks else ROW_SECONDS
        until = time.time() + left - row_seconds
        lines = worker.measured(
            worker.Job(
                step["rows"], self.device, str(self.record(step)), step["k"], details=not of_blocks, until=until,
                row_seconds=row_seconds, settings=vars(Settings(0.4, attempts=1)), every=True,
            )
        )  # fmt: skip
        rows = [row for line in lines for row in line.get("rows", ())]
        chosen = choose(rows) if of_blocks else {}
        if chosen:
            capability = ".".join(map(str, torch.cuda.get_device_capability()))
            for file in (tuned.FILE, self.out / tuned.FILE.name):
                store(file, capability, chosen)
        return {
            "status": int(any("error" in row for row in rows)),
            "over": bool(lines) and "over" in lines[-1],
            "chosen": chosen,
        }

    def profile(self, step: dict[str, Any], left: float) -> dict[str, Any]:
        """Record the kernels of each workload in a process of its own."""
        status = 0
        begun = {line["workload"] for line in worker.read(self.record(step))}
        for title, (room, pattern) in step["profile"].items():
            if title not in begun:
                arguments = json.dumps([title, room, pattern, self.device, str(self.record(step))])
                code = "import json, sys; from tools.bench.gpu import profile; profile(*json.loads(sys.argv[1]))"
                status |= command([sys.executable, "-c", code, arguments], left / len(step["profile"]))["status"]
        return {"status": status}


def command(words: list[str], seconds: float) -> dict[str, Any]:
    """Run a command in the root for at most ``seconds``; return its status and last lines, and whether it was ended."""
    path = os.pathsep.join(filter(None, [str(worker.ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        words, cwd=worker.ROOT, env={**os.environ, "PYTHONPATH": path}, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, over = process.communicate(timeout=seconds)[0], False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, over = process.communicate()[0], True
    last = output.splitlines()[-8:]
    print(*last, sep="\n", flush=True)
    return {"status": process.returncode, "last": last, "over": over}


def choose(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the candidates that are faster than the default over all rows of their names, by the mean ratio."""
    ratios: dict[str, dict[str, list[float]]] = {}
    count: dict[str, int] = {}
    for row in rows:
        if "error" not in row:
            name = row["case"].split(":")[0]
            count[name] = count.get(name, 0) + 1
            for title, peer in row["peers"].items():
                if "min" in peer:
                    ratios.setdefault(name, {}).setdefault(title, []).append(peer["min"] / row["ours"]["min"])
    chosen = {}
    for name, of_name in ratios.items():
        values = next(dict(candidates(v["values"])) for v in variants.plan()["variants"] if name in v["names"])
        means = {title: statistics.geometric_mean(r) for title, r in of_name.items() if len(r) == count[name]}
        best = min(means, key=lambda title: means[title], default=None)
        if best is not None and means[best] < BETTER:
            print(f"{name}: {best} takes {means[best]:.2f} of the default's time")
            if not name.startswith(SWITCH):  # those are conditions in C++
                chosen[name] = values[best]
    return chosen


def store(file: Path, capability: str, chosen: dict[str, Any]) -> None:
    """Add choices for a capability to a file of defaults."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content[capability] = {**content.get(capability, {}), **chosen}
    write_text(file, json.dumps(content, indent=1, sort_keys=True) + "\n")


def profile(title: str, room: str, pattern: str, device: str, record: str) -> None:
    """Append the kernels of a row's run, with their numbers and microseconds in a run, to ``record``."""
    from torch.profiler import ProfilerActivity

    (case,) = variants.matching(cases(room, device), pattern)
    made = case.ours()
    for _ in range(3):
        made()
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        for _ in range(RUNS):
            made()
        if device == "cuda":
            torch.cuda.synchronize()
    time_of = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    kernels = [(event.key, event.count / RUNS, getattr(event, time_of) / RUNS) for event in profiler.key_averages()]
    kernels = sorted((kernel for kernel in kernels if kernel[2]), key=lambda kernel: -kernel[2])
    worker.append(Path(record), {"workload": title, "row": case.name, "kernels": kernels})
    print(f"{title}: {sum(kernel[2] for kernel in kernels):.0f} µs")
    print(*(f"  {microseconds:8.1f} {kernel[:90]}" for kernel, _, microseconds in kernels), sep="\n", flush=True)


# --- without a device -------------------------------------------------------------------------------------------------


def walk(step: dict[str, Any]) -> Iterator[str]:
    """Yield what a step would do, with every check that needs no device.

    Raises:
        ValueError: it would do nothing, or a candidate would change no launch.
    """
    if "run" in step:
        if not (worker.ROOT / step["run"].split()[0]).is_file():
            raise ValueError(f"there is no {step['run']}")
        yield step["run"]
    elif "tests" in step:
        words = [*TESTS[2:], "--collect-only", *shlex.split(step["tests"])]
        collected = command([sys.executable, "-c", AS_WITH_A_DEVICE, *words], SECONDS)
        if collected["status"]:
            raise ValueError(f"no tests: {step['tests']}")
        yield collected["last"][-1]
    elif "profile" in step:
        for title, (room, pattern) in step["profile"].items():
            (case,) = variants.matching(cases(room, "cuda"), pattern)
            yield f"{title}: {case.name}"
    elif step["rows"] == "all":
        yield f"{sum(case.main for name in (*NAMES, 'modules') for case in cases(name, 'cuda'))} rows"
    else:
        job = worker.Job(step["rows"], "cuda", "", step["k"], every=True)
        for name, case in (rows := list(worker.chosen(job))):
            yield f"{name}: {case.name}: {', '.join(case.peers)}"
        if not rows:
            raise ValueError(f"{step['name']}: no row matches {step['k']!r}")
        if step["rows"] == ["variants"]:
            check_launches({case.name.split(":")[0] for _, case in rows})


def check_launches(names: set[str]) -> None:
    """Check that the candidates of these names change what is launched, with tensors of the CPU and no launch."""
    for variant in variants.plan()["variants"]:
        for name in sorted(name for name in names.intersection(variant["names"]) if not name.startswith(SWITCH)):
            for room, pattern in variant["rows"]:
                for case in variants.matching(cases(room, "cuda"), pattern):
                    with ops.backend(triton_launch.NAME), triton_launch.recorded((9, 0)) as launches:
                        made = prepared_on(case.ours, "cpu")
                        seen = set()
                        values = [value for _, value in candidates(variant["values"])]
                        for value in (values[0], values[-1]):
                            launches.clear()
                            with trying(name, value):
                                made()
                            seen.add(repr([launch[1::2] for launch in launches]))  # grids and constants
                    if len(seen) < 2:
                        raise ValueError(f"{name}: the candidates do not change the launches of {case.name}")


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("bench gpu", __doc__)
    numbers = list(variants.plan()["calls"])
    parser.add_argument("call", type=int, nargs="?", choices=numbers, help="1 to 4")
    parser.add_argument("--out", type=Path, default=worker.ROOT / "build/gpu", help="folder of results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="end after this time, default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="walk through the steps without a device")
    options = parser.parse_args(arguments)
    if options.dry_run:
        for number in [options.call] if options.call else numbers:
            for step in variants.plan()["calls"][number]:
                for line in walk(step):
                    print(f"{number}, {step['name']}: {line}", flush=True)
        return 0
    if options.call is None:
        parser.error("name a call, 1 to 4, or --dry-run")
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --dry-run needs none")
    options.out.mkdir(parents=True, exist_ok=True)
    return Call(options.call, options.out, time.time() + options.seconds).carry_out()
