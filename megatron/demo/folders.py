"""What the demo leaves where, relative to the root of the checkout."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run."""

    path: Path
    number: int
    """Counted from 1."""

    @property
    def log(self) -> Path:
        """All that the run printed."""
        return self.path / "train.log"

    @property
    def checkpoints(self) -> Path:
        """Megatron's `--save`."""
        return self.path / "checkpoints"

    @property
    def figure(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    def saved_iteration(self) -> int | None:
        """Iteration of the newest checkpoint.

        Returns:
            What Megatron's tracker file says, None without a checkpoint.
        """
        tracker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else None


def new_run(parent: Path) -> RunFolder:
    """Make the folder of a new run, so that a run never meets the leftovers of another.

    Args:
        parent: folder of all runs; made if missing.

    Returns:
        The first of `parent/1`, `parent/2`, ... that did not exist.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = parent / str(number)
        try:
            path.mkdir()
        except FileExistsError:  # an earlier run's, or a run's that started at the same moment
            continue
        return RunFolder(path, number)
    raise AssertionError("count() does not end")
