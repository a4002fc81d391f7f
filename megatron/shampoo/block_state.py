"""State of the blocks that a rank owns, stacked by shape: factors, roots, eigenbases, moments, counters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.shampoo.config import Precision, ShampooConfig
from megatron.shampoo.linalg.basis import carry_weights
from megatron.shampoo.linalg.precision import full_float32
from megatron.shampoo.methods import Application, Estimator, Recipe, recipe_of, root_of
from megatron.shampoo.plan.plan import Plan
from megatron.shampoo.plan.schedule import Stack
from megatron.shampoo.preconditioner.ladder import Task

SIDES = ("left", "right")
NEGLIGIBLE = 2.0**-40
"""Ratio of gradients' sizes below which averages of products begin anew."""

SMALLEST_SHRINK = 2.0**-60
"""Smallest ratio of gradients' sizes that roots are brought to: 2^60 does not overflow, and a refresh is near."""


class FactorState:
    """One side of a stack: `count` factors of size d x d and what is made of them."""

    def __init__(
        self, side: str, stack: Stack, config: ShampooConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Allocate everything at once: a checkpoint's structure must not change after the first step.

        Args:
            side: `left` or `right`.
            stack: the blocks.
            config: method and data types.
            device: of all tensors.
            dtype: of products, and of storage where the configuration does not say bfloat16.
        """
        recipe = recipe_of(config)
        self.side = side
        count, self.size = len(stack.blocks), stack.shape[SIDES.index(side)]
        root = root_of(stack.sides, config) if recipe.application is Application.ROOT else None
        self.task = Task(root=root, trace_scaled=root == 2 and all(stack.sides), epsilon=config.epsilon)
        stored = torch.bfloat16 if config.factor_dtype is Precision.BF16 else dtype
        self.factor = torch.zeros(count, self.size, self.size, device=device, dtype=stored)
        """Moving average of (G/scale)(G/scale)' or of its whitened form; the lower triangle counts."""
        stored = torch.bfloat16 if config.root_dtype is Precision.BF16 else dtype
        identity = torch.eye(self.size, device=device, dtype=stored).repeat(count, 1, 1)
        self.inverse = identity
        """Inverse root, or eigenbasis for the methods that are applied in it."""
        self.basis = identity.clone() if root is not None and recipe.keeps_basis else None
        """Eigenbasis behind an inverse root, for the solver that tracks it."""
        has_eigenvalues = recipe.estimator is Estimator.KL
        self.eigenvalues = torch.zeros(count, self.size, device=device, dtype=dtype) if has_eigenvalues else None
        """Averaged eigenvalues in the basis."""
        self.condition = torch.ones(count, device=device, dtype=dtype)
        """Condition number of the damped factor at the last refresh; NaN where the solver does not know it."""
        self.failures = torch.zeros(count, dtype=torch.long)
        """Failed refreshes in a row."""

    @property
    def tracked(self) -> Tensor | None:
        """Eigenbases of the last refresh, where they are kept."""
        return self.inverse if self.task.root is None else self.basis

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the state by name."""
        for name in ("factor", "inverse", "basis", "eigenvalues", "condition", "failures"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


class StackState:
    """Everything kept for one stack of equal-shaped blocks.

    Counters that decide the schedule live on the CPU, where it is decided without a device synchronisation.
    """

    def __init__(
        self, stack: Stack, plan: Plan, config: ShampooConfig, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Allocate everything at once.

        Args:
            stack: the blocks.
            plan: for names and refresh turns.
            config: method, data types and refresh interval.
            device: of factors and roots.
            dtype: of products.
        """
        self.stack = stack
        count = len(stack.blocks)
        self.names = [plan.name_of(block) for block in stack.blocks]
        turns = [plan.blocks[block].ordinal % config.refresh_interval for block in stack.blocks]
        self.turn = torch.tensor(turns, dtype=torch.long)
        self.left, self.right = (
            FactorState(side, stack, config, device, dtype) if present else None
            for side, present in zip(SIDES, stack.sides, strict=True)
        )
        self.scale = torch.zeros(count, device=device, dtype=dtype)
        """Power of two that gradients are divided by before products; zero until a gradient is not zero."""
        recipe = recipe_of(config)
        in_basis = recipe.application is Application.ADAM
        self.second_moment = torch.zeros(count, *stack.shape, device=device, dtype=dtype) if in_basis else None
        """Second moment of G/scale in the eigenbasis."""
        averages = recipe.estimator is Estimator.KL
        self.num_averaged = torch.zeros(count, device=device, dtype=dtype) if averages else None
        """Gradients in the averaged eigenvalues: those that were not zero."""
        self.num_updates = torch.zeros(count, dtype=torch.long)
        """Gradients accumulated into the factors of each block."""
        self.refreshed_at = torch.zeros(count, dtype=torch.long)
        """`num_updates` at the last refresh."""

    @property
    def divisor(self) -> Tensor:
        """The scale, one where there is none yet, `(blocks,)`."""
        return torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))

    @property
    def sides(self) -> tuple[FactorState, ...]:
        """The sides that have factors."""
        return tuple(side for side in (self.left, self.right) if side is not None)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name; not copied."""
        state = {f"{side.side}.{name}": tensor for side in self.sides for name, tensor in side.named_tensors()}
        for name in ("scale", "second_moment", "num_averaged", "num_updates", "refreshed_at"):
            tensor = getattr(self, name)
            if tensor is not None:
                state[name] = tensor
        return state

    def check_state_dict(self, state: dict[str, Tensor]) -> None:
        """Refuse a state that does not fit.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(
                f"state of blocks {self.stack.shape} has {sorted(state)}, expected {sorted(own)}: "
                "another --shampoo-method, --shampoo-side or --shampoo-solver saved it"
            )
        for name, saved in state.items():
            if own[name].shape != saved.shape:
                raise ValueError(
                    f"{name} of the {len(self.names)} blocks {self.stack.shape} (first: {self.names[0]}) has shape "
                    f"{tuple(saved.shape)} in the saved state and {tuple(own[name].shape)} here: the block grid or the "
                    "owners differ"
                )

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the tensors into the present ones.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape.
        """
        self.check_state_dict(state)
        own = self.state_dict()
        for name, saved in state.items():
            own[name].copy_(saved)

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

    def rescale_(self, shrink: Tensor, recipe: Recipe) -> None:
        """Bring everything to a new scale of the gradients, in place; exact, for powers of two.

        Args:
            shrink: old scale over new scale, `(blocks,)`.
            recipe: of the method.
        """
        # Whitened factors and eigenvalues are products of two gradients over one eigenvalue of the other side.
        power = shrink if recipe.estimator is Estimator.KL else shrink.square()
        for side in self.sides:
            side.factor.mul_(power.to(side.factor)[:, None, None])
            if side.eigenvalues is not None:
                side.eigenvalues.mul_(shrink[:, None])
            if side.task.root is not None:
                exponent = -0.5 if side.task.trace_scaled else -2.0 / side.task.root
                side.inverse.mul_(shrink.clamp(min=SMALLEST_SHRINK).pow(exponent).to(side.inverse)[:, None, None])
        if self.second_moment is not None:
            self.second_moment.mul_(shrink.square()[:, None, None])
        if self.num_averaged is not None:
            # What is that small beside the new gradient is as good as nothing, and would be divided by.
            is_kept = shrink > NEGLIGIBLE
            self.num_averaged.mul_(is_kept)
            for side in self.sides:
                side.factor.mul_(is_kept[:, None, None])
                if side.eigenvalues is not None:
                    side.eigenvalues.mul_(is_kept[:, None])

    def change_basis(self, side: FactorState, slots: Tensor, new: Tensor) -> None:
        """Put new eigenbases in place, and carry what is expressed in the old ones along.

        Args:
            side: left or right.
            slots: `(batch,)`, on the device.
            new: `(batch, d, d)`.
        """
        if self.second_moment is not None or side.eigenvalues is not None:
            old = side.inverse[slots].to(new)
            with full_float32():
                weights = carry_weights(new, old)
                if side.eigenvalues is not None:
                    carried = torch.bmm(weights, side.eigenvalues[slots].unsqueeze(-1))
                    side.eigenvalues[slots] = carried.squeeze(-1)
                if self.second_moment is not None:
                    moment = self.second_moment[slots]
                    is_left = side is self.left
                    self.second_moment[slots] = torch.bmm(weights, moment) if is_left else torch.bmm(moment, weights.mT)
        side.inverse.index_copy_(0, slots, new.to(side.inverse))
