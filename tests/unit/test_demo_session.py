"""The course of the demo: what it prints, how it fails, what a second call does. Training is a script that pretends."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from megatron.demo import session
from megatron.demo.session import DemoOptions, RunFailedError, run_demo
from tests.unit.test_demo_log import log_line, validation_line
from tools import demo

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = {
    "vocab_size": 1024,
    "unigram_entropy_nats": 5.628,
    "splits": {"train": {"tokens": 4_656_890}, "valid": {"tokens": 290_513}},
    "reused": False,
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout whose corpus is there at once."""
    asked: list[Any] = []

    def prepare(options: Any) -> dict[str, Any]:
        asked.append(options)
        return {**MANIFEST, "reused": len(asked) > 1}

    monkeypatch.setattr(session, "prepare", prepare)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_training(checkout: Path, body: str) -> None:
    (checkout / "train.sh").write_text(f"set -e\n{body}\n")


def pretended_training(losses: list[float]) -> str:
    lines = [log_line(number, loss, 500, total=len(losses)) for number, loss in enumerate(losses, 1)]
    output = "".join(["  seq_length ............. 128\n", *lines, validation_line(len(losses), 3.125)])
    save = 'mkdir -p "$RUN_DIR/checkpoints"; printf 20 > "$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt"'
    return f"cat <<'END'\n{output}END\n{save}\n"


def run(checkout: Path, *flags: str, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal)
    run_demo(DemoOptions(root=checkout, script="train.sh", flags=flags), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_names_losses_speed_and_files_that_exist(checkout: Path) -> None:
    write_training(checkout, pretended_training([6.9375, *[5.0] * 17, 3.5, 3.0]))
    printed = run(checkout)
    assert f"loss at start  6.938 nats per token (guessing blindly costs ln 1024 = {math.log(1024):.3f})" in printed
    assert "loss at end    3.250, 3.125 on held-out text (the corpus' unigram entropy is 5.628)" in printed
    assert f"speed          {32 * 128 * 2:,} tokens per second" in printed
    assert "0 min 10 s for 20 iterations" in printed
    assert "checkpoint     runs/demo/1/checkpoints (iteration 20)" in printed
    for name in ("train.log", "loss.png"):
        assert f"runs/demo/1/{name}" in printed
        assert (checkout / "runs" / "demo" / "1" / name).stat().st_size > 0


def test_progress_is_shown_with_loss_and_speed(checkout: Path) -> None:
    write_training(checkout, pretended_training([6.5, 6.0, 5.5]))
    assert "iteration 3/3: loss 5.500, 8,192 tokens/s" in run(checkout)
    bar = run(checkout, terminal=True)
    assert "3/3" in bar and "loss 5.500, 8,192 tokens/s" in bar


def test_the_script_gets_folders_flags_and_this_interpreters_launcher(checkout: Path) -> None:
    tell = 'echo "$DATA_DIR|$RUN_DIR|$(command -v python)|$PWD|$*" > told\n'
    write_training(checkout, tell + pretended_training([6.5]))
    run(checkout, "--optimizer", "adam")
    python = Path(sys.executable).parent / "python"
    assert (checkout / "told").read_text() == f"data/demo|runs/demo/1|{python}|{checkout}|--optimizer adam\n"


def test_a_second_demo_reuses_the_corpus_and_leaves_the_first_run_alone(checkout: Path) -> None:
    write_training(checkout, pretended_training([6.5]))
    assert "prepared: 4,656,890 tokens" in run(checkout)
    first = (checkout / "runs/demo/1/train.log").stat()
    printed = run(checkout)
    assert "reused: 4,656,890 tokens" in printed
    assert "This is run 2; earlier ones stay in runs/demo" in printed
    assert (checkout / "runs/demo/1/train.log").stat() == first
    assert (checkout / "runs/demo/2/loss.png").exists()


def test_a_failing_run_shows_the_error_the_status_and_the_log(checkout: Path) -> None:
    write_training(
        checkout, "echo working; echo '[rank1]: ValueError: bad weather'; echo '[rank0]: lost a peer'; exit 7"
    )
    with pytest.raises(RunFailedError) as failure:
        run(checkout)
    assert "ended with status 7. From runs/demo/1/train.log" in str(failure.value)
    assert str(failure.value).splitlines()[-2:] == ["  working", "  [rank1]: ValueError: bad weather"]


def test_a_run_that_trains_nothing_is_a_failure(checkout: Path) -> None:
    write_training(checkout, "echo done")
    with pytest.raises(RunFailedError, match="made no iteration"):
        run(checkout)


def test_the_command_ends_with_status_1_after_a_failed_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: DemoOptions, console: Console) -> None:
        raise RunFailedError(f"cannot train with {' '.join(options.flags)} in {options.runs}")

    monkeypatch.setattr(session, "run_demo", fail)
    assert demo.main(["--lr", "1", "--runs", "elsewhere"]) == 1
    assert "error: cannot train with --lr 1 in elsewhere" in capsys.readouterr().err


def check_gone(pid: int) -> None:
    """A process has ended; one that was killed may stay a zombie until init reaps it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for _ in range(100):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.1)
        raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_ends_with_status_130_and_no_process_left(tmp_path: Path, number: signal.Signals) -> None:
    """The whole program in a process of its own, told to stop while its script sleeps."""
    script = tmp_path / session.SCRIPT
    script.parent.mkdir(parents=True)
    script.write_text("sleep 600 & echo $! > sleeper\nwait\n")
    program = (
        "import json, sys, pathlib\n"
        "from megatron.demo import session\n"
        "from tools import demo\n"
        f"session.prepare = lambda options: json.loads({json.dumps(MANIFEST)!r})\n"
        f"demo.ROOT = pathlib.Path({str(tmp_path)!r})\n"
        "sys.exit(demo.main([]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    while not (tmp_path / "sleeper").exists() or not (tmp_path / "sleeper").read_text().strip():
        assert child.poll() is None, child.stderr and child.stderr.read()
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, "interrupted; all processes have ended\n")
    check_gone(int((tmp_path / "sleeper").read_text()))
