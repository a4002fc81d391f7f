"""A training step that waits for its turn and says how long it took: for the benchmark, in its own processes alone."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from megatron.shampoo.mcore.seams.registry import Function, Seam


def step_by_turns(wait: Callable[[], None], report: Callable[[float], None]) -> Seam:
    """Make the seam.

    Args:
        wait: called before every step, whose time does not count.
        report: called after it with the seconds of forward, backward and optimizer.
    """

    def replace(original: Function) -> Function:
        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            wait()
            start = time.perf_counter()
            result = original(*args, **kwargs)
            report(time.perf_counter() - start)
            return result

        return train_step

    return Seam(
        name="steps by turns",
        target="megatron.training.training.train_step",
        reason="Megatron has no hook before a step",
        probe=lambda: True,
        replace=replace,
    )
