"""Owners: which data-parallel rank keeps a block's factors and computes its search direction."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from megatron.shampoo.config import Ownership, ShampooConfig
from megatron.shampoo.methods import Application, Estimator, recipe_of
from megatron.shampoo.plan.fragments import Fragment
from megatron.shampoo.plan.grid import Block

FULL = 1.05
"""With balanced ownership: work of a rank, relative to the mean, up to which it owns the blocks that it holds."""
MOST_RECEIVED = 1.25
"""With balanced ownership: elements that a rank may receive in a step, relative to the mean number of preconditioned
elements of a rank. One mean share is what a rank without blocks needs; the rest is room for small and cheap blocks."""


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

    Where every rank holds every block (no distributed optimizer): the rank with the least work so far. Where
    parameters are sharded: with `local` ownership the rank that holds most of the block, so that it travels least;
    among equal holders the one with the least work so far. With `balanced` ownership that rank while its work stays
    within `FULL` times the mean; then another holder that has room; then the rank with the least work, unless it
    would receive more than `MOST_RECEIVED` times the mean share of elements.

    Args:
        blocks: the plan's blocks.
        fragments: for each block its fragments; none where every rank holds all of it.
        num_ranks: data-parallel size.
        config: for the cost model, the refresh turns and the ownership.

    Returns:
        For each block its owner.

    Source: Graham 1969 (SIAM J. Appl. Math. 17) for the greedy rule, dearest first: within 4/3 of the best balance.
    """
    cost = [block_cost(block.shape, block.sides, config) for block in blocks]
    ranks = _Ranks(num_ranks, sum(cost) / num_ranks, sum(block.numel for block in blocks) / num_ranks)
    owners = [0] * len(blocks)
    for index in _order(blocks, fragments, cost, config):
        held = {fragment.rank: fragment.numel for fragment in fragments[index]}
        owner = ranks.nearest(held)
        if held and config.ownership is Ownership.BALANCED and not ranks.has_room(owner, cost[index]):
            owner = ranks.relief(owner, held, cost[index], blocks[index].numel)
        owners[index] = owner
        ranks.give(owner, cost[index], blocks[index].numel - held.get(owner, 0) if held else 0)
    return owners


def _order(
    blocks: Sequence[Block], fragments: Sequence[Sequence[Fragment]], cost: Sequence[float], config: ShampooConfig
) -> list[int]:
    """The order in which blocks are given away: dearest first, which balances best.

    Equal blocks that any rank may own: in the order of their refresh turns, so that those of one turn are dealt out to
    different ranks and no rank has all the roots of a step. Where parameters are sharded a rank keeps the first and
    gives away the last of its equal blocks: in the order of the plan, in which all turns alternate.
    """
    interval = config.refresh_interval
    turn = [0 if found else block.ordinal % interval for block, found in zip(blocks, fragments, strict=True)]
    return sorted(range(len(blocks)), key=lambda index: (-cost[index], turn[index], index))


class _Ranks:
    """What every data-parallel rank has been given so far."""

    def __init__(self, num_ranks: int, mean_cost: float, mean_numel: float) -> None:
        self._load, self._received = [0.0] * num_ranks, [0.0] * num_ranks
        self._full, self._most_received = FULL * mean_cost, MOST_RECEIVED * mean_numel
        self._by_load = [(0.0, rank) for rank in range(num_ranks)]  # a heap; entries with an old load are passed over

    def nearest(self, held: Mapping[int, int]) -> int:
        """The rank that holds most of a block (elements by rank), of equals the one with the least work."""
        if not held:
            return self._least_loaded()
        most = max(held.values())
        return min((rank for rank, numel in held.items() if numel == most), key=lambda rank: (self._load[rank], rank))

    def has_room(self, rank: int, cost: float) -> bool:
        """Whether a block of that cost leaves the rank within `FULL` times the mean."""
        return self._load[rank] + cost <= self._full

    def relief(self, owner: int, held: Mapping[int, int], cost: float, numel: int) -> int:
        """Who takes a block in the place of the owner that has no room; the owner where nobody can."""

        def may_receive(rank: int) -> bool:
            return self._received[rank] + numel - held.get(rank, 0) <= self._most_received

        for rank in sorted(held, key=lambda rank: (-held[rank], self._load[rank], rank)):
            if self.has_room(rank, cost) and may_receive(rank):
                return rank
        rank = self._least_loaded()
        return rank if self._load[rank] < self._load[owner] and may_receive(rank) else owner

    def give(self, rank: int, cost: float, received: int) -> None:
        """Note that a rank owns a block, of which it receives so many elements."""
        self._load[rank] += cost
        self._received[rank] += received
        heapq.heappush(self._by_load, (self._load[rank], rank))

    def _least_loaded(self) -> int:
        while self._by_load[0][0] != self._load[self._by_load[0][1]]:
            heapq.heappop(self._by_load)
        return self._by_load[0][1]
