"""The plan: every block of a data-parallel group's parameters, its fragments and its owner."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from megatron.shampoo.config import ShampooConfig
from megatron.shampoo.plan.fragments import Fragment, fragments_of
from megatron.shampoo.plan.grid import Block, blocks_of, check_alignment, num_global_blocks
from megatron.shampoo.plan.owners import assign_owners, block_cost
from megatron.shampoo.plan.parts import MatrixParameter


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a data-parallel group does with its preconditioned parameters; equal on every rank of the group."""

    parameters: tuple[MatrixParameter, ...]
    blocks: tuple[Block, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    """For each block its fragments; empty where the parameters are replicated."""
    owners: tuple[int, ...]
    num_ranks: int
    config: ShampooConfig

    @property
    def replicated(self) -> bool:
        """Whether every rank holds every parameter whole (no distributed optimizer)."""
        return all(not parameter.spans for parameter in self.parameters)

    def is_cut(self, block: int) -> bool:
        """Whether the block has fragments on more than one rank."""
        return len(self.fragments[block]) > 1

    def travels(self, block: int) -> bool:
        """Whether a rank other than the owner holds some of the block."""
        return any(fragment.rank != self.owners[block] for fragment in self.fragments[block])

    def name_of(self, block: int) -> str:
        """Global name of a block, for messages, e.g. `decoder.layers.0.mlp.linear_fc2.weight[weight 1,0]`."""
        it = self.blocks[block]
        parameter = self.parameters[it.parameter]
        return f"{parameter.name}[{parameter.parts[it.part].name} {it.grid[0]},{it.grid[1]}]"

    def load(self) -> list[float]:
        """Cost-model work of each rank, in multiply-adds per step."""
        load = [0.0] * self.num_ranks
        for block, owner in zip(self.blocks, self.owners, strict=True):
            load[owner] += block_cost(block.shape, block.sides, self.config)
        return load

    def digest(self) -> str:
        """Hash of everything in the plan; ranks that differ must not run together."""
        fields = (
            self.parameters,
            self.blocks,
            self.fragments,
            self.owners,
            self.num_ranks,
            self.config.refresh_interval,
        )
        return hashlib.sha256(repr(fields).encode()).hexdigest()


def make_plan(parameters: Sequence[MatrixParameter], num_ranks: int, config: ShampooConfig, tp_alignment: int) -> Plan:
    """Plan the blocks of a data-parallel group.

    Blocks are numbered within their unit (layer or expert), and a unit's numbers begin at its index times its
    number of blocks: consecutive numbers take consecutive refresh turns, on any layout.

    Args:
        parameters: in an order that is the same on every rank of the group; all replicated or all with spans.
        num_ranks: data-parallel size.
        config: block size, refresh interval, method.
        tp_alignment: segments into which a tensor-parallel dimension is cut.

    Raises:
        ValueError: an alignment that some part cannot meet, or parameters of both kinds.
    """
    if len({bool(parameter.spans) for parameter in parameters}) > 1:
        raise ValueError("some parameters have spans and some are replicated: a plan holds one kind")
    unit_blocks: dict[tuple[str, int], int] = {}
    for parameter in parameters:
        check_alignment(parameter, tp_alignment)
        count = num_global_blocks(parameter, config.block_size, tp_alignment)
        unit = (parameter.family, parameter.unit)
        unit_blocks[unit] = unit_blocks.get(unit, 0) + count
    next_number = {unit: unit[1] * count for unit, count in unit_blocks.items()}
    blocks: list[Block] = []
    for index, parameter in enumerate(parameters):
        unit = (parameter.family, parameter.unit)
        blocks += blocks_of(parameter, index, next_number[unit], config.block_size, tp_alignment)
        next_number[unit] += num_global_blocks(parameter, config.block_size, tp_alignment)
    fragments = tuple(
        tuple(fragments_of(parameters[block.parameter], block, index)) for index, block in enumerate(blocks)
    )
    return Plan(
        parameters=tuple(parameters),
        blocks=tuple(blocks),
        fragments=fragments,
        owners=tuple(assign_owners(blocks, fragments, num_ranks, config)),
        num_ranks=num_ranks,
        config=config,
    )
