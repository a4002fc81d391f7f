"""A step whose gradients are not finite changes nothing, and says where they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.shampoo.optimizer import Shampoo

MAX_NAMES = 5
"""Parameters named in one line of the log."""

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
    held = [
        (parameter.name, shard.grad)
        for optimizer in optimizers
        for parameter, shard in zip(optimizer.placement.parameters, optimizer.placement.shards, strict=True)
        if shard is not None and shard.grad is not None
    ]
    if not held:
        return
    finite = torch.stack([gradient.isfinite().all() for _, gradient in held]).tolist()
    named = [name for (name, _), good in zip(held, finite, strict=True) if not good]
    if named:
        more = f" and {len(named) - MAX_NAMES} more" if len(named) > MAX_NAMES else ""
        logger.warning("rank %d: gradient of %s%s is not finite", rank, ", ".join(named[:MAX_NAMES]), more)
