"""Settings of the process that a run on CPU needs, made for the user."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt. Source: mallopt(3), malloc.h."""


def _slurm_tasks_on_node() -> int:
    """Read how many Slurm tasks share this machine; 1 outside Slurm."""
    # The value may read "4(x2)": four tasks on each of two nodes.
    return int(os.environ.get("SLURM_NTASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE", "1")).split("(")[0])


def ranks_on_this_machine() -> int:
    """Read how many processes of the run share this machine's cores.

    Returns:
        What torchrun or Slurm says, 1 without a launcher.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    return _slurm_tasks_on_node()


def available_cores() -> int:
    """Count the cores this process may run on.

    Returns:
        The size of the affinity mask where the system has one, else the number of cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_environment() -> None:
    """Set what a run on CPU needs and the user did not set.

    - `TORCHDYNAMO_DISABLE=1`: Megatron's fused functions are compiled for GPUs; eager is what works here.
    - `CUDA_DEVICE_MAX_CONNECTIONS=1`: Megatron's validation asks for it on every device older than Blackwell.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def keep_freed_memory() -> bool:
    """Make malloc keep what is freed for the next request, as the caching allocator does on a GPU.

    Without it glibc hands every large tensor back to the system, and each step pays for its pages anew, several times
    what it costs to write them. Left alone where the user has tuned malloc by its variables.

    Returns:
        Whether it was done: not with another C library, nor with settings of the user's.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No mapping of its own for any request, however large; and the heap's free top is never handed back.
    return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, -1))


def share_cores() -> None:
    """Share the machine's cores out among its ranks unless `OMP_NUM_THREADS` says otherwise.

    Without it every rank would start a thread per core. torchrun sets the variable to 1 by itself.
    """
    ranks = ranks_on_this_machine()
    if ranks == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    import torch

    threads = max(1, available_cores() // ranks)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


def set_rendezvous() -> None:
    """Let a process that no launcher started form a world of one, on a port the system picks.

    Port 0 makes torch's store listen on whatever port is free, so runs started at once do not meet.
    """
    if "RANK" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return
    world_of_one = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in world_of_one.items():
        os.environ.setdefault(name, str(value))
