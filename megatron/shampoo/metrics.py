"""What a step did, for the log: time by phase, refreshes, graft ratios."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import Tensor


@dataclasses.dataclass
class StepMetrics:
    """Figures of the last step of this rank; tensors stay on the device until somebody reads them."""

    refreshes: int = 0
    """Inverse roots and eigenbases computed in this step."""
    skipped: int = 0
    """Refreshes skipped, since the old eigenbasis still fits."""
    failed: int = 0
    """Refreshes that no solver could do."""
    graft_ratios: list[Tensor] = dataclasses.field(default_factory=list)
    """For each stack, norm of the grafting step over that of the preconditioned momentum, by block."""


class PhaseClock:
    """Time by phase of one step. Off by default; when on, it costs a device synchronisation when it is read."""

    def __init__(self, device: torch.device) -> None:
        """Args: the device whose work is timed."""
        self._cuda = device.type == "cuda"
        self.enabled = False
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a step."""
        self._marks = []
        self.mark("")

    def mark(self, phase: str) -> None:
        """End of a phase: the time since the last mark is added to it."""
        if self.enabled:
            self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by phase of the last step; empty where the clock was off."""
        if self._cuda and self._marks:
            torch.cuda.synchronize()
        spent: dict[str, float] = {}
        for (_, before), (phase, now) in zip(self._marks[:-1], self._marks[1:], strict=True):
            spent[phase] = spent.get(phase, 0.0) + _between(before, now)
        return spent

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(before: float | torch.cuda.Event, now: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(now, float):
        return now - before
    return before.elapsed_time(now) / 1000.0  # type: ignore[union-attr]
