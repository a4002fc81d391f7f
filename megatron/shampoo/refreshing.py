"""Refresh of inverse roots and eigenbases: by turns, batched over equal sizes of all stacks; what follows a failure."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.block_state import FactorState, StackState
from megatron.shampoo.config import ShampooConfig, Solver
from megatron.shampoo.linalg.basis import off_diagonal_ratio
from megatron.shampoo.linalg.precision import full_float32
from megatron.shampoo.linalg.symmetric import symmetric_from_lower
from megatron.shampoo.methods import recipe_of
from megatron.shampoo.preconditioner.factors import bias_correction
from megatron.shampoo.preconditioner.ladder import RUNGS, Refreshed, Task, climb, root_in_basis

logger = logging.getLogger("megatron.shampoo")

MAX_FAILURES_IN_A_ROW = 3
"""Failed refreshes after which a block goes on with the identity. Source: Distributed Shampoo tolerates as many."""

MAX_BATCH_NUMEL = 1 << 27
"""Elements of the largest batch of matrices decomposed at once, 1 GiB in float64: bounds the workspace."""


@dataclasses.dataclass
class RefreshCounts:
    """What one step's refreshes came to."""

    computed: int = 0
    """Inverse roots or eigenbases computed."""
    skipped: int = 0
    """Left as they were, since the old eigenbasis still fits."""
    failed: int = 0
    """That no attempt could compute."""


class _Due(NamedTuple):
    """Factors of one side of one stack that are to be refreshed."""

    state: StackState
    side: FactorState
    slots: Tensor


class _Kind(NamedTuple):
    """What can be computed in one batch."""

    size: int
    root: int
    trace_scaled: bool


def refresh_due(states: Sequence[StackState], active: Sequence[Tensor], config: ShampooConfig) -> RefreshCounts:
    """Refresh all blocks whose turn it is.

    Args:
        states: of the stacks.
        active: for each stack the slots whose factors were updated in this step.
        config: schedule, damping, averaging, solver.
    """
    counts = RefreshCounts()
    solver = recipe_of(config).solver
    by_kind: dict[_Kind, list[_Due]] = {}
    for state, slots in zip(states, active, strict=True):
        due = state.due(config, slots)
        if not due.numel():
            continue
        for side in state.sides:
            kind = _Kind(side.size, side.task.root or 0, side.task.trace_scaled)
            by_kind.setdefault(kind, []).append(_Due(state, side, due))
        state.refreshed_at[due] = state.num_updates[due]
    for kind in sorted(by_kind):
        for batch in _batches(by_kind[kind], max(1, MAX_BATCH_NUMEL // (kind.size * kind.size))):
            _refresh_batch(batch, solver, config, counts)
    return counts


def _batches(parts: list[_Due], most: int) -> Iterator[list[_Due]]:
    """Group into batches of at most `most` matrices."""
    batch: list[_Due] = []
    room = most
    for part in parts:
        slots = part.slots
        while slots.numel():
            batch.append(part._replace(slots=slots[:room]))
            room, slots = room - batch[-1].slots.numel(), slots[room:]
            if room == 0:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


def _refresh_batch(batch: list[_Due], solver: Solver, config: ShampooConfig, counts: RefreshCounts) -> None:
    if config.refresh_tolerance > 0:
        batch = [part for part in (_still_needed(part, config, counts) for part in batch) if part.slots.numel()]
        if not batch:
            return
    factors = torch.cat([_corrected(part, config) for part in batch])
    previous = [
        part.side.tracked.index_select(0, part.slots.to(factors.device)).to(factors)
        for part in batch
        if part.side.tracked is not None
    ]
    task = batch[0].side.task
    found = climb(factors, torch.cat(previous) if previous else None, task, solver)
    start = 0
    for part in batch:
        stop = start + part.slots.numel()
        _take(part, Refreshed(*(None if it is None else it[start:stop] for it in found)), task, solver, counts)  # type: ignore[arg-type]
        start = stop


def _corrected(part: _Due, config: ShampooConfig) -> Tensor:
    slots = part.slots.to(part.side.factor.device)
    weight = bias_correction(config.factor_beta, part.state.num_updates[part.slots])
    factors = part.side.factor.index_select(0, slots).to(part.side.condition.dtype)
    return factors.div_(weight.to(factors)[:, None, None])


def _still_needed(part: _Due, config: ShampooConfig, counts: RefreshCounts) -> _Due:
    """Leave out the slots whose eigenbasis still fits. Decided by the owner, on its own factors alone."""
    basis = part.side.tracked
    assert basis is not None
    factors = symmetric_from_lower(_corrected(part, config))
    kept = basis[part.slots.to(basis.device)].to(factors)
    with full_float32():
        ratio = off_diagonal_ratio(factors, kept).cpu()
    needed = ~(ratio <= config.refresh_tolerance)
    # The identity that a block starts with is no basis of its own, and that of a failure fits no root.
    needed |= (part.state.num_updates[part.slots] == config.start_step) | (part.side.failures[part.slots] > 0)
    counts.skipped += int((~needed).sum())
    if part.side.task.root is not None and not bool(needed.all()):
        # The basis stays, the eigenvalues do not.
        fits = (~needed).to(factors.device)
        with full_float32():
            root = root_in_basis(factors[fits], kept[fits], part.side.task)
        part.side.inverse[part.slots[~needed].to(factors.device)] = root.to(part.side.inverse)
    return part._replace(slots=part.slots[needed])


def _take(part: _Due, found: Refreshed, task: Task, solver: Solver, counts: RefreshCounts) -> None:
    """Store what was computed; name failures, count them in a row, give a block up after some."""
    side, rungs = part.side, RUNGS[solver]
    good = found.rung < len(rungs)
    counts.computed += int(good.sum())
    if bool(good.all()):
        _store(part, part.slots, found.root, found.basis, found.condition)
        side.failures[part.slots] = 0
    else:
        chosen = Refreshed(*(None if it is None else it[good.to(it.device)] for it in found))  # type: ignore[arg-type]
        _store(part, part.slots[good], chosen.root, chosen.basis, chosen.condition)
        side.failures[part.slots] = torch.where(good, 0, side.failures[part.slots] + 1)
        counts.failed += int((~good).sum())
    for index in found.rung.nonzero().flatten().tolist():
        _report(part, int(part.slots[index]), int(found.rung[index]), task, solver)


def _store(part: _Due, slots: Tensor, root: Tensor | None, basis: Tensor | None, condition: Tensor) -> None:
    state, side = part.state, part.side
    slots = slots.to(side.factor.device)
    if side.task.root is None:
        assert basis is not None
        state.change_basis(side, slots, basis)
    else:
        assert root is not None
        side.inverse.index_copy_(0, slots, root.to(side.inverse))
        if side.basis is not None and basis is not None:
            side.basis.index_copy_(0, slots, basis.to(side.basis))
    side.condition[slots] = condition


def _report(part: _Due, slot: int, rung: int, task: Task, solver: Solver) -> None:
    side, rungs = part.side, RUNGS[solver]
    name = f"{side.side} {'eigenbasis' if task.root is None else 'root'} of {part.state.names[slot]}"
    if rung < len(rungs):
        logger.warning("%s: %s failed, %s was used", name, rungs[rung - 1].name, rungs[rung].name)
        return
    in_a_row = int(side.failures[slot])
    if in_a_row < MAX_FAILURES_IN_A_ROW:
        logger.warning("%s: every solver failed, the previous one stays (%d in a row)", name, in_a_row)
        return
    identity = torch.eye(side.size, dtype=side.condition.dtype, device=side.factor.device).unsqueeze(0)
    _store(part, torch.tensor([slot]), identity, identity, side.condition[slot].clone())
    logger.error(
        "%s: every solver failed %d times in a row; the block goes on without it until a refresh succeeds. Look for "
        "gradients that are not finite, lower the learning rate or raise --shampoo-epsilon",
        name,
        in_a_row,
    )
