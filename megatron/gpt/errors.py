"""A user's mistake ends the run with one line instead of a traceback."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def reported_to_user(program: str) -> Iterator[None]:
    """Turn a refused argument into a message and exit status 1.

    Megatron's validation asserts, ours raises ValueError and NotImplementedError; none of them has anything to show but
    its message. An assertion without one is shown as written, with its place.

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
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise SystemExit(f"{program}: error: {str(error) or frame.line} [{place}]") from error
