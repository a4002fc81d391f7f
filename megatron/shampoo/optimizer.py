"""Shampoo as a `torch.optim.Optimizer`: owns the state, runs the phases of a step, holds no formulas.

A step, on every rank of a data-parallel group:

    1  moments      elementwise on shards: exp_avg, exp_avg_sq; AdamW for what is not preconditioned
    2  exchange     fragments of cut blocks to their owners            (one all-to-all)
    3  accumulate   owners, batched by block shape: factor matrices    <- gradient
    4  refresh      owners, batched by factor size: inverse roots of the blocks whose turn it is
    5  apply        owners, batched by block shape: search direction   <- roots, momentum; graft the norm
    6  exchange     directions of cut blocks to their holders          (one all-to-all)
    7  update       weight decay and step on shards

Without the distributed optimizer 2 is empty and 6 is one all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron.shampoo.block_state import StackState, refresh_due
from megatron.shampoo.collective.exchange import BlockExchange, DirectionGather, Inbox
from megatron.shampoo.collective.views import gather, scatter_add
from megatron.shampoo.config import Grafting, ShampooConfig
from megatron.shampoo.metrics import PhaseClock, StepMetrics
from megatron.shampoo.placement import Placement, check_same_plan, place_alone
from megatron.shampoo.plan.plan import make_plan
from megatron.shampoo.plan.schedule import make_schedule
from megatron.shampoo.preconditioner.apply import apply_roots, graft_norm_
from megatron.shampoo.preconditioner.factors import update_factors_
from megatron.shampoo.preconditioner.moments import adam_step, update_moments_

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
"""State of every parameter, under the names that `torch.optim.AdamW` uses: Megatron's checkpoints know them."""


class Shampoo(torch.optim.Optimizer):
    """Shampoo with blocks, staggered refresh and grafting for matrices; AdamW for everything else.

    For a block with gradient G, momentum M and grafting step P, every step:
    L <- b L + (1-b) GG', R <- b R + (1-b) G'G, U = L^(-1/4) M R^(-1/4), W <- (1 - lr wd) W - lr |P|/|U| U,
    with the roots of bias-corrected L and R recomputed every `refresh_interval` steps.

    Source: Gupta et al. 2018 (arXiv:1802.09568); blocks, grafting and ownership as in Distributed Shampoo
    (arXiv:2309.06497), but with blocks that follow tensor-parallel cuts and shards that follow Megatron's buffers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        config: ShampooConfig | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Plan the blocks and allocate all state.

        Args:
            params: parameters or parameter groups. Matrices are preconditioned unless their group says
                `precondition=False`; with a `placement`, the parameters it names are.
            lr: learning rate; AdamW's is a good start with Adam grafting.
            betas: decay of the first and second moment.
            eps: Adam's epsilon (grafting, and AdamW for the rest).
            weight_decay: decoupled.
            config: settings of the preconditioner.
            placement: how the parameters are sharded; None for one process.

        Raises:
            ValueError: a value out of range, or an alignment that the parameters cannot meet.

        Collective: every rank of the placement's group, if there is one.
        """
        if config is not None and not isinstance(config, ShampooConfig):
            raise ValueError(f"config {config!r}: allowed is a ShampooConfig")
        self._is_built = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        groups = list(params)
        if placement is None:
            super().__init__(groups, defaults)
        else:
            # Shards are views of parameters, which torch refuses as non-leaf tensors: they are put in afterwards.
            super().__init__([{**group, "params": []} for group in groups], defaults)
            for mine, given in zip(self.param_groups, groups, strict=True):
                mine["params"] = list(given["params"])
        for group in self.param_groups:
            _check_group(group)
        self.config = config or ShampooConfig()
        self._alone = placement is None
        self.placement = placement or place_alone(self.param_groups, self.config.tp_alignment)
        self.plan = make_plan(
            self.placement.parameters, self.placement.num_ranks, self.config, self.placement.tp_alignment
        )
        check_same_plan(self.plan.digest(), self.placement)
        self._build()

    def _build(self) -> None:
        place = self.placement
        self._dtype = place.dtype
        self.schedule = make_schedule(self.plan, place.rank)
        self.states = [StackState(stack, self.plan, place.device, self._dtype) for stack in self.schedule.stacks]
        self._slots = [
            [torch.tensor([pair[side] for pair in pairs], dtype=torch.long, device=place.device) for side in (0, 1)]
            for pairs in self.schedule.unpack_slots
        ]
        self._index = {id(shard): index for index, shard in enumerate(place.shards) if shard is not None}
        # Replicated parameters: nothing travels to the owners, directions are gathered from them.
        gathers = self.plan.replicated and place.num_ranks > 1
        self._directions = DirectionGather(self.plan, place.group, place.device, self._dtype) if gathers else None
        self._exchange = BlockExchange(self.schedule, None if gathers else place.group, place.device, self._dtype)
        self.num_root_computations = 0
        """Inverse roots that this rank has computed, ever."""
        self.metrics = StepMetrics()
        self.clock = PhaseClock(place.device)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.init_state(parameter)
        self._is_built = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, but only at construction: the plan of blocks is made once.

        Raises:
            NotImplementedError: called later.
        """
        if getattr(self, "_is_built", False):
            raise NotImplementedError("add_param_group after construction: give Shampoo all parameters when it is made")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: a plan and its buffers belong to these very parameters.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "Shampoo cannot be copied or pickled: make a new one on the other parameters and load its state_dict()"
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to other ranks in exchanges, ever."""
        return self._exchange.bytes_sent + (self._directions.bytes_sent if self._directions else 0)

    @property
    def planned_bytes(self) -> int:
        """Bytes that this rank sends to other ranks in a step, by the plan."""
        numel = self._directions.numel if self._directions else self.schedule.exchanged_numel
        return numel * torch.empty((), dtype=self._dtype).element_size()

    def is_preconditioned(self, parameter: Tensor) -> bool:
        """Whether the parameter (or shard) takes Shampoo rather than AdamW."""
        return id(parameter) in self._index

    def init_state(self, parameter: Tensor) -> None:
        """Allocate the elementwise state of a parameter unless it is there."""
        state = self.state[parameter]
        if "exp_avg" in state:
            return
        dtype = self._dtype if self.is_preconditioned(parameter) else parameter.dtype
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step.

        Args:
            closure: recomputes the loss, as for any torch optimizer.

        Returns:
            The closure's loss.

        Raises:
            RuntimeError: a root failed for the third time in a row.

        Collective: every rank of the placement's group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.clock.start()
        gradients, grafts = self._moments()
        self.clock.mark("moments")
        if self.plan.parameters:
            self._precondition(gradients, grafts)
        return loss

    # -- phase 1

    def _moments(self) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Update moments; take AdamW steps. Returns flat gradients and grafting steps of the plan's parameters."""
        gradients: list[Tensor | None] = [None] * len(self.placement.shards)
        grafts: list[Tensor | None] = [None] * len(self.placement.shards)
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            self._adamw(group, [parameter for parameter in ready if not self.is_preconditioned(parameter)])
            ready = [parameter for parameter in ready if self.is_preconditioned(parameter)]
            if not ready:
                continue
            states = [self.state[parameter] for parameter in ready]
            own = [parameter.grad.to(self._dtype) for parameter in ready]
            first, second = ([state[key] for state in states] for key in ADAM_STATE[1:])
            update_moments_(own, first, second, group["betas"])
            for state in states:
                state["step"] += 1
            steps = [int(state["step"]) for state in states]
            # The grafting step up to a factor that is common to a parameter, see _inputs_and_scale.
            graft = adam_step(first, second, steps, group["betas"], group["eps"]) if self._grafts_adam else first
            for parameter, gradient, step in zip(ready, own, graft, strict=True):
                gradients[self._index[id(parameter)]] = gradient.reshape(-1)
                grafts[self._index[id(parameter)]] = step.view(-1)
        return gradients, grafts

    @property
    def _grafts_adam(self) -> bool:
        return self.config.grafting is Grafting.ADAM

    def _adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if not parameters:
            return
        states = [self.state[parameter] for parameter in parameters]
        step, first, second = ([state[key] for state in states] for key in ADAM_STATE)
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],  # type: ignore[misc]
            first,
            second,
            [],
            step,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    # -- phases 2 to 7

    def _precondition(self, gradients: list[Tensor | None], grafts: list[Tensor | None]) -> None:
        inputs, scale = self._inputs_and_scale(gradients, grafts)
        inbox = self._exchange.to_owners(gradients, inputs, grafts)
        self.clock.mark("exchange")
        active = [self._active(state, gradients) for state in self.states]
        for number, state in enumerate(self.states):
            self._accumulate(number, state, active[number], gradients, inbox)
        self.clock.mark("accumulate")
        self.metrics.refreshes = refresh_due(self.states, active, self.config)
        self.num_root_computations += self.metrics.refreshes
        self.clock.mark("refresh")
        self._decay(gradients)
        targets = [None if shard is None else shard.view(-1) for shard in self.placement.shards]
        directions = []
        self.metrics.graft_ratios = []
        for number, state in enumerate(self.states):
            direction = self._direction(number, state, active[number], inputs, grafts, inbox)
            directions.append(direction)
            if self._directions is None:
                scatter_add(self._active_copies(number, gradients), direction, targets, scale)
        self.clock.mark("apply")
        (self._directions or self._exchange).to_holders(directions, targets, scale)
        self.clock.mark("exchange")

    def _inputs_and_scale(
        self, gradients: Sequence[Tensor | None], grafts: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], list[float]]:
        """What the roots are applied to, and the factor of the direction in the update, for each parameter.

        Momentum is not bias-corrected as a tensor: with Adam grafting its scale is lost anyway, otherwise the
        correction is a factor of the result.
        """
        inputs = list(grafts)
        scale = [0.0] * len(inputs)
        for group in self.param_groups:
            for parameter in group["params"]:
                index = self._index.get(id(parameter))
                if index is None or gradients[index] is None:
                    continue
                state = self.state[parameter]
                step = int(state["step"])
                scale[index] = -group["lr"]
                if not self._grafts_adam:
                    scale[index] /= 1.0 - group["betas"][0] ** step
                if step >= self.config.start_step:
                    inputs[index] = state["exp_avg"].view(-1)
        return inputs, scale

    def _active(self, state: StackState, gradients: Sequence[Tensor | None]) -> Tensor:
        """Slots of a stack whose parameter has a gradient in this step."""
        everything = torch.arange(len(state.stack.blocks))
        if self.placement.group is not None:
            return everything  # Megatron's buffers always hold a gradient
        have = [gradients[self.plan.blocks[block].parameter] is not None for block in state.stack.blocks]
        return everything[torch.tensor(have, dtype=torch.bool)]

    def _active_copies(self, number: int, gradients: Sequence[Tensor | None]) -> Iterable[Any]:
        return (copy for copy in self.schedule.local[number] if gradients[copy.source] is not None)

    def _collect(
        self, number: int, state: StackState, sources: Sequence[Tensor | None], received: Tensor | None
    ) -> Tensor:
        """Blocks of a stack, `(blocks, m, n)`, from this rank's shards and what it received."""
        shape = (len(state.stack.blocks), *state.stack.shape)
        collected = torch.zeros(shape, dtype=self._dtype, device=self.placement.device)
        gather(self._active_copies(number, sources), sources, collected)
        if received is not None:
            gather(self.schedule.unpack[number], [received], collected)
        return collected

    def _accumulate(
        self, number: int, state: StackState, active: Tensor, gradients: Sequence[Tensor | None], inbox: Inbox
    ) -> None:
        gradient = self._collect(number, state, gradients, inbox.payloads[0])
        # A gradient that is not finite must not reach a moving average, which would keep it for ever.
        gradient.masked_fill_(~gradient.sum((-2, -1), keepdim=True).isfinite(), 0.0)
        if active.numel() == len(state.stack.blocks):
            update_factors_(state.left, state.right, gradient, self.config.factor_beta)
        else:
            slots = active.to(gradient.device)
            left, right = state.left[slots], state.right[slots]
            update_factors_(left, right, gradient[slots], self.config.factor_beta)
            state.left[slots], state.right[slots] = left, right
        state.num_updates[active] += 1

    def _direction(
        self,
        number: int,
        state: StackState,
        active: Tensor,
        inputs: Sequence[Tensor | None],
        grafts: Sequence[Tensor | None],
        inbox: Inbox,
    ) -> Tensor:
        """Grafted search directions of a stack, `(blocks, m, n)`."""
        momentum = self._collect(number, state, inputs, inbox.payloads[1])
        started = state.num_updates >= self.config.start_step
        if not bool(started.any()):
            return momentum
        direction = apply_roots(state.left_root, momentum, state.right_root)
        if self.config.grafting is not Grafting.NONE:
            norms = torch.linalg.vector_norm(self._collect(number, state, grafts, None), dim=(-2, -1)).square()
            fragment, slot = self._slots[number]
            norms.index_add_(0, slot, inbox.norms[fragment])
            self.metrics.graft_ratios.append(graft_norm_(direction, norms.sqrt()))
        if not bool(started.all()):
            direction = torch.where(started.to(direction.device)[:, None, None], direction, momentum)
        return direction

    def _decay(self, gradients: Sequence[Tensor | None]) -> None:
        """Decoupled weight decay of the preconditioned shards that are updated in this step."""
        for group in self.param_groups:
            if group["weight_decay"] == 0:
                continue
            decayed = [
                parameter
                for parameter in group["params"]
                if self.is_preconditioned(parameter) and gradients[self._index[id(parameter)]] is not None
            ]
            if decayed:
                torch._foreach_mul_(decayed, 1.0 - group["lr"] * group["weight_decay"])

    # -- state

    def block_state_dict(self) -> list[dict[str, Tensor]]:
        """Factors, roots and counters of the stacks that this rank owns; tensors are not copied."""
        return [state.state_dict() for state in self.states]

    def load_block_state_dict(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Load what `block_state_dict` gave, on the same plan.

        Raises:
            ValueError: other stacks than this rank's.
        """
        self._check_block_states(states)
        for mine, saved in zip(self.states, states, strict=True):
            mine.load_state_dict(saved)

    def _check_block_states(self, states: Sequence[dict[str, Tensor]]) -> None:
        if len(states) != len(self.states):
            raise ValueError(f"the saved state has {len(states)} stacks of blocks, this rank owns {len(self.states)}")
        for mine, saved in zip(self.states, states, strict=True):
            mine.check_state_dict(saved)

    def state_dict(self) -> dict[str, Any]:
        """State of the moments as for AdamW; alone on one process also that of the blocks, under `blocks`."""
        state = super().state_dict()
        if self._alone:
            state["blocks"] = self.block_state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict` of the same parameters and settings.

        Raises:
            ValueError: the blocks are missing or are others.
        """
        if self._alone and "blocks" not in state_dict:
            raise ValueError("the state has no 'blocks': it is not one of Shampoo, and its factors cannot be guessed")
        if self._alone:  # before anything is loaded
            self._check_block_states(state_dict["blocks"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "blocks"})
        self._restore_precision(state_dict)
        if self._alone:
            self.load_block_state_dict(state_dict["blocks"])

    def _restore_precision(self, state_dict: dict[str, Any]) -> None:
        """Moments of preconditioned parameters as they were saved: torch casts them to the parameters' dtype."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            saved, state = state_dict["state"].get(key, {}), self.state[parameter]
            if not self.is_preconditioned(parameter) or parameter.dtype == self._dtype:
                continue
            for name in ADAM_STATE[1:]:
                if isinstance(saved.get(name), Tensor):
                    state[name] = saved[name].to(device=parameter.device, dtype=self._dtype, copy=True)


def _check_group(group: dict[str, Any]) -> None:
    betas = group["betas"]
    allowed = {
        "lr": (group["lr"] >= 0, "a number >= 0"),
        "betas": (len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas), "two numbers in [0, 1)"),
        "eps": (group["eps"] >= 0, "a number >= 0"),
        "weight_decay": (group["weight_decay"] >= 0, "a number >= 0"),
    }
    for name, (holds, text) in allowed.items():
        if not holds:
            raise ValueError(f"{name} {group[name]}: allowed is {text}")
