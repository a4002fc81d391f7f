"""Parameters and the logical matrices (parts) inside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One logical matrix inside a parameter, and which of its rows and columns this tensor-parallel rank has.

    The local rows of the part lie in the local parameter as runs of equal length: local part row i is parameter
    row `first_row + (i // run_rows) * run_stride + i % run_rows`. Columns are the parameter's own.
    """

    name: str
    """Short name within the parameter, e.g. `q`, `gate`, `weight`."""
    global_shape: tuple[int, int]
    """Rows and columns of the whole matrix."""
    tp_dim: int | None = None
    """Dimension that is, or may be, tensor-parallel; None where every rank has the whole matrix."""
    tp_size: int = 1
    tp_rank: int = 0
    first_row: int = 0
    run_rows: int | None = None
    """Rows in a run; None for one run of all local rows."""
    run_stride: int = 0
    sides: tuple[bool, bool] = (True, True)
    """Whether its blocks have a left and a right factor; at least one."""
    row_segments: int = 1
    """Equal segments that the rows are cut into before blocks are, e.g. heads."""

    @property
    def local_offset(self) -> tuple[int, int]:
        """Global row and column of the local matrix's first element."""
        return (self._local_start(0), self._local_start(1))

    @property
    def local_shape(self) -> tuple[int, int]:
        """Rows and columns that this tensor-parallel rank has."""
        return (self._local_length(0), self._local_length(1))

    def _local_length(self, dim: int) -> int:
        return self.global_shape[dim] // (self.tp_size if dim == self.tp_dim else 1)

    def _local_start(self, dim: int) -> int:
        return self.tp_rank * self._local_length(dim) if dim == self.tp_dim else 0

    def row_runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Runs (first parameter row, number of rows) that hold the local part rows start..stop, in order."""
        run = self.run_rows or self.local_shape[0]
        runs = []
        while start < stop:
            count = min(run - start % run, stop - start)
            runs.append((self.first_row + (start // run) * self.run_stride + start % run, count))
            start += count
        return runs


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """The flat range of a local parameter that one data-parallel rank holds: its part of the shard."""

    rank: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatrixParameter:
    """A preconditioned parameter as one data-parallel group sees it."""

    name: str
    """Global name: the same on every layout (layers and experts numbered globally)."""
    shape: tuple[int, int]
    """Local rows and columns, that is, after the tensor-parallel cut."""
    parts: tuple[Part, ...]
    spans: tuple[Span, ...] = ()
    """Flat ranges of the local parameter and the data-parallel ranks that hold them, in order, without gaps.

    Empty where every rank holds the whole parameter (no distributed optimizer).
    """
    family: str = "layer"
    """What the unit is: a layer, or an expert."""
    unit: int = 0
    """Global index of the layer (or of the expert among all layers' experts) that the parameter belongs to."""

    def __post_init__(self) -> None:
        """Check that the parts tile the parameter.

        Raises:
            ValueError: the parts' rows do not cover the local rows exactly once, or have other columns.
        """
        if len({span.rank for span in self.spans}) < len(self.spans):
            raise ValueError(f"parameter {self.name}: a rank holds more than one span: {self.spans}")
        runs = [run for part in self.parts for run in part.row_runs(0, part.local_shape[0])]
        tiles = _tile(((first, first + count) for first, count in runs), self.shape[0])
        if not tiles or any(part.local_shape[1] != self.shape[1] for part in self.parts):
            described = ", ".join(f"{part.name} {part.local_shape}" for part in self.parts)
            raise ValueError(
                f"parameter {self.name} of local shape {self.shape} is not tiled by its parts: {described}"
            )
        numel, ranges = self.shape[0] * self.shape[1], [(span.start, span.stop) for span in self.spans]
        if ranges and (not _tile(ranges, numel) or ranges != sorted(ranges)):
            raise ValueError(f"parameter {self.name} of {numel} elements is not tiled by its spans: {self.spans}")


def _tile(ranges: Iterable[tuple[int, int]], length: int) -> bool:
    """Whether the ranges (start, stop) cover 0..length exactly once."""
    ordered = sorted(ranges)
    starts = [start for start, _ in ordered] + [length]
    stops = [0] + [stop for _, stop in ordered]
    return starts == stops and all(start < stop for start, stop in ordered)
