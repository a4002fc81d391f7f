"""Refuse to resume where the checkpoint's factors cannot be used, before the model is built."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.shampoo.config import ShampooConfig, Side, Solver, flag_of
from megatron.shampoo.mcore.arguments import config_of
from megatron.shampoo.methods import Application, Recipe, recipe_of, root_of

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
    "ddp_pad_buckets_for_high_nccl_busbw",
    "bf16",
    "fp16",
    "grad_reduce_in_bf16",
    "accumulate_allreduce_grads_in_fp32",
    "main_grads_dtype",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "padded_vocab_size",
    "num_experts",
    "num_layers_per_virtual_pipeline_stage",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Megatron's arguments that decide which blocks a rank owns: precision, overlap and buckets move shard borders."""

_GRID = ("block_size", "tp_alignment", "ownership", "refresh_interval", "max_dim", "qkv")
"""Our settings that decide the blocks, their owners and their turns."""

_STATE = (
    *("method", "side", "root", "grafting", "momentum_placement", "factor_dtype", "root_dtype", "factor_beta"),
    "start_step",
)
"""Our settings that decide what the state of a block and of its moments means."""

_GROUPS = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")
"""Arguments by which Megatron 0.19 finds the parameter groups of a checkpoint again."""


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
    if saved is None:
        return
    if getattr(saved, "no_save_optim", None):
        raise ValueError(f"--load {args.load}: was saved with --no-save-optim; load the weights with --no-load-optim")
    word = getattr(saved, "second_order_optimizer", None) or saved.optimizer
    if word != args.second_order_optimizer:
        raise ValueError(
            f"--load {args.load}: was saved with --optimizer {word}, which has no factors for --optimizer "
            f"{args.second_order_optimizer}; load the weights alone with --no-load-optim or --finetune"
        )
    _check_layout(saved, args)
    _check_grid(saved, args, config)
    for name in _GROUPS:
        if getattr(saved, name, None) != getattr(args, name, None):
            raise NotImplementedError(
                f"--{name.replace('_', '-')} {getattr(args, name, None)}: the checkpoint was saved with "
                f"{getattr(saved, name, None)}, and Megatron 0.19 finds the optimizer's parameter groups again by it; "
                "keep it, or load the weights alone with --no-load-optim"
            )


def _check_layout(saved: Any, args: Any) -> None:
    differing = [name for name in _LAYOUT if str(getattr(saved, name, None)) != str(getattr(args, name, None))]
    if differing:
        described = ", ".join(
            f"{name} {getattr(saved, name, None)} -> {getattr(args, name, None)}" for name in differing
        )
        raise NotImplementedError(
            f"--load {args.load}: --optimizer {args.second_order_optimizer} resumes on the layout that saved the "
            f"checkpoint; here differ {described}. Resume on the saved layout, or load the weights alone with "
            "--no-load-optim"
        )


def _check_grid(saved: Any, args: Any, config: ShampooConfig) -> None:
    then, now = _resolved(config_of(saved), saved), _resolved(config, args)
    for name in (*_GRID, *_STATE):
        if then[name] != now[name]:
            raise ValueError(
                f"{flag_of(name)} {now[name]}: the checkpoint was saved with {then[name]}, and its state fits "
                "that value alone; use it, or load the weights alone with --no-load-optim"
            )
    before, after = _with_former_solver(recipe_of(config_of(saved)), config_of(saved)), recipe_of(config)
    if before.keeps_basis != after.keeps_basis:
        raise ValueError(
            f"--shampoo-solver {after.solver}: the checkpoint was saved with {before.solver}, and only one of the two "
            "keeps an eigenbasis; use that solver, or load the weights alone with --no-load-optim"
        )


def _with_former_solver(recipe: Recipe, saved: ShampooConfig) -> Recipe:
    """A saved recipe; checkpoints that say `auto` are older than its change to `qr` for roots too."""
    if saved.solver is Solver.AUTO and recipe.application is Application.ROOT:
        return dataclasses.replace(recipe, solver=Solver.EIGH)
    return recipe


def _resolved(config: ShampooConfig, args: Any) -> dict[str, Any]:
    """Settings of the grid and the state, with what stands for none."""
    values = {name: getattr(config, name) for name in (*_GRID, *_STATE)}
    recipe = recipe_of(config)
    return values | {
        "tp_alignment": config.tp_alignment or args.tensor_model_parallel_size,
        "side": recipe.side,
        "grafting": recipe.grafting,
        # Given or by default; where some matrices have two factors and some have one the defaults are two.
        "root": root_of((True, recipe.side is Side.BOTH), config) if config.max_dim is None else config.root,
    }


def _saved_arguments(args: Any) -> Any:
    """Arguments stored in the checkpoint that Megatron would load, or None where there is none."""
    from megatron.training.checkpointing import _load_base_checkpoint, checkpoint_exists

    if not checkpoint_exists(args.load):
        return None  # Megatron starts from random weights, or stops with --exit-on-missing-checkpoint
    state_dict = _load_base_checkpoint(args.load, args, rank0=True)[0]
    return None if state_dict is None else state_dict.get("args")
