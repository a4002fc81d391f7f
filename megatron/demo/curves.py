"""Loss curves of Megatron runs, from a log file or a TensorBoard folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.demo.training_log import TrainingLog


class NoCurveError(ValueError):
    """A path that holds no loss; the message says what was expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Training loss of one run, with its validation points."""

    label: str
    iterations: list[int]
    losses: list[float]
    """Nats per token."""
    seconds: list[float]
    """Since training began: time in iterations for a log, clock time since the first point for TensorBoard."""
    validation: dict[int, float]
    """Validation loss by iteration, in nats per token."""

    def seconds_at(self, iteration: int) -> float:
        """Time when an iteration was over.

        Args:
            iteration: its number.

        Returns:
            Seconds of the last point that is not later.
        """
        earlier = [second for number, second in zip(self.iterations, self.seconds, strict=True) if number <= iteration]
        return earlier[-1] if earlier else 0.0


def read_curve(path: Path, label: str | None = None) -> Curve:
    """Read a run's losses.

    Args:
        path: a file with Megatron's output, or a folder written by `--tensorboard-dir`.
        label: name in a legend, the path if None.

    Returns:
        The curve.

    Raises:
        NoCurveError: the path does not exist or holds no losses.
    """
    label = label if label is not None else str(path)
    if path.is_dir():
        return _from_tensorboard(path, label)
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            curve = curve_of(TrainingLog.of(lines), label)
    except OSError as error:
        raise NoCurveError(f"{path}: cannot be read: {error.strerror}") from error
    if not curve.iterations:
        raise NoCurveError(f"{path}: no line like 'iteration 1/ 10 | ... | lm loss: ...' of Megatron's training loop")
    return curve


def curve_of(log: TrainingLog, label: str) -> Curve:
    """Turn a log that has been read into a curve.

    Args:
        log: the log.
        label: name in a legend.

    Returns:
        The curve, empty if the log holds no iteration.
    """
    return Curve(
        label=label,
        iterations=[iteration.number for iteration in log.iterations],
        losses=[iteration.loss for iteration in log.iterations],
        seconds=log.seconds,
        validation=dict(log.validation),
    )


def _from_tensorboard(folder: Path, label: str) -> Curve:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if "lm loss" not in tags:
        found = f"it has {', '.join(sorted(tags))}" if tags else "it has no TensorBoard scalars"
        raise NoCurveError(f"{folder}: no scalar named 'lm loss', which Megatron writes to --tensorboard-dir; {found}")
    points = events.Scalars("lm loss")
    validation = events.Scalars("lm loss validation") if "lm loss validation" in tags else []
    return Curve(
        label=label,
        iterations=[point.step for point in points],
        losses=[point.value for point in points],
        seconds=[point.wall_time - points[0].wall_time for point in points],
        validation={point.step: point.value for point in validation},
    )
