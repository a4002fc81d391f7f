"""Ends the process where a call takes too long that Python cannot interrupt, such as one into LAPACK or cuSOLVER."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

logger = logging.getLogger("megatron.shampoo")

_POLL_SECONDS = 0.5

_deadlines: dict[int, tuple[float, str]] = {}
"""By thread: when it must have ended what it does, and what to say if not."""

_thread: threading.Thread | None = None


@contextlib.contextmanager
def at_most(seconds: float, message: str) -> Iterator[None]:
    """End the process with status 1 if the body takes longer, whatever it waits for.

    The other ranks then fail in their next collective, at once or after the timeout of their process group.

    Args:
        seconds: 0 for no limit.
        message: goes to the log, before the tracebacks of all threads go to standard error.

    Yields:
        Nothing.
    """
    if seconds <= 0:
        yield
        return
    _start()
    own = threading.get_ident()
    _deadlines[own] = (time.monotonic() + seconds, message)
    try:
        yield
    finally:
        _deadlines.pop(own, None)


def _start() -> None:
    """One thread for the process; a fork has none and starts its own."""
    global _thread
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_watch, name="shampoo-watchdog", daemon=True)
        _thread.start()


def _watch() -> None:
    while True:
        time.sleep(_POLL_SECONDS)
        for deadline, message in list(_deadlines.values()):
            if time.monotonic() > deadline:
                logger.error("%s", message)
                faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
                os._exit(1)
