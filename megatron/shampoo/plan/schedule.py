"""One rank's share of a plan: its stacks of equal-shaped blocks, and every copy and message of a step.

Flat buffers, per data-parallel rank k that this rank sends to (all fragments it holds of blocks that k owns):

    to the owner:    [ gradient of each fragment | what is preconditioned of each | grafted square norm of each ]
    to the holder:   [ search direction of each fragment ]

The message back has the order of the message there, so one layout serves both.
"""

from __future__ import annotations

import dataclasses

from megatron.shampoo.config import ShampooConfig
from megatron.shampoo.plan.copies import StridedCopy, merge
from megatron.shampoo.plan.fragments import Fragment, rectangles_of
from megatron.shampoo.plan.plan import Plan


def num_payloads(config: ShampooConfig) -> int:
    """Tensors that travel to the owner for each fragment: the gradient, and what is preconditioned if it is another.

    With momentum after preconditioning that is the gradient, unless grafting steps take its place before a start step.
    """
    return 2 if config.averages_gradients or config.start_step > 1 else 1


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Blocks of one shape and one choice of sides that a rank owns; they are computed together as one batch."""

    shape: tuple[int, int]
    sides: tuple[bool, bool]
    """Whether they have a left and a right factor."""
    blocks: tuple[int, ...]
    """Plan indices, in the order of the batch."""

    @property
    def block_numel(self) -> int:
        """Elements of one block."""
        return self.shape[0] * self.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """Fragments that travel between this rank and a peer, in order."""

    peer: int
    fragments: tuple[Fragment, ...]

    @property
    def numel(self) -> int:
        """Elements of all fragments."""
        return sum(fragment.numel for fragment in self.fragments)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What one rank does in every step."""

    stacks: tuple[Stack, ...]
    local: tuple[tuple[StridedCopy, ...], ...]
    """For each stack: from this rank's shards (source = parameter) into the stack, its own fragments."""
    sends: tuple[Message, ...]
    """Fragments that this rank holds of blocks owned elsewhere."""
    receives: tuple[Message, ...]
    """Fragments held elsewhere of blocks that this rank owns."""
    pack: tuple[StridedCopy, ...]
    """From this rank's shards into a buffer of all sent fragments, in the order of `sends`."""
    unpack: tuple[tuple[StridedCopy, ...], ...]
    """For each stack: from a buffer of all received fragments, in the order of `receives`, into the stack."""
    unpack_slots: tuple[tuple[tuple[int, int], ...], ...]
    """For each stack: (number of the received fragment, slot in the stack) of each received fragment."""
    num_payloads: int
    """Tensors that travel to the owner for each fragment."""

    @property
    def exchanged_numel(self) -> int:
        """Elements that this rank sends to other ranks in a step, there and back."""
        there = sum(self.num_payloads * message.numel + len(message.fragments) for message in self.sends)
        return there + sum(message.numel for message in self.receives)


def make_schedule(plan: Plan, rank: int) -> Schedule:
    """The share of one rank in a plan."""
    stacks = _stacks(plan, rank)
    local, places = _local_copies(plan, rank, stacks)
    sends, receives = _messages(plan, rank)
    unpack, slots = _unpack_copies(receives, places, len(stacks))
    return Schedule(
        stacks=stacks,
        local=local,
        sends=sends,
        receives=receives,
        pack=_pack_copies(plan, rank, sends),
        unpack=unpack,
        unpack_slots=slots,
        num_payloads=num_payloads(plan.config),
    )


def scatter_copies(plan: Plan, rank: int) -> tuple[StridedCopy, ...]:
    """For a replicated plan: from the buffer of all directions of `rank`'s stacks into the parameters.

    Here the source number of a copy still is the parameter, and its source offset lies in the parameter: the copy
    runs from target to source.
    """
    copies, base = [], 0
    for stack in _stacks(plan, rank):
        for slot, block in enumerate(stack.blocks):
            copies += _block_copies(plan, block, 0, stack.block_numel, base + slot * stack.block_numel, 0)
        base += len(stack.blocks) * stack.block_numel
    return tuple(merge(copies))


def owned_numel(plan: Plan, rank: int) -> int:
    """Elements of all blocks that a rank owns."""
    return sum(block.numel for block, owner in zip(plan.blocks, plan.owners, strict=True) if owner == rank)


def _stacks(plan: Plan, rank: int) -> tuple[Stack, ...]:
    by_kind: dict[tuple[tuple[int, int], tuple[bool, bool]], list[int]] = {}
    for index, owner in enumerate(plan.owners):
        if owner == rank:
            block = plan.blocks[index]
            by_kind.setdefault((block.shape, block.sides), []).append(index)
    return tuple(Stack(shape, sides, tuple(blocks)) for (shape, sides), blocks in sorted(by_kind.items()))


def _span_start(plan: Plan, parameter: int, rank: int) -> int:
    return next((span.start for span in plan.parameters[parameter].spans if span.rank == rank), 0)


def _block_copies(plan: Plan, block: int, start: int, stop: int, target: int, span_start: int) -> list[StridedCopy]:
    """Copies of the flat range start..stop of a block from its parameter's shard to flat offset `target`."""
    it = plan.blocks[block]
    parameter = plan.parameters[it.parameter]
    return [
        StridedCopy(
            source=it.parameter,
            source_offset=rectangle.parameter_offset - span_start,
            target_offset=target + rectangle.block_offset - start,
            size=(rectangle.rows, rectangle.columns),
            source_stride=(parameter.shape[1], 1),
            target_stride=(rectangle.columns, 1),
        )
        for rectangle in rectangles_of(parameter, it, start, stop)
    ]


def _local_copies(
    plan: Plan, rank: int, stacks: tuple[Stack, ...]
) -> tuple[tuple[tuple[StridedCopy, ...], ...], dict[int, tuple[int, int, int]]]:
    """Copies of this rank's fragments into its stacks; and the stack, slot and flat offset of every owned block."""
    local, places = [], {}
    for number, stack in enumerate(stacks):
        copies = []
        for slot, block in enumerate(stack.blocks):
            base = slot * stack.block_numel
            places[block] = (number, slot, base)
            ranges = [(0, stack.block_numel)] if plan.replicated else []
            ranges += [(it.start, it.stop) for it in plan.fragments[block] if it.rank == rank]
            span_start = _span_start(plan, plan.blocks[block].parameter, rank)
            for start, stop in ranges:
                copies += _block_copies(plan, block, start, stop, base + start, span_start)
        local.append(tuple(merge(copies)))
    return tuple(local), places


def _messages(plan: Plan, rank: int) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    sends: dict[int, list[Fragment]] = {}
    receives: dict[int, list[Fragment]] = {}
    for fragments, owner in zip(plan.fragments, plan.owners, strict=True):
        for fragment in fragments:
            if fragment.rank == rank != owner:
                sends.setdefault(owner, []).append(fragment)
            elif owner == rank != fragment.rank:
                receives.setdefault(fragment.rank, []).append(fragment)
    return tuple(
        tuple(Message(peer, tuple(found)) for peer, found in sorted(messages.items())) for messages in (sends, receives)
    )  # type: ignore[return-value]


def _pack_copies(plan: Plan, rank: int, sends: tuple[Message, ...]) -> tuple[StridedCopy, ...]:
    copies, target = [], 0
    for message in sends:
        for fragment in message.fragments:
            span_start = _span_start(plan, plan.blocks[fragment.block].parameter, rank)
            copies += _block_copies(plan, fragment.block, fragment.start, fragment.stop, target, span_start)
            target += fragment.numel
    return tuple(merge(copies))


def _unpack_copies(
    receives: tuple[Message, ...], places: dict[int, tuple[int, int, int]], num_stacks: int
) -> tuple[tuple[tuple[StridedCopy, ...], ...], tuple[tuple[tuple[int, int], ...], ...]]:
    copies: list[list[StridedCopy]] = [[] for _ in range(num_stacks)]
    slots: list[list[tuple[int, int]]] = [[] for _ in range(num_stacks)]
    source = 0
    for number, fragment in enumerate(it for message in receives for it in message.fragments):
        stack, slot, base = places[fragment.block]
        copies[stack].append(StridedCopy(0, source, base + fragment.start, (fragment.numel,), (1,), (1,)))
        slots[stack].append((number, slot))
        source += fragment.numel
    return tuple(tuple(merge(found)) for found in copies), tuple(tuple(found) for found in slots)
