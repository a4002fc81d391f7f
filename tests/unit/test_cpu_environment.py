"""What a run on CPU sets in the environment, and that it never overrides the user."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from megatron.cpu import environment
from tests.child_process import run_in_child

OURS = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLIBC_TUNABLES", "MALLOC_ARENA_MAX",
)  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_settings_are_made_and_the_users_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.set_environment()
    assert (os.environ["TORCHDYNAMO_DISABLE"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("1", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    environment.set_environment()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"SLURM_TASKS_PER_NODE": "2(x3)"}, 4),
        ({"LOCAL_WORLD_SIZE": "1"}, 7),
        ({"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "3"}, 7),
    ],
)
def test_ranks_share_the_cores(variables: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "available_cores", lambda: 8)

    def check() -> None:
        os.environ.update(variables)
        torch.set_num_threads(7)
        environment.share_cores()
        assert torch.get_num_threads() == threads

    run_in_child(check)


def test_a_process_without_a_launcher_is_a_world_of_one_on_any_free_port() -> None:
    environment.set_rendezvous()
    store, rank, world_size = next(torch.distributed.rendezvous("env://"))
    assert (rank, world_size) == (0, 1)
    assert store.underlying_store.port > 0 if hasattr(store, "underlying_store") else store.port > 0


def test_a_launchers_rendezvous_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    environment.set_rendezvous()
    assert "MASTER_PORT" not in os.environ
    assert os.environ["RANK"] == "1"


HELD_AND_KEPT = """
import torch
from megatron.cpu.environment import keep_freed_memory
from megatron.cpu.platform import resident_bytes

is_done = keep_freed_memory()
before = resident_bytes()
tensor = torch.ones(64 << 20, dtype=torch.uint8)
held = resident_bytes() - before
del tensor
print(is_done, held >> 20, (resident_bytes() - before) >> 20)
"""


@pytest.mark.parametrize(("variables", "keeps"), [({}, True), ({"MALLOC_ARENA_MAX": "2"}, False)])
def test_freed_memory_is_kept_unless_the_user_has_tuned_malloc(variables: dict[str, str], keeps: bool) -> None:
    """The second case is the control: with glibc's own settings a large tensor's memory goes back at once."""
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("this C library has no mallopt")
    # Not in a fork of this process, whose malloc another test may have set already.
    process = subprocess.run(
        [sys.executable, "-c", HELD_AND_KEPT],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    is_done, held, kept = process.stdout.split()
    assert is_done == str(keeps)
    assert int(held) > 60
    assert int(kept) > 60 if keeps else int(kept) < 32
