"""Run other projects' test suites on this package's classes, from their sources.

python -m tools.upstream_tests --mmdet PATH --timm PATH --natten PATH   # any of them: make test-upstream

* mmdet: its tests of models, with our drop-in imported first (they need the package parameterized).
* timm: ``tests/test_models.py`` on the names that we register, and on stock models with our layers.
* NATTEN: the cases of ``tests/test_fna.py`` in one and two dimensions, with ``window_attention`` as the backend.

Nothing is fetched, and nothing is written there. The sources' own packages are imported before installed ones. A file
with a failure is run once more without our classes. The table goes to ``--page``. The exit status is 1 if a test fails
that passes without us and that ``KNOWN`` does not explain.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from tools import command_parser
from tools.files import write_text
from tools.machine import machine

HERE = Path(__file__).parent
PACKAGES = ("torch", "torchvision", "mmcv", "onedl-mmcv", "timm", "attn-plugins")
PAGE = HERE.parents[1] / "benchmarks/other-suites.md"
STOCK, OURS = "fails without us as well", "ours"


class Suite(NamedTuple):
    """A run of pytest: its title and sources, the tests, the variables of our plug-in, and those without us."""

    title: str
    project: str
    tests: str
    environment: dict[str, str]
    without: dict[str, str] | None = None


LAYERS, STOCK_LAYERS = {"UPSTREAM_TESTS": "layers"}, {"UPSTREAM_TESTS": "stock"}
SUITES = (
    Suite("mmdet's models with the drop-in", "mmdet", "tests/test_models", LAYERS, STOCK_LAYERS),
    Suite("timm's models, our names", "timm", "tests/test_models.py", {"UPSTREAM_TESTS": "names"}),
    Suite("timm's models, stock names with our layers", "timm", "tests/test_models.py", LAYERS, STOCK_LAYERS),
    Suite("NATTEN's cases on `window_attention`", "natten", "tests/test_fna.py", {"NATTEN_RUN_EXTENDED_TESTS": "1"}),
)
# What a failure means that does not occur without us, by a part of the test's name.
KNOWN = {
    r"default_cfgs\[1-(attn_vit|timesformer)": "timm leaves vision transformers out of this test by their own names",
    r"torchscript\[|script_after_resize\[": "TorchScript takes none of our layers; torch.export and torch.compile do",
}


class Outcome(NamedTuple):
    """Result of a run of pytest: numbers of tests passed, failed and skipped, and the message of each failure."""

    counts: Counter[str]
    failures: dict[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites whose sources are given, print the table and write the page."""
    parser = command_parser("upstream_tests", __doc__)
    projects = tuple(dict.fromkeys(suite.project for suite in SUITES))
    for project in projects:
        parser.add_argument(f"--{project}", type=Path, metavar="PATH", help=f"a checkout or sources of {project}")
    parser.add_argument("--page", type=Path, default=PAGE, help="the table's file; default: benchmarks/other-suites.md")
    parser.add_argument("-k", default="", help="pytest's -k, for some of the tests; the page is not written then")
    options = parser.parse_args(arguments)
    sources = {name: getattr(options, name) for name in projects if getattr(options, name)}
    if not sources:
        parser.error(f"give the sources of at least one project: {', '.join(f'--{name}' for name in projects)}")
    suites = [suite for suite in SUITES if suite.project in sources]
    for suite in suites:
        if not (sources[suite.project] / suite.tests).exists():
            parser.error(f"--{suite.project} must be a folder with {suite.tests}, got {sources[suite.project]}")
    lines: list[str] = []
    notes: list[str] = []
    ours = 0
    for suite in suites:
        root = sources[suite.project].resolve()
        outcome = run(root, [suite.tests], suite.project, suite.environment, options.k)
        reasons = judge(root, suite, outcome)
        explained = _explain(outcome.failures, reasons)
        print(line := _line(suite, outcome.counts, reasons), *explained, sep="\n", flush=True)
        lines.append(line)
        notes += explained
        ours += list(reasons.values()).count(OURS)
    if not options.k:
        write_text(options.page, _page(lines, notes, sources))
    return 1 if ours else 0


def run(root: Path, tests: Sequence[str], project: str, environment: dict[str, str], k: str = "") -> Outcome:
    """Run tests of the sources ``root`` with the project's plug-in, in as many processes as there are cores."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore"]
        command += ["-n", str(os.cpu_count()), f"--junitxml={report}", "-k", k, "-p", f"with_{project}"]
        paths = [str(root / "src"), str(root), str(HERE), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
        done = subprocess.run(
            [*command, *tests], cwd=root, env={**os.environ, **variables}, capture_output=True, text=True
        )
        if not report.exists():
            said = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
            raise SystemExit(f"tools.upstream_tests: pytest ended with {done.returncode} in {root}:\n{said}")
        return read(report)


def read(report: Path) -> Outcome:
    """Read pytest's XML report."""
    counts: Counter[str] = Counter()
    failures = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped") is not None
        counts["failed" if problem is not None else "skipped" if skipped else "passed"] += 1
        counts["cases"] += sum(int(p.get("value", 0)) for p in case.iter("property") if p.get("name") == "cases")
        if problem is not None:
            path, _, kind = case.get("classname", "").rpartition(".")
            file, inside = (path, f"::{kind}") if kind[:1].isupper() else (f"{path}.{kind}", "")
            name = f"{file.replace('.', '/')}.py{inside}::{case.get('name')}"
            if not path:  # a file that could not be imported
                name = f"{case.get('name', '').replace('.', '/')}.py"
            failures[name] = re.sub(r"\s+", " ", problem.get("message", ""))[:160]
    return Outcome(counts, failures)


def judge(root: Path, suite: Suite, outcome: Outcome) -> dict[str, str]:
    """Classify every failure: it occurs without our classes as well, KNOWN explains it, or it is ours."""
    without: dict[str, str] = {}
    files = {test: test.split("::")[0] for test in outcome.failures}
    if suite.without and files:  # whole files: pytest runs nothing if it does not find one of the tests
        without = run(root, sorted({*files.values()}), suite.project, suite.without).failures
    known = {test: next((KNOWN[p] for p in KNOWN if re.search(p, test)), OURS) for test in files}
    return {test: STOCK if test in without or file in without else known[test] for test, file in files.items()}


def _line(suite: Suite, counts: Counter[str], reasons: dict[str, str]) -> str:
    said = Counter(reasons.values())
    passed = f"{counts['passed']} ({counts['cases']} cases)" if counts["cases"] else counts["passed"]
    known = len(reasons) - said[STOCK] - said[OURS]
    cells = (suite.title, passed, counts["failed"], said[STOCK], known, said[OURS], counts["skipped"])
    return f"| {' | '.join(map(str, cells))} |"


def _explain(failures: dict[str, str], reasons: dict[str, str]) -> list[str]:
    """List our failures one by one, and the others by file and reason."""
    ours = [f"* `{test}`: {OURS}; `{failures[test]}`" for test in sorted(failures) if reasons[test] == OURS]
    others = Counter((test.split("::")[0], why) for test, why in sorted(reasons.items()) if why != OURS)
    return ours + [f"* `{file}`, {count} of its cases: {why}" for (file, why), count in others.items()]


def _version(root: Path, name: str) -> str:
    folder = root / "src" / name if (root / "src").is_dir() else root / name
    stated = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", (folder / "version.py").read_text())
    return stated[1] if stated else "unknown"


def _page(lines: Sequence[str], notes: Sequence[str], sources: dict[str, Path]) -> str:
    stated = ", ".join(f"{name} {_version(path, name)}" for name, path in sources.items())
    given = " ".join(f"{name.upper()}=path" for name in sources)
    return "\n".join([
        "# Other projects' tests on our classes", "",
        f"`make test-upstream {given}`, with the sources of {stated}.", "",
        ", ".join(f"{name} {value}" for name, value in machine(PACKAGES, 1).items()), "",
        "| suite | passed | failed | without us as well | explained below | ours | skipped |",
        "| --- | --- | --- | --- | --- | --- | --- |", *lines, "",
        *(["Failures:", "", *notes, ""] if notes else ()),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
