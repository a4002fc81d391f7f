"""Progress of a long run: a bar on a terminal, plain lines elsewhere; both on standard error."""

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Counts documents and bytes, and shows documents/s and MB/s."""

    def __init__(self, total_bytes: int | None, log_interval: int) -> None:
        """Prepares the display.

        Args:
            total_bytes: Size of the input; None if not known.
            log_interval: Documents between two plain lines.
        """
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._num_documents = 0
        self._num_bytes = 0
        self._next_line = log_interval
        self._start = time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        """Starts the bar if standard error is a terminal."""
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("tokenizing"),
                progress.BarColumn(),
                progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[rate]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total_bytes, rate="")
        return self

    def advance(self, num_documents: int, num_bytes: int) -> None:
        """Adds finished documents and the bytes of input they came from."""
        self._num_documents += num_documents
        self._num_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self._num_bytes, rate=self._rate())
        elif self._num_documents >= self._next_line:
            self._next_line = (self._num_documents // self._log_interval + 1) * self._log_interval
            print(f"processed {self._rate()}", file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the bar; prints the totals if the run succeeded."""
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            seconds = time.perf_counter() - self._start
            print(f"processed {self._rate()} in {seconds:.1f} s", file=sys.stderr, flush=True)

    def _rate(self) -> str:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        megabytes = self._num_bytes / 1e6
        return (
            f"{self._num_documents:,} documents, {megabytes:,.1f} MB "
            f"({self._num_documents / seconds:,.0f} documents/s, {megabytes / seconds:.2f} MB/s)"
        )
