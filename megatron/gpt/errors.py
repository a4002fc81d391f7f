"""A user's mistake ends the run with one line instead of a traceback."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator


def _place(error: BaseException) -> str:
    """Where Megatron or a library raised the error; nothing for our own errors, whose messages stand alone."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return ""
    module = trace.tb_frame.f_globals.get("__name__", "")
    ours = module.startswith("megatron.") and not module.startswith(("megatron.core", "megatron.training"))
    return "" if ours else f" [{module}, line {trace.tb_lineno}]"


@contextlib.contextmanager
def reported_to_user(program: str) -> Iterator[None]:
    """Turn a refused argument into a message and exit status 1.

    Megatron's validation asserts, ours raises ValueError and NotImplementedError; none of them has anything to show but
    its message. An assertion without one is shown as written.

    Args:
        program: what the message begins with.

    Yields:
        Nothing.

    Raises:
        SystemExit: with the message, in place of the errors above.
    """
    try:
        yield
    except (AssertionError, ValueError, NotImplementedError) as error:
        message = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise SystemExit(f"{program}: error: {message}{_place(error)}") from error
