"""Reads the lines that Megatron's training loop prints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)\s*\|(.*)")
_VALIDATION = re.compile(r"\bvalidation loss at iteration (\d+) on validation set\s*\|.*?\blm loss value: (\S+)")
_SEQUENCE_LENGTH = re.compile(r"^\s+seq_length \.+ (\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One log line of the training loop; with `--log-interval` n it stands for the n iterations before it."""

    number: int
    """Counted from 1."""
    total: int
    """`--train-iters`."""
    loss: float
    """Nats per token, the mean over the logged iterations."""
    seconds: float
    """Per iteration, the mean over the logged iterations."""
    global_batch_size: int
    """Samples per iteration."""
    learning_rate: float | None
    grad_norm: float | None


def parse_iteration(line: str) -> Iteration | None:
    """Read a line like ` [time] iteration 1/ 50 | ... | lm loss: 6.93E+00 | ...`.

    Args:
        line: one line of the log.

    Returns:
        Its numbers, or None if it is another line or names no loss (an iteration whose step was skipped).
    """
    match = _ITERATION.search(line)
    if match is None:
        return None
    fields = dict(part.rsplit(":", 1) for part in match[3].split("|") if ":" in part)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    if "lm loss" not in values:
        return None
    return Iteration(
        number=int(match[1]),
        total=int(match[2]),
        loss=float(values["lm loss"]),
        seconds=float(values["elapsed time per iteration (ms)"]) / 1000,
        global_batch_size=int(values["global batch size"]),
        learning_rate=_number(values.get("learning rate")),
        grad_norm=_number(values.get("grad norm")),
    )


def _number(text: str | None) -> float | None:
    return None if text is None else float(text)


@dataclass(kw_only=True, slots=True)
class TrainingLog:
    """What is known of a run from its log so far."""

    iterations: list[Iteration] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    """Validation loss in nats per token, by iteration."""
    sequence_length: int | None = None

    def read(self, line: str) -> Iteration | None:
        """Take in one line.

        Args:
            line: one line of the log.

        Returns:
            The iteration, if the line reports one.
        """
        iteration = parse_iteration(line)
        if iteration is not None:
            self.iterations.append(iteration)
        elif match := _VALIDATION.search(line):
            self.validation[int(match[1])] = float(match[2])
        elif self.sequence_length is None and (match := _SEQUENCE_LENGTH.match(line)):
            self.sequence_length = int(match[1])
        return iteration

    @classmethod
    def of(cls, lines: Iterable[str]) -> TrainingLog:
        """Read a whole log.

        Args:
            lines: its lines.

        Returns:
            What they say.
        """
        log = cls()
        for line in lines:
            log.read(line)
        return log

    @property
    def steps(self) -> list[int]:
        """Iterations that each log line stands for; 1 for the first, since where a resumed run began is not in it."""
        numbers = [iteration.number for iteration in self.iterations]
        return [1, *(later - earlier for earlier, later in pairwise(numbers))] if numbers else []

    @property
    def seconds(self) -> list[float]:
        """Time in iterations up to each log line: without start-up, evaluation and checkpoints."""
        return list(accumulate(n * line.seconds for n, line in zip(self.steps, self.iterations, strict=True)))

    def tokens_per_second(self) -> float | None:
        """Speed of all ranks together in training iterations.

        Returns:
            Tokens per second, None before it is known.
        """
        if self.sequence_length is None or not self.iterations:
            return None
        samples = sum(n * line.global_batch_size for n, line in zip(self.steps, self.iterations, strict=True))
        return samples * self.sequence_length / self.seconds[-1]

    def loss_at_start(self) -> float:
        """Loss of the first log line, in nats per token."""
        return self.iterations[0].loss

    def loss_at_end(self) -> float:
        """Mean loss of the last tenth of the log lines, ten at most, in nats per token: one batch's loss is noisy."""
        last = [iteration.loss for iteration in self.iterations[-max(1, min(10, len(self.iterations) // 10)) :]]
        return sum(last) / len(last)
