"""Seams that bring our optimizers into Megatron's arguments, optimizer set-up, step, log and checkpoints.

Each does nothing unless the user asked for one of our optimizers; but all ranks compare what they were asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.shampoo.mcore.arguments import add_arguments, config_of, is_ours, shown_arguments
from megatron.shampoo.mcore.seams.registry import Seam


def wrap_add_megatron_arguments(original: Callable) -> Callable:
    """`--optimizer shampoo` and our flags, wherever Megatron builds its parser (it does so twice)."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_arguments(original(parser))

    return add_megatron_arguments


def wrap_print_args(original: Callable) -> Callable:
    """Show the user's word for the optimizer, not the one that stands for it."""

    @functools.wraps(original)
    def _print_args(title: str, args: Any) -> None:
        original(title, shown_arguments(args))

    return _print_args


def wrap_get_megatron_optimizer(original: Callable) -> Callable:
    """Refuse ranks with different settings; put Shampoo inside the optimizers that Megatron has built."""

    @functools.wraps(original)
    def get_megatron_optimizer(config: Any, model_chunks: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron.shampoo.mcore.agreement import check_same_settings
        from megatron.shampoo.mcore.build import use_shampoo

        check_same_settings(get_args())
        optimizer = original(config, model_chunks, *args, **kwargs)
        if is_ours(get_args()):
            use_shampoo(optimizer, model_chunks, config_of(get_args()))
        return optimizer

    return get_megatron_optimizer


def wrap_get_grad_norm(original: Callable) -> Callable:
    """Remember the global gradient norm, which Megatron computes in every step, for the guard."""

    @functools.wraps(original)
    def get_grad_norm(self: Any) -> Any:
        self.last_grad_norm = original(self)
        return self.last_grad_norm

    return get_grad_norm


def wrap_get_grads_for_grad_norm(original: Callable) -> Callable:
    """Let a gradient that is not finite reach the global norm also where the norm leaves it out."""

    @functools.wraps(original)
    def get_grads_for_grad_norm(self: Any, grad_norm_group: Any = None) -> Any:
        from megatron.shampoo.mcore.build import shampoo_of
        from megatron.shampoo.mcore.guard import spoiled_by_excluded

        gradients = original(self, grad_norm_group)
        if grad_norm_group is not None or not shampoo_of(self):
            return gradients
        return spoiled_by_excluded(self, gradients)

    return get_grads_for_grad_norm


def wrap_step(original: Callable) -> Callable:
    """Compare replicas before a step whose turn it is; name the gradients for which fp16's loss scaler skips one."""

    @functools.wraps(original)
    def step(self: Any) -> Any:
        from megatron.training import get_args

        from megatron.shampoo.mcore import guard, replicas

        args = get_args()
        if not is_ours(args):
            return original(self)
        if replicas.is_due(args.curr_iteration + 1, config_of(args).check_replicas):
            replicas.check_replicas(self.watched_chunks, args.curr_iteration + 1)
        result = original(self)
        if not result[0] and result[1] is None:
            guard.report_skipped_step(self, None)
        return result

    return step


def wrap_step_with_ready_grads(original: Callable) -> Callable:
    """Skip a step whose gradients are not finite; write our metrics after a step."""

    @functools.wraps(original)
    def step_with_ready_grads(self: Any) -> bool:
        from megatron.training import get_args, get_tensorboard_writer

        from megatron.shampoo.mcore import guard, tensorboard
        from megatron.shampoo.mcore.build import shampoo_of

        args = get_args()
        if not is_ours(args):
            return original(self)
        optimizers = shampoo_of(self)
        if not guard.is_finite(getattr(self, "last_grad_norm", None)):
            guard.report_skipped_step(self, self.last_grad_norm)
            return False
        iteration, interval = args.curr_iteration + 1, config_of(args).log_interval
        tensorboard.time_next_step(optimizers, iteration, interval)
        successful = original(self)
        tensorboard.log_step(optimizers, iteration, interval, get_tensorboard_writer())
        return successful

    return step_with_ready_grads


def wrap_sharded_state_dict(original: Callable) -> Callable:
    """Add the blocks' state to what Megatron saves, and to what it loads into."""

    @functools.wraps(original)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.shampoo.mcore.build import shampoo_of
        from megatron.shampoo.mcore.checkpoint import KEY, blocks_to_sharded

        # Before it loads, the distributed optimizer loads its own state dict into itself to allocate what torch's
        # optimizers allocate late: that one has no blocks, and ours are there from the start.
        self.allocates_state = True
        try:
            state = original(self, *args, **kwargs)
        finally:
            self.allocates_state = False
        for inner in shampoo_of(self):
            state[KEY] = blocks_to_sharded(inner)
        return state

    return sharded_state_dict


def wrap_load_state_dict(original: Callable) -> Callable:
    """Take the blocks' state out of what Megatron has loaded."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        from megatron.shampoo.mcore.build import shampoo_of
        from megatron.shampoo.mcore.checkpoint import KEY, load_blocks

        for inner in [] if getattr(self, "allocates_state", False) else shampoo_of(self):
            load_blocks(inner, state_dict.pop(KEY, {}))
        return original(self, state_dict)

    return load_state_dict


def _wanted() -> bool:
    """These seams add what Megatron does not have; no version of it makes them needless."""
    return True


def _seam(name: str, target: str, reason: str, replace: Callable) -> Seam:
    return Seam(name=name, target=target, reason=reason, probe=_wanted, replace=replace)


_CHAIN = "megatron.core.optimizer.optimizer.ChainedOptimizer"
_STATE_HOLDERS = (
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
    "megatron.core.optimizer.optimizer.Float16OptimizerWithFloat16Params",
    "megatron.core.optimizer.optimizer.FP32Optimizer",
)

SEAMS = (
    _seam(
        "optimizer_flag",
        "megatron.training.arguments.add_megatron_arguments",
        "the choices of --optimizer are a fixed list, also where in-process restart parses a second time",
        wrap_add_megatron_arguments,
    ),
    _seam(
        "shown_arguments",
        "megatron.training.arguments._print_args",
        "the printed arguments would show the optimizer that stands for ours",
        wrap_print_args,
    ),
    _seam(
        "inner_optimizer",
        "megatron.training.training.get_megatron_optimizer",
        "Megatron's registry of optimizers excludes its distributed optimizer",
        wrap_get_megatron_optimizer,
    ),
    _seam(
        "remembered_grad_norm",
        f"{_CHAIN}.get_grad_norm",
        "the norm is a local variable of step, and the guard below must not compute it twice",
        wrap_get_grad_norm,
    ),
    _seam(
        "gradients_of_the_norm",
        "megatron.core.optimizer.optimizer.MegatronOptimizer.get_grads_for_grad_norm",
        "copies on tensor-parallel ranks are left out of the norm, and with them a NaN that one rank alone has",
        wrap_get_grads_for_grad_norm,
    ),
    _seam(
        "checked_step",
        f"{_CHAIN}.step",
        "Megatron has no hook between the backward pass and the step, and its loss scaler does not name what it found",
        wrap_step,
    ),
    _seam(
        "guarded_step",
        f"{_CHAIN}.step_with_ready_grads",
        "without fp16's loss scaler Megatron steps on gradients that are not finite",
        wrap_step_with_ready_grads,
    ),
    *(
        _seam(
            f"saved_blocks_{holder.rpartition('.')[2]}",
            f"{holder}.sharded_state_dict",
            "Megatron saves tensors of the parameters' shapes only",
            wrap_sharded_state_dict,
        )
        for holder in _STATE_HOLDERS
    ),
    *(
        _seam(
            f"loaded_blocks_{holder.rpartition('.')[2]}",
            f"{holder}.load_state_dict",
            "Megatron loads tensors of the parameters' shapes only",
            wrap_load_state_dict,
        )
        for holder in _STATE_HOLDERS
    ),
)
