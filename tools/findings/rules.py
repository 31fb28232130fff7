"""Rules that decide from samples whether a claim is seen.

Three seeds per side are few, so the rules are strict. One setting is *above* another if each of its seeds is above each
of the other's (for three against three, one time in twenty by chance). If the seeds overlap, the claim is *not seen* if
the difference that the document reports is larger than the difference here and twice its standard error, and *cannot be
seen at this size* otherwise. For a single seed, the spread is that of the other side's seeds (a 95 % prediction
interval), or the 95 % interval over the test sentences; without either, a single seed decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tools.findings.values import Sample, Samples

Verdict = Literal["seen", "not seen", "cannot be seen at this size", "not measured yet"]
SEEN, NOT, CANNOT, MISSING = "seen", "not seen", "cannot be seen at this size", "not measured yet"
SEEDS = 3  # per side, for a verdict by the seeds' order
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}  # 97.5 % of Student's t by degrees of freedom


@dataclass(frozen=True)
class Outcome:
    """Result of a rule.

    Attributes:
        verdict: One of four verdicts.
        result: The figures.
        why: Reason for the verdict.
    """

    verdict: str
    result: str = ""
    why: str = ""


class Rule(Protocol):
    """Rule of a claim."""

    def __call__(self, samples: Samples) -> Outcome:
        """Apply the rule."""
        ...


def width(a: Sample, b: Sample) -> float | None:
    """Return half the interval of the difference of two means, or None if unknown."""
    if a.exact and b.exact:
        return 0.0
    few, many = sorted((a, b), key=lambda sample: len(sample.values))
    n = len(many.values)
    if len(few.values) > 1:
        return 2 * math.hypot(a.error, b.error)
    if n > 2:
        return STUDENT.get(n - 1, 2.0) * many.deviation * math.sqrt(1 + 1 / n)
    if a.interval is not None and b.interval is not None:
        return math.hypot(a.interval, b.interval)
    return None


def apart(a: Sample, b: Sample) -> bool:
    """Return whether ``a`` is above ``b`` by more than the variation of seeds or test sentences."""
    if a.exact and b.exact:
        return a.mean > b.mean
    if min(len(a.values), len(b.values)) >= SEEDS:
        return min(a.values) > max(b.values)
    if min(len(a.values), len(b.values)) > 1:
        return False  # two seeds are apart too often by chance
    found = width(a, b)
    return found is not None and a.mean - b.mean > found


def _figures(samples: Samples, names: Sequence[str]) -> str:
    return ", ".join(f"`{name}` {samples[name]}" for name in names)


def _seeds(*samples: Sample) -> str:
    return "" if min(len(one.values) for one in samples) > 1 or all(one.exact for one in samples) else " (one seed)"


@dataclass(frozen=True)
class Above:
    """One setting is better than another.

    Attributes:
        high: The better setting.
        low: The other setting.
        effect: Difference in the document, in the same unit; None if it reports none.
        p: p-value of the paired test in the study's page, if any; it then decides.
    """

    high: str
    low: str
    effect: float | None = None
    p: float | None = None

    def __call__(self, samples: Samples) -> Outcome:
        """Compare the two settings."""
        high, low = samples[self.high], samples[self.low]
        difference, found = high.mean - low.mean, width(high, low)
        result = f"{_figures(samples, (self.high, self.low))}: {difference:+.1f}"
        one = _seeds(high, low)
        if self.p is not None and self.p < 0.01:
            verdict = SEEN if difference > 0 else NOT
            return Outcome(verdict, result, f"paired bootstrap over the test sentences: p = {self.p}{one}")
        if apart(high, low):
            return Outcome(SEEN, result, f"larger than the variation of seeds or test sentences{one}")
        if apart(low, high):
            return Outcome(NOT, result, f"the opposite order{one}")
        if found is None:
            return Outcome(CANNOT, result, "one seed, whose variation is unknown")
        if self.effect is not None and difference + found < self.effect:
            return Outcome(
                NOT, result, f"chance makes ± {found:.1f}, which excludes the document's {self.effect:+.1f}{one}"
            )
        return Outcome(CANNOT, result, f"within chance, ± {found:.1f}{one}")


@dataclass(frozen=True)
class AsGood:
    """One setting is as good as another, or better.

    Attributes:
        one: The setting.
        other: The setting for comparison.
        margin: Differences up to this size are ignored.
        p: p-value of the paired test for a difference in the study's page, if any.
    """

    one: str
    other: str
    margin: float
    p: float | None = None

    def __call__(self, samples: Samples) -> Outcome:
        """Compare the two settings."""
        one, other = samples[self.one], samples[self.other]
        behind, found = other.mean - one.mean, width(one, other)
        result = f"{_figures(samples, (self.one, self.other))}: {-behind:+.1f}"
        few = _seeds(one, other)
        if self.p is not None and self.p < 0.01 and behind > self.margin:
            return Outcome(NOT, result, f"paired bootstrap over the test sentences: p = {self.p}{few}")
        if found is None:
            return Outcome(CANNOT, result, "one seed, whose variation is unknown")
        if behind + found <= self.margin:
            return Outcome(SEEN, result, f"behind by less than {self.margin:g}, chance included{few}")
        if behind > self.margin and apart(other, one):
            return Outcome(NOT, result, f"behind by more than {self.margin:g}, beyond chance{few}")
        return Outcome(
            CANNOT, result, f"within chance, ± {found:.1f}; differences up to {self.margin:g} are ignored{few}"
        )


@dataclass(frozen=True)
class Every:
    """Conjunction of several rules: seen if all are seen, not seen if one is not."""

    rules: tuple[Rule, ...]

    def __call__(self, samples: Samples) -> Outcome:
        """Apply all rules."""
        outcomes = [rule(samples) for rule in self.rules]
        verdicts = [outcome.verdict for outcome in outcomes]
        verdict = NOT if NOT in verdicts else CANNOT if CANNOT in verdicts else SEEN
        reasons = dict.fromkeys(outcome.why for outcome in outcomes if outcome.verdict == verdict)
        return Outcome(verdict, "; ".join(outcome.result for outcome in outcomes), "; ".join(reasons))


@dataclass(frozen=True)
class Beyond:
    """A claim that no small data can test."""

    reason: str

    def __call__(self, samples: Samples) -> Outcome:
        """Return that the claim cannot be seen."""
        return Outcome(CANNOT, "", self.reason)
