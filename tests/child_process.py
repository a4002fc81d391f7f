"""Runs a function in a forked child, for what changes torch or the environment of the whole process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def run_in_child(function: Callable[[], None]) -> None:
    """Call ``function`` in a child of this process and require that it returns.

    Args:
        function: what to run; its assertions are reported with their traceback.

    Raises:
        AssertionError: the child raised or died.
    """
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        report = ""
        try:
            import torch

            # The parent's pool of threads does not exist here; more than one thread would wait for it for ever.
            torch.set_num_threads(1)
            function()
        except BaseException:
            report = traceback.format_exc()
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(report)
        os._exit(1 if report else 0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        report = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"child ended with status {status}:\n{report}"
