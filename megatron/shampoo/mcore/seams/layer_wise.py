"""``--optimizer muon`` and ``soap`` with ``--use-distributed-optimizer``: in fp32, and over gloo.

With them Megatron uses its `LayerWiseDistributedOptimizer`, which deals whole parameters out to the data-parallel
ranks. It is written for bf16, where every inner optimizer gets a wrapper, and for NCCL, which gathers tensors of
unequal length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer

from megatron.shampoo.mcore.seams.registry import Function, Seam

CLASS = "megatron.core.optimizer.layer_wise_optimizer.LayerWiseDistributedOptimizer"


class LayerWiseFP32Optimizer(FP32Optimizer):
    """Megatron's fp32 wrapper, with its state where the layer-wise checkpoint code looks: under ``optimizer``."""

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state under ``optimizer``."""
        return {"optimizer": super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or `sharded_state_dict` gave."""
        super().load_state_dict(state_dict["optimizer"])

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The sharded state of `FP32Optimizer` under ``optimizer``; the arguments are its own."""
        plain = FP32Optimizer(self.optimizer, self.config, self.init_state_fn)
        return {"optimizer": plain.sharded_state_dict(*args, **kwargs)}


def wrap_in_fp32(original: Function) -> Function:
    """Wrap the inner optimizers of an fp32 model, as Megatron does with those of a bf16 model.

    Args:
        original: ``LayerWiseDistributedOptimizer.__init__``, which deals the parameters out and may leave plain torch
            optimizers behind.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def construct(
        self: Any,
        optimizers: list[Any],
        config: Any,
        pg_collection: Any = None,
        init_state_fn_list: list[Callable[..., None] | None] | None = None,
        model_chunks: list[Any] | None = None,
    ) -> None:
        original(self, optimizers, config, pg_collection, init_state_fn_list, model_chunks)
        init_state_fns = init_state_fn_list or [None] * len(self.chained_optimizers)
        self.chained_optimizers = [
            LayerWiseFP32Optimizer(inner, config, init_state) if isinstance(inner, torch.optim.Optimizer) else inner
            for inner, init_state in zip(self.chained_optimizers, init_state_fns, strict=True)
        ]
        self.config = config

    return construct


def gather_by_broadcasts(original: Function) -> Function:
    """Send updated parameters one by one where the backend cannot gather tensors of unequal length.

    Args:
        original: ``LayerWiseDistributedOptimizer.allgather_params``.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def allgather_params(self: Any) -> None:
        if self.dp_cp_params_list and torch.distributed.get_backend(self.dp_cp) == "gloo":
            self.broadcast_params()
        else:
            original(self)

    return allgather_params


def leaves_fp32_bare() -> bool:
    """Whether an fp32 configuration leaves the inner torch optimizer without Megatron's wrapper."""
    names = LayerWiseDistributedOptimizer.__init__.__code__.co_names
    return "Float16OptimizerWithFloat16Params" in names and "FP32Optimizer" in names and "bf16" in names


def gathers_unequal_lengths() -> bool:
    """Whether ``allgather_params`` still gathers tensors whose lengths differ between ranks."""
    codes = [LayerWiseDistributedOptimizer.allgather_params.__wrapped__.__code__]
    codes += [constant for constant in codes[0].co_consts if isinstance(constant, CodeType)]
    return any("all_gather" in code.co_names for code in codes)


SEAMS = (
    Seam(
        name="layer-wise optimizers in fp32",
        target=f"{CLASS}.__init__",
        reason="AttributeError: 'SOAP' object has no attribute 'get_loss_scale'",
        probe=leaves_fp32_bare,
        replace=wrap_in_fp32,
    ),
    Seam(
        name="layer-wise optimizers over gloo",
        target=f"{CLASS}.allgather_params",
        reason="gloo refuses to all-gather tensors of unequal length",
        probe=gathers_unequal_lengths,
        replace=gather_by_broadcasts,
    ),
)
