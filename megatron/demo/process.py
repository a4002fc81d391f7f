"""Runs a launcher such as torchrun as a child and leaves none of its processes behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

GRACE_SECONDS = 10.0

# `error: ...`, `pretrain_gpt.py: error: ...`, `[rank0]: AssertionError`, `torch.OutOfMemoryError: ...`
_ERROR = re.compile(r"(\[rank\d+\]: )?(([\w./-]+: )?error: |[\w.]*(Error|Exception|Interrupt|Exit)(: |$))")


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def running(
    command: Sequence[str], *, log: Path, cwd: Path, env: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """Run a command and write its output to a file; on leaving, all its processes have ended.

    The child is in a session of its own: a Ctrl-C at the terminal reaches the caller alone, who leaves the block.

    Args:
        command: program and arguments.
        log: file for standard output and error, written anew.
        cwd: working folder.
        env: added to this process's environment.

    Yields:
        The process and the lines of its output, as they come.
    """
    # An interrupt waits until the child is known: one between its start and the `try` would leave it behind.
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **env}, start_new_session=True,
            preexec_fn=_unblock,  # the child inherits the mask
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
        try:
            _unblock()
            yield process, _copy_lines(process, log)
        finally:
            stop(process)
    finally:
        _unblock()


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)


def _copy_lines(process: subprocess.Popen[str], log: Path) -> Iterator[str]:
    assert process.stdout is not None
    with open(log, "w", encoding="utf-8", buffering=1) as file:
        for line in process.stdout:
            file.write(line)
            yield line
    process.wait()


def stop(process: subprocess.Popen[str]) -> None:
    """End a process and everything it started.

    The launcher is asked to end, which ends torchrun's workers too; what is left when it has ended, or after
    `GRACE_SECONDS`, is killed. Its process group would not do: torchrun gives each worker a session of its own.

    Args:
        process: the launcher; it may have ended already.
    """
    if process.poll() is None:
        with _uninterrupted():
            _end(process)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore an impatient second Ctrl-C, which would leave processes behind."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[str]) -> None:
    launcher, group = psutil.Process(process.pid), os.getpgid(process.pid)
    family = launcher.children(recursive=True)
    launcher.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    for member in [*family, launcher]:
        with suppress(psutil.NoSuchProcess):
            for child in member.children(recursive=True):  # started since
                child.kill()
            member.kill()
    if group != os.getpgrp():  # whoever the list of children has missed
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    psutil.wait_procs(family, timeout=GRACE_SECONDS)
    process.wait()


def error_lines(log: Path, number: int) -> list[str]:
    """Find what went wrong: where one rank fails, the other ranks' errors follow, then the launcher's own.

    Args:
        log: the file; it may be missing.
        number: lines at most.

    Returns:
        The lines that end with the first one that names an error; without such a line the last ones of the log.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    first = next((index for index, line in enumerate(lines) if _ERROR.match(line)), len(lines) - 1)
    return lines[max(0, first + 1 - number) : first + 1]
