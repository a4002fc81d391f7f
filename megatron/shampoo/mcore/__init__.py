"""Glue between Megatron and the optimizer: the only package of ours that imports Megatron's training code."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Install the seams into Megatron; called once, before arguments are parsed."""
    import megatron.training.arguments as arguments
    import megatron.training.training as training
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.shampoo.mcore.seams import optimizer as ours
    arguments.add_megatron_arguments = ours.wrap_add_megatron_arguments(arguments.add_megatron_arguments)
    arguments._print_args = ours.wrap_print_args(arguments._print_args)
    training.get_megatron_optimizer = ours.wrap_get_megatron_optimizer(training.get_megatron_optimizer)
    ChainedOptimizer.get_grad_norm = ours.wrap_get_grad_norm(ChainedOptimizer.get_grad_norm)
    ChainedOptimizer.step_with_ready_grads = ours.wrap_step_with_ready_grads(ChainedOptimizer.step_with_ready_grads)
    for c in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer):
        c.sharded_state_dict = ours.wrap_sharded_state_dict(c.sharded_state_dict)
        c.load_state_dict = ours.wrap_load_state_dict(c.load_state_dict)


def add_arguments(parser: Any) -> Any:
    """Kept for callers that add arguments themselves; the seam into Megatron's parser has added ours already."""
    return parser


def validate_args(args: Any) -> None:
    """Check our arguments against Megatron's, and the checkpoint to resume from, before the model is built.

    Args:
        args: Megatron's, after its own validation.

    Raises:
        SystemExit: with one message that names the flag, its value, what is allowed and what to do.
    """
    from megatron.shampoo.mcore import resume, validation

    try:
        config = validation.validate_args(args)
        if config is not None:
            resume.check_resume(args, config)
    except (ValueError, NotImplementedError) as error:
        raise SystemExit(f"pretrain_gpt.py: error: {error}") from error
