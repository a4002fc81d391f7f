"""Fully reshardable checkpoints are right when a gradient buffer has several buckets.

For ``--dist-ckpt-optim-fully-reshardable`` Megatron gathers each buffer's state into one tensor without the padding at
the buckets' ends, and then cuts the parameters out of it at their offsets in the buffer, padding included. Every
parameter behind a padded bucket end is saved from the wrong place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.shampoo.mcore.seams.registry import Function, Seam

TARGET = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.sharded_param_state_fully_reshardable"

ParamRange = tuple[int, int, int]
"""Start and end in the buffer, and the bucket's number."""


def unpadded_ranges(ranges: Mapping[Any, ParamRange], buckets: Sequence[tuple[int, int]]) -> dict[Any, ParamRange]:
    """Each parameter's range once the padding at the buckets' ends is dropped.

    Args:
        ranges: by parameter, in the buffer.
        buckets: by number, where the bucket starts in the buffer and its length without the padding at its end.

    Returns:
        By parameter in the same order, in the concatenation of the unpadded buckets.
    """
    shifts, unpadded_start = [], 0
    for start, numel_unpadded in buckets:
        shifts.append(unpadded_start - start)
        unpadded_start += numel_unpadded
    return {param: (start + shifts[b], end + shifts[b], b) for param, (start, end, b) in ranges.items()}


@contextmanager
def unpadded(buffers: Sequence[Any]) -> Iterator[None]:
    """Let the buffers show unpadded ranges for a while.

    Args:
        buffers: Megatron's ``_ParamAndGradBuffer``.

    Yields:
        Nothing.
    """
    saved = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            buckets = [(bucket.offset, bucket.numel_unpadded) for bucket in buffer.buckets]
            buffer.param_index_map = unpadded_ranges(buffer.param_index_map, buckets)
        yield
    finally:
        for buffer, ranges in zip(buffers, saved, strict=True):
            buffer.param_index_map = ranges


def cut_from_unpadded(original: Function) -> Function:
    """Cut parameters out of the gathered state at the offsets that it has.

    Args:
        original: ``DistributedOptimizer.sharded_param_state_fully_reshardable``, which takes offsets from
            ``buffer.param_index_map``.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def sharded_param_state_fully_reshardable(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unpadded(self.buffers):
            return original(self, *args, **kwargs)

    return sharded_param_state_fully_reshardable


def cuts_at_padded_offsets() -> bool:
    """Whether Megatron's function still has its own warning about ranges beyond the unpadded buffer."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    constants = DistributedOptimizer.sharded_param_state_fully_reshardable.__code__.co_consts
    return any("param range exceeds unpadded buffer" in text for text in constants if isinstance(text, str))


SEAMS = (
    Seam(
        name="fully reshardable state of several buckets",
        target=TARGET,
        reason="optimizer state behind a padded bucket end is saved from the wrong offset",
        probe=cuts_at_padded_offsets,
        replace=cut_from_unpadded,
    ),
)
