"""Statistics of measured times."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Times of steps, seconds."""

    count: int
    mean: float
    median: float
    p99: float
    """The smallest value that 99 % of all are not above; below 100 values the largest."""

    @property
    def spread(self) -> float:
        """99th percentile over median: 1 where all steps are alike."""
        return self.p99 / self.median

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**dataclasses.asdict(self), "spread": self.spread}


def summarize(seconds: Sequence[float]) -> Summary:
    """Reduce times.

    Args:
        seconds: at least one.

    Returns:
        Their summary.
    """
    ordered = sorted(seconds)
    return Summary(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        median=statistics.median(ordered),
        p99=ordered[math.ceil(0.99 * len(ordered)) - 1],
    )


def shares(phases: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Shares of the phases in all steps, and of what lies between them as `other`.

    Args:
        phases: seconds by phase of each step.
        seconds: of each step.

    Returns:
        By phase; they add up to 1.
    """
    whole = sum(seconds)
    names = dict.fromkeys(name for step in phases for name in step)
    found = {name: sum(step.get(name, 0.0) for step in phases) / whole for name in names}
    return {**found, "other": 1.0 - sum(found.values())}
