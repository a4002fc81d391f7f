"""From Megatron's optimizers to a `Placement`: shards, spans and groups.

Everything Megatron-private that describes where a parameter lies is read here (megatron-core 0.19):
`DistributedOptimizer.buffers` with their buckets and `param_index_map`, and the groups of model parameters beside
the groups of main parameters in each of its three optimizer classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from megatron.shampoo.mcore.routing import Route
from megatron.shampoo.placement import Placement
from megatron.shampoo.plan.parts import MatrixParameter, Span


def place(optimizer: Any, routes: Sequence[Route], replica_group: dist.ProcessGroup, tp_alignment: int) -> Placement:
    """Placement of the preconditioned parameters of one of Megatron's optimizers.

    Args:
        optimizer: a `DistributedOptimizer`, `Float16OptimizerWithFloat16Params` or `FP32Optimizer` with parameters.
        routes: of all parameters of the model chunks.
        replica_group: the data-parallel (x context-parallel) ranks that hold copies of the parameters; used without
            the distributed optimizer, which brings its own group.
        tp_alignment: segments of a tensor-parallel dimension.

    Returns:
        The placement; parameters in the model's order.
    """
    main_of = {id(model): main for model, main in main_parameters(optimizer)}
    if isinstance(optimizer, DistributedOptimizer):
        group = optimizer.data_parallel_group
        spans_of = _spans_by_parameter(optimizer)
    else:
        group, spans_of = replica_group, {}
    managed = spans_of.keys() if spans_of else main_of.keys()
    device = routes[0].parameter.device
    routes = [route for route in routes if route.is_preconditioned and id(route.parameter) in managed]
    parameters = [
        MatrixParameter(
            name=route.name,
            family=route.family,
            unit=route.unit,
            shape=(route.parameter.shape[0], route.parameter.shape[1]),
            parts=route.parts,
            spans=spans_of.get(id(route.parameter), ()),
        )
        for route in routes
    ]
    return Placement(
        parameters=tuple(parameters),
        shards=tuple(main_of.get(id(route.parameter)) for route in routes),
        group=group,
        tp_alignment=tp_alignment,
        device=device,
    )


def main_parameters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a model parameter and what the inner optimizer updates in its place (a shard, a copy or itself)."""
    if isinstance(optimizer, DistributedOptimizer):
        pairs = [
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        ]
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    else:
        own = [group["params"] for group in optimizer.optimizer.param_groups]
        pairs = [(own, own)]
    for model_groups, main_groups in pairs:
        for model_group, main_group in zip(model_groups, main_groups, strict=True):
            yield from zip(model_group, main_group, strict=True)


def _spans_by_parameter(optimizer: DistributedOptimizer) -> dict[int, tuple[Span, ...]]:
    """For every parameter in the optimizer's buffers, which flat range each data-parallel rank's shard holds.

    A bucket is cut into equal shards, wherever the cuts fall in its parameters.
    """
    spans = {}
    num_ranks = optimizer.data_parallel_group.size()
    for buffer in optimizer.buffers:
        for parameter, (start, stop, bucket_index) in buffer.param_index_map.items():
            bucket = buffer.buckets[bucket_index]
            shard = bucket.grad_data.numel() // num_ranks
            first, last = (start - bucket.offset) // shard, (stop - 1 - bucket.offset) // shard
            spans[id(parameter)] = tuple(
                Span(
                    rank,
                    max(bucket.offset + rank * shard, start) - start,
                    min(bucket.offset + (rank + 1) * shard, stop) - start,
                )
                for rank in range(first, last + 1)
            )
    return spans
