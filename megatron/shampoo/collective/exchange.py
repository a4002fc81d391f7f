"""The exchange of cut blocks: fragments to their owners, search directions back.

Both directions are one `all_to_all_single` for all cut blocks of a step together. A rank without cut blocks takes
part with empty messages. Without the distributed optimizer nothing travels to the owners, since every rank has the
whole gradient, and the directions come back by one `all_gather_into_tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.shampoo.collective.views import gather, scatter_add, square_norms
from megatron.shampoo.plan.plan import Plan
from megatron.shampoo.plan.schedule import Message, Schedule, owned_numel, scatter_copies


class Inbox:
    """Fragments received for the blocks that this rank owns."""

    def __init__(self, payloads: Sequence[Tensor], norms: Tensor) -> None:
        """Args: the received fragments of each payload, flat, and their grafted square norms."""
        self.payloads = payloads
        self.norms = norms


class BlockExchange:
    """Moves the fragments of cut blocks within a data-parallel group whose parameters are sharded."""

    def __init__(
        self, schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Prepare message sizes.

        Args:
            schedule: this rank's schedule.
            group: the data-parallel group; None for one process.
            device: of the shards.
            dtype: that fragments travel in.
        """
        self.schedule = schedule
        self.group = group
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.bytes_sent = 0
        """Bytes that left this rank through this object, ever."""
        num_ranks = group.size() if group is not None else 1
        self._sends = {message.peer: message for message in schedule.sends}
        self._receives = {message.peer: message for message in schedule.receives}
        self._num_ranks = num_ranks
        lengths = [it.numel for message in schedule.sends for it in message.fragments]
        self._sent_lengths = torch.tensor(lengths, dtype=torch.long, device=device)

    def to_owners(
        self, gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None], grafts: Sequence[Tensor | None]
    ) -> Inbox:
        """Send this rank's fragments of blocks owned elsewhere; receive those of blocks it owns.

        Args:
            gradients: for each parameter of the plan this rank's flat shard of the gradient (None: holds nothing).
            inputs: likewise, what is preconditioned; not sent where the schedule says that it is the gradient.
            grafts: likewise, the grafting optimizer's step; only its square norm per fragment travels.

        Collective: every rank of the group.
        """
        if self.group is None or self._num_ranks == 1:
            return Inbox([self._like] * self.schedule.num_payloads, self._like)
        sent = [self._packed(sources) for sources in (gradients, inputs)[: self.schedule.num_payloads]]
        norms = square_norms(self._packed(grafts), self._sent_lengths)
        parts, fragment, element = [], 0, 0
        for message in self.schedule.sends:
            stop, fragments = element + message.numel, fragment + len(message.fragments)
            parts += [payload[element:stop] for payload in sent] + [norms[fragment:fragments]]
            element, fragment = stop, fragments
        received = self._all_to_all(
            parts, self._sizes(self._sends, self._there), self._sizes(self._receives, self._there)
        )
        return self._opened(received)

    def to_holders(
        self, directions: Sequence[Tensor], targets: Sequence[Tensor | None], scale: Sequence[float]
    ) -> None:
        """Send the search directions of fragments held elsewhere; add those received to the target shards.

        Args:
            directions: for each stack `(blocks, m, n)`.
            targets: for each parameter of the plan this rank's flat shard, updated in place.
            scale: for each parameter the factor of the direction (minus the learning rate).

        Collective: every rank of the group.
        """
        if self.group is None or self._num_ranks == 1:
            return
        outgoing = self._like.new_empty(sum(message.numel for message in self.schedule.receives))
        for copies, direction in zip(self.schedule.unpack, directions, strict=True):
            for copy in copies:  # from the stack (the copy's target) into the message (its source)
                scatter_view = outgoing.as_strided(copy.size, copy.source_stride, copy.source_offset)
                scatter_view.copy_(direction.as_strided(copy.size, copy.target_stride, copy.target_offset))
        back, there = self._sizes(self._receives, _back), self._sizes(self._sends, _back)
        received = self._all_to_all([outgoing], back, there)
        scatter_add(self.schedule.pack, received, targets, scale)

    def _there(self, message: Message) -> int:
        return self.schedule.num_payloads * message.numel + len(message.fragments)

    def _packed(self, sources: Sequence[Tensor | None]) -> Tensor:
        flat = self._like.new_empty(sum(message.numel for message in self.schedule.sends))
        gather(self.schedule.pack, sources, flat)
        return flat

    def _sizes(self, messages: dict[int, Message], numel: object) -> list[int]:
        return [numel(messages[rank]) if rank in messages else 0 for rank in range(self._num_ranks)]  # type: ignore[operator]

    def _all_to_all(self, parts: list[Tensor], send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        outgoing = torch.cat(parts) if parts else self._like
        incoming = self._like.new_empty(sum(receive_sizes))
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self.group)
        self.bytes_sent += outgoing.numel() * outgoing.element_size()
        return incoming

    def _opened(self, received: Tensor) -> Inbox:
        """Sort the received messages by payload."""
        sizes = []
        for message in self.schedule.receives:
            sizes += [message.numel] * self.schedule.num_payloads + [len(message.fragments)]
        pieces = received.split(sizes) if sizes else ()
        empty = received[:0]
        count = self.schedule.num_payloads
        payloads = [torch.cat(pieces[k :: count + 1]) if pieces else empty for k in range(count)]
        return Inbox(payloads, torch.cat(pieces[count :: count + 1]) if pieces else empty)


class DirectionGather:
    """Brings the owners' search directions to every rank where parameters are replicated."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype) -> None:
        """Prepare the layout of every rank's directions.

        Args:
            plan: a replicated plan.
            group: the data-parallel group; None for one process.
            device: of the parameters.
            dtype: that directions travel in.
        """
        self.group = group
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.bytes_sent = 0
        """Bytes that this rank handed to the collective, ever."""
        self._num_ranks = group.size() if group is not None else 1
        self.numel = max(owned_numel(plan, rank) for rank in range(self._num_ranks))
        """Elements that every rank hands to the collective, padded to those of the rank that owns most."""
        self._copies = [scatter_copies(plan, rank) for rank in range(self._num_ranks)]

    def to_holders(
        self, directions: Sequence[Tensor], targets: Sequence[Tensor | None], scale: Sequence[float]
    ) -> None:
        """Gather all directions and add them to the parameters.

        Args:
            directions: for each of this rank's stacks `(blocks, m, n)`.
            targets: for each parameter of the plan the flat parameter, updated in place.
            scale: for each parameter the factor of the direction (minus the learning rate).

        Collective: every rank of the group.
        """
        own = torch.cat([direction.flatten() for direction in directions] or [self._like])
        everyone = own.unsqueeze(0)
        if self.group is not None and self._num_ranks > 1:
            padded = torch.nn.functional.pad(own, (0, self.numel - own.numel()))
            everyone = self._like.new_empty(self._num_ranks, self.numel)
            dist.all_gather_into_tensor(everyone.view(-1), padded, group=self.group)
            self.bytes_sent += padded.numel() * padded.element_size()
        for copies, flat in zip(self._copies, everyone, strict=True):
            scatter_add(copies, flat, targets, scale)


def _back(message: Message) -> int:
    return message.numel
