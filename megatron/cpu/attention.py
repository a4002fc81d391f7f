"""Attention of Megatron's local layers on CPU, also for a sequence that is cut over context-parallel ranks.

Megatron leaves context parallelism and heads whose keys and values differ in width (multi-latent attention) to
Transformer Engine. Here every context-parallel rank gathers all keys and values and computes the rows of its own
queries; the gradients of keys and values are added up over the ranks on the way back.

Megatron cuts a sequence into 2 c chunks for c context-parallel ranks and gives rank r the chunks r and 2 c - 1 - r, so
that all ranks have the same work under a causal mask.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig


def chunks_of(rank: int, num_ranks: int) -> tuple[int, int]:
    """The two chunks of a sequence that a context-parallel rank has, in the order in which it has them."""
    return rank, 2 * num_ranks - 1 - rank


def in_natural_order(gathered: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """Sort what was gathered from all context-parallel ranks by position in the sequence.

    Args:
        gathered: `(sequence, ...)`, the two chunks of rank 0, then those of rank 1, and so on.
        num_ranks: context-parallel size.

    Returns:
        A tensor of the same shape.
    """
    order = [chunk for rank in range(num_ranks) for chunk in chunks_of(rank, num_ranks)]
    pieces = gathered.chunk(len(order))
    return torch.cat([pieces[order.index(chunk)] for chunk in range(len(order))])


def causal_rows(length: int, rank: int, num_ranks: int, device: torch.device) -> torch.Tensor:
    """The rows of a causal mask that belong to a context-parallel rank's queries.

    Args:
        length: of the whole sequence.
        rank: context-parallel rank.
        num_ranks: context-parallel size.
        device: of the mask.

    Returns:
        `(1, 1, length / num_ranks, length)` bool, True where a key is later than the query.
    """
    positions = torch.arange(length, device=device)
    pieces = positions.chunk(2 * num_ranks)
    rows = torch.cat([pieces[chunk] for chunk in chunks_of(rank, num_ranks)])
    return (positions[None, :] > rows[:, None])[None, None]


class CpuAttention(DotProductAttention):
    """Megatron's dot-product attention with context parallelism and with heads of two widths."""

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Build it as Megatron does.

        Args:
            config: of the model.
            args: see `DotProductAttention`.
            k_channels: width of a head's keys; without effect, the scale of the softmax is given beside it.
            v_channels: width of a head's values; None for that of the configuration.
            kwargs: see `DotProductAttention`.
        """
        alone = copy.copy(config)
        alone.context_parallel_size = 1  # the base class refuses any other
        super().__init__(alone, *args, **kwargs)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: `(sequence / c, batch, heads, key width)`, this rank's queries.
            key: `(sequence / c, batch, query groups, key width)`, this rank's keys.
            value: `(sequence / c, batch, query groups, value width)`, this rank's values.
            attention_mask: `(batch or 1, 1, sequence / c, sequence)` bool, True where a key is hidden; None: causal.
            kwargs: see `DotProductAttention`.

        Returns:
            `(sequence / c, batch, heads x value width)`.

        Collective: every rank of the context-parallel group.
        """
        group = parallel_state.get_context_parallel_group()
        num_ranks = group.size()
        if num_ranks > 1:
            key, value = (in_natural_order(_gather(tensor, group), num_ranks) for tensor in (key, value))
            if attention_mask is None:
                attention_mask = causal_rows(len(key), group.rank(), num_ranks, key.device)
        return super().forward(query, key.contiguous(), value.contiguous(), attention_mask, **kwargs)


def _gather(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    """All ranks' tensors along the first dimension; backwards the sum over ranks of what each rank needs of it."""
    return gather_from_sequence_parallel_region(tensor, tensor_parallel_output_grad=True, group=group)


def install() -> None:
    """Let Megatron's local layers attend by `CpuAttention`."""
    LocalSpecProvider.core_attention = lambda self: CpuAttention
