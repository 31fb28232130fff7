"""Rules that decide from samples whether a claim is seen.

The interval of a difference is Student's, at 95 %: of the differences of equal seeds if both settings have at least two
seeds in common, else Welch's of two means. A single seed is compared with the other setting's seeds by their prediction
interval, or with another single seed by the intervals over the test sentences; without either it decides nothing.

A claim that one setting is *above* another is a claim of sign: it is seen if the interval lies above 0, and not seen if
it lies below. The sizes of the documents' differences are not tested, since they are on the scale of another metric. A
claim that one is *as good* is a claim of equivalence: it is seen if it is behind by less than a margin, interval
included, and not seen if by more. Either side of a comparison may be several settings, which stand for their mean: that
``b`` is above ``[a, c]`` says that b gains more over a than c over b.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SEEN, NOT, CANNOT, MISSING = "seen", "not seen", "cannot be seen at this size", "not measured yet"
# 97.5 % of Student's t, by degrees of freedom
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MARGIN = 1.0  # of "as good", in points of the study's metric, if the claim states no other


@dataclass(frozen=True)
class Sample:
    """Results of one setting.

    Attributes:
        values: One value per seed.
        interval: Half of the 95 % interval over test sentences, if the study has one.
        exact: Whether the value only depends on the architecture, not on seeds.
        seeds: The seed of each value; empty if unknown.
    """

    values: tuple[float, ...]
    interval: float | None = None
    exact: bool = False
    seeds: tuple[int, ...] = ()

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; 0 for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        if len(self.values) > 1 and not self.exact:
            return f"{self.mean:.1f} ± {self.deviation:.1f}"
        return f"{self.mean:.1f}" + (f" (± {self.interval:.1f} of the texts)" if self.interval is not None else "")


Samples = Mapping[str, Sample]


@dataclass(frozen=True)
class Outcome:
    """Verdict on a claim, with its figures, its reason, and the differences with half of their 95 % intervals."""

    verdict: str
    result: str = ""
    why: str = ""
    differences: tuple[tuple[float, float | None], ...] = ()


def counts_operations(claim: Mapping[str, Any]) -> bool:
    """Return whether a claim compares operations, which need no training."""
    return "/operations" in str(claim.get("above"))


def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t, rounded up for a fraction of a degree and beyond the table."""
    return STUDENT[min(int(freedom), len(STUDENT) - 1)]


def difference(a: Sample, b: Sample) -> tuple[float, float | None, str]:
    """Return the difference a - b, half of its 95 % interval (None if unknown), and what the interval is of."""
    mean = a.mean - b.mean
    if a.exact and b.exact:
        return mean, 0.0, "operations, which have no variation"
    common = sorted(set(a.seeds) & set(b.seeds))
    if len(common) > 1:
        pairs = [a.values[a.seeds.index(seed)] - b.values[b.seeds.index(seed)] for seed in common]
        half = student(len(pairs) - 1) * statistics.stdev(pairs) / math.sqrt(len(pairs))
        return statistics.fmean(pairs), half, f"{len(pairs)} paired seeds"
    few, many = sorted((a, b), key=lambda sample: len(sample.values))
    if len(few.values) > 1:
        parts = [(sample.deviation**2 / len(sample.values), len(sample.values) - 1) for sample in (a, b)]
        total = sum(part for part, _ in parts)
        freedom = total**2 / sum(part**2 / n for part, n in parts) if total else math.inf
        return mean, student(min(freedom, 1e9)) * math.sqrt(total), "seeds"
    if (n := len(many.values)) > 2:
        return mean, student(n - 1) * many.deviation * math.sqrt(1 + 1 / n), "one seed against several"
    if a.interval is not None and b.interval is not None:
        return mean, math.hypot(a.interval, b.interval), "test sentences, one seed"
    return mean, None, "one seed, whose variation is unknown"


def above(shift: float, half: float | None, p: float | None, margin: float) -> str:
    """Return the verdict on "the first is better", by the sign; a ``p`` of a paired bootstrap below 0.01 decides."""
    if half is None:
        return CANNOT
    if p is not None and p < 0.01:
        half = 0.0
    return SEEN if shift > half else NOT if shift < -half else CANNOT


def as_good(shift: float, half: float | None, p: float | None, margin: float) -> str:
    """Return the verdict on "the first is behind by less than ``margin``"."""
    if half is None:
        return CANNOT
    if p is not None and p < 0.01 and shift < -margin:
        return NOT
    return SEEN if shift - half > -margin else NOT if shift + half < -margin else CANNOT


RULES = {"above": above, "as_good": as_good}


def middle(samples: Sequence[Sample]) -> Sample:
    """Return the means of several settings, of the seeds they share."""
    seeds = tuple(seed for seed in samples[0].seeds if all(seed in sample.seeds for sample in samples))
    rows = ([sample.values[sample.seeds.index(seed)] for sample in samples] for seed in seeds)
    return Sample(tuple(map(statistics.fmean, rows)), seeds=seeds)


def compare(samples: Samples, rule: str, pair: list[str | list[str]], claim: Mapping[str, Any]) -> Outcome:
    """Apply a rule to a pair of settings, or of means of settings."""
    a, b = (samples[side] if isinstance(side, str) else middle([samples[name] for name in side]) for side in pair)
    names = [f"`{side}`" if isinstance(side, str) else f"mean of `{'` and `'.join(side)}`" for side in pair]
    shift, half, of = difference(a, b)
    p, margin = claim.get("p"), claim.get("margin", MARGIN)
    verdict = RULES[rule](shift, half, p, margin)
    why = of if not half else f"± {half:.1f} of {of}"
    if p is not None and p < 0.01:
        why = f"paired bootstrap over the test sentences, one seed: p = {p}"
    if rule == "as_good":
        why += f"; margin {margin:g}"
    shown = round(shift, 1) + 0.0  # never -0.0
    return Outcome(verdict, f"{names[0]} {a}, {names[1]} {b}: {shown:+.1f}", why, ((shift, half),))


def outcome(claim: Mapping[str, Any], samples: Samples) -> Outcome:
    """Return the verdict on a claim: seen if all its comparisons are seen, not seen if one is not.

    Raises:
        KeyError: a sample is missing.
    """
    if "beyond" in claim:
        return Outcome(CANNOT, "", claim["beyond"])
    rule = next(name for name in RULES if name in claim)
    outcomes = [compare(samples, rule, pair, claim) for pair in claim[rule]]
    verdicts = [part.verdict for part in outcomes]
    verdict = next((v for v in (NOT, CANNOT) if v in verdicts), SEEN)
    reasons = dict.fromkeys(part.why for part in outcomes if part.verdict == verdict)
    differences = tuple(one for part in outcomes for one in part.differences)
    return Outcome(verdict, "; ".join(part.result for part in outcomes), "; ".join(reasons), differences)
