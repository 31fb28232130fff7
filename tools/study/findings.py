"""Compare the documents' claims with small trainings: run missing studies, write ``benchmarks/findings.{md,svg}``.

::

    python -m tools.study findings --list              # studies, their state, and the time of missing ones
    python -m tools.study findings                     # run missing studies, two at a time, the shortest first
    python -m tools.study findings --studies sharing paddings --jobs 1
    python -m tools.study findings --write             # only write the page, from the files in benchmarks/
    python -m tools.study findings --collect           # copy the figures of unfinished studies to benchmarks/ first

Studies and claims are those of ``configs/studies/findings.yaml``. Run it in the repository's root. A study works in
``work_dirs/findings``, continues where it stopped, and copies its figures to ``benchmarks`` when all settings and seeds
are finished; the page is rewritten after each study. Collected figures of an unfinished study are reused on another
machine. Each training runs on one CPU thread. In the background: ``nohup nice python -m tools.study findings &``.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tools import command_parser, need
from tools.files import write_text
from tools.study.commands import ROOT, StudyError, run
from tools.study.figure import draw_claims
from tools.study.rules import CANNOT, MISSING, NOT, SEEN, Outcome, Sample, counts_operations, outcome
from tools.study.settings import FOLDER, Study
from tools.study.table import value

BENCHMARKS, WORK = Path("benchmarks"), Path("work_dirs/findings")
DATA_SETS = threading.Lock()  # two studies may need the same data set
INTRODUCTION = """\
# Claims of the documents, tested on small data

`python -m tools.study findings` runs the missing studies and generates this page from the figures in this folder. Each
row is a claim of one of the four documents, with the document's figures in brackets, and a study that tests it.

* A claim that one setting is ahead is tested by its sign: **seen** if the 95 % interval of the difference is above 0,
  **not seen** if it is below. The interval is Student's, of the differences of equal seeds where settings share them.
  The sizes of the documents' differences are not tested: they are on the scale of other data and metrics.
* A claim that one is as good is tested by a margin that was set before, one point of the study's metric: **seen** if
  the setting is behind by less, interval included, **not seen** if by more.
* A single seed is judged by the interval over the test sentences, or by the study's paired bootstrap if its p < 0.01.
* Some studies were trained again with other seeds. Their claims are **seen**, or **not seen**, only if both agree.
* **cannot be seen at this size**: the interval holds both answers, or no small study tests the claim.
* ± is the standard deviation over seeds; "of the texts" is half of the 95 % interval over the test sentences of
  one seed.

The networks have about a million parameters and are trained for minutes. A claim that is seen here does not confirm the
document's figures, and one that is not seen does not refute them.
"""


class Record:
    """A study that tests claims: an entry of ``studies`` in ``findings.yaml``.

    Its keys are ``data``, in words; ``file`` in ``benchmarks``; ``minutes`` of one core; ``sample`` (by default the
    setting), ``value`` (or several, each by a suffix of the sample's name) and ``factor``, which read samples from the
    results, or ``samples``, which are those of a page; ``steps`` with the file that marks one as made (by default
    ``tools.study NAME`` is the last); ``product``, which the last step writes (by default
    ``work_dirs/findings/NAME/NAME.json``), or else the ``page`` of a study that was measured by hand; ``needed``
    samples of ``seeds`` values; ``resumed``, whether its trainings depend on no file of each other, so that they
    resume from ``file`` on another machine; and ``again``, ``file`` and command (``run``) of a repetition with several
    other seeds.
    """

    def __init__(self, name: str, content: dict[str, Any], root: Path = ROOT) -> None:
        if "page" not in content:
            steps = content.get("steps", [])
            if not any(step["run"].startswith("tools.study ") for step in steps):
                steps = [*steps, {"run": f"tools.study {name} {WORK / name}"}]
            content = {"product": WORK / name / f"{name}.json", **content, "steps": steps}
        self.name, self.content, self.root = name, content, root
        self.file = root / BENCHMARKS / content["file"]

    @cached_property
    def samples(self) -> dict[str, Sample]:
        """Samples of the file; empty if it is missing."""
        content = self.content
        if not self.file.is_file():
            return {}
        if "samples" in content:
            return {name: Sample(tuple(values)) for name, values in content["samples"].items()}
        samples: dict[str, Sample] = {}
        values = content["value"] if isinstance(content["value"], dict) else {"": content["value"]}
        for row in rows(json.loads(self.file.read_text(encoding="utf-8"))):
            name = content.get("sample", "{setting}").format_map(row)
            for suffix, of in values.items():
                number = value(row, of) * content.get("factor", 1)
                before = samples.get(f"{name}{suffix}", Sample(()))
                seeds = (*before.seeds, row["seed"]) if "seed" in row else ()
                interval = row.get("bleu_interval") if of == "bleu" and not before.values else None
                samples[f"{name}{suffix}"] = Sample((*before.values, number), interval, seeds=seeds)
            if "multiply_adds" in row:
                samples[f"{name}/operations"] = Sample((value(row, "operations"),), exact=True)
        return samples

    @cached_property
    def again(self) -> Record | None:
        """The repetition with other seeds."""
        again = self.content.get("again")
        return again and Record(self.name, {**self.content, **again, "again": None}, self.root)

    @property
    def complete(self) -> dict[str, Sample]:
        """Samples without the needed ones that lack seeds."""
        needed, seeds = self.content.get("needed", ()), self.content.get("seeds", 3)
        return {n: s for n, s in self.samples.items() if n not in needed or len(s.values) >= seeds}

    @property
    def finished(self) -> bool:
        """Whether every setting has all its seeds."""
        return bool(self.samples) and all(name in self.complete for name in self.content.get("needed", ()))

    @property
    def product(self) -> Path:
        """File that the last step writes."""
        return self.root / self.content["product"]

    def restore(self) -> None:
        """Write the results of the trainings in ``benchmarks`` to their folders, so that they are not repeated."""
        if self.content.get("resumed") and self.file.is_file():
            study = Study(Path(self.content["product"]).stem)
            for result in json.loads(self.file.read_text(encoding="utf-8"))["results"]:
                path = self.product.parent / study.run_of(result).folder / "result.json"
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_text(path, json.dumps(result, indent=1) + "\n")

    def collect(self) -> None:
        """Copy the figures to ``benchmarks``, if there are any."""
        if self.product.is_file():
            write_text(self.file, self.product.read_text(encoding="utf-8"))
            self.__dict__.pop("samples", None)

    def carry_out(self) -> None:
        """Resume the study in the current folder, which is the root, and collect its figures.

        Raises:
            StudyError: a command failed.
        """
        self.restore()
        for number, step in enumerate(self.content["steps"], 1):
            command, *arguments = shlex.split(step["run"])
            with DATA_SETS if command.startswith("tools.datasets.") else contextlib.nullcontext():
                log = self.root / WORK / f"{self.name}-{number}.log"
                unfinished = log.with_suffix(".unfinished")  # what an interrupted training made is not its last
                if unfinished.exists() or "made" not in step or not (self.root / step["made"]).exists():
                    print(f"{self.name}: {shell(step['run'])}, see {log}", flush=True)
                    log.parent.mkdir(parents=True, exist_ok=True)
                    unfinished.touch()
                    run(command, arguments, log)
                    unfinished.unlink()
        if not self.product.is_file():
            raise StudyError(f"{self.name}: its last command wrote no {self.content['product']}")
        self.collect()


def rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a file; those of several lists have the list's name as their ``part``."""
    if "results" in content:
        return content["results"]
    parts = {name: part for name, part in content.items() if isinstance(part, list)}
    return [{**row, "part": name} for name, part in parts.items() for row in part]


def shell(words: str) -> str:
    """Return a step's command as typed in a shell."""
    command, _, arguments = words.partition(" ")
    return f"python {'$TOOLS/train.py' if command in ('mmdet', 'mmseg') else f'-m {command}'} {arguments}".rstrip()


def load(root: Path = ROOT) -> tuple[dict[str, Record], list[dict[str, Any]]]:
    """Return the studies and the claims."""
    content = yaml.safe_load((FOLDER / "findings.yaml").read_text(encoding="utf-8"))
    claims = [{"document": name, **claim} for name, claims in content["claims"].items() for claim in claims]
    return {name: Record(name, study, root) for name, study in content["studies"].items()}, claims


def judge(claim: dict[str, Any], records: dict[str, Record]) -> Outcome:
    """Return the verdict on a claim, which is undecided if a repetition differs; missing samples are a verdict, too."""
    record = records.get(claim.get("study", ""))
    try:
        judged = outcome(claim, record.complete if record else {})
    except KeyError as error:
        assert record is not None
        how = f"`python -m tools.study findings --studies {record.name}`, about {record.content['minutes']} minutes"
        return Outcome(MISSING, why=f"`{error.args[0]}` is missing: {how} of one core")
    if record and record.again:
        again = judge(claim, {record.name: record.again})
        if again.verdict != MISSING:  # a repetition may leave settings out
            intervals = ", ".join(f"{shift:+.1f} ± {half:.1f}" for shift, half in again.differences)
            why = f"{judged.why}; **again with other seeds**: {intervals}, {again.verdict}"
            verdict = judged.verdict if again.verdict == judged.verdict else CANNOT
            judged = replace(judged, verdict=verdict, why=why, differences=judged.differences + again.differences)
    return judged


def claim_row(claim: dict[str, Any], judged: Outcome) -> str:
    """Return a claim's line of the table."""
    study = f"[{claim['study']}](#studies)" if "study" in claim else ""
    why = "; ".join(part for part in (judged.why, claim.get("note")) if part)
    text = f"{claim['claim']}{' *(other data)*' if claim.get('repeats') else ''}"
    cells = [text, f"{claim['document']}, {claim['place']}", study, judged.result, f"**{judged.verdict}**", why]
    return f"| {' | '.join(cells)} |"


def study_row(record: Record) -> str:
    """Return a study's line of the table."""
    content = record.content
    commands = "<br>".join(f"`{shell(step['run'])}`" for step in content["steps"])
    if page := content.get("page"):
        commands += f"<br>measured before, see [{page}]({page})"
    files = [content["file"]]
    if again := record.again:
        commands += f"<br>again: `{shell(again.content['run'])}`"
        files.append(again.content["file"])
    where = ", ".join(f"[{file}]({file})" for file in files) if record.samples else MISSING
    seeds = Counter(len(sample.values) for sample in record.samples.values() if not sample.exact)
    counted = ", ".join(f"{count}: {n} settings" for count, n in sorted(seeds.items(), reverse=True))
    return f"| {record.name} | {content['data']} | {commands} | {content['minutes']} | {counted} | {where} |"


def page(records: dict[str, Record], claims: Sequence[dict[str, Any]]) -> str:
    """Return the page with a table of all claims and one of the studies."""
    outcomes = [judge(claim, records) for claim in claims]
    lines = [
        INTRODUCTION, "![the difference that every claim is about](findings.svg)", "",
        f"{len(claims)} claims: {counts(outcomes)}. {asides(claims, outcomes)}", "",
        "| claim | where | study | result | verdict | why |", "|---|---|---|---|---|---|",
        *map(claim_row, claims, outcomes), "",
        "## Studies", "",
        "Minutes are of one core, for all seeds; `$TOOLS` is the folder of mmdet's or mmsegmentation's own tools "
        "(`.mim/tools` of the package). Seeds are counted for each setting.", "",
        "| study | data, metric | command | minutes | seeds | figures |", "|---|---|---|---:|---|---|",
        *(study_row(record) for record in records.values()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def counts(outcomes: Sequence[Outcome]) -> str:
    """Return the numbers of claims by verdict."""
    number = Counter(judged.verdict for judged in outcomes)
    return ", ".join(f"{number[verdict]} {verdict}" for verdict in (SEEN, NOT, CANNOT, MISSING) if number[verdict])


def asides(claims: Sequence[dict[str, Any]], outcomes: Sequence[Outcome]) -> str:
    """Return how many of the claims that are seen count operations, and how many repeat another on other data."""
    seen = [claim for claim, judged in zip(claims, outcomes) if judged.verdict == SEEN]
    operations = sum(map(counts_operations, seen))
    repeated = sum("repeats" in claim for claim in seen)
    return f"Of those seen, {operations} only count operations, and {repeated} repeat another claim on other data."


def listing(records: dict[str, Record], missing: Sequence[str]) -> str:
    """Return a line for each study, and the total of missing ones."""
    lines = []
    for name in [*missing, *(name for name in records if name not in missing)]:
        content = records[name].content
        state = f"missing, about {content['minutes']} minutes of one core" if name in missing else "measured"
        lines.append(f"{name:20s} {state}: {content['data']}")
    minutes = sum(records[name].content["minutes"] for name in missing)
    return "\n".join([*lines, f"missing: {len(missing)} studies, about {minutes} minutes of one core"])


def carry_out_all(names: Sequence[str], jobs: int, root: Path = ROOT) -> list[str]:
    """Run studies, ``jobs`` at a time, and rewrite the page after each; return the errors of failed ones."""
    records, claims = load(root)
    errors = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(records[name].carry_out): name for name in names}
        for done in as_completed(running):
            if isinstance(error := done.exception(), StudyError):
                errors.append(f"{running[done]}: {error}")
                print(f"findings: {errors[-1]}", file=sys.stderr, flush=True)
            elif error:
                raise error
            else:
                print(f"{running[done]}: finished", flush=True)
            write_text(root / BENCHMARKS / "findings.md", page(records, claims))
    return errors


def main(arguments: list[str] | None = None) -> int:
    parser = command_parser("study findings", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="list the studies and stop")
    what.add_argument("--write", action="store_true", help="write the page and stop")
    what.add_argument(
        "--collect", action="store_true", help="copy figures of unfinished studies, write the page and stop"
    )
    what.add_argument("--studies", nargs="+", metavar="NAME", help="studies to run; default: all missing ones")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="studies at a time, default %(default)s")
    options = parser.parse_args(arguments)
    records, claims = load()
    runnable = [name for name, record in records.items() if "product" in record.content]
    unfinished = [name for name in runnable if not records[name].finished]
    missing = sorted(unfinished, key=lambda name: records[name].content["minutes"])
    for name in options.studies or ():
        if name not in runnable:
            parser.error(f"--studies must be among {', '.join(runnable)}, got {name!r}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    if options.list:
        print(listing(records, missing))
        return 0
    need("matplotlib")
    errors: list[str] = []
    if options.collect:
        for name in missing:
            records[name].collect()
    elif not options.write:
        if Path.cwd() != ROOT:
            parser.error(f"studies run in the repository's root, {ROOT}, not in {Path.cwd()}")
        print(listing(records, missing), flush=True)
        errors = carry_out_all(options.studies or missing, options.jobs)
        records, claims = load()
    outcomes = [judge(claim, records) for claim in claims]
    write_text(ROOT / BENCHMARKS / "findings.md", page(records, claims))
    draw_claims(claims, outcomes, ROOT / BENCHMARKS / "findings.svg")
    print(counts(outcomes))
    print(f"written: {BENCHMARKS / 'findings.md'} and .svg")
    return 2 if errors else 0
