"""``pretrain_gpt.py`` as a user starts it: without a launcher, twice at once, for help, and with mistakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import RANK_VARIABLES, ROOT, Launcher
from tests.tiny import Layout, tiny_gpt


def start(*args: str) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "pretrain_gpt.py", *args],
        cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_two_runs_at_once_without_a_launcher_and_a_checkpoint_do_not_meet(tmp_path: Path) -> None:
    runs = [start(*tiny_gpt(iters=2), "--save", str(tmp_path / str(run)), "--save-interval", "2") for run in (0, 1)]
    for run, process in enumerate(runs):
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
        assert len(re.findall(r"lm loss: \d", output)) == 2
        assert output.count("> running on CPU, no CUDA device found; set: ") == 1
        assert (tmp_path / str(run) / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_help_describes_every_flag() -> None:
    process = start("--help")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    for flag in ("--tensor-model-parallel-size", "--optimizer", "--moe-paged-stash-buffer-size-factor-cuda"):
        assert flag in output


@pytest.mark.parametrize(
    ("flags", "layout", "message"),
    [
        (["--transformer-impl", "transformer_engine"], Layout(dp=2), "transformer_engine: cannot run on CPU"),
        (["--num-layers", "5"], Layout(pp=2), "layers should be divisible by the pipeline-model-parallel size"),
        (["--load", "no/such", "--exit-on-missing-checkpoint"], Layout(), "--load no/such: holds no checkpoint"),
        (["--no-such-flag"], Layout(), "unrecognized arguments: --no-such-flag"),
    ],
    ids=["TE", "layers", "load", "unknown"],
)
def test_a_mistake_ends_the_run_with_one_last_line(
    launcher: Launcher, flags: list[str], layout: Layout, message: str
) -> None:
    result = launcher.run([*tiny_gpt(), *layout.flags, *flags], world_size=layout.world_size)
    assert all(result.returncodes)
    last = result.output.splitlines()[-1]
    assert last.startswith("pretrain_gpt.py: error: ")
    assert message in last
    assert "Traceback" not in result.output
