"""Benchmark our operators against their peers, side by side in one run.

python -m tools.benchmark deform_conv            # one file of cases, printed and written to benchmarks/
python -m tools.benchmark --device cuda          # everything, on a GPU
python -m tools.benchmark deform_conv -k 256     # only cases whose name contains 256
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from pathlib import Path

from tools.requires import extras

with extras():
    import torch

    from . import report
    from .case import Case
    from .measure import interleaved, paired_ratio, peak_memory

BENCHMARKS = {  # name -> room
    "deform_conv": "sampled",
    "global_attention": "everywhere",
    "augmented_conv": "everywhere",
    "window_attention": "window",
    "criss_cross": "criss_cross",
    "sequence_attention": "everywhere",
}


def measure(case: Case, device: str, repeats: int) -> dict:
    """One row: medians, memory, and the ratios to the fastest peer."""
    runs, memory, errors = {"ours": case.ours()}, {}, {}
    memory["ours"] = peak_memory(runs["ours"], device)
    for name, prepare in case.peers.items():
        try:
            run = prepare()
            memory[name] = peak_memory(run, device)
            runs[name] = run
        except (ImportError, RuntimeError) as error:
            errors[name] = {"error": f"cannot run: {str(error).splitlines()[0][:80]}"}
    times = interleaved(runs, device, repeats)
    found = {
        name: {"median": statistics.median(times[name]), "times": times[name], "memory": memory[name]} for name in runs
    }
    ours = found.pop("ours")
    best = min(found, key=lambda name: found[name]["median"], default=None)
    return {
        "case": case.name,
        "ours": ours,
        "peers": {name: found.get(name) or errors[name] for name in case.peers},
        "best_peer": best,
        "speedup": None if best is None else paired_ratio(times[best], times["ours"]),
        "memory_ratio": None if best is None else ours["memory"] / max(1, found[best]["memory"]),
        "goal": case.goal,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmark", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(BENCHMARKS)}; all if none is named"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds per case")
    parser.add_argument("-k", metavar="TEXT", default="", help="only cases whose name contains TEXT (writes no file)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "benchmarks", help="where tables go")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    for name in options.names or BENCHMARKS:
        with extras():
            cases = importlib.import_module(f"{__package__}.{BENCHMARKS[name]}.{name}").cases(options.device)
        rows = []
        for case in cases:
            if options.k not in case.name:
                continue
            rows.append(measure(case, options.device, options.repeats))
            row = rows[-1]
            ratio = "" if row["speedup"] is None else f"{row['speedup']:6.2f}x over {row['best_peer']}"
            print(f"{name}: {case.name:60s} {report.milliseconds(row['ours']['median']):>8s} ms {ratio}", flush=True)
        facts = report.machine(options.device)
        command = " ".join(
            ["python -m tools.benchmark", name, *(["--device cuda"] if options.device == "cuda" else [])]
        )
        text = report.markdown(f"{name}, {options.device}", command, facts, rows)
        print("\n" + text)
        if not options.k:
            print(f"written to {report.write(options.out, f'{name}-{options.device}', text, {**facts, 'rows': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
