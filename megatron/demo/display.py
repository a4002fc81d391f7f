"""Shows a run's progress: a moving bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron.demo.training_log import Iteration, TrainingLog

SECONDS_BETWEEN_LINES = 15.0


def follow(lines: Iterable[str], console: Console) -> TrainingLog:
    """Read a run's output to its end and show how far it is.

    Args:
        lines: the output, as it comes.
        console: where to show it.

    Returns:
        What the output said.
    """
    log = TrainingLog()
    shown = _Bar(console) if console.is_terminal else _Lines(console)
    with shown:
        for line in lines:
            if log.read(line):
                shown.show(log)
    return log


def summary(log: TrainingLog) -> str:
    """Loss and speed so far.

    Args:
        log: with at least one iteration.

    Returns:
        For example `loss 5.08, 7,912 tokens/s`.
    """
    speed = log.tokens_per_second()
    return f"loss {log.iterations[-1].loss:.3f}" + (f", {speed:,.0f} tokens/s" if speed else "")


class _Bar:
    """One line that moves."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[summary]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID = self._progress.add_task("starting 4 processes", total=None, summary="")

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, log: TrainingLog) -> None:
        last = log.iterations[-1]
        description = "training" if last.number < last.total else "evaluating, saving"
        self._progress.update(
            self._task, description=description, completed=last.number, total=last.total, summary=summary(log)
        )


class _Lines:
    """A line for the first and the last iteration, and every `SECONDS_BETWEEN_LINES`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def __enter__(self) -> _Lines:
        self._console.print("starting 4 processes ...")
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def show(self, log: TrainingLog) -> None:
        last: Iteration = log.iterations[-1]
        if monotonic() < self._next and last.number < last.total:
            return
        self._next = monotonic() + SECONDS_BETWEEN_LINES
        self._console.print(f"iteration {last.number}/{last.total}: {summary(log)}", highlight=False)
