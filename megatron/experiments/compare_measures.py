"""The numbers of a comparison, from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from megatron.experiments.compare_contenders import CONTENDERS, REFERENCE, Run, Settings
from megatron.experiments.compare_records import Point, Record
from megatron.experiments.compare_search import explore

Axis = Literal["step", "seconds"]


def first_at(points: Sequence[Point], target: float, axis: Axis) -> float | None:
    """Find when a curve first comes down to a loss, on straight lines between its points.

    Args:
        points: of the curve, in order.
        target: the loss.
        axis: steps or seconds.

    Returns:
        The place; None if no point is that low. A curve that is there at its first point may have been earlier: its
        first point is the answer, since nothing is known before it.
    """
    for number, point in enumerate(points):
        if point.loss <= target:
            if number == 0:
                return float(getattr(point, axis))
            before = points[number - 1]
            part = (before.loss - target) / (before.loss - point.loss)
            start, end = float(getattr(before, axis)), float(getattr(point, axis))
            return start + part * (end - start)
    return None


def loss_at(points: Sequence[Point], seconds: float) -> float | None:
    """Read a curve at a time, on straight lines between its points.

    Args:
        points: of the curve, in order.
        seconds: the time.

    Returns:
        The loss: None before the first point; after the last one, when the run was over, the last one's.
    """
    if not points or seconds < points[0].seconds:
        return None
    for before, point in pairwise(points):
        if seconds <= point.seconds:
            part = (seconds - before.seconds) / (point.seconds - before.seconds)
            return before.loss + part * (point.loss - before.loss)
    return points[-1].loss


@dataclass(frozen=True, slots=True)
class Sample:
    """A number of every seed; None where it does not exist."""

    values: tuple[float | None, ...]

    @property
    def known(self) -> list[float]:
        """Those that exist."""
        return [value for value in self.values if value is not None]

    @property
    def mean(self) -> float | None:
        """Of those that exist, None if none does."""
        return sum(self.known) / len(self.known) if self.known else None

    @property
    def half_range(self) -> float | None:
        """Half the difference of the largest and the smallest, None with fewer than two."""
        return (max(self.known) - min(self.known)) / 2 if len(self.known) > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Values and what they come to."""
        return {"values": list(self.values), "mean": self.mean, "half_range": self.half_range}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a comparison says of one contender, at the learning rate chosen for it."""

    name: str
    rate: float | None
    """The chosen one; None if no run of the grid came to its end."""
    rates: tuple[float, ...]
    """That were tried."""
    is_at_end: bool
    """The chosen rate is the lowest or highest that was tried: a better one may lie outside."""
    runs: tuple[Record, ...]
    """At the chosen rate, one for each seed."""
    losers: tuple[Record, ...]
    """At the other rates, and all if none was chosen."""
    held_out: Sample
    """Loss at the end."""
    train: Sample
    """Loss at the end."""
    at_reference_seconds: Sample
    """Held-out loss when the reference's whole run was over."""
    steps_to_reference: Sample
    """Steps to the reference's final held-out loss, of the reference's steps."""
    seconds_to_reference: Sample
    """The same in seconds."""
    speed: Sample
    """Tokens per second, of the reference's."""
    tokens_per_second: Sample

    @property
    def label(self) -> str:
        """In tables and figures."""
        return CONTENDERS[self.name].label

    @property
    def finished(self) -> tuple[Record, ...]:
        """Of the runs at the chosen rate those that came to their end."""
        return tuple(record for record in self.runs if record.final_loss is not None)


def summarise(names: Iterable[str], settings: Settings, records: Mapping[Run, Record]) -> list[Summary]:
    """Compare contenders with each other, seed by seed.

    Args:
        names: the contenders'.
        settings: of the comparison.
        records: all runs that were needed.

    Returns:
        One summary each, the lowest mean held-out loss first, contenders without one last.
    """
    names = list(names)
    reference = _chosen(REFERENCE, settings, records)[1] if REFERENCE in names else {}
    summaries = [_summary(name, settings, records, reference) for name in names]
    return sorted(summaries, key=lambda one: (one.held_out.mean is None, one.held_out.mean or 0.0))


def _chosen(name: str, settings: Settings, records: Mapping[Run, Record]) -> tuple[float | None, dict[int, Record]]:
    rate = explore(name, settings.grids[name], settings.seeds[0], records).best
    if rate is None:
        return None, {}
    runs = [Run(optimizer=name, rate=rate, seed=seed) for seed in settings.seeds]
    return rate, {run.seed: records[run] for run in runs if run in records}


def _summary(name: str, settings: Settings, records: Mapping[Run, Record], reference: Mapping[int, Record]) -> Summary:
    rate, chosen = _chosen(name, settings, records)
    found = explore(name, settings.grids[name], settings.seeds[0], records)
    others = [record for run, record in records.items() if run.optimizer == name and run.rate != rate]
    pairs = [
        (record, _finished(reference.get(seed)))
        for seed, record in chosen.items()
        if record.final_loss is not None
    ]  # fmt: skip
    return Summary(
        name=name,
        rate=rate,
        rates=found.rates,
        is_at_end=found.is_at_end,
        runs=tuple(chosen.values()),
        losers=tuple(sorted(others, key=lambda record: (record.run.rate, record.run.seed))),
        held_out=Sample(tuple(record.final_loss for record, _ in pairs)),
        train=Sample(tuple(record.measured.train_loss_at_end for record, _ in pairs)),
        at_reference_seconds=Sample(
            tuple(loss_at(own.measured.held_out, adam.measured.seconds) if adam else None for own, adam in pairs)
        ),
        steps_to_reference=Sample(tuple(_part(own, adam, "step") for own, adam in pairs)),
        seconds_to_reference=Sample(tuple(_part(own, adam, "seconds") for own, adam in pairs)),
        speed=Sample(tuple(_speed(own, adam) for own, adam in pairs)),
        tokens_per_second=Sample(tuple(record.measured.tokens_per_second for record, _ in pairs)),
    )


def _finished(record: Record | None) -> Record | None:
    return record if record is not None and record.final_loss is not None else None


def _part(own: Record, adam: Record | None, axis: Axis) -> float | None:
    if adam is None or adam.final_loss is None:
        return None
    place = first_at(own.measured.held_out, adam.final_loss, axis)
    return None if place is None else place / float(getattr(adam.measured.held_out[-1], axis))


def _speed(own: Record, adam: Record | None) -> float | None:
    if adam is None or not own.measured.tokens_per_second or not adam.measured.tokens_per_second:
        return None
    return own.measured.tokens_per_second / adam.measured.tokens_per_second
