"""Setups for the launcher's own tests; light to import, so that a busy machine does not stop them half-way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any


def fail_on_rank_one() -> None:
    """Rank 1 fails; rank 0 would go on for ever."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("planted failure")
    time.sleep(600)


def start_a_child_and_hang() -> None:
    """Print the pid of a child process that outlives its parent, then hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)


def leave_a_child() -> None:
    """Print the pid of a child process that nobody waits for, and exit successfully."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    sys.exit(0)


def exit_with_message() -> None:
    """Exit as a refused command line does."""
    sys.exit("no such flag")


def report_environment() -> None:
    """Print what torchrun would have set, and exit."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ADDED", "PATH")
    print("environment", [os.environ.get(name) for name in names], sys.argv[1:], flush=True)
    sys.exit(0)


def count_steps() -> dict[str, int]:
    """Count calls of ``train_step`` in the dict that goes back with the record."""
    from megatron.training import training

    counted, original = {"steps": 0}, training.train_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted["steps"] += 1
        return original(*args, **kwargs)

    training.train_step = counting
    return counted
