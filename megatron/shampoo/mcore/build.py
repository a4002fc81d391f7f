"""Put Shampoo in the place of the torch optimizer inside each of Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config

from megatron.shampoo.config import ShampooConfig
from megatron.shampoo.mcore.geometry import place
from megatron.shampoo.mcore.report import start_report
from megatron.shampoo.mcore.routing import Route, TensorParallel, routes_of
from megatron.shampoo.optimizer import Shampoo

_GROUP_KEYS_OF_ADAMW = frozenset(torch.optim.AdamW([torch.zeros(1)]).defaults) - {"lr", "betas", "eps", "weight_decay"}
"""Settings of `torch.optim.AdamW` that Megatron's groups carry and that mean nothing here."""


def use_shampoo(optimizer: Any, model_chunks: Sequence[Any], config: ShampooConfig) -> list[Route]:
    """Replace the inner torch optimizer of every optimizer in a chain; print what goes where.

    Megatron has built its optimizers for `adam`: shards, main parameters, gradient scalers and parameter groups are
    its own and stay. Nothing has been stored in the inner optimizer yet.

    Args:
        optimizer: Megatron's `ChainedOptimizer`.
        model_chunks: this rank's.
        config: our settings.

    Returns:
        Routes of this rank's parameters.

    Raises:
        ValueError: an alignment that a parameter cannot meet.
        NotImplementedError: a parameter whose slices are not understood.

    Collective: every rank (data-parallel groups compare plans; the report is gathered over all ranks).
    """
    routes = routes_of(model_chunks, get_model_config(model_chunks[0]), _tensor_parallel(), config)
    inner = []
    for child in optimizer.chained_optimizers:
        if child.is_stub_optimizer:
            continue
        child.optimizer = _build(child, routes, config)
        child.init_state_fn = _init_state
        inner.append(child.optimizer)
    optimizer.watched_chunks = list(model_chunks)  # its own list is empty without the distributed optimizer
    start_report(routes, inner)
    return routes


def shampoo_of(optimizer: Any) -> list[Shampoo]:
    """The Shampoo optimizers inside one of Megatron's optimizers or chains; empty for any other optimizer."""
    children = getattr(optimizer, "chained_optimizers", [optimizer])
    found = [child.optimizer for child in children if not getattr(child, "is_stub_optimizer", False)]
    return [inner for inner in found if isinstance(inner, Shampoo)]


def _build(child: Any, routes: Sequence[Route], config: ShampooConfig) -> Shampoo:
    groups = child.optimizer.param_groups
    expert = any(group["is_expert_parallel"] for group in groups)
    replicas = (
        mpu.get_expert_data_parallel_group() if expert else mpu.get_data_parallel_group(with_context_parallel=True)
    )
    size = mpu.get_expert_tensor_parallel_world_size() if expert else mpu.get_tensor_model_parallel_world_size()
    placement = place(child, routes, replicas, config.tp_alignment or size)
    for group in groups:
        for key in _GROUP_KEYS_OF_ADAMW:
            group.pop(key, None)
    return Shampoo(
        groups,
        lr=child.config.lr,
        betas=(child.config.adam_beta1, child.config.adam_beta2),
        eps=child.config.adam_eps,
        weight_decay=child.config.weight_decay,
        config=config,
        placement=placement,
    )


def _init_state(optimizer: Shampoo, config: Any = None) -> None:
    """Megatron's hook for state that is allocated lazily; ours is there from the start."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.init_state(parameter)


def _tensor_parallel() -> TensorParallel:
    return TensorParallel(
        size=mpu.get_tensor_model_parallel_world_size(),
        rank=mpu.get_tensor_model_parallel_rank(),
        expert_size=mpu.get_expert_tensor_parallel_world_size(),
        expert_rank=mpu.get_expert_tensor_parallel_rank(),
        expert_parallel_rank=mpu.get_expert_model_parallel_rank(),
    )
