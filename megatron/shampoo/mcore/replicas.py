"""`--shampoo-check-replicas`: data-parallel ranks still hold the same parameters, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config

from megatron.shampoo.collective.replicas import drifted
from megatron.shampoo.mcore.routing import is_expert, names_of

MAX_NAMES = 5
"""Parameters named in the message."""


def is_due(iteration: int, interval: int) -> bool:
    """Whether parameters are compared before the step of an iteration, counted from 1: after every `interval` steps."""
    return interval > 0 and iteration > 1 and (iteration - 1) % interval == 0


def check_replicas(model_chunks: Sequence[Any], iteration: int) -> None:
    """Compare the parameters of this rank's model chunks with those of the ranks that hold copies of them.

    To be called between the backward pass and the optimizer's step, when parameters that are gathered with overlap have
    all arrived.

    Args:
        model_chunks: this rank's.
        iteration: of the step to come, counted from 1.

    Raises:
        RuntimeError: on every rank that holds a copy of a parameter whose copies differ; names parameters and ranks.

    Collective: every rank. One all-gather of 8 bytes a parameter over the data-parallel (x context-parallel) group, and
    one over the experts' data-parallel group.
    """
    config = get_model_config(model_chunks[0])
    names = names_of(model_chunks, config, mpu.get_expert_model_parallel_rank())
    parameters = [(names[id(it)], it) for chunk in model_chunks for it in chunk.parameters()]
    groups = (
        (False, mpu.get_data_parallel_group(with_context_parallel=True)),
        (True, mpu.get_expert_data_parallel_group()),
    )
    found = []
    for experts, group in groups:
        own = [(name, parameter) for name, parameter in parameters if is_expert(name) is experts]
        if own and group.size() > 1:
            ranks = dist.get_process_group_ranks(group)
            differing = drifted([parameter for _, parameter in own], group)
            found += [(own[index][0], [ranks[it] for it in others], ranks) for index, others in differing.items()]
    if found:
        raise RuntimeError(_message(found, iteration))


def _message(found: Sequence[tuple[str, list[int], list[int]]], iteration: int) -> str:
    named = "; ".join(
        f"{name}: rank {_listed(odd)} of ranks {_listed(ranks)}" for name, odd, ranks in found[:MAX_NAMES]
    )
    more = f"; and {len(found) - MAX_NAMES} more parameters" if len(found) > MAX_NAMES else ""
    return (
        f"before iteration {iteration} data-parallel copies of parameters differ (--shampoo-check-replicas): "
        f"{named}{more}. One of these ranks has computed or received something else, as broken memory does; "
        "resume from a checkpoint that is older than the drift, without the machine of that rank"
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
