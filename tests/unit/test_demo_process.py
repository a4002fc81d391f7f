"""The demo leaves no process behind and says what went wrong first."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.demo import process as demo_process
from megatron.demo.folders import new_run
from megatron.demo.process import error_lines, running

# A launcher as torchrun is one: its worker has a session of its own and outlives a signal to the launcher's group.
LAUNCHER = """
import signal, subprocess, sys, time
if sys.argv[1:] == ["stubborn"]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hold = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
else:
    hold = "import time; time.sleep(600)"
worker = subprocess.Popen([sys.executable, "-c", hold], start_new_session=True)
print(worker.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("arguments", [[], ["stubborn"]], ids=["polite", "stubborn"])
def test_an_interrupt_ends_the_launcher_and_workers_in_other_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(demo_process, "GRACE_SECONDS", 1.0)
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    pids = []
    with (
        pytest.raises(KeyboardInterrupt),
        running(command, log=tmp_path / "log", cwd=tmp_path, env={}) as (process, lines),
    ):
        pids = [process.pid, int(next(iter(lines)))]
        assert all(map(is_running, pids))
        raise KeyboardInterrupt
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, pids))


def test_output_goes_to_the_log_and_the_caller_and_the_status_is_kept(tmp_path: Path) -> None:
    script = "import os, sys; print('out', os.environ['MINE'], os.getcwd()); print('err', file=sys.stderr); sys.exit(3)"
    log = tmp_path / "log"
    with running([sys.executable, "-c", script], log=log, cwd=tmp_path, env={"MINE": "yes"}) as (process, lines):
        seen = list(lines)
    assert process.returncode == 3
    assert sorted(seen) == ["err\n", f"out yes {tmp_path}\n"]
    assert log.read_text() == "".join(seen)


TRACEBACK = """\
iteration 1/ 10 | lm loss: 6.9
[rank3]: Traceback (most recent call last):
[rank3]:   File "a.py", line 1, in <module>
[rank3]: torch.OutOfMemoryError: no memory
[rank0]: RuntimeError: Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
===== pretrain_gpt.py FAILED =====
"""  # noqa: W291


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (TRACEBACK, "[rank3]: torch.OutOfMemoryError: no memory"),
        ("usage: x\npretrain_gpt.py: error: --lr: no\nChildFailedError\n", "pretrain_gpt.py: error: --lr: no"),
        ("error: no corpus in DATA_DIR=x\n       make it\n", "error: no corpus in DATA_DIR=x"),
        ("[rank1]: AssertionError\nlater\n", "[rank1]: AssertionError"),
        ("  error_injection_rate ........ 0\nKilled\n", "Killed"),
    ],
)
def test_the_first_error_of_a_log_is_shown(tmp_path: Path, text: str, last: str) -> None:
    log = tmp_path / "log"
    log.write_text(text)
    assert error_lines(log, 3)[-1] == last
    assert len(error_lines(log, 3)) <= 3


def test_a_log_that_was_never_written_has_no_lines(tmp_path: Path) -> None:
    assert error_lines(tmp_path / "log", 3) == []


def test_each_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "2").write_text("a leftover that is not even a folder")
    runs = [new_run(tmp_path / "runs") for _ in range(3)]
    assert [run.number for run in runs] == [1, 3, 4]
    assert all(run.path.is_dir() and list(run.path.iterdir()) == [] for run in runs)


def test_the_saved_iteration_is_megatrons_tracker(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.saved_iteration() is None
    run.checkpoints.mkdir()
    (run.checkpoints / "latest_checkpointed_iteration.txt").write_text("300")
    assert run.saved_iteration() == 300
