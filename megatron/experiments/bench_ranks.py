"""Runs `pretrain_gpt.py` on several ranks of this machine, many times.

On CUDA by torchrun. On CPU the ranks are forked from this process, which has imported Megatron once, and get the
variables that torchrun would set: a run starts in two seconds in the place of ten, and takes its steps by turns with
others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from megatron import cpu
from megatron.experiments.bench_turns import Gate, gates, take_turn, wait_for_turns
from megatron.experiments.ports import free_port

GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed: theirs may be the error that says more."""


class Ranks:
    """Starts runs of one entry script."""

    def __init__(self, entry: Path, timeout_seconds: float) -> None:
        """Import what a run needs, on CPU.

        Args:
            entry: `pretrain_gpt.py`.
            timeout_seconds: after which a run is ended.
        """
        self._entry = entry
        self._timeout_seconds = timeout_seconds
        self._runs: list[Run] = []
        self._module = _import_entry(entry) if cpu.install_if_needed() else None

    @property
    def on_cpu(self) -> bool:
        """Whether the runs are on CPU."""
        return self._module is not None

    def refusal(self, world_size: int) -> str | None:
        """Why this machine cannot run so many ranks.

        Args:
            world_size: number of ranks.

        Returns:
            The reason, None if it can.
        """
        import torch

        devices = torch.cuda.device_count()
        if self.on_cpu or devices >= world_size:
            return None
        return f"needs {world_size} GPUs, this machine has {devices}"

    def run(self, flags: Sequence[str], world_size: int, folder: Path) -> int:
        """Run once, on CUDA, from beginning to end.

        Args:
            flags: of the entry script.
            world_size: number of ranks.
            folder: for the logs, `*.log`; made if missing.

        Returns:
            The first exit status that is not 0, or 0; minus the signal's number where a signal ended a rank.
        """
        folder.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        with open(folder / "torchrun.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen([*launcher, str(self._entry), *flags], stdout=log, stderr=subprocess.STDOUT)
            try:
                return process.wait(self._timeout_seconds)
            except subprocess.TimeoutExpired:
                return -signal.SIGTERM
            finally:
                process.terminate()  # torchrun ends its ranks
                process.wait()

    def start(self, flags: Sequence[str], world_size: int, folder: Path) -> Run:
        """Start a run, on CPU, which then waits for its turns.

        Args:
            flags: of the entry script.
            world_size: number of ranks.
            folder: for the logs, `*.log`; made if missing.
        """
        assert self._module is not None
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        run = Run(self._timeout_seconds)
        self._runs.append(run)
        for rank in range(world_size):
            ours, theirs = gates()
            run.turns.append(ours)
            # The threads that Python warns of are OpenBLAS', which ends them at a fork and starts them anew.
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                pid = os.fork()
            if not pid:
                # While another rank holds these ends, one that waits would not hear that this process has died.
                for each in self._runs:
                    each.close_turns()
                _be_rank(self._module, flags, rank, world_size, port, folder / f"rank{rank}.log", theirs)
            theirs.close()
            run.running[pid] = rank
        return run


class Run:
    """Ranks that train and take their steps by turns with those of other runs."""

    def __init__(self, timeout_seconds: float) -> None:
        """Args: the timeout of a step, and of the end. `Ranks.start` fills in the rest."""
        self._timeout_seconds = timeout_seconds
        self.running: dict[int, int] = {}
        """Rank by process, of those that are not known to have ended."""
        self.turns: list[Gate] = []
        """This process's ends of the gates; none after the end."""

    def step(self) -> float | None:
        """Take one step.

        Returns:
            Seconds of the slowest rank; None where the run has ended.
        """
        return take_turn(self.turns, self._timeout_seconds)

    def end(self, *, at_once: bool = False) -> int:
        """Wait for the end of the ranks, then kill those that are left.

        Args:
            at_once: kill without waiting.

        Returns:
            The first exit status that is not 0, or 0; minus the signal's number where a signal ended a rank.
        """
        try:
            return 0 if at_once else _wait(self.running, time.monotonic() + self._timeout_seconds)
        finally:
            for pid in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.running.clear()
            self.close_turns()

    def close_turns(self) -> None:
        """Close the gates."""
        for gate in self.turns:
            gate.close()
        self.turns.clear()


def _import_entry(entry: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(entry.stem, entry)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[entry.stem] = module
    spec.loader.exec_module(module)
    # These import all of Megatron that a run imports.
    from megatron.gpt import datasets, helpers, step, vocabulary  # noqa: F401

    return module


def _be_rank(
    module: ModuleType, flags: Sequence[str], rank: int, world_size: int, port: int, log: Path, turns: Gate
) -> NoReturn:
    """Run the entry's `main` in a forked process, and end the process."""
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        import torch

        from megatron.cpu.environment import available_cores

        torch.set_num_threads(max(1, available_cores() // world_size))
        wait_for_turns(turns)
        sys.argv = [str(module.__file__), *flags]
        module.main()
        status = 0
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(running: dict[int, int], deadline: float) -> int:
    """Wait for ranks; takes those that have ended out of `running` and leaves the others there to be killed."""
    failure = 0
    while running and time.monotonic() < deadline:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del running[pid]
            status = os.waitstatus_to_exitcode(status)
            if status and not failure:
                failure = status
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)
    return failure or (-signal.SIGKILL if running else 0)
