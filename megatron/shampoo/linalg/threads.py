"""LAPACK calls on batches: one matrix to a thread, instead of all threads on one matrix after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

SMALLEST = 64
"""Rows of the smallest matrix worth a hand-over to another thread, which costs some 50 microseconds."""

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}


def _pool(num_threads: int) -> ThreadPoolExecutor:
    # By process: threads do not survive a fork.
    key = (os.getpid(), num_threads)
    if key not in _pools:
        pool = _pools[key] = ThreadPoolExecutor(
            num_threads, thread_name_prefix="lapack", initializer=torch.set_num_threads, initargs=(1,)
        )
        # All threads at once, since set_num_threads also decides what threads begin with that start later.
        everyone = threading.Barrier(num_threads)
        list(pool.map(lambda _: everyone.wait(), range(num_threads)))
        torch.set_num_threads(num_threads)
    return _pools[key]


def over_batch(solve: Callable[[Tensor], tuple[Tensor, ...]], matrices: Tensor) -> tuple[Tensor, ...]:
    """Solve a batch `(..., d, d)`; on the CPU each of torch's threads takes a share of it.

    A decomposition of a few hundred rows gains little from a second thread (two cores, 512 rows: a quarter), so on the
    CPU whole matrices are dealt out. The results do not depend on it.

    Args:
        solve: from a batch to tensors with the same leading dimensions; an error of it is raised here.
        matrices: the batch.
    """
    num_threads = torch.get_num_threads()
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    if matrices.is_cuda or num_threads == 1 or len(flat) < 2 or matrices.shape[-1] < SMALLEST:
        return tuple(solve(matrices))
    found = list(_pool(num_threads).map(solve, flat.tensor_split(min(num_threads, len(flat)))))
    batch = matrices.shape[:-2]
    joined = (torch.cat(each) for each in zip(*found, strict=True))
    return tuple(tensor.reshape(*batch, *tensor.shape[1:]) for tensor in joined)
