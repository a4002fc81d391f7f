"""Run the real ``pretrain_gpt.py`` on several ranks, cheaply: the client of `tests.fork_server`.

with Launcher() as launcher:
    result = launcher.run(tiny_gpt() + layout_flags(tp=2), world_size=2).check()
    print(result.losses, result.grad_norms)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tests.recorder import gather_parameters

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
LOG_LINES = 40
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one run left behind."""

    args: list[str]
    directory: Path
    returncodes: list[int]
    """Exit status by rank; minus the signal's number for a rank that was killed."""
    first_failed: int | None
    """The rank that failed first."""
    timed_out: bool
    wall_seconds: float
    records: list[dict[str, Any]] = field(repr=False)
    """By rank: iterations, losses (last pipeline stage only), grad_norms, learning_rates, skipped, params_norms, setup
    and position (`tests.recorder`); empty when the rank was killed."""

    @property
    def logs(self) -> list[Path]:
        """Standard output and error of each rank."""
        return [self.directory / f"rank{rank}.log" for rank in range(len(self.returncodes))]

    @property
    def output(self) -> str:
        """All ranks' output, rank after rank."""
        return "".join(log.read_text(errors="replace") for log in self.logs)

    @property
    def losses(self) -> list[float]:
        """Exact loss of each iteration, reduced over the data-parallel ranks as Megatron logs it."""
        return next(record["losses"] for record in reversed(self.records) if record["losses"])

    @property
    def grad_norms(self) -> list[float]:
        """Gradient norm of each iteration, before clipping."""
        return self.records[0]["grad_norms"]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters by global name; the run must have recorded ``parameters``."""
        return gather_parameters(log.with_suffix(".pt") for log in self.logs)

    def failure(self) -> str | None:
        """Why the run failed, with the end of the log that shows it; None if it did not."""
        if not any(self.returncodes) and not self.timed_out:
            return None
        rank = self.first_failed or 0
        reason = f"timed out after {self.wall_seconds:.0f} s" if self.timed_out else f"rank {rank} failed"
        tail = "\n".join(self.logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:])
        return f"{reason} (exit statuses {self.returncodes}): pretrain_gpt.py {' '.join(self.args)}\n{tail}"

    def check(self) -> RunResult:
        """Require that every rank ended with status 0.

        Returns:
            Itself.

        Raises:
            AssertionError: one did not; the message ends with the failing rank's last lines.
        """
        failure = self.failure()
        if failure is not None:
            raise AssertionError(failure)
        return self


class Launcher:
    """A lazily started `tests.fork_server` and the folder of its runs; both end with `close`."""

    def __init__(self, entry: Path = ROOT / "pretrain_gpt.py") -> None:
        """Remember what to run; the first `run` starts the server.

        Args:
            entry: script with a function ``main``.
        """
        self.entry = entry
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-shampoo-runs-")
        self._server: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._num_runs = 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and whatever it runs, and remove the folder of the runs."""
        if self._server is not None:
            assert self._server.stdin is not None
            self._server.stdin.close()
            self._server.wait()
            self._server = None
        self._folder.cleanup()

    def run(
        self,
        args: Sequence[str | int | float],
        *,
        world_size: int = 1,
        setup: str | None = None,
        record: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        timeout: float = 120.0,
        directory: Path | None = None,
    ) -> RunResult:
        """Run ``pretrain_gpt.py args`` on ``world_size`` ranks of this machine.

        Args:
            args: command line after the script's name.
            world_size: number of ranks.
            setup: ``package.module:function`` called on each rank before ``main``; what it returns (a dict that it
                goes on filling, say) must be JSON and comes back as the record's ``setup``.
            record: any of ``parameters`` and ``params_norm``, see `tests.recorder.Recorder`.
            env: environment variables; None removes one.
            timeout: seconds until all ranks are killed.
            directory: existing folder for logs and records; default a new one that `close` removes.

        Returns:
            The result, of a failed run too: call its `check`.

        Raises:
            RuntimeError: the server died.
        """
        with self._lock:
            if directory is None:
                directory = Path(self._folder.name) / f"run{self._num_runs}"
                directory.mkdir()
                self._num_runs += 1
            request: dict[str, Any] = {
                "args": [str(arg) for arg in args],
                "world_size": world_size,
                "setup": setup,
                "record": list(record),
                "env": dict(env or {}),
                "timeout": timeout,
                "directory": str(directory.resolve()),
                "cwd": str(ROOT),
            }
            reply = self._ask(request)
        records = [directory / f"rank{rank}.json" for rank in range(world_size)]
        return RunResult(
            args=request["args"],
            directory=directory,
            records=[json.loads(path.read_text()) if path.exists() else {} for path in records],
            **reply,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request, starting the server if need be, and wait for its reply."""
        if self._server is None:
            self._server = self._start()
            self._reply(self._server)
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return self._reply(self._server)

    def _start(self) -> subprocess.Popen[str]:
        """Start the server; one thread in every library, since it forks."""
        env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        env |= {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
        with self._server_log("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(self.entry)],
                cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip

    def _server_log(self, mode: str) -> IO[str]:
        return open(Path(self._folder.name) / "server.log", mode, errors="replace")

    def _reply(self, server: subprocess.Popen[str]) -> dict[str, Any]:
        """Read one reply line."""
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            status = server.wait()
            with self._server_log("r") as log:
                tail = "\n".join(log.read().splitlines()[-LOG_LINES:])
            raise RuntimeError(f"the fork server ended with status {status}:\n{tail}")
        reply: dict[str, Any] = json.loads(line)
        return reply
