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

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.shampoo.collective.exchange import BlockExchange, DirectionGather
from megatron.shampoo.config import Grafting, ShampooConfig, WeightDecay
from megatron.shampoo.elementwise import ADAM_STATE, adamw_, decay_, penalised
from megatron.shampoo.methods import recipe_of
from megatron.shampoo.metrics import PhaseClock, StepMetrics
from megatron.shampoo.owned_stack import OwnedStack
from megatron.shampoo.placement import Placement, check_same_plan, known_to_all, place_alone
from megatron.shampoo.plan.plan import make_plan
from megatron.shampoo.plan.schedule import make_schedule
from megatron.shampoo.preconditioner.moments import (
    adam_steps_,
    can_fuse,
    grafting_steps,
    looked_ahead,
    momentum_weight,
    update_first_,
    update_second_,
)
from megatron.shampoo.refreshing import refresh_due
from megatron.shampoo.stack_step import grafts_by_momentum
from megatron.shampoo.watchdog import at_most


class Shampoo(torch.optim.Optimizer):
    """A Kronecker-factored preconditioner on blocks of matrices, refreshed by turns; AdamW for everything else.

    The formulas of every method are in docs/methods.md and in `preconditioner`. For a block with gradient G, momentum M
    and grafting step P, the method `shampoo` does every step:
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
        self.placement = placement or place_alone(self.param_groups, self.config)
        self.plan = make_plan(
            self.placement.parameters, self.placement.num_ranks, self.config, self.placement.tp_alignment
        )
        # Settings beyond the plan decide what travels, so they are compared too; the interval of the log does not.
        settings = dataclasses.replace(self.config, log_interval=0)
        check_same_plan(f"{self.plan.digest()} {settings}", self.placement)
        self._build()

    def _build(self) -> None:
        place = self.placement
        self._dtype = place.dtype
        self.schedule = make_schedule(self.plan, place.rank)
        self.recipe = recipe_of(self.config)
        """The method, with every default filled in."""
        self._first_lr = [group["lr"] for group in self.param_groups]
        self._index = {id(shard): index for index, shard in enumerate(place.shards) if shard is not None}
        held = {
            self._index[id(parameter)]: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if id(parameter) in self._index
        }
        group_of = known_to_all(held, place)
        self._stacks = [
            OwnedStack(number, self.schedule, self.plan, self.config, place, group_of)
            for number in range(len(self.schedule.stacks))
        ]
        self.states = [stack.state for stack in self._stacks]
        # Replicated parameters: nothing travels to the owners, directions are gathered from them.
        gathers = self.plan.replicated and place.num_ranks > 1
        self._directions = DirectionGather(self.plan, place.group, place.device, self._dtype) if gathers else None
        self._exchange = BlockExchange(self.schedule, None if gathers else place.group, place.device, self._dtype)
        self._too_slow = (
            f"data-parallel rank {place.rank}: the refreshes of one step took more than --shampoo-solver-timeout "
            f"{self.config.solver_timeout:g} seconds; the trace below ends where {self.recipe.solver} hangs. "
            "Resume with another --shampoo-solver, a smaller --shampoo-block-size or a longer timeout"
        )
        self.num_root_computations = 0
        """Inverse roots and eigenbases that this rank has computed, ever."""
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

    # Eager inside a compiled training step too: eigensolvers fail under torch.compile that work without (pytorch issue
    # 188232), and refresh turns change every step. Unlike torch.compiler.disable this imports no compiler by itself.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One optimizer step.

        Args:
            closure: recomputes the loss, as for any torch optimizer.

        Returns:
            The closure's loss.

        Collective: every rank of the placement's group.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # A step that is called under autocast must not compute in half precision. And every tensor is where it belongs:
        # a mode that moves them (a default device, a CPU that stands in for CUDA) would be asked at a thousand calls.
        with torch.autocast(self.placement.device.type, enabled=False), torch._C.DisableTorchFunction():
            self.clock.start()
            gradients, inputs, grafts = self._moments()
            self.clock.mark("moments")
            if self.plan.parameters:
                self._precondition(gradients, inputs, grafts)
        return loss

    # -- phase 1

    def _moments(self) -> tuple[list[Tensor | None], list[Tensor | None], list[Tensor | None]]:
        """Update moments; take AdamW steps.

        Returns:
            Flat gradients, what is preconditioned, and grafting steps of the plan's parameters; None where this rank
            has no gradient.
        """
        count = len(self.placement.shards)
        gradients: list[Tensor | None] = [None] * count
        inputs: list[Tensor | None] = [None] * count
        grafts: list[Tensor | None] = [None] * count
        for number, group in enumerate(self.param_groups):
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            rest = [parameter for parameter in ready if not self.is_preconditioned(parameter)]
            mode = self.config.weight_decay_mode
            adamw_(group, rest, [self.state[parameter] for parameter in rest], mode, self._peak_lr(number))
            ready = [parameter for parameter in ready if self.is_preconditioned(parameter)]
            if not ready:
                continue
            own = penalised(group, [parameter.grad.to(self._dtype).contiguous() for parameter in ready], ready, mode)
            x, graft = self._momentum_of(group, ready, own)
            for parameter, *found in zip(ready, own, x, graft, strict=True):
                index = self._index[id(parameter)]
                gradients[index], inputs[index], grafts[index] = (tensor.reshape(-1) for tensor in found)
        return gradients, inputs, grafts

    def _momentum_of(
        self, group: dict[str, Any], parameters: list[Tensor], own: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Update the moments of one group's preconditioned parameters.

        Returns:
            What is preconditioned, and the grafting steps (those of plain momentum without correction: the owner
            corrects their norms).
        """
        config, (beta1, beta2) = self.config, group["betas"]
        states = [self.state[parameter] for parameter in parameters]
        counts, first, second = ([state[key] for state in states] for key in ADAM_STATE)
        is_adam = self.recipe.grafting is Grafting.ADAM and config.averages_gradients and config.bias_correction
        if is_adam and not config.nesterov and can_fuse(own, first, second):
            return first, adam_steps_(own, first, second, counts, group["betas"], group["eps"])
        for count in counts:
            count += 1
        if not grafts_by_momentum(self.recipe.grafting):
            update_second_(own, second, beta2, self.recipe.grafting)
        x = own
        if self.config.averages_gradients:
            update_first_(own, first, beta1)
            x = looked_ahead(own, first, beta1) if config.nesterov else first
        if grafts_by_momentum(self.recipe.grafting):
            return x, x
        steps = [int(count) for count in counts]
        corrects_first = config.bias_correction and self.config.averages_gradients
        corrects_second = config.bias_correction and self.recipe.grafting is Grafting.ADAM
        weights = (
            [momentum_weight(beta1, step, config.nesterov) if corrects_first else 1.0 for step in steps],
            [momentum_weight(beta2, step, False) if corrects_second else 1.0 for step in steps],
        )
        return x, grafting_steps(x, second, weights, group["eps"])

    def _peak_lr(self, group: int) -> float:
        """The learning rate that the schedule of a group scales: Megatron's, or what the group was made with."""
        settings = self.param_groups[group]
        peak = settings.get("max_lr")
        peak = float(self._first_lr[group] if peak is None else peak)
        if peak > 0:
            return peak
        if settings["lr"] > 0 and self.config.weight_decay_mode is WeightDecay.INDEPENDENT:
            raise ValueError(
                f"lr {peak}: --shampoo-weight-decay independent is relative to the highest learning rate; make the "
                "optimizer with it, or put it into the parameter group as max_lr"
            )
        return 1.0  # of a rate of zero any share is zero

    # -- phases 2 to 7

    def _precondition(
        self, gradients: list[Tensor | None], inputs: list[Tensor | None], grafts: list[Tensor | None]
    ) -> None:
        updated = self._with_gradient(gradients)
        early = self._before_start(updated)
        inputs = [grafts[index] if index in early else x for index, x in enumerate(inputs)]
        inbox = self._exchange.to_owners(gradients, inputs, grafts)
        self.clock.mark("exchange")
        active = [stack.active(gradients) for stack in self._stacks]
        for stack, slots in zip(self._stacks, active, strict=True):
            stack.accumulate(slots, gradients, inbox)
        self.clock.mark("accumulate")
        with at_most(self.config.solver_timeout, self._too_slow):
            counts = refresh_due(self.states, active, self.config)
        self.metrics.refreshes = counts.computed
        self.metrics.skipped, self.metrics.failed = counts.skipped, counts.failed
        self.num_root_computations += counts.computed
        self.clock.mark("refresh")
        for number, group in enumerate(self.param_groups):
            decay_(group, updated[number], self.config.weight_decay_mode, self._peak_lr(number))
        targets, scale = self._targets(gradients, updated)
        directions = []
        self.metrics.graft_ratios = []
        for stack, slots in zip(self._stacks, active, strict=True):
            direction, ratio = stack.directions(slots, inputs, grafts, inbox, self.param_groups)
            directions.append(direction)
            if ratio is not None:
                self.metrics.graft_ratios.append(ratio)
            if self._directions is None:
                stack.scatter_local(direction, targets, scale, gradients)
        self.clock.mark("apply")
        (self._directions or self._exchange).to_holders(directions, targets, scale)
        self.clock.mark("exchange")
        if not self.config.averages_gradients:
            self._average_directions(updated, targets)
            self.clock.mark("moments")

    def _with_gradient(self, gradients: Sequence[Tensor | None]) -> list[list[Tensor]]:
        """For each parameter group its preconditioned parameters that are updated in this step."""
        return [
            [
                parameter
                for parameter in group["params"]
                if self.is_preconditioned(parameter) and gradients[self._index[id(parameter)]] is not None
            ]
            for group in self.param_groups
        ]

    def _before_start(self, updated: Sequence[list[Tensor]]) -> set[int]:
        """Parameters of the plan for which this step still comes before the start step."""
        start = self.config.start_step
        return {
            self._index[id(parameter)]
            for parameters in updated
            for parameter in parameters
            if int(self.state[parameter]["step"]) < start
        }

    def _targets(
        self, gradients: Sequence[Tensor | None], updated: Sequence[list[Tensor]]
    ) -> tuple[list[Tensor | None], list[float]]:
        """What directions are added to, and with which factor: weights and minus the learning rate, or empty shards."""
        if not self.config.averages_gradients:
            return [None if it is None else torch.zeros_like(it) for it in gradients], [1.0] * len(gradients)
        scale = [0.0] * len(gradients)
        for group, parameters in zip(self.param_groups, updated, strict=True):
            for parameter in parameters:
                scale[self._index[id(parameter)]] = -group["lr"]
        return [None if shard is None else shard.view(-1) for shard in self.placement.shards], scale

    def _average_directions(self, updated: Sequence[list[Tensor]], targets: Sequence[Tensor | None]) -> None:
        """Momentum after preconditioning: average the search directions and step along the average."""
        for group, parameters in zip(self.param_groups, updated, strict=True):
            if not parameters:
                continue
            own = [targets[self._index[id(parameter)]].view_as(parameter) for parameter in parameters]  # type: ignore[union-attr]
            states = [self.state[parameter] for parameter in parameters]
            first, beta = [state["exp_avg"] for state in states], group["betas"][0]
            update_first_(own, first, beta)
            x = looked_ahead(own, first, beta) if self.config.nesterov else first
            for parameter, state, step in zip(parameters, states, x, strict=True):
                weight = momentum_weight(beta, int(state["step"]), self.config.nesterov)
                parameter.add_(step, alpha=-group["lr"] / (weight if self.config.bias_correction else 1.0))

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
