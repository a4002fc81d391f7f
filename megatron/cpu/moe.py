"""Mixture of experts on CPU: sizes as gloo's collectives want them, weights that do not depend on the layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.experts import SequentialMLP

from megatron.cpu import weights

_WEIGHTS_PER_EXPERT = 2
"""A local expert has two matrices, `linear_fc1` and `linear_fc2`; gate and up are one."""


def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Bring what the token dispatcher computed to where the all-to-all reads its split sizes.

    Megatron's own function does so for tensors on a GPU only and leaves split sizes a tensor here, which
    `all_to_all_single` refuses.

    Args:
        tensor: the value; anything but a tensor is returned as it is.
        as_numpy: return a NumPy array, as split sizes must be.
        record_stream: ignored, there is one stream.

    Returns:
        The tensor or its array.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def gather_rows(rows: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int]) -> torch.Tensor:
    """Gather different numbers of rows from every rank, which gloo's own gather refuses.

    Args:
        rows: this rank's, `(lengths[rank], ...)`.
        group: the ranks.
        lengths: number of rows of each rank.

    Returns:
        All rows, `(sum(lengths), ...)`, rank after rank.

    Collective: every rank of the group.
    """
    longest = max(lengths)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = rows.new_empty(len(lengths), *padded.shape)
    dist.all_gather_into_tensor(gathered.view(-1, *rows.shape[1:]), padded, group=group)
    return torch.cat([part[:length] for part, length in zip(gathered, lengths, strict=True)])


def reduce_scatter_rows(rows: torch.Tensor, group: dist.ProcessGroup, lengths: Sequence[int]) -> torch.Tensor:
    """Add up all ranks' rows and give each rank its share, of a length of its own.

    Args:
        rows: `(sum(lengths), ...)`, on every rank.
        group: the ranks.
        lengths: number of rows that each rank gets.

    Returns:
        This rank's rows of the sum, `(lengths[rank], ...)`.

    Collective: every rank of the group.
    """
    total = rows.clone()
    dist.all_reduce(total, group=group)
    return total.split(list(lengths))[group.rank()]


def _allow_uneven_rows(original: Callable[..., torch.Tensor], uneven: Callable[..., torch.Tensor]) -> Callable:
    """One of Megatron's two collectives along the first dimension, with `uneven` where it is given lengths."""

    @functools.wraps(original)
    def collective(
        input_: torch.Tensor, group: dist.ProcessGroup, lengths: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if lengths is None or group.size() == 1:
            return original(input_, group, lengths, use_global_buffer)
        return uneven(input_, group, [int(length) for length in lengths])

    return collective


def _keep_place_in_stream() -> None:
    """Give every expert the seeds of its global index, whichever expert-parallel rank holds it."""
    original = SequentialMLP.__init__

    @functools.wraps(original)
    def build(self: SequentialMLP, num_local_experts: int, config: Any, *args: Any, **kwargs: Any) -> None:
        ep_group = kwargs["pg_collection"].ep if "pg_collection" in kwargs else args[1].ep
        drawn = num_local_experts * _WEIGHTS_PER_EXPERT if config.perform_initialization else 0
        weights.skip_streams(drawn * ep_group.rank())
        original(self, num_local_experts, config, *args, **kwargs)
        weights.skip_streams(drawn * (ep_group.size() - 1 - ep_group.rank()))

    SequentialMLP.__init__ = build


def install() -> None:
    """Replace the functions in Megatron 0.19."""
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    mappings._gather_along_first_dim = _allow_uneven_rows(mappings._gather_along_first_dim, gather_rows)
    mappings._reduce_scatter_along_first_dim = _allow_uneven_rows(
        mappings._reduce_scatter_along_first_dim, reduce_scatter_rows
    )
    _keep_place_in_stream()
