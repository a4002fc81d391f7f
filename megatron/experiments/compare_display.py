"""Shows how far a comparison is: bars on a terminal, a line for each run that starts or ends elsewhere too."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron.experiments.compare_contenders import Run
from megatron.experiments.compare_records import Record


class Display:
    """The terminal during a comparison."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._done = 0
        self._tasks: dict[Run, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._all = self._progress.add_task("runs", total=None)

    def __enter__(self) -> Display:
        """Show the bars."""
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Take the bars away."""
        self._progress.stop()

    def started(self, run: Run) -> None:
        """Say that a run has started."""
        if self._console.is_terminal:
            self._tasks[run] = self._progress.add_task(str(run), total=self._steps)
        else:
            self._say(f"started {run}")

    def ended(self, record: Record, *, reused: bool) -> None:
        """Say how a run ended."""
        self._done += 1
        measured = record.measured
        if record.final_loss is not None:
            outcome = f"held-out loss {record.final_loss:.4f}, {measured.seconds:.1f} s"
        else:
            outcome = f"{measured.outcome}: {measured.reason}"
        self._say(f"{'reused ' if reused else 'ended '} {record.run}: {outcome}")
        if record.run in self._tasks:
            self._progress.remove_task(self._tasks.pop(record.run))

    def update(self, steps: Mapping[Run, int], waiting: int) -> None:
        """Move the bars.

        Args:
            steps: made by each active run.
            waiting: runs that are known to be needed and have not started; extensions and seeds may follow.
        """
        for run, step in steps.items():
            if run in self._tasks:
                self._progress.update(self._tasks[run], completed=step)
        self._progress.update(self._all, completed=self._done, total=self._done + len(steps) + waiting)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
