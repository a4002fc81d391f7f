"""Owners: which data-parallel rank keeps a block's factors and computes its search direction."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.shampoo.plan.fragments import Fragment
from megatron.shampoo.plan.grid import Block


def block_cost(shape: tuple[int, int], refresh_interval: int) -> float:
    """Multiply-adds that a block costs its owner per step.

    Factor update m n (m + n), application m n (m + n), and every `refresh_interval` steps two eigendecompositions
    with the product that builds the root, about 10 d^3 each.

    Source: Golub and Van Loan, Matrix Computations (4th edition), section 8.3 (about 9 d^3 for tridiagonal QR
    with vectors).
    """
    m, n = shape
    return 2.0 * m * n * (m + n) + 10.0 * (m**3 + n**3) / refresh_interval


def assign_owners(
    blocks: Sequence[Block],
    fragments: Sequence[Sequence[Fragment]],
    num_ranks: int,
    refresh_interval: int,
) -> list[int]:
    """Owner rank of every block, the same on every rank.

    A block goes to the rank that holds most of it, so that it travels least; among equal holders to the one with
    the least work so far. Where every rank holds every block (no distributed optimizer) that is greedy balancing.

    Args:
        blocks: the plan's blocks.
        fragments: for each block its fragments; none where every rank holds all of it.
        num_ranks: data-parallel size.
        refresh_interval: for the cost model.

    Returns:
        For each block its owner.
    """
    cost = [block_cost(block.shape, refresh_interval) for block in blocks]
    load = [0.0] * num_ranks
    owners = [0] * len(blocks)
    # Dearest first: the greedy rule that balances best. Equal blocks in the order of their refresh turns, so that those
    # of one turn are dealt out to different ranks and no rank has all the roots of a step.
    turn = [block.ordinal % refresh_interval for block in blocks]
    for index in sorted(range(len(blocks)), key=lambda index: (-cost[index], turn[index], index)):
        most = max((fragment.numel for fragment in fragments[index]), default=0)
        holders = [fragment.rank for fragment in fragments[index] if fragment.numel == most]
        candidates: Sequence[int] = holders or range(num_ranks)
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        owners[index] = owner
        load[owner] += cost[index]
    return owners
