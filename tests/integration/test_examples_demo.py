"""`make demo`'s program from an empty data folder to its last line, with a model that trains in seconds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHRINK = [
    *("--num-layers", "2", "--hidden-size", "64", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "3", "--eval-iters", "1"),
]  # fmt: skip


def demo(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "tools" / "demo.py"),
        "--data",
        str(folder / "data"),
        "--runs",
        str(folder / "runs"),
    ]
    return subprocess.run([*command, *SHRINK, *flags], cwd=folder, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests' demos keep their data and runs."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def first(folder: Path) -> subprocess.CompletedProcess[str]:
    """The first demo, which finds nothing."""
    return demo(folder)


def test_the_demo_trains_from_nothing(folder: Path, first: subprocess.CompletedProcess[str]) -> None:
    assert first.returncode == 0, first.stdout + first.stderr
    assert "prepared:" in first.stdout
    facts = dict(
        re.findall(r"^(loss at start|loss at end|speed|log|checkpoint|loss curve)  +(.*)$", first.stdout, re.M)
    )
    assert 6.5 < float(facts["loss at start"].split()[0]) < 7.5
    assert "held-out" in facts["loss at end"]
    assert "tokens per second" in facts["speed"]
    run = folder / "runs" / "1"
    assert facts["log"] == str(run / "train.log")
    assert facts["checkpoint"] == f"{run / 'checkpoints'} (iteration 3)"
    assert Path(facts["loss curve"]).read_bytes().startswith(b"\x89PNG")
    assert "----- end of shampoo -----" in (run / "train.log").read_text()


def test_a_second_demo_reuses_the_corpus_and_takes_another_optimizer(
    folder: Path, first: subprocess.CompletedProcess[str]
) -> None:
    second = demo(folder, "--optimizer", "adam")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "reused:" in second.stdout
    assert "This is run 2" in second.stdout
    assert "----- end of shampoo -----" not in (folder / "runs" / "2" / "train.log").read_text()
