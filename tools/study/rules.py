"""Rules that decide from samples whether a claim is seen.

Three seeds per side are few, so the rules are strict. One setting is *above* another if each of its seeds is above each
of the other's (for three against three, one time in twenty by chance). If the seeds overlap, the claim is *not seen* if
the difference that the document reports is larger than the difference here and twice its standard error, and *cannot be
seen at this size* otherwise. For a single seed, the spread is that of the other side's seeds (a 95 % prediction
interval), or the 95 % interval over the test sentences; without either, a single seed decides nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SEEN, NOT, CANNOT, MISSING = "seen", "not seen", "cannot be seen at this size", "not measured yet"
SEEDS = 3  # per side, for a verdict by the seeds' order
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}  # 97.5 % of Student's t by degrees of freedom
MARGIN = 1.0  # differences that "as good" ignores


@dataclass(frozen=True)
class Sample:
    """Results of one setting.

    Attributes:
        values: One value per seed.
        interval: Half of the 95 % interval over test sentences, if the study has one.
        exact: Whether the value only depends on the architecture, not on seeds.
    """

    values: tuple[float, ...]
    interval: float | None = None
    exact: bool = False

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
    """Verdict on a claim, with its figures and its reason."""

    verdict: str
    result: str = ""
    why: str = ""


def width(a: Sample, b: Sample) -> float | None:
    """Return half the interval of the difference of two means, or None if unknown."""
    if a.exact and b.exact:
        return 0.0
    few, many = sorted((a, b), key=lambda sample: len(sample.values))
    n = len(many.values)
    if len(few.values) > 1:
        return 2 * math.hypot(*(sample.deviation / math.sqrt(len(sample.values)) for sample in (a, b)))
    if n > 2:
        return STUDENT.get(n - 1, 2.0) * many.deviation * math.sqrt(1 + 1 / n)
    if a.interval is not None and b.interval is not None:
        return math.hypot(a.interval, b.interval)
    return None


def apart(a: Sample, b: Sample) -> bool:
    """Return whether ``a`` is above ``b`` by more than the variation of seeds or test sentences."""
    if a.exact and b.exact:
        return a.mean > b.mean
    few = min(len(a.values), len(b.values))
    if few >= SEEDS:
        return min(a.values) > max(b.values)
    chance = width(a, b) if few == 1 else None  # two seeds are apart too often by chance
    return chance is not None and a.mean - b.mean > chance


def above(high: Sample, low: Sample, effect: float | None, p: float | None) -> tuple[str, str]:
    """Return verdict and reason of "``high`` is better than ``low``".

    Args:
        high: The better setting.
        low: The other one.
        effect: Difference in the document, in the same unit; None if it reports none.
        p: p-value of the paired test in the study's page, if any; it then decides.
    """
    difference, chance = high.mean - low.mean, width(high, low)
    if p is not None and p < 0.01:
        return SEEN if difference > 0 else NOT, f"paired bootstrap over the test sentences: p = {p}"
    if apart(high, low):
        return SEEN, "larger than the variation of seeds or test sentences"
    if apart(low, high):
        return NOT, "the opposite order"
    if chance is None:
        return CANNOT, ""
    if effect is not None and difference + chance < effect:
        return NOT, f"chance makes ± {chance:.1f}, which excludes the document's {effect:+.1f}"
    return CANNOT, f"within chance, ± {chance:.1f}"


def as_good(one: Sample, other: Sample, effect: float | None, p: float | None) -> tuple[str, str]:
    """Return verdict and reason of "``one`` is as good as ``other``, or better"; ``effect`` is not used."""
    behind, chance = other.mean - one.mean, width(one, other)
    if p is not None and p < 0.01 and behind > MARGIN:
        return NOT, f"paired bootstrap over the test sentences: p = {p}"
    if chance is None:
        return CANNOT, ""
    if behind + chance <= MARGIN:
        return SEEN, f"behind by less than {MARGIN:g}, chance included"
    if behind > MARGIN and apart(other, one):
        return NOT, f"behind by more than {MARGIN:g}, beyond chance"
    return CANNOT, f"within chance, ± {chance:.1f}; differences up to {MARGIN:g} are ignored"


RULES = {"above": above, "as_good": as_good}


def compare(samples: Samples, rule: str, pair: list[Any], p: float | None) -> Outcome:
    """Apply a rule to a pair of settings, which may have the document's difference as a third item."""
    first, second, effect = [*pair, None][:3]
    a, b = samples[first], samples[second]
    verdict, why = RULES[rule](a, b, effect, p)
    exact = a.exact and b.exact
    seeds = "" if min(len(a.values), len(b.values)) > 1 or exact else " (one seed)"
    result = f"`{first}` {a}, `{second}` {b}: {a.mean - b.mean:+.1f}"
    return Outcome(verdict, result, why + seeds if why else "one seed, whose variation is unknown")


def outcome(claim: Mapping[str, Any], samples: Samples) -> Outcome:
    """Return the verdict on a claim: seen if all its comparisons are seen, not seen if one is not.

    Raises:
        KeyError: a sample is missing.
    """
    if "beyond" in claim:
        return Outcome(CANNOT, "", claim["beyond"])
    rule = next(name for name in RULES if name in claim)
    outcomes = [compare(samples, rule, pair, claim.get("p")) for pair in claim[rule]]
    verdicts = [part.verdict for part in outcomes]
    verdict = next((v for v in (NOT, CANNOT) if v in verdicts), SEEN)
    reasons = dict.fromkeys(part.why for part in outcomes if part.verdict == verdict)
    return Outcome(verdict, "; ".join(part.result for part in outcomes), "; ".join(reasons))
