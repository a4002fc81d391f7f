"""Runs a function on several processes over gloo, and cuts parameters into shards as a distributed optimizer does."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron.shampoo import Shampoo, ShampooConfig
from megatron.shampoo.methods import factor_sides
from megatron.shampoo.placement import Placement
from megatron.shampoo.plan.parts import MatrixParameter, Part, Span

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def run_ranks(body: Callable[..., Any], num_ranks: int, *arguments: Any) -> list[Any]:
    """Call `body(*arguments)` on every rank of a gloo world of its own; returns what each rank returned.

    Raises:
        torch.multiprocessing.ProcessRaisedException: with the traceback of the first rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        # The fork server imports torch once; its children begin in a fraction of a second.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "megatron.shampoo.optimizer"])
        mp.start_processes(  # type: ignore[no-untyped-call]
            _rank, (num_ranks, folder, body, arguments), nprocs=num_ranks, join=True, start_method="forkserver"
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, folder: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    torch.save(body(*arguments), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@dataclasses.dataclass(frozen=True)
class Model:
    """Parameters in one flat buffer: matrices are preconditioned, vectors take AdamW."""

    shapes: tuple[tuple[int, ...], ...]
    seed: int = 0
    padding: int = 3
    """Elements of nobody between two parameters."""

    def weights(self) -> list[Tensor]:
        """Initial values, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def gradients(self, step: int) -> list[Tensor]:
        """Gradients of a step, the same on every rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def starts(self) -> list[int]:
        """Offset of each parameter in the buffer."""
        starts, at = [], 0
        for shape in self.shapes:
            starts.append(at)
            at += _numel(shape) + self.padding
        return starts

    def numel(self) -> int:
        """Length of the buffer."""
        return self.starts()[-1] + _numel(self.shapes[-1]) + self.padding

    def equal_borders(self, num_ranks: int) -> list[int]:
        """Borders of equal shards, as Megatron's buffers have them; the last one may reach past the buffer."""
        shard = -(-self.numel() // num_ranks)
        return [rank * shard for rank in range(num_ranks + 1)]

    def spans(self, borders: Sequence[int]) -> list[tuple[Span, ...]]:
        """For each parameter its flat ranges by rank."""
        found = []
        for start, shape in zip(self.starts(), self.shapes, strict=True):
            stop = start + _numel(shape)
            ranges = enumerate(itertools.pairwise(borders))
            cuts = [(rank, max(start, low) - start, min(stop, high) - start) for rank, (low, high) in ranges]
            found.append(tuple(Span(*cut) for cut in cuts if cut[1] < cut[2]))
        return found


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


class Trainer:
    """One rank of a data-parallel group that trains a model on made-up gradients."""

    def __init__(
        self, model: Model, config: ShampooConfig, group: dist.ProcessGroup, borders: Sequence[int] | None
    ) -> None:
        """Args: the borders of the shards, or None for parameters that every rank holds whole."""
        self.model, self.rank = model, group.rank()
        self.ranges: list[tuple[int, int] | None] = [(0, _numel(shape)) for shape in model.shapes]
        spans: list[tuple[Span, ...]] = [() for _ in model.shapes]
        if borders is not None:
            spans = model.spans(borders)
            self.ranges = [
                next(((span.start, span.stop) for span in found if span.rank == self.rank), None) for found in spans
            ]
        self.shards = [
            None if held is None else weight.flatten()[held[0] : held[1]].clone()
            for weight, held in zip(model.weights(), self.ranges, strict=True)
        ]
        sides = [factor_sides(shape, config) if len(shape) == 2 else () for shape in model.shapes]  # type: ignore[arg-type]
        matrices = [index for index, found in enumerate(sides) if any(found)]
        placement = Placement(
            parameters=tuple(
                MatrixParameter(
                    name=f"parameter {index}",
                    shape=model.shapes[index],  # type: ignore[arg-type]
                    parts=(Part(name="weight", global_shape=model.shapes[index], sides=sides[index]),),  # type: ignore[arg-type]
                    spans=spans[index],
                )
                for index in matrices
            ),
            shards=tuple(self.shards[index] for index in matrices),
            group=group,
            tp_alignment=1,
            device=torch.device("cpu"),
        )
        params = [{"params": [shard for shard in self.shards if shard is not None]}]
        self.optimizer = Shampoo(params, config=config, placement=placement, **SETTINGS)

    def step(self, number: int) -> None:
        """One optimizer step on the gradients of step `number`."""
        for shard, held, gradient in zip(self.shards, self.ranges, self.model.gradients(number), strict=True):
            if shard is not None and held is not None:
                shard.grad = gradient.flatten()[held[0] : held[1]].clone()
        self.optimizer.step()

    def result(self) -> list[tuple[int, int, Tensor] | None]:
        """For each parameter the range that this rank holds, and its values."""
        return [
            None if shard is None or held is None else (*held, shard.detach())
            for shard, held in zip(self.shards, self.ranges, strict=True)
        ]


def train_alone(model: Model, config: ShampooConfig, steps: int) -> list[Tensor]:
    """The same training by the plain optimizer on one process; returns flat parameters."""
    weights = [nn.Parameter(weight) for weight in model.weights()]
    optimizer = Shampoo(weights, config=config, **SETTINGS)
    for step in range(steps):
        for weight, gradient in zip(weights, model.gradients(step), strict=True):
            weight.grad = gradient
        optimizer.step()
    return [weight.detach().flatten() for weight in weights]


def assemble(model: Model, results: Sequence[list[tuple[int, int, Tensor] | None]]) -> list[Tensor]:
    """Flat parameters from the shards of all ranks; every element must be there once."""
    whole = [torch.full((_numel(shape),), torch.nan) for shape in model.shapes]
    for result in results:
        for flat, held in zip(whole, result, strict=True):
            if held is not None:
                start, stop, shard = held
                assert flat[start:stop].isnan().all(), "two ranks hold an element"
                flat[start:stop] = shard
    assert all(flat.isfinite().all() for flat in whole), "an element is missing or not finite"
    return whole
