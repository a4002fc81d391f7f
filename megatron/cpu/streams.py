"""Stand-ins for CUDA's streams and events on a device that runs every operation in program order.

A CPU tensor operation has finished when the call returns, so a wait is always already satisfied. Events keep the
wall-clock time at which they were recorded, so that `elapsed_time` still measures what was timed with them.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import torch


class Event:
    """A point in program order; stands in for `torch.cuda.Event`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded_at: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Remember the present wall-clock time.

        Args:
            stream: ignored, there is one order of execution.
        """
        self._recorded_at = time.perf_counter()

    def query(self) -> bool:
        """Say whether all work before the event is done.

        Returns:
            Always True.
        """
        return True

    def wait(self, stream: Stream | None = None) -> None:
        """Return at once: all earlier work is done.

        Args:
            stream: ignored, there is one order of execution.
        """

    def synchronize(self) -> None:
        """Return at once: all earlier work is done."""

    def elapsed_time(self, end_event: Event) -> float:
        """Measure the time between two recorded events.

        Args:
            end_event: the later event.

        Returns:
            Milliseconds from this event's record to `end_event`'s.

        Raises:
            RuntimeError: if either event was never recorded.
        """
        if self._recorded_at is None or end_event._recorded_at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) * 1e3


class Stream:
    """The one order of execution there is; stands in for `torch.cuda.Stream`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Give the priorities a stream may have.

        Returns:
            The lowest and the highest priority; both 0, since there is one stream.
        """
        return 0, 0

    def query(self) -> bool:
        """Say whether the stream is idle.

        Returns:
            Always True.
        """
        return True

    def synchronize(self) -> None:
        """Return at once: all earlier work is done."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once: all earlier work is done.

        Args:
            stream: the stream to wait for.
        """

    def wait_event(self, event: Event) -> None:
        """Return at once: all earlier work is done.

        Args:
            event: the event to wait for.
        """

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event at this point of the program.

        Args:
            event: the event to record, a new one if None.

        Returns:
            The recorded event.
        """
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
