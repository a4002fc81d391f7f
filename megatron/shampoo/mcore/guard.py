"""A step whose gradients are not finite changes nothing, and says where they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.shampoo.optimizer import Shampoo

logger = logging.getLogger("megatron.shampoo")


def is_finite(grad_norm: Any) -> bool:
    """Whether Megatron's global gradient norm is finite: the same answer on every rank, at no extra traffic."""
    return grad_norm is None or math.isfinite(float(grad_norm))


def report_skipped_step(optimizers: Sequence[Shampoo], grad_norm: Any) -> None:
    """Log that a step is skipped, and on the ranks that hold them the parameters with non-finite gradients.

    Args:
        optimizers: this rank's.
        grad_norm: the global norm.
    """
    rank = dist.get_rank()
    if rank == 0:
        logger.warning("gradient norm is %s: this step is skipped, no parameter and no factor changes", grad_norm)
    for optimizer in optimizers:
        for parameter, shard in zip(optimizer.placement.parameters, optimizer.placement.shards, strict=True):
            gradient = None if shard is None else shard.grad
            if gradient is not None and not bool(gradient.isfinite().all()):
                logger.warning("rank %d: gradient of %s is not finite", rank, parameter.name)
