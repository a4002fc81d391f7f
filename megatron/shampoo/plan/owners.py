"""Owners: which data-parallel rank keeps a block's factors and computes its search direction."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.shampoo.config import ShampooConfig
from megatron.shampoo.methods import Application, Estimator, recipe_of
from megatron.shampoo.plan.fragments import Fragment
from megatron.shampoo.plan.grid import Block


def block_cost(shape: tuple[int, int], sides: tuple[bool, bool], config: ShampooConfig) -> float:
    """Multiply-adds that a block costs its owner per step.

    For every side of length d: the factor update m n d, as much for every product with a root or basis, and every
    `refresh_interval` steps a decomposition with the products around it, about 10 d^3.

    Args:
        shape: m and n.
        sides: which have factors.
        config: method and refresh interval.

    Source: Golub and Van Loan, Matrix Computations (4th edition), section 8.3 (about 9 d^3 for tridiagonal QR
    with vectors).
    """
    recipe = recipe_of(config)
    products = 2.0 if recipe.application is Application.ROOT else 4.0  # the factor; into the basis twice, and back
    if recipe.estimator is Estimator.KL:
        products += 1.0
    numel = shape[0] * shape[1]
    lengths = [length for length, present in zip(shape, sides, strict=True) if present]
    return sum(products * numel * length + 10.0 * length**3 / config.refresh_interval for length in lengths)


def assign_owners(
    blocks: Sequence[Block],
    fragments: Sequence[Sequence[Fragment]],
    num_ranks: int,
    config: ShampooConfig,
) -> list[int]:
    """Owner rank of every block, the same on every rank.

    A block goes to the rank that holds most of it, so that it travels least; among equal holders to the one with
    the least work so far. Where every rank holds every block (no distributed optimizer) that is greedy balancing.

    Args:
        blocks: the plan's blocks.
        fragments: for each block its fragments; none where every rank holds all of it.
        num_ranks: data-parallel size.
        config: for the cost model and the refresh turns.

    Returns:
        For each block its owner.
    """
    cost = [block_cost(block.shape, block.sides, config) for block in blocks]
    load = [0.0] * num_ranks
    owners = [0] * len(blocks)
    # Dearest first: the greedy rule that balances best. Equal blocks in the order of their refresh turns, so that those
    # of one turn are dealt out to different ranks and no rank has all the roots of a step.
    turn = [block.ordinal % config.refresh_interval for block in blocks]
    for index in sorted(range(len(blocks)), key=lambda index: (-cost[index], turn[index], index)):
        most = max((fragment.numel for fragment in fragments[index]), default=0)
        holders = [fragment.rank for fragment in fragments[index] if fragment.numel == most]
        candidates: Sequence[int] = holders or range(num_ranks)
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        owners[index] = owner
        load[owner] += cost[index]
    return owners
