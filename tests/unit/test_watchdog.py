"""A call that takes too long ends the process; one that does not leaves no trace."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron.shampoo import watchdog
from tests.launch import ROOT

HANGS = """
import ctypes, threading
from megatron.shampoo import watchdog
watchdog._POLL_SECONDS = 0.05
with watchdog.at_most(60, "another"):
    pass
with watchdog.at_most({seconds}, "it took too long"):
    ctypes.CDLL(None).{call}
print("went on")
"""


def hang(seconds: str, call: str) -> subprocess.CompletedProcess[str]:
    script = HANGS.format(seconds=seconds, call=call)
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_call_into_c_that_hangs_ends_the_process() -> None:
    start = time.monotonic()
    done = hang("0.2", "sleep(50)")
    assert done.returncode == 1 and time.monotonic() - start < 30
    assert "it took too long" in done.stderr and "another" not in done.stderr
    assert "<string>" in done.stderr, "the trace of the thread that hangs"
    assert done.stdout == ""


@pytest.mark.parametrize(("seconds", "call"), [("0", "usleep(300000)"), ("30", "usleep(300000)")])
def test_what_ends_in_time_goes_on(seconds: str, call: str) -> None:
    done = hang(seconds, call)
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


def test_an_error_inside_lifts_the_limit() -> None:
    with pytest.raises(RuntimeError, match="inside"), watchdog.at_most(30, "never"):
        raise RuntimeError("inside")
    assert watchdog._deadlines == {}
