"""A step whose gradients are not finite changes nothing, and says where they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron.shampoo.mcore.geometry import main_parameters
from megatron.shampoo.mcore.routing import names_of

MAX_NAMES = 5
"""Parameters named in one line of the log."""

logger = logging.getLogger("megatron.shampoo")


def is_finite(grad_norm: Any) -> bool:
    """Whether Megatron's global gradient norm is finite: the same answer on every rank, at no extra traffic."""
    return grad_norm is None or math.isfinite(float(grad_norm))


def report_skipped_step(optimizer: Any, grad_norm: Any) -> None:
    """Log that a step is skipped, and on the ranks that hold them the parameters with non-finite gradients.

    Args:
        optimizer: Megatron's chain of this rank.
        grad_norm: the global norm; None where fp16's loss scaler has found the step before a norm was computed.
    """
    rank = dist.get_rank()
    if rank == 0:
        what = "gradients are not finite at this loss scale" if grad_norm is None else f"gradient norm is {grad_norm}"
        logger.warning("%s: this step is skipped, no parameter and no factor changes", what)
    held = list(_gradients(optimizer))
    if not held:
        return
    finite = torch.stack([gradient.isfinite().all() for _, gradient in held]).tolist()
    named = [name for (name, _), good in zip(held, finite, strict=True) if not good]
    if named:
        more = f" and {len(named) - MAX_NAMES} more" if len(named) > MAX_NAMES else ""
        logger.warning("rank %d: gradient of %s%s is not finite", rank, ", ".join(named[:MAX_NAMES]), more)


def _gradients(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and gradients of all parameters that this rank updates, of those on AdamW too."""
    if not optimizer.model_chunks:
        return
    names = names_of(
        optimizer.model_chunks, get_model_config(optimizer.model_chunks[0]), mpu.get_expert_model_parallel_rank()
    )
    for child in optimizer.chained_optimizers:
        for model, main in [] if child.is_stub_optimizer else main_parameters(child):
            if main is not None and main.grad is not None:
                yield names[id(model)], main.grad
