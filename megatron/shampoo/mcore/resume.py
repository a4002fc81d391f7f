"""Refuse to resume where the checkpoint's factors cannot be used, before the model is built."""

from __future__ import annotations

from typing import Any

from megatron.shampoo.config import ShampooConfig, flag_of
from megatron.shampoo.mcore.arguments import config_of

_LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "data_parallel_size",
    "use_distributed_optimizer",
    "num_distributed_optimizer_instances",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "ddp_num_buckets",
    "ddp_bucket_size",
    "num_layers",
)
"""Megatron's arguments that decide which blocks a rank owns (overlap and buckets move the shards' borders)."""

_GRID = ("block_size", "tp_alignment")
"""Our settings that decide the blocks."""


def check_resume(args: Any, config: ShampooConfig) -> None:
    """Compare the arguments stored in the checkpoint to load with those of this run.

    Args:
        args: Megatron's, validated.
        config: ours.

    Raises:
        ValueError: the checkpoint holds another optimizer's state, or other blocks.
        NotImplementedError: it was saved on another layout.
    """
    if args.load is None or args.finetune or args.no_load_optim:
        return
    saved = _saved_arguments(args)
    if saved is None or getattr(saved, "no_save_optim", None):
        return
    word = getattr(saved, "second_order_optimizer", None) or saved.optimizer
    if word != args.second_order_optimizer:
        raise ValueError(
            f"--load {args.load}: was saved with --optimizer {word}, which has no factors for --optimizer "
            f"{args.second_order_optimizer}; load the weights alone with --no-load-optim or --finetune"
        )
    differing = [name for name in _LAYOUT if getattr(saved, name, None) != getattr(args, name, None)]
    if differing:
        described = ", ".join(
            f"{name} {getattr(saved, name, None)} -> {getattr(args, name, None)}" for name in differing
        )
        raise NotImplementedError(
            f"--load {args.load}: --optimizer {args.second_order_optimizer} resumes on the layout that saved the "
            f"checkpoint; here differ {described}. Resume on the saved layout, or load the weights alone with "
            "--no-load-optim"
        )
    then, now = config_of(saved), config
    for name in _GRID:
        if getattr(then, name) != getattr(now, name):
            raise ValueError(
                f"{flag_of(name)} {getattr(now, name)}: the checkpoint was saved with {getattr(then, name)}, and its "
                "factors fit those blocks alone; use that value, or load the weights alone with --no-load-optim"
            )


def _saved_arguments(args: Any) -> Any:
    """Arguments stored in the checkpoint that Megatron would load, or None where there is none."""
    from megatron.training.checkpointing import _load_base_checkpoint, checkpoint_exists

    if not checkpoint_exists(args.load):
        return None  # Megatron starts from random weights, or stops with --exit-on-missing-checkpoint
    state_dict = _load_base_checkpoint(args.load, args, rank0=True)[0]
    return None if state_dict is None else state_dict.get("args")
