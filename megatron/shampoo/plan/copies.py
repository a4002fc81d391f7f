"""Strided copies: the moves between flat buffers that a plan asks for, merged into as few as possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class StridedCopy:
    """One copy between two flat buffers: element k of the index space lies at offset + sum(stride * k) in each."""

    source: int
    """Number of the source buffer (a parameter's shard)."""
    source_offset: int
    target_offset: int
    size: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements moved."""
        total = 1
        for length in self.size:
            total *= length
        return total


def merge(copies: Iterable[StridedCopy]) -> list[StridedCopy]:
    """Join runs of copies of one shape at constant distances into copies with one more dimension.

    Two passes: the first joins the blocks of a grid row (or the row runs of a block), the second the grid rows.
    """
    merged = list(copies)
    for _ in range(2):
        merged = _merge_once(merged)
    return merged


def _merge_once(copies: list[StridedCopy]) -> list[StridedCopy]:
    merged = []
    start = 0
    while start < len(copies):
        first, stop = copies[start], start + 1
        step = None
        while stop < len(copies) and _same_shape(first, copies[stop]):
            distance = _distance(copies[stop - 1], copies[stop])
            if min(distance) <= 0:  # views have no negative strides
                break
            if step is None:
                step = distance
            elif distance != step:
                break
            stop += 1
        if step is None or stop - start < 2:
            merged.append(first)
        else:
            merged.append(
                dataclasses.replace(
                    first,
                    size=(stop - start, *first.size),
                    source_stride=(step[0], *first.source_stride),
                    target_stride=(step[1], *first.target_stride),
                )
            )
        start = stop
    return merged


def _same_shape(one: StridedCopy, other: StridedCopy) -> bool:
    return (one.source, one.size, one.source_stride, one.target_stride) == (
        other.source,
        other.size,
        other.source_stride,
        other.target_stride,
    )


def _distance(one: StridedCopy, other: StridedCopy) -> tuple[int, int]:
    return (other.source_offset - one.source_offset, other.target_offset - one.target_offset)
