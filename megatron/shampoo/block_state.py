"""State of the blocks that a rank owns, stacked by shape, and the refresh of their inverse roots by turns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.config import ShampooConfig
from megatron.shampoo.plan.plan import Plan
from megatron.shampoo.plan.schedule import Stack
from megatron.shampoo.preconditioner.factors import bias_correction
from megatron.shampoo.preconditioner.refresh import refresh_roots

logger = logging.getLogger("megatron.shampoo")

ROOT = 4
"""p of the inverse root on either side. Source: Gupta et al. 2018, 2 x the number of dimensions."""

DECOMPOSITION = torch.float64
"""Precision of the eigendecompositions. In float32 the eigenvalues of a singular factor are off by a tenth of the
default damping, so that two layouts of one run drift apart eight times as fast (tests/integration/test_layouts.py)."""

MAX_FAILURES_IN_A_ROW = 3
"""Failed refreshes of one root before the run stops. Source: Distributed Shampoo's tolerance."""

MAX_BATCH_NUMEL = 1 << 27
"""Elements of the largest batch of matrices decomposed at once, 1 GiB in float64: bounds the workspace."""


class StackState:
    """Factor matrices, inverse roots and counters of one stack of equal-shaped blocks.

    `left` and `left_root` are `(blocks, m, m)`, `right` and `right_root` `(blocks, n, n)`. Counters live on the CPU,
    where the schedule is decided without a device synchronisation.
    """

    TENSORS = ("left", "right", "left_root", "right_root", "condition", "num_updates", "refreshed_at", "failures")

    def __init__(self, stack: Stack, plan: Plan, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate everything at once: a checkpoint's structure must not change after the first step.

        Args:
            stack: the blocks.
            plan: for names and refresh turns.
            device: of factors and roots.
            dtype: of factors and roots.
        """
        self.stack = stack
        count, (rows, columns) = len(stack.blocks), stack.shape
        self.names = [plan.name_of(block) for block in stack.blocks]
        turns = [plan.blocks[block].ordinal % plan.refresh_interval for block in stack.blocks]
        self.turn = torch.tensor(turns, dtype=torch.long)
        self.left = torch.zeros(count, rows, rows, device=device, dtype=dtype)
        self.right = torch.zeros(count, columns, columns, device=device, dtype=dtype)
        self.left_root = torch.eye(rows, device=device, dtype=dtype).repeat(count, 1, 1)
        self.right_root = torch.eye(columns, device=device, dtype=dtype).repeat(count, 1, 1)
        self.condition = torch.ones(count, 2, device=device, dtype=dtype)
        """Condition number of the damped left and right factor at the last refresh."""
        self.num_updates = torch.zeros(count, dtype=torch.long)
        """Gradients accumulated into the factors of each block."""
        self.refreshed_at = torch.zeros(count, dtype=torch.long)
        """`num_updates` at the last refresh."""
        self.failures = torch.zeros(count, 2, dtype=torch.long)
        """Failed refreshes in a row of the left and right root."""

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name; not copied."""
        return {name: getattr(self, name) for name in self.TENSORS}

    def check_state_dict(self, state: dict[str, Tensor]) -> None:
        """Refuse a state that does not fit.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        if set(state) != set(self.TENSORS):
            raise ValueError(f"state of blocks {self.stack.shape} has {sorted(state)}, expected {sorted(self.TENSORS)}")
        for name, saved in state.items():
            mine = getattr(self, name)
            if mine.shape != saved.shape:
                raise ValueError(
                    f"{name} of the {len(self.names)} blocks {self.stack.shape} (first: {self.names[0]}) has shape "
                    f"{tuple(saved.shape)} in the saved state and {tuple(mine.shape)} here: the block grid or the "
                    "owners differ"
                )

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors into the present ones.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        self.check_state_dict(state)
        for name, saved in state.items():
            getattr(self, name).copy_(saved)

    def due(self, config: ShampooConfig, active: Tensor) -> Tensor:
        """Slots that refresh in this step.

        A block refreshes at its first preconditioned step, then on its turn in every interval. While it is younger than
        an interval it also refreshes whenever the number of its gradients has doubled: a factor of few gradients is
        nearly singular, and its root, kept for long, would amplify rounding errors and directions it has not seen.

        Args:
            config: start step and interval.
            active: slots whose factors were updated in this step.
        """
        count = self.num_updates[active]
        turn = (count + self.turn[active]) % config.refresh_interval == 0
        doubled = ((count & (count - 1)) == 0) & (count < config.refresh_interval)
        return active[(count == config.start_step) | ((count > config.start_step) & (turn | doubled))]


class _Due(NamedTuple):
    """Factor matrices of one side of one stack that are to be refreshed."""

    state: StackState
    side: int
    slots: Tensor

    @property
    def factor(self) -> Tensor:
        return self.state.left if self.side == 0 else self.state.right

    @property
    def root(self) -> Tensor:
        return self.state.left_root if self.side == 0 else self.state.right_root


def refresh_due(states: Sequence[StackState], active: Sequence[Tensor], config: ShampooConfig) -> int:
    """Refresh the inverse roots of all blocks whose turn it is, batched over equal sizes of all stacks.

    Args:
        states: of the stacks.
        active: for each stack the slots whose factors were updated in this step.
        config: schedule, damping, averaging.

    Returns:
        Number of root computations (two per block).

    Raises:
        RuntimeError: a root failed for the third time in a row; names the block.
    """
    by_size: dict[int, list[_Due]] = {}
    for state, slots in zip(states, active, strict=True):
        due = state.due(config, slots)
        if due.numel():
            for side, size in enumerate(state.stack.shape):
                by_size.setdefault(size, []).append(_Due(state, side, due))
            state.refreshed_at[due] = state.num_updates[due]
    count = 0
    for size in sorted(by_size):
        for batch in _batches(by_size[size], max(1, MAX_BATCH_NUMEL // (size * size))):
            _refresh_batch(batch, config)
            count += sum(part.slots.numel() for part in batch)
    return count


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


def _refresh_batch(batch: list[_Due], config: ShampooConfig) -> None:
    factors, previous = [], []
    for part in batch:
        slots = part.slots.to(part.factor.device)
        weight = bias_correction(config.factor_beta, part.state.num_updates[part.slots]).to(part.factor)
        factors.append(part.factor[slots] / weight[:, None, None])
        previous.append(part.root[slots])
    result = refresh_roots(torch.cat(factors), torch.cat(previous), ROOT, config.epsilon, DECOMPOSITION)
    retried, failed = result.retried.cpu(), result.failed.cpu()
    start = 0
    for part in batch:
        stop = start + part.slots.numel()
        slots = part.slots.to(part.factor.device)
        part.root[slots] = result.root[start:stop]
        good = ~failed[start:stop]
        part.state.condition[slots[good.to(slots.device)], part.side] = result.condition[start:stop][
            good.to(slots.device)
        ]
        if bool(retried[start:stop].any()):
            _count_failures(part, retried[start:stop], failed[start:stop])
        else:
            part.state.failures[part.slots, part.side] = 0
        start = stop


def _count_failures(part: _Due, retried: Tensor, failed: Tensor) -> None:
    """Name failed roots in the log, count them in a row, stop at the limit."""
    failures = part.state.failures
    failures[part.slots, part.side] = torch.where(failed, failures[part.slots, part.side] + 1, 0)
    for index in retried.nonzero().flatten().tolist():
        slot = int(part.slots[index])
        name = f"{'left' if part.side == 0 else 'right'} root of {part.state.names[slot]}"
        if not failed[index]:
            logger.warning("%s failed at first and was computed again from a copy", name)
            continue
        in_a_row = int(failures[slot, part.side])
        logger.warning("%s failed again from a copy: the previous root stays (%d in a row)", name, in_a_row)
        if in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"{name} failed {in_a_row} times in a row: its factor matrix is not finite or the solver is broken; "
                "lower the learning rate or raise --shampoo-epsilon, and look for non-finite gradients"
            )
