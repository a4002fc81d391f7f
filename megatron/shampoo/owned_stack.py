"""One stack of blocks in a step: brings its blocks together from shards and messages, and runs the step on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.shampoo.block_state import StackState
from megatron.shampoo.collective.exchange import Inbox
from megatron.shampoo.collective.views import SlotNorms, gather, scatter_add
from megatron.shampoo.config import Grafting, ShampooConfig
from megatron.shampoo.methods import Application, recipe_of
from megatron.shampoo.placement import Placement
from megatron.shampoo.plan.copies import StridedCopy
from megatron.shampoo.plan.plan import Plan
from megatron.shampoo.plan.schedule import Schedule
from megatron.shampoo.stack_step import (
    Hyper,
    accumulate,
    direction,
    finish,
    grafts_by_momentum,
    per_block,
    refresh_rotated_,
    untouched,
)

Shards = Sequence[Tensor | None]
"""For each parameter of the plan this rank's flat shard; None where it holds nothing or there is no gradient."""


class _Work(NamedTuple):
    """What the directions of a stack need of its gradient."""

    gradient: Tensor
    """Normalised, `(blocks, m, n)`."""
    rotated: Tensor | None
    """In the eigenbases of before this step's refresh, where the method has computed it."""


class OwnedStack:
    """A stack that this rank owns, with the copies and messages that its blocks are made of."""

    def __init__(
        self,
        number: int,
        schedule: Schedule,
        plan: Plan,
        config: ShampooConfig,
        placement: Placement,
        group_of: Mapping[int, int],
    ) -> None:
        """Allocate the state and prepare the indices.

        Args:
            number: of the stack in the schedule.
            schedule: this rank's.
            plan: of the group.
            config: method and all settings.
            placement: device, data type, group.
            group_of: for each parameter of the plan the number of its parameter group, also where this rank holds
                nothing of it.
        """
        stack, device = schedule.stacks[number], placement.device
        self.state = StackState(stack, plan, config, device, placement.dtype)
        self._config, self._recipe = config, recipe_of(config)
        self._dtype, self._device = placement.dtype, device
        self._local, self._unpack = schedule.local[number], schedule.unpack[number]
        pairs = schedule.unpack_slots[number]
        self._fragments = torch.tensor([fragment for fragment, _ in pairs], dtype=torch.long, device=device)
        self._square_norms = SlotNorms(
            self._local, stack.block_numel, [slot for _, slot in pairs], len(stack.blocks), device
        )
        self._parameters = [plan.blocks[block].parameter for block in stack.blocks]
        self._always_active = placement.group is not None  # Megatron's buffers always hold a gradient
        self._groups, self._group_slots = torch.tensor([group_of[index] for index in self._parameters]).unique(
            return_inverse=True
        )
        self._work: _Work | None = None

    def active(self, gradients: Shards) -> Tensor:
        """Slots whose parameter has a gradient in this step, on the CPU."""
        everything = torch.arange(len(self._parameters))
        if self._always_active or all(gradient is not None for gradient in gradients):
            return everything
        return everything[torch.tensor([gradients[index] is not None for index in self._parameters])]

    def accumulate(self, active: Tensor, gradients: Shards, inbox: Inbox) -> None:
        """Put this step's gradient into the factors.

        Args:
            active: slots with a gradient.
            gradients: of the parameters.
            inbox: fragments from other ranks.
        """
        gradient = self._collect(active, gradients, inbox.payloads[0])
        with untouched(self.state, active):
            rotated = accumulate(self.state, self._recipe, self._config, gradient)
        self.state.num_updates[active] += 1
        is_needed = self._recipe.application is not Application.ROOT or not self._config.averages_gradients
        self._work = _Work(gradient, rotated) if is_needed else None

    def directions(
        self, active: Tensor, inputs: Shards, grafts: Shards, inbox: Inbox, groups: Sequence[dict[str, Any]]
    ) -> tuple[Tensor, Tensor | None]:
        """Grafted search directions, after the refresh.

        Args:
            active: slots with a gradient.
            inputs: what is preconditioned.
            grafts: the grafting steps.
            inbox: fragments from other ranks.
            groups: the optimizer's parameter groups.

        Returns:
            `(blocks, m, n)`, and the factors `(blocks,)` of the grafting where there is one.
        """
        state, work, self._work = self.state, self._work, None
        hyper = self._hyper(groups)
        started = state.num_updates >= self._config.start_step
        x = self._collect(active, inputs, inbox.payloads[1]) if self._config.averages_gradients else None
        early = None
        if not bool(started.all()):
            # Before the start step a block's grafting step travels in the place of what is preconditioned.
            graft = self._collect(active, inputs, inbox.payloads[-1]) if x is None else x
            early = graft / hyper.momentum_weight if grafts_by_momentum(self._recipe.grafting) else graft.clone()
        if work is not None and work.rotated is not None:
            refresh_rotated_(state, work.gradient, work.rotated)
        gradient, rotated = (None, None) if work is None else work
        with untouched(state, active):
            found = direction(state, self._recipe, self._config, gradient, rotated, x, hyper)
        norms = None if self._recipe.grafting is Grafting.NONE else self._norms(grafts, inbox, hyper)
        found, ratio = finish(state, self._recipe, found, norms)
        if early is not None:
            found = torch.where(started.to(found.device)[:, None, None], found, early)
        return found, ratio

    def scatter_local(self, directions: Tensor, targets: Shards, scale: Sequence[float], gradients: Shards) -> None:
        """Add the directions, times the scale of their parameter, to this rank's own fragments.

        Args:
            directions: `(blocks, m, n)`.
            targets: added to in place.
            scale: for each parameter.
            gradients: parameters without one are left alone.
        """
        scatter_add(self._copies(gradients), directions, targets, scale)

    def _copies(self, sources: Shards) -> Iterable[StridedCopy]:
        return (copy for copy in self._local if sources[copy.source] is not None)

    def _collect(self, active: Tensor, sources: Shards, received: Tensor) -> Tensor:
        """Blocks `(blocks, m, n)` from this rank's shards and what it received; zero where there is no gradient."""
        shape = (len(self._parameters), *self.state.stack.shape)
        allocate = torch.empty if active.numel() == len(self._parameters) else torch.zeros
        collected = allocate(shape, dtype=self._dtype, device=self._device)
        gather(self._copies(sources), sources, collected)
        gather(self._unpack, [received], collected)
        return collected

    def _norms(self, grafts: Shards, inbox: Inbox, hyper: Hyper) -> Tensor:
        """Norms of the grafting steps, `(blocks,)`."""
        norms = self._square_norms(grafts, inbox.norms[self._fragments]).sqrt()
        if grafts_by_momentum(self._recipe.grafting):
            weight = hyper.momentum_weight
            norms = norms / (weight.flatten() if isinstance(weight, Tensor) else weight)
        return norms

    def _hyper(self, groups: Sequence[dict[str, Any]]) -> Hyper:
        """Settings of the blocks, from the groups of their parameters."""
        steps = self.state.num_updates.double()
        mine = [groups[group] for group in self._groups.tolist()]
        betas = torch.tensor([group["betas"] for group in mine], dtype=torch.float64)[self._group_slots]
        eps = torch.tensor([group["eps"] for group in mine], dtype=torch.float64)[self._group_slots]
        ones = torch.ones_like(steps)
        corrects = self._config.bias_correction
        ahead = 1 if self._config.nesterov else 0
        first = 1 - betas[:, 0] ** (steps + ahead) if corrects and self._config.averages_gradients else ones
        second = 1 - betas[:, 1] ** steps if corrects else ones
        # A block without any gradient yet has no weight; it is not updated either.
        first, second = (torch.where(weight > 0, weight, ones) for weight in (first, second))
        found = [per_block(values, self._device, self._dtype) for values in (betas[:, 1], eps, first, second)]
        return Hyper(beta2=found[0], eps=found[1], momentum_weight=found[2], second_weight=found[3])
