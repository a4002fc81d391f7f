"""A step whose gradients are not finite changes nothing, and says where they are."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
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


def spoiled_by_excluded(optimizer: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Make the global norm see gradients that Megatron leaves out of it, such as copies on tensor-parallel ranks.

    One of those that is not finite would spoil this rank's weights and no other's.

    Args:
        optimizer: one of Megatron's.
        gradients: that its norm is computed of.

    Returns:
        The gradients, and one element more: 0, or NaN where one that is left out is not finite.
    """
    counted = {id(gradient) for gradient in gradients}
    grads = [parameter.grad for parameter in optimizer.get_parameters() if parameter.grad is not None]
    left_out = [gradient for gradient in grads if id(gradient) not in counted]
    if not left_out:
        return list(gradients)
    flag = torch.stack(torch._foreach_norm(left_out)).sum(0, keepdim=True) * 0.0
    return [*gradients, flag.to(left_out[0].dtype)]


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
    chunks = optimizer.watched_chunks
    names = names_of(chunks, get_model_config(chunks[0]), mpu.get_expert_model_parallel_rank())
    for child in optimizer.chained_optimizers:
        for model, main in [] if child.is_stub_optimizer else main_parameters(child):
            if main is not None and main.grad is not None:
                yield names[id(model)], main.grad
