"""A step on one stack of blocks: accumulate its factors, and turn what is preconditioned into search directions.

These functions read and write a `StackState`; the formulas are in `preconditioner`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.shampoo.block_state import FactorState, StackState
from megatron.shampoo.config import Grafting, ShampooConfig
from megatron.shampoo.linalg.norms import largest_entry
from megatron.shampoo.methods import Application, Estimator, Recipe
from megatron.shampoo.preconditioner.apply import (
    apply_sides,
    clip_factor,
    divide_by_adam_,
    divide_by_eigenvalues_,
    graft_factor,
    update_second_moment_,
)
from megatron.shampoo.preconditioner.factors import normalise_, update_factors_, update_whitened_factors_
from megatron.shampoo.preconditioner.spectral import average_eigenvalues, first_eigenvalues, floored

PerBlock = float | Tensor
"""A number for all blocks of a stack, or `(blocks, 1, 1)`."""


def per_block(values: Tensor, device: torch.device, dtype: torch.dtype) -> PerBlock:
    """A number where all are equal, as they nearly always are; else a tensor `(blocks, 1, 1)`.

    Args:
        values: `(blocks,)` on the CPU.
        device: of the tensor.
        dtype: of the tensor.
    """
    if values.numel() and bool((values == values[0]).all()):
        return float(values[0])
    return values.to(device, dtype)[:, None, None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """Settings that come with the parameter groups, for the blocks of a stack in this step."""

    beta2: PerBlock
    eps: PerBlock
    momentum_weight: PerBlock
    """Sum of the weights in the momentum, which it is divided by; 1 where it is not corrected."""
    second_weight: PerBlock
    """Likewise of the second moment in the basis."""


def accumulate(state: StackState, recipe: Recipe, config: ShampooConfig, gradient: Tensor) -> Tensor | None:
    """Accumulate the factors of a stack.

    Args:
        state: of the stack, updated.
        recipe: of the method.
        config: decay.
        gradient: `(blocks, m, n)`, normalised in place.

    Returns:
        The gradient in the present eigenbases, where the method has computed it on the way.
    """
    scale, shrink, is_nonzero = normalise_(gradient, state.scale)
    state.scale.copy_(scale)
    if bool((shrink != 1).any()):  # gradients grew by a million: a block's state is brought to the new scale
        state.rescale_(shrink, recipe)
    if recipe.estimator is Estimator.OUTER:
        factors = [None if side is None else _wide(side.factor, gradient) for side in (state.left, state.right)]
        update_factors_(factors[0], factors[1], gradient, config.factor_beta)
        _store_factors(state, factors)
        return None
    eigenvalues = _eigenvalues(state)
    assert state.left is not None
    assert state.right is not None
    # The identity is the first basis, and the first gradient's size the first eigenvalue of both sides.
    is_first = (eigenvalues[0].sum(-1) == 0) & is_nonzero
    start = first_eigenvalues(gradient)
    for values in eigenvalues:
        values.copy_(torch.where(is_first[:, None], start[:, None], values))
    left, right = _wide(state.left.factor, gradient), _wide(state.right.factor, gradient)
    bases = (_wide(state.left.inverse, gradient), _wide(state.right.inverse, gradient))
    rotated = update_whitened_factors_(left, right, gradient, bases, _divisible(state), config.factor_beta)
    _store_factors(state, [left, right])
    return rotated


def direction(
    state: StackState,
    recipe: Recipe,
    config: ShampooConfig,
    gradient: Tensor | None,
    rotated: Tensor | None,
    x: Tensor | None,
    hyper: Hyper,
) -> Tensor:
    """Search directions before grafting.

    Args:
        state: of the stack; second moments and eigenvalues in the basis are updated.
        recipe: of the method.
        config: decay of averaged eigenvalues.
        gradient: normalised, `(blocks, m, n)`; None for methods that do not look at it again.
        rotated: the gradient in the eigenbases, where that is known.
        x: what is preconditioned, overwritten; None for the gradient itself.
        hyper: of the blocks.

    Returns:
        `(blocks, m, n)`.
    """
    inverses = [None if side is None else _wide(side.inverse, gradient if x is None else x) for side in _both(state)]
    if x is not None:
        x.mul_(1 / state.divisor[:, None, None] / hyper.momentum_weight)
    if recipe.application is Application.ROOT:
        chosen = gradient if x is None else x
        assert chosen is not None
        return apply_sides(inverses[0], chosen, inverses[1])
    left, right = inverses
    into, back = (None if left is None else left.mT, right), (left, None if right is None else right.mT)
    if rotated is None:
        assert gradient is not None
        rotated = apply_sides(into[0], gradient, into[1])
    if recipe.estimator is Estimator.KL:
        _average(state, config, rotated)
    if state.second_moment is not None:
        update_second_moment_(state.second_moment, rotated, 1.0 - hyper.beta2)
    projected = rotated if x is None else apply_sides(into[0], x, into[1])
    if state.second_moment is not None:
        eps = hyper.eps / state.divisor[:, None, None]
        divide_by_adam_(projected, state.second_moment, hyper.second_weight, eps, config.epsilon)
    else:
        divide_by_eigenvalues_(projected, *_divisible(state))
    return apply_sides(back[0], projected, back[1])


def refresh_rotated_(state: StackState, gradient: Tensor, rotated: Tensor) -> None:
    """Bring the rotated gradient of the blocks that were refreshed in this step into their new bases, in place.

    Args:
        state: of the stack, with both factors.
        gradient: normalised, `(blocks, m, n)`.
        rotated: in the bases of before the refresh, `(blocks, m, n)`.
    """
    slots = (state.refreshed_at == state.num_updates).nonzero().flatten().to(gradient.device)
    if slots.numel():
        left, right = (None if side is None else _wide(side.inverse[slots], gradient) for side in _both(state))
        rotated[slots] = apply_sides(None if left is None else left.mT, gradient[slots], right)


@contextlib.contextmanager
def untouched(state: StackState, active: Tensor) -> Iterator[None]:
    """Leave the state of the slots that are not active as it was before the block.

    Parameters without a gradient are rare, so everything is computed and their state is put back.

    Args:
        state: of the stack.
        active: slots, on the CPU.
    """
    count = len(state.stack.blocks)
    if active.numel() == count:
        yield
        return
    idle = torch.ones(count, dtype=torch.bool)
    idle[active] = False
    before = {name: tensor[idle.to(tensor.device)].clone() for name, tensor in state.state_dict().items()}
    yield
    for name, tensor in state.state_dict().items():
        tensor[idle.to(tensor.device)] = before[name]


def finish(state: StackState, recipe: Recipe, directions: Tensor, norms: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Graft the norms and clip the root mean square, in place.

    Args:
        state: of the stack.
        recipe: grafting and limit.
        directions: `(blocks, m, n)`, overwritten.
        norms: of the grafting steps, `(blocks,)`; None without grafting.

    Returns:
        The directions, and the factors of the grafting where there is one.
    """
    if norms is None and not recipe.update_rms_clip and _lost_power(state) == 0:
        return directions, None
    norm = torch.linalg.vector_norm(directions, dim=(-2, -1))
    grafted = None
    if norms is not None:
        factor = grafted = graft_factor(norm, norms)
    else:
        factor = state.divisor.pow(_lost_power(state))
    if recipe.update_rms_clip:
        factor = factor * clip_factor(norm * factor, recipe.update_rms_clip, state.stack.block_numel)
    return directions.mul_(factor[:, None, None]), grafted


def _lost_power(state: StackState) -> float:
    """Power of the gradient's scale that an ungrafted direction of normalised input lacks.

    Roots L^(-1/p) of normalised factors lack scale^(-2/p) each, and the input lacks scale^1: nothing in all for two
    fourth roots or one square root. Everything else is invariant to the scale.
    """
    side = state.sides[0]
    if side.task.root is None or side.task.trace_scaled:
        return 0.0
    return 1.0 - 2.0 * len(state.sides) / side.task.root


def _both(state: StackState) -> tuple[FactorState | None, FactorState | None]:
    return state.left, state.right


def _average(state: StackState, config: ShampooConfig, rotated: Tensor) -> None:
    assert state.num_averaged is not None
    left, right = _eigenvalues(state)
    is_nonzero = largest_entry(rotated) > 0
    count = state.num_averaged + 1
    averaged = average_eigenvalues(left, right, rotated, config.factor_beta, count)
    for values, new in zip((left, right), averaged, strict=True):
        values.copy_(torch.where(is_nonzero[:, None], new, values))
    state.num_averaged.copy_(torch.where(is_nonzero, count, state.num_averaged))


def _eigenvalues(state: StackState) -> tuple[Tensor, Tensor]:
    """Averaged eigenvalues of both sides; the methods that have them have both."""
    left, right = (None if side is None else side.eigenvalues for side in _both(state))
    assert left is not None
    assert right is not None
    return left, right


def _divisible(state: StackState) -> tuple[Tensor, Tensor]:
    """Eigenvalues that may be divided by: with their floor, and one while no gradient was seen."""
    left, right = (
        torch.where(values.sum(-1, keepdim=True) > 0, floored(values), 1.0) for values in _eigenvalues(state)
    )
    return left, right


def _wide(stored: Tensor, like: Tensor | None) -> Tensor:
    """In the data type of products; the tensor itself where it is stored in that."""
    assert like is not None
    return stored.to(like.dtype)


def _store_factors(state: StackState, factors: list[Tensor | None]) -> None:
    for side, factor in zip(_both(state), factors, strict=True):
        if side is not None and factor is not None and factor is not side.factor:
            side.factor.copy_(factor)


def grafts_by_momentum(grafting: Grafting) -> bool:
    """Whether the grafting step is the momentum itself, without a second moment."""
    return grafting in (Grafting.NONE, Grafting.SGD)
