"""Page with a table of all claims and one of the studies."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tools.findings.claims import CLAIMS, Claim
from tools.findings.rules import CANNOT, MISSING, NOT, SEEN, Beyond, Outcome
from tools.findings.studies import STUDIES, Study
from tools.findings.values import Samples
from tools.study import ROOT

INTRODUCTION = """\
# Claims of the documents, tested on small data

`python -m tools.findings` runs the missing studies and generates this page from the figures in this folder. Each row is
a claim of one of the four documents, with the document's figures in brackets, and a study that tests it.

* **seen**: every seed of one setting is above every seed of the other (for three against three, one time in twenty by
  chance); for a single seed, the difference is beyond a 95 % interval, or the paired bootstrap of the study's page has
  p < 0.01. "As good" is seen if a setting is behind by less than one point, chance included.
* **not seen**: the order is the opposite, or the interval of the difference excludes the document's difference.
* **cannot be seen at this size**: both differences are within chance, or no small study tests the claim.
* ± is the standard deviation over seeds; "of the texts" is half of the 95 % interval over the test sentences of
  one seed.

The networks have about a million parameters and are trained for minutes. A claim that is seen here does not confirm the
document's figures, and one that is not seen does not refute them.
"""


def outcome(claim: Claim, samples: Samples) -> Outcome:
    """Apply a claim's rule, unless its samples are missing."""
    if isinstance(claim.rule, Beyond):
        return claim.rule(samples)
    try:
        return claim.rule(samples)
    except KeyError as error:
        study = STUDIES[claim.study]
        how = f"`python -m tools.findings --studies {claim.study}`, about {study.minutes} minutes of one core"
        return Outcome(MISSING, why=f"`{error.args[0]}` is missing: {how}")


def row(claim: Claim, samples: Samples) -> str:
    """Return a claim's line of the table."""
    found = outcome(claim, samples)
    study = f"[{claim.study}](#studies)" if claim.study else ""
    why = "; ".join(part for part in (found.why, claim.note) if part)
    cells = [claim.text, f"{claim.document}, {claim.place}", study, found.result, f"**{found.verdict}**", why]
    return f"| {' | '.join(cells)} |"


def study_row(name: str, study: Study, samples: Samples) -> str:
    """Return a study's line of the table."""
    commands = "<br>".join(f"`{step.command}`" for step in study.steps)
    if study.page:
        commands += f"<br>measured before, see [{study.page}]({study.page})"
    where = f"[{study.file}]({study.file})" if samples else MISSING
    seeds = Counter(len(sample.values) for sample in samples.values() if not sample.exact)
    counted = ", ".join(f"{count}: {n} settings" for count, n in sorted(seeds.items(), reverse=True))
    return f"| {name} | {study.data} | {commands} | {study.minutes} | {counted} | {where} |"


def counts(root: Path = ROOT) -> Counter[str]:
    """Count the claims by verdict."""
    samples = {name: study.complete(root) for name, study in STUDIES.items()}
    return Counter(outcome(claim, samples.get(claim.study, {})).verdict for claim in CLAIMS)


def markdown(root: Path = ROOT) -> str:
    """Return the page, from the files in ``benchmarks`` in ``root``."""
    samples = {name: study.samples(root) for name, study in STUDIES.items()}
    complete = {name: study.complete(root) for name, study in STUDIES.items()}
    found = counts(root)
    total = ", ".join(f"{found[verdict]} {verdict}" for verdict in (SEEN, NOT, CANNOT, MISSING) if found[verdict])
    lines = [
        INTRODUCTION, f"{len(CLAIMS)} claims: {total}.", "",
        "| claim | where | study | result | verdict | why |", "|---|---|---|---|---|---|",
        *(row(claim, complete.get(claim.study, {})) for claim in CLAIMS), "",
        "## Studies", "",
        "Minutes are of one core, for all seeds; `$TOOLS` is the folder of mmdet's or mmsegmentation's own tools "
        "(`.mim/tools` of the package). Seeds are counted for each setting.", "",
        "| study | data, metric | command | minutes | seeds | figures |", "|---|---|---|---:|---|---|",
        *(study_row(name, study, samples[name]) for name, study in STUDIES.items()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
