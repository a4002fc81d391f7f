"""The least that a step of ours can take on this machine: its matrix products at full speed, and its roots alone."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable

import torch

from megatron.experiments.bench_flops import products, sides
from megatron.shampoo import Shampoo
from megatron.shampoo.linalg.precision import full_float32
from megatron.shampoo.refreshing import refresh_due

Blocks = list[tuple[tuple[int, int], tuple[int, int]]]
"""Of each block its shape and that of its matrix, see `bench_names.blocks`."""


class Stopwatch:
    """Times work on a device: by the clock on CPU, by CUDA events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        """Args: where the work is done."""
        self._cuda = device.type == "cuda"

    def seconds(self, work: Callable[[], object]) -> float:
        """Time one call.

        Args:
            work: called once.

        Returns:
            Seconds until all that it has started is done.
        """
        if not self._cuda:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000.0


class ProductRate:
    """Operations per second of batched float32 products at full precision, for each block shape of the benchmark."""

    def __init__(self, blocks: Blocks, device: torch.device) -> None:
        """Allocate the batches.

        Args:
            blocks: all blocks; those of one shape are a batch, as in the optimizer.
            device: where they are multiplied.
        """
        self._watch = Stopwatch(device)
        self._batches = {
            (m, n): (
                torch.randn(count, m, n, device=device),
                torch.randn(count, n, m, device=device),
                torch.empty(count, m, m, device=device),
            )
            for (m, n), count in Counter(shape for shape, _ in blocks).items()
        }
        self._rates: dict[tuple[int, int], list[float]] = {shape: [] for shape in self._batches}
        self._multiply_all()

    def measure(self) -> None:
        """Take one sample of every shape."""
        for shape, seconds in self._multiply_all().items():
            count, (m, n) = self._batches[shape][0].shape[0], shape
            self._rates[shape].append(2.0 * m * m * n * count / seconds)

    def _multiply_all(self) -> dict[tuple[int, int], float]:
        with full_float32():
            return {
                shape: self._watch.seconds(lambda one=one, other=other, out=out: torch.bmm(one, other, out=out))  # type: ignore[misc]
                for shape, (one, other, out) in self._batches.items()
            }

    def rates(self) -> dict[tuple[int, int], float]:
        """Median operations per second, by block shape."""
        return {shape: statistics.median(samples) for shape, samples in self._rates.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Least time of one step, on average over a refresh interval."""

    flops: float
    """Operations in matrix products, see `bench_flops`."""
    products_seconds: float
    roots_seconds: float

    @property
    def seconds(self) -> float:
        """Products and roots."""
        return self.products_seconds + self.roots_seconds

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {**dataclasses.asdict(self), "seconds": self.seconds}


def floor_of(method: str, blocks: Blocks, rates: dict[tuple[int, int], float], roots_seconds: float) -> Floor:
    """Put the floor together.

    Args:
        method: one of `METHODS`.
        blocks: all blocks.
        rates: operations per second by block shape.
        roots_seconds: of the roots alone, a step on average.

    Returns:
        The floor.
    """
    counted = [(block, products(method, block, sides(method, matrix)).total) for block, matrix in blocks]
    return Floor(
        flops=sum(flops for _, flops in counted),
        products_seconds=sum(flops / rates[block] for block, flops in counted),
        roots_seconds=roots_seconds,
    )


def time_roots(optimizer: Shampoo, watch: Stopwatch) -> tuple[float, float]:
    """Time the refreshes of one whole interval by themselves, with the turns of the optimizer.

    The counters of the blocks go on as if steps were taken, the factors stay: call it after all else is measured.

    Args:
        optimizer: ours, some steps old.
        watch: for its device.

    Returns:
        Seconds and roots of a step, on average.
    """
    interval = optimizer.config.refresh_interval
    active = [torch.arange(len(state.stack.blocks)) for state in optimizer.states]
    seconds, roots = 0.0, 0

    def refresh() -> None:
        nonlocal roots
        roots += refresh_due(optimizer.states, active, optimizer.config).computed

    with torch.no_grad():
        for _ in range(interval):
            for state in optimizer.states:
                state.num_updates += 1
            seconds += watch.seconds(refresh)
    return seconds / interval, roots / interval
