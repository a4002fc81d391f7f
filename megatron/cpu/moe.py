"""Mixture of experts on CPU: split sizes as the collective wants them, weights that do not depend on the layout."""

from __future__ import annotations

import functools
from typing import Any

import torch
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
    """Replace the two functions in Megatron 0.19."""
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    _keep_place_in_stream()
