"""What is known of a run that has ended, read from its log, and kept so that a later comparison reuses it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron.demo.process import error_lines
from megatron.demo.training_log import TrainingLog
from megatron.experiments.compare_contenders import Run, Settings
from megatron.experiments.compare_data import Corpus

FORMAT = 1
RECORD, LOG = "run.json", "train.log"

DIVERGED_FACTOR = 1.1
"""A run that ends with a held-out loss this many times the training loss it began with has not learned but diverged."""

# Of the evaluations between steps and of the one after the last, which names the set; one validation set of several
# has a number.
_HELD_OUT = re.compile(
    r"^ ?validation(?:-0)? loss at iteration (\d+)(?: on validation set)? \| lm loss value: ([-+.\w]+)"
)
_NOT_FINITE = re.compile(r"\b(nan|inf|infinite|not finite)\b", re.IGNORECASE)

Outcome = Literal["finished", "diverged", "failed"]


class Point(NamedTuple):
    """Of a held-out curve."""

    step: int
    seconds: float
    """In training steps up to here: without start-up and evaluations."""
    loss: float
    """Nats per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the log of a run says."""

    outcome: Outcome
    reason: str = ""
    """Why it did not finish."""
    train: tuple[tuple[int, float], ...] = ()
    """Step and training loss."""
    train_loss_at_end: float | None = None
    """Mean over the last tenth of the steps, ten at most."""
    held_out: tuple[Point, ...] = ()
    seconds: float = 0.0
    """Of all training steps."""
    tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A run that has ended, and under which conditions it ran."""

    run: Run
    measured: Measured
    command: tuple[str, ...]
    folder: str
    """Of its log, relative to the comparison's."""
    wall_seconds: float
    """All of it, start-up and evaluations included."""
    started: str
    load_average: float
    """Of the machine when the run started, over a minute."""
    environment: dict[str, Any]
    """See `compare_environment`."""

    @property
    def final_loss(self) -> float | None:
        """Held-out loss at the end, None if the run diverged or failed."""
        return self.measured.held_out[-1].loss if self.measured.outcome == "finished" else None


def measure(log: Path, status: int, steps: int) -> Measured:
    """Read the log of a run that has ended.

    Args:
        log: the file.
        status: the exit status of the process, negative for a signal.
        steps: that the run was to make.

    Returns:
        What came out.
    """
    with open(log, encoding="utf-8", errors="replace") as lines:
        training, evaluations = read_lines(lines)
    seconds_at = dict(zip((line.number for line in training.iterations), training.seconds, strict=True))
    points = tuple(
        Point(step, seconds_at[step], loss)
        for step, loss in sorted(evaluations.items())
        if step in seconds_at and math.isfinite(loss)
    )
    outcome, reason = _outcome(log, status, training, evaluations.get(steps), steps)
    return Measured(
        outcome=outcome,
        reason=reason,
        train=tuple((line.number, line.loss) for line in training.iterations if math.isfinite(line.loss)),
        train_loss_at_end=_finite(training.loss_at_end()) if training.iterations else None,
        held_out=points,
        seconds=training.seconds[-1] if training.iterations else 0.0,
        tokens_per_second=training.tokens_per_second(),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_lines(lines: Iterable[str]) -> tuple[TrainingLog, dict[int, float]]:
    """Read Megatron's output.

    Args:
        lines: of the log.

    Returns:
        The training steps, and the held-out loss by step.
    """
    training, evaluations = TrainingLog(), {}
    for line in lines:
        training.read(line)
        if match := _HELD_OUT.match(line):
            evaluations[int(match[1])] = float(match[2])
    return training, evaluations


def _outcome(log: Path, status: int, training: TrainingLog, final: float | None, steps: int) -> tuple[Outcome, str]:
    if status < 0:
        return "failed", f"ended by signal {-status}"
    if status > 0:
        # Without Megatron's prefix of the rank; the log has all of it.
        error = re.sub(r"^\[rank\d+\]: ", "", "".join(error_lines(log, 1))).strip() or "no output"
        if _NOT_FINITE.search(error):
            return "diverged", f"a loss or gradient was not finite after {len(training.iterations)} steps"
        return "failed", f"status {status}: {error}"
    if final is not None and not math.isfinite(final):
        return "diverged", "the held-out loss at the end is not finite"
    last = training.iterations[-1].number if training.iterations else 0
    if last != steps or final is None:
        evaluated = "no evaluation after it" if final is None else "an evaluation after it"
        return "failed", f"the log ends at step {last} of {steps}, with {evaluated}"
    first = training.iterations[0].loss
    if final > DIVERGED_FACTOR * first:
        return "diverged", f"held-out loss {final:.3f} at the end, training loss {first:.3f} at the start"
    return "finished", ""


class Store:
    """The runs kept in a folder, one folder each with its log and its record.

    The name of a run's folder ends with a hash of all that it depends on. A record is written when the run has ended,
    under another name first, so that one that is there is whole.
    """

    def __init__(self, folder: Path, settings: Settings, corpus: Corpus) -> None:
        self.folder = folder
        self._settings = settings
        self._corpus = corpus

    def command(self, run: Run) -> list[str]:
        """Spell out a run: `pretrain_gpt.py` and its flags."""
        return self._settings.command(run, self._corpus.flags)

    def name(self, run: Run) -> str:
        """Name of a run's folder: readable, then the key.

        The key covers the command, the contents of the data, and what the seconds depend on beside these.
        """
        depends_on = [FORMAT, self.command(run), self._corpus.digest, self._settings.jobs, self._settings.threads]
        key = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
        return f"{run.optimizer}-lr{run.rate:g}-seed{run.seed}-{key[:16]}"

    def load(self, run: Run) -> Record | None:
        """Look for a run that has ended.

        Args:
            run: which one.

        Returns:
            Its record; None if there is none, or none of this format, or the run failed: what made it fail may be gone.
        """
        path = self.folder / self.name(run) / RECORD
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        if held.get("format") != FORMAT:
            return None
        record = record_from_json(held)
        return None if record.measured.outcome == "failed" else record

    def keep(self, record: Record, log: Path) -> None:
        """Keep a run that has ended.

        Args:
            record: what came out.
            log: its log, which is moved here.
        """
        folder = self.folder / self.name(record.run)
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(log, folder / LOG)
        write_atomically(folder / RECORD, json.dumps(record_to_json(record), indent=1, allow_nan=False) + "\n")


def record_to_json(record: Record) -> dict[str, Any]:
    """Turn a record into what JSON can hold."""
    return {"format": FORMAT, **asdict(record)}


def record_from_json(held: dict[str, Any]) -> Record:
    """Turn JSON into a record; the inverse of `record_to_json`."""
    fields = {name: value for name, value in held.items() if name != "format"}
    measured = fields["measured"]
    measured["train"] = tuple((step, loss) for step, loss in measured["train"])
    measured["held_out"] = tuple(Point(*point) for point in measured["held_out"])
    fields |= {"run": Run(**fields["run"]), "measured": Measured(**measured), "command": tuple(fields["command"])}
    return Record(**fields)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that under its name there is the old content or the new one, never a part.

    Args:
        path: the file.
        content: what it is to hold.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
