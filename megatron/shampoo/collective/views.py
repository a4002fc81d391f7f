"""Strided copies carried out on tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron.shampoo.plan.copies import StridedCopy


def source_view(sources: Sequence[Tensor | None], copy: StridedCopy) -> Tensor:
    """The elements that a copy reads, as a view of its source buffer."""
    source = sources[copy.source]
    if source is None:
        raise ValueError(f"the plan reads parameter {copy.source}, of which this rank holds nothing")
    return source.as_strided(copy.size, copy.source_stride, source.storage_offset() + copy.source_offset)


def target_view(target: Tensor, copy: StridedCopy) -> Tensor:
    """The elements that a copy writes, as a view of its target buffer."""
    return target.as_strided(copy.size, copy.target_stride, target.storage_offset() + copy.target_offset)


def gather(copies: Iterable[StridedCopy], sources: Sequence[Tensor | None], target: Tensor) -> None:
    """Copy from the sources into the flat target."""
    for copy in copies:
        target_view(target, copy).copy_(source_view(sources, copy))


def scatter_add(
    copies: Iterable[StridedCopy], target: Tensor, sources: Sequence[Tensor | None], scale: Sequence[float]
) -> None:
    """Add the flat target's elements, times the scale of their source, to the sources they came from.

    Args:
        copies: as for `gather`; they run backwards here.
        target: flat buffer that is read.
        sources: buffers that are added to, in place.
        scale: one factor for each source.
    """
    for copy in copies:
        source_view(sources, copy).add_(target_view(target, copy), alpha=scale[copy.source])


def slots_of(copy: StridedCopy, block_numel: int) -> list[int]:
    """Slots of the stack that a copy's rectangles go to, one for each index of its leading dimensions, in order.

    Args:
        copy: into a stack of blocks; its last two dimensions are rows and columns within one block.
        block_numel: elements of a block.
    """
    offsets = [copy.target_offset]
    for length, stride in zip(copy.size[:-2], copy.target_stride[:-2], strict=True):
        offsets = [offset + index * stride for offset in offsets for index in range(length)]
    return [offset // block_numel for offset in offsets]


class SlotNorms:
    """Square norms of blocks that lie in several rectangles and messages, summed in a fixed order.

    Adding them up by index would do so in any order on a GPU, and two runs would differ.
    """

    def __init__(
        self,
        copies: Sequence[StridedCopy],
        block_numel: int,
        fragment_slots: Sequence[int],
        count: int,
        device: torch.device,
    ) -> None:
        """Prepare the order.

        Args:
            copies: of this rank's own rectangles into the stack.
            block_numel: elements of a block.
            fragment_slots: slots of the received fragments, in the order in which their norms are given.
            count: blocks.
            device: of the norms.
        """
        self._copies = copies
        slots = [slots_of(copy, block_numel) for copy in copies]
        self._lengths = [len(found) for found in slots]
        index = torch.tensor([*itertools.chain.from_iterable(slots), *fragment_slots], dtype=torch.long)
        self._order = index.argsort(stable=True).to(device)
        self._counts = index.bincount(minlength=count).to(device)

    def __call__(self, sources: Sequence[Tensor | None], received: Tensor) -> Tensor:
        """Sum up.

        Args:
            sources: buffers that the copies read; one that is missing counts as zero.
            received: square norms of the received fragments.

        Returns:
            `(blocks,)`.
        """
        squares = [
            received.new_zeros(length)
            if sources[copy.source] is None
            else torch.linalg.vector_norm(source_view(sources, copy), dim=(-2, -1)).square().flatten().to(received)
            for copy, length in zip(self._copies, self._lengths, strict=True)
        ]
        every = torch.cat([*squares, received])[self._order]
        return torch.segment_reduce(every, "sum", lengths=self._counts, unsafe=True, initial=0.0)


def square_norms(flat: Tensor, lengths: Tensor) -> Tensor:
    """Sum of squares of each of the consecutive segments of a flat tensor.

    Args:
        flat: `(sum of lengths,)`.
        lengths: `(segments,)`, integer.

    Returns:
        `(segments,)`.
    """
    return torch.segment_reduce(flat.square(), "sum", lengths=lengths, unsafe=True)
