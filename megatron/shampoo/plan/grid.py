"""The block grid: how a part is cut into blocks. Defined on the global part, so it is the same on every layout."""

from __future__ import annotations

import dataclasses
import itertools
import math

from megatron.shampoo.plan.parts import MatrixParameter, Part


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a part: the unit of state, work and ownership."""

    parameter: int
    """Index of its parameter in the plan."""
    part: int
    """Index of its part in the parameter."""
    grid: tuple[int, int]
    """Row and column in the part's global block grid."""
    start: tuple[int, int]
    """First row and column in the local part."""
    shape: tuple[int, int]
    ordinal: int
    """Global number within the model's blocks that the refresh turn comes from."""
    sides: tuple[bool, bool] = (True, True)
    """Whether it has a left and a right factor."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]


def cut(length: int, segments: int, block_size: int) -> list[tuple[int, int]]:
    """Cut a dimension into equal segments, each into ceil(segment / block_size) near-equal pieces.

    Args:
        length: of the dimension; a multiple of `segments`.
        segments: number of equal segments.
        block_size: longest piece.

    Returns:
        (start, stop) of each piece, in order.
    """
    segment = length // segments
    pieces = -(-segment // block_size)
    ends = [segment * k // pieces for k in range(pieces + 1)]
    return [
        (base + start, base + stop) for base in range(0, length, segment) for start, stop in itertools.pairwise(ends)
    ]


def check_alignment(parameter: MatrixParameter, tp_alignment: int) -> None:
    """Refuse a tensor-parallel alignment that a part's cuts cannot meet.

    Raises:
        ValueError: names the parameter, its numbers and what would work.
    """
    for part in parameter.parts:
        if part.tp_dim is None:
            continue
        if tp_alignment % part.tp_size:
            raise ValueError(
                f"--shampoo-tp-alignment {tp_alignment} is not a multiple of the tensor-parallel size {part.tp_size}: "
                f"blocks of {parameter.name} would cross its cuts; use a multiple of {part.tp_size}"
            )
        length = part.global_shape[part.tp_dim]
        if length % tp_alignment:
            working = [a for a in range(1, length + 1) if length % a == 0 and a % part.tp_size == 0 and a <= 1024]
            raise ValueError(
                f"--shampoo-tp-alignment {tp_alignment} does not divide the {length} "
                f"{'rows' if part.tp_dim == 0 else 'columns'} of part {part.name} of {parameter.name}; "
                f"for this part these work: {', '.join(map(str, working))}"
            )


def grid_of(part: Part, block_size: int, tp_alignment: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Row cuts and column cuts of the global part.

    Args:
        part: the part; its tensor-parallel dimension, if any, is cut into `tp_alignment` segments first, its rows into
            its own segments (heads).
        block_size: largest side of a block.
        tp_alignment: number of segments.
    """
    aligned = [tp_alignment if dim == part.tp_dim else 1 for dim in (0, 1)]
    segments = (math.lcm(aligned[0], part.row_segments), aligned[1])
    return tuple(cut(part.global_shape[dim], segments[dim], block_size) for dim in (0, 1))  # type: ignore[return-value]


def blocks_of(parameter: MatrixParameter, index: int, first: int, block_size: int, tp_alignment: int) -> list[Block]:
    """Blocks of a parameter that lie in this rank's tensor-parallel slice.

    Args:
        parameter: the parameter.
        index: its index in the plan, stored in the blocks.
        first: global number of the parameter's first block (of all tensor-parallel slices).
        block_size: largest side of a block.
        tp_alignment: segments of a tensor-parallel dimension.

    Returns:
        In order of part, grid row, grid column.
    """
    blocks = []
    for part_index, part in enumerate(parameter.parts):
        row_cuts, column_cuts = grid_of(part, block_size, tp_alignment)
        (row0, column0), (rows, columns) = part.local_offset, part.local_shape
        for i, (top, bottom) in enumerate(row_cuts):
            for j, (left, right) in enumerate(column_cuts):
                if not (row0 <= top and bottom <= row0 + rows and column0 <= left and right <= column0 + columns):
                    continue
                ordinal = first + i * len(column_cuts) + j
                start, shape = (top - row0, left - column0), (bottom - top, right - left)
                blocks.append(Block(index, part_index, (i, j), start, shape, ordinal, part.sides))
        first += len(row_cuts) * len(column_cuts)
    return blocks


def num_global_blocks(parameter: MatrixParameter, block_size: int, tp_alignment: int) -> int:
    """Blocks of the whole parameter, over all tensor-parallel slices."""
    grids = [grid_of(part, block_size, tp_alignment) for part in parameter.parts]
    return sum(len(row_cuts) * len(column_cuts) for row_cuts, column_cuts in grids)
