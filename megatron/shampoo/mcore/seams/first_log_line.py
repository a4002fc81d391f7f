"""The second logged loss is that of its own iteration.

Megatron logs the first iteration after a start whatever the log interval, and does not reset its running sums there,
so that the first regular interval has the whole of its iterations. When the first iteration ends an interval itself
(always, with ``--log-interval 1``), the next line then shows the mean of two intervals: loss, time and counts.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from megatron.shampoo.mcore.seams.registry import Function, Seam

TARGET = "megatron.training.training.training_log"


def close_interval(original: Function) -> Function:
    """Treat a first iteration that ends a log interval as the regular end of it.

    Args:
        original: Megatron's ``training_log``.

    Returns:
        The function that takes its place.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        call = signature.bind(*args, **kwargs)
        if call.arguments["iteration"] % get_args().log_interval == 0:
            call.arguments["is_first_iteration"] = False
        return original(*call.args, **call.kwargs)

    return training_log


def keeps_sums_after_first_iteration() -> bool:
    """Whether ``training_log`` still decides by ``is_first_iteration`` alone whether to reset its sums."""
    from megatron.training.training import training_log

    return "should_reset = not is_first_iteration\n" in inspect.getsource(training_log)


SEAMS = (
    Seam(
        name="first log line closes its interval",
        target=TARGET,
        reason="the second log line shows the mean of the first two iterations",
        probe=keeps_sums_after_first_iteration,
        replace=close_interval,
    ),
)
