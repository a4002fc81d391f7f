"""Fragments: which elements of a block each data-parallel rank holds.

A block's elements in row-major order are also in the order in which they lie in the parameter, so the part of a
block that a rank's contiguous span holds is a contiguous range of the block's own flat order.
"""

from __future__ import annotations

import bisect
import dataclasses

from megatron.shampoo.plan.grid import Block
from megatron.shampoo.plan.parts import MatrixParameter


@dataclasses.dataclass(frozen=True, slots=True)
class Fragment:
    """A flat range of a block held by one data-parallel rank."""

    block: int
    """Index of the block in the plan."""
    rank: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive equal rows of a block that lie at a constant stride in the parameter."""

    parameter_offset: int
    """Flat offset of the first element in the local parameter."""
    block_offset: int
    """Flat offset of the first element in the block."""
    rows: int
    columns: int


def fragments_of(parameter: MatrixParameter, block: Block, index: int) -> list[Fragment]:
    """Fragments of a block, in the order of ranks; together they are the block.

    Args:
        parameter: the block's parameter.
        block: the block.
        index: its index in the plan, stored in the fragments.
    """
    runs, width = _row_runs(parameter, block), parameter.shape[1]
    fragments: list[Fragment] = []
    # Spans are in order: those before the block's first and behind its last element are skipped by bisection.
    first = bisect.bisect_right(parameter.spans, runs[0][0] * width, key=lambda span: span.stop)
    low = 0
    for span in parameter.spans[first:]:
        high = _elements_before(runs, block, width, span.stop)
        if low < high:
            fragments.append(Fragment(index, span.rank, low, high))
        if high == block.numel:
            break
        low = high
    return fragments


def rectangles_of(parameter: MatrixParameter, block: Block, start: int, stop: int) -> list[Rectangle]:
    """Where the flat range start..stop of a block lies in its parameter.

    Returns:
        Rectangles in order: cut first and last rows by themselves, whole rows together.
    """
    width, columns = parameter.shape[1], block.shape[1]
    rectangles = []
    row = 0
    for first, count in _row_runs(parameter, block):
        low, high = max(start, row * columns), min(stop, (row + count) * columns)
        while low < high:
            column = low % columns
            if column or high - low < columns:
                rows, length = 1, min(columns - column, high - low)
            else:
                rows, length = (high - low) // columns, columns
            offset = (first + low // columns - row) * width + block.start[1] + column
            rectangles.append(Rectangle(offset, low, rows, length))
            low += rows * length
        row += count
    return rectangles


def _row_runs(parameter: MatrixParameter, block: Block) -> list[tuple[int, int]]:
    top, rows = block.start[0], block.shape[0]
    return parameter.parts[block.part].row_runs(top, top + rows)


def _elements_before(runs: list[tuple[int, int]], block: Block, width: int, position: int) -> int:
    """How many of the block's elements lie before flat position `position` of the parameter."""
    columns, left = block.shape[1], block.start[1]
    before = 0
    for first, count in runs:
        whole_rows = min(max((position - first * width) // width, 0), count)
        before += whole_rows * columns
        if whole_rows < count:
            inside = position - (first + whole_rows) * width - left
            return before + min(max(inside, 0), columns)
    return before
