"""The step of the optimizer alone, on the matrices of a GPT with random gradients, on one process.

    python -m megatron.experiments.bench_alone measure|memory REQUEST.json RESULT.json

`measure` interleaves all optimizers step by step in one process, in an order that turns from step to step, so that a
machine that slows down does so for all alike, and every optimizer finds the caches full of others' data, as it does
after a backward pass. The blocks of ours start at the age of one interval, so that each refreshes once in the
unmeasured steps and not, as young blocks do, four times; a measured step costs what it always costs.

`memory` takes one step of every optimizer, each in a process of its own, for its peak. It refreshes every block, so
that no later step needs more. `tools/bench.py` writes the requests.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.cpu.environment import keep_freed_memory, set_environment
from megatron.experiments.bench_floor import ProductRate, Stopwatch, floor_of, time_roots
from megatron.experiments.bench_names import METHODS, MUON_NOTE, REFRESH_INTERVAL, WARM_UP, blocks, matrices
from megatron.experiments.bench_optimizers import STRIDES, build, state_bytes
from megatron.experiments.bench_stats import shares, summarize
from megatron.shampoo import Shampoo

GRADIENT_SETS = 4
"""Prepared beforehand and taken in turn."""


class Participant:
    """One optimizer with parameters of its own, and its measured steps."""

    def __init__(
        self, name: str, shapes: list[tuple[int, int]], device: torch.device, *, staggered: bool, age: int
    ) -> None:
        """Make the parameters and the optimizer.

        Args:
            name: one of `OPTIMIZERS`.
            shapes: of the parameters.
            device: of the parameters.
            staggered: of ours: blocks refresh by turns.
            age: of ours, see `build`.
        """
        self.name, self.staggered = name, staggered
        self.stride = STRIDES.get(name, 1)
        self._watch = Stopwatch(device)
        self.parameters = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
        self.optimizer = build(name, list(self.parameters), staggered=staggered, age=age)
        self.seconds: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.roots: list[int] = []
        if isinstance(self.optimizer, Shampoo):
            self.optimizer.clock.enabled = True

    def step(self, gradients: list[Tensor], is_measured: bool) -> None:
        """Take a step.

        Args:
            gradients: of the parameters, shared with other optimizers.
            is_measured: whether to keep its time.
        """
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        seconds = self._watch.seconds(self.optimizer.step)
        if not is_measured:
            return
        self.seconds.append(seconds)
        if isinstance(self.optimizer, Shampoo):
            self.phases.append(self.optimizer.clock.seconds())
            self.roots.append(self.optimizer.metrics.refreshes)

    def row(self, rates: dict[tuple[int, int], float], shapes: list[tuple[int, int]]) -> dict[str, Any]:
        """Reduce the measurements; the optimizer is of no use afterwards.

        Args:
            rates: of matrix products, by block shape.
            shapes: of the parameters.

        Returns:
            A row of the table.
        """
        summary = summarize(self.seconds)
        row: dict[str, Any] = {
            "optimizer": self.name,
            "seconds": summary.as_dict(),
            "state_bytes_per_parameter": state_bytes(self.optimizer.state_dict()) / sum(m * n for m, n in shapes),
            "note": MUON_NOTE if self.name == "megatron-muon" and self.parameters[0].device.type == "cpu" else None,
            "all_seconds": self.seconds,
        }
        if not isinstance(self.optimizer, Shampoo):
            return row
        roots_seconds, roots = time_roots(self.optimizer, self._watch)
        floor = floor_of(self.name, blocks(shapes), rates, roots_seconds)
        return row | {
            "staggered": self.staggered,
            "shares": shares(self.phases, self.seconds),
            "roots_per_step": sum(self.roots) / len(self.roots),
            "roots_per_step_alone": roots,
            "floor": floor.as_dict(),
            "over_floor": summary.mean / floor.seconds,
            "all_phases": self.phases,
        }


def make_gradients(shapes: list[tuple[int, int]], device: torch.device) -> list[list[Tensor]]:
    """Random gradients, the same in every process.

    Args:
        shapes: of the parameters.
        device: of the gradients.

    Returns:
        `GRADIENT_SETS` lists.
    """
    generator = torch.Generator(device).manual_seed(1234)
    return [
        [1e-2 * torch.randn(shape, device=device, generator=generator) for shape in shapes]
        for _ in range(GRADIENT_SETS)
    ]


def check_blocks(optimizer: Shampoo, shapes: list[tuple[int, int]]) -> None:
    """The floor counts blocks by itself: they have to be those of the optimizer.

    Args:
        optimizer: ours.
        shapes: of its parameters.

    Raises:
        RuntimeError: they are not.
    """
    own = Counter({state.stack.shape: 0 for state in optimizer.states})
    for state in optimizer.states:
        own[state.stack.shape] += len(state.stack.blocks)
    counted = Counter(shape for shape, _ in blocks(shapes))
    if own != counted:
        raise RuntimeError(f"the optimizer has blocks {dict(own)}, the floor is of {dict(counted)}")


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure all optimizers on the matrices of one width.

    Args:
        request: width, layers, optimizers (names and whether they are staggered), steps.

    Returns:
        Rows, and what they depend on.
    """
    device = _device()
    shapes = matrices(request["width"], request["layers"])
    gradients = make_gradients(shapes, device)
    participants, rows = [], []
    for name, staggered in request["optimizers"]:
        try:
            participants.append(Participant(name, shapes, device, staggered=staggered, age=REFRESH_INTERVAL))
        except ImportError as error:
            if name in METHODS:
                raise
            rows.append({"optimizer": name, "reason": str(error)})
    for participant in participants:
        if isinstance(participant.optimizer, Shampoo):
            check_blocks(participant.optimizer, shapes)
    rate = ProductRate(blocks(shapes), device)
    for number in range(request["steps"]):
        print(f"optimizer, width {request['width']}, step {number + 1} of {request['steps']}", flush=True)
        turn = number % max(1, len(participants))
        for participant in participants[turn:] + participants[:turn]:
            if number % participant.stride == 0:
                participant.step(gradients[number % GRADIENT_SETS], number >= WARM_UP)
        rate.measure()
    rates = rate.rates()
    return {
        "width": request["width"],
        "layers": request["layers"],
        "parameters": sum(m * n for m, n in shapes),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "product_flops_per_second": {f"{m}x{n}": value for (m, n), value in rates.items()},
        "rows": [participant.row(rates, shapes) for participant in participants] + rows,
    }


def memory(request: Mapping[str, Any]) -> dict[str, Any]:
    """Peak memory of each optimizer: parameters, gradients, state and workspace (on CPU also Python and torch).

    Args:
        request: width, layers, optimizers.

    Returns:
        Bytes by optimizer.

    Raises:
        RuntimeError: a process ended without an answer.
    """
    # Forked from this process, which has imported torch and done nothing with it, on CUDA neither.
    context = multiprocessing.get_context("fork")
    peaks = {}
    for name in request["optimizers"]:
        print(f"optimizer, width {request['width']}: memory of {name}", flush=True)
        answers, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send_peak, args=(name, request["width"], request["layers"], sender))
        process.start()
        sender.close()
        try:
            peaks[name] = answers.recv()
        except EOFError:
            raise RuntimeError(f"memory of {name}: its process ended without an answer") from None
        finally:
            process.join()
    return {"peak_bytes": peaks}


def _send_peak(name: str, width: int, layers: int, answer: Connection) -> None:
    device = _device()
    shapes = matrices(width, layers)
    participant = Participant(name, shapes, device, staggered=True, age=0)
    participant.step([1e-2 * torch.randn(shape, device=device) for shape in shapes], is_measured=False)
    if device.type == "cuda":
        answer.send(torch.cuda.max_memory_allocated())
        return
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts in bytes
    answer.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def _device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    # As in training on CPU: Megatron's optimizers are not compiled, and memory is not handed back after every tensor.
    set_environment()
    keep_freed_memory()
    return torch.device("cpu")


def main() -> None:
    """Read the request, write the result."""
    mode, request, result = sys.argv[1], *(Path(path) for path in sys.argv[2:])
    work = {"measure": measure, "memory": memory}[mode]
    result.write_text(json.dumps(work(json.loads(request.read_text()))))


if __name__ == "__main__":
    main()
