"""Training runs as child processes, some at a time, none of which outlives its caller."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from types import TracebackType

from megatron.demo.process import stop
from megatron.experiments.compare_contenders import Run

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STEP = re.compile(rb"\biteration +(\d+)/")
_TAIL_BYTES = 8192


@dataclass(slots=True, kw_only=True)
class Job:
    """A run on its way."""

    run: Run
    process: subprocess.Popen[str]
    folder: Path
    """Its own until it has ended."""
    started: str
    load_average: float
    began: float
    wall_seconds: float = 0.0
    """Known when it has ended."""

    @property
    def log(self) -> Path:
        """All that it prints."""
        return self.folder / "train.log"

    def step(self) -> int:
        """Read how far it is.

        Returns:
            The last step in the log, 0 before the first.
        """
        with open(self.log, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            found = _STEP.findall(stream.read())
        return int(found[-1]) if found else 0


class Jobs:
    """The running children; leaving the context ends them all."""

    def __init__(self, root: Path, folder: Path, environment: Mapping[str, str]) -> None:
        """Prepare to start runs.

        Args:
            root: where `pretrain_gpt.py` is.
            folder: for the files of running jobs; what a killed comparison left there is removed.
            environment: added to this process's.
        """
        self.active: list[Job] = []
        self._root = root
        self._folder = folder
        self._environment = {**os.environ, **environment}
        shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Jobs:
        """Return the jobs themselves."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every child, whatever else is pressed in the meantime."""
        with _blocked():
            for job in self.active:
                if job.process.poll() is None:
                    job.process.terminate()
            for job in self.active:
                stop(job.process)
            shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, run: Run, name: str, command: Sequence[str]) -> None:
        """Start a run.

        Args:
            run: which one.
            name: for its folder.
            command: a script in the root and its flags.
        """
        folder = self._folder / name
        folder.mkdir(parents=True)
        # Megatron writes its index of samples file by file: of two runs that start together one could read half of it.
        private = ["--data-cache-path", str(folder / "cache")]
        load = os.getloadavg()[0]
        with open(folder / "train.log", "wb") as log, _blocked():
            # Of a session of its own: Ctrl-C at the terminal reaches the caller alone. Signals wait until the child is
            # known, since one between its start and the next line would leave it behind.
            process = subprocess.Popen(
                [sys.executable, *command, *private], cwd=self._root, env=self._environment,
                start_new_session=True, preexec_fn=_unblock,  # the child inherits the mask
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            self.active.append(
                Job(
                    run=run, process=process, folder=folder, load_average=load, began=monotonic(),
                    started=datetime.now(UTC).isoformat(timespec="seconds"),
                )
            )  # fmt: skip

    def ended(self) -> Iterator[Job]:
        """Hand over the runs that have ended since the last call; their files go when the next is asked for."""
        for job in [job for job in self.active if job.process.poll() is not None]:
            job.wall_seconds = monotonic() - job.began
            self.active.remove(job)
            yield job
            with suppress(FileNotFoundError):
                shutil.rmtree(job.folder)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)


@contextmanager
def _blocked() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        _unblock()
