"""Which runs a comparison needs next: learning rates of a grid on one seed, then the other seeds at the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from megatron.experiments.compare_contenders import Run

MAX_EXTENSIONS = 2
"""Rates that are added to a grid whose best rate is at an end."""


class HasLoss(Protocol):
    """What the search reads of a run that has ended."""

    @property
    def final_loss(self) -> float | None:
        """Held-out loss at the end, None if the run diverged or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """How far the search for a contender's learning rate is."""

    rates: tuple[float, ...]
    """Of the grid and its extensions, ascending."""
    missing: tuple[Run, ...]
    """Runs that must end before the search can go on."""
    best: float | None
    """Of the runs so far; None if none of them came to its end."""

    @property
    def is_at_end(self) -> bool:
        """Whether a better rate may lie outside."""
        return len(self.rates) > 1 and self.best in (self.rates[0], self.rates[-1])


def explore(optimizer: str, grid: Sequence[float], seed: int, results: Mapping[Run, HasLoss]) -> Exploration:
    """Follow the search as far as results go; the same results always lead to the same place.

    The best rate is the one of lowest held-out loss at the end (of two equal ones the lower). If it is an end of the
    grid, the grid grows by one rate there, `MAX_EXTENSIONS` times at most.

    Args:
        optimizer: the contender's name.
        grid: learning rates, ascending.
        seed: of the runs that choose.
        results: runs that have ended.

    Returns:
        Where the search is.
    """
    rates = list(grid)
    for extension in range(MAX_EXTENSIONS + 1):
        runs = [Run(optimizer=optimizer, rate=rate, seed=seed) for rate in rates]
        losses = {run.rate: results[run].final_loss for run in runs if run in results}
        finished = [(loss, rate) for rate, loss in losses.items() if loss is not None]
        found = Exploration(
            rates=tuple(rates),
            missing=tuple(run for run in runs if run not in results),
            best=min(finished)[1] if finished else None,
        )
        if found.missing or not found.is_at_end or extension == MAX_EXTENSIONS:
            break
        rates = _extended(rates, upwards=found.best == rates[-1])
    return found


def _extended(rates: Sequence[float], *, upwards: bool) -> list[float]:
    """Continue a grid by its own pattern: 1, 3, 10 by 30 or 0.3, and 1, 2, 4 by 8 or 0.5."""
    steps = [later / earlier for earlier, later in pairwise(rates)]
    if upwards:
        return [*rates, _rounded(rates[-1] * steps[-2 if len(steps) > 1 else -1])]
    return [_rounded(rates[0] / steps[1 if len(steps) > 1 else 0]), *rates]


def _rounded(rate: float) -> float:
    return float(f"{rate:.3g}")


def needed(
    optimizer: str, grid: Sequence[float], seeds: Sequence[int], results: Mapping[Run, HasLoss]
) -> tuple[Run, ...]:
    """Name the runs that can be started now.

    Args:
        optimizer: the contender's name.
        grid: learning rates, ascending.
        seeds: the first one chooses.
        results: runs that have ended.

    Returns:
        The runs, running ones among them; none if the contender is done.
    """
    found = explore(optimizer, grid, seeds[0], results)
    if found.missing or found.best is None:
        return found.missing
    chosen = [Run(optimizer=optimizer, rate=found.best, seed=seed) for seed in seeds[1:]]
    return tuple(run for run in chosen if run not in results)
