"""Refuse to resume where the checkpoint's factors cannot be used, before the model is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megatron.shampoo.config import ShampooConfig, Side, Solver, flag_of
from megatron.shampoo.mcore.arguments import config_of
from megatron.shampoo.methods import Application, Recipe, recipe_of, root_of

_MODEL = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "swiglu",
    ),
    *("untie_embeddings_and_output_weights", "multi_latent_attention", "mtp_num_layers"),
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
)
"""Megatron's arguments that decide which matrices there are."""

_KEPT = ("use_distributed_optimizer", "bf16", "fp16")
"""Megatron's arguments that decide in which form it saves main parameters and moments."""

_GRID = ("block_size", "tp_alignment", "refresh_interval", "max_dim", "qkv")
"""Our settings that decide the blocks and their turns."""

_STATE = (
    *("method", "side", "root", "grafting", "momentum_placement", "factor_dtype", "root_dtype", "factor_beta"),
    "start_step",
)
"""Our settings that decide what the state of a block and of its moments means."""

_SCHEDULE = (
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_decay_style", "lr_decay_iters"),
    *("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init"),
    *("start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
)
"""Megatron's arguments of which it wants to know whose count, where they differ."""


def check_resume(args: Any, config: ShampooConfig) -> None:
    """Compare the arguments stored in the checkpoint to load with those of this run.

    An alignment of blocks that the user has left open becomes the checkpoint's.

    Args:
        args: Megatron's, validated; `shampoo_tp_alignment` may be set.
        config: ours.

    Raises:
        ValueError: the checkpoint holds another optimizer's state, or other blocks.
        NotImplementedError: it was saved in a form that cannot be read here.
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
    _check_model(saved, args)
    _adopt_alignment(saved, args, config)
    _check_grid(saved, args, config_of(args))
    _check_schedule(saved, args)


def _check_schedule(saved: Any, args: Any) -> None:
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
        return
    for name in _SCHEDULE:
        then, now = (getattr(it, name, None) for it in (saved, args))
        if name == "lr_decay_iters":  # Megatron fills it in later
            then, now = then or saved.train_iters, now or args.train_iters
        if then != now:
            raise ValueError(
                f"--{name.replace('_', '-')} {now}: the checkpoint was saved with {then}; add "
                "--override-opt-param-scheduler to go on with the new value, or "
                "--use-checkpoint-opt-param-scheduler to keep the checkpoint's"
            )


def _check_model(saved: Any, args: Any) -> None:
    def differing(names: Sequence[str]) -> str:
        pairs = [(name, getattr(saved, name, None), getattr(args, name, None)) for name in names]
        return ", ".join(f"{name} {then} -> {now}" for name, then, now in pairs if str(then) != str(now))

    if described := differing(_MODEL):
        raise ValueError(f"--load {args.load}: the checkpoint is of another model: {described}")
    if _num_query_groups(saved) != _num_query_groups(args):
        raise ValueError(
            f"--num-query-groups {_num_query_groups(args)}: the checkpoint is of another model, with "
            f"{_num_query_groups(saved)}"
        )
    if not args.use_distributed_optimizer and (args.expert_model_parallel_size > 1) != (
        saved.expert_model_parallel_size > 1
    ):
        raise NotImplementedError(
            f"--expert-model-parallel-size {saved.expert_model_parallel_size} -> {args.expert_model_parallel_size}: "
            "experts get an optimizer of their own; use --use-distributed-optimizer in both runs, or load the weights "
            "alone with --no-load-optim"
        )
    if described := differing(_KEPT):
        raise NotImplementedError(
            f"--load {args.load}: was saved in another form: {described}; keep these, or load the weights alone with "
            "--no-load-optim"
        )
    if args.use_distributed_optimizer and not getattr(saved, "dist_ckpt_optim_fully_reshardable", False):
        raise NotImplementedError(
            f"--load {args.load}: was saved by an older version, on whose layout its state depends; load the weights "
            "alone with --no-load-optim"
        )


def _num_query_groups(args: Any) -> int:
    return args.num_query_groups if args.group_query_attention else args.num_attention_heads


def _adopt_alignment(saved: Any, args: Any, config: ShampooConfig) -> None:
    """Take the blocks as they were saved, unless the user says how they are cut."""
    if config.tp_alignment is not None:
        return
    alignment, size = _alignment(config_of(saved), saved), args.tensor_model_parallel_size
    if alignment % size:
        raise ValueError(
            f"--tensor-model-parallel-size {size}: the checkpoint's blocks are cut for --shampoo-tp-alignment "
            f"{alignment}, and {size} ranks would cut through them; use a size that divides {alignment}, or load the "
            "weights alone with --no-load-optim. A run that starts with a multiple of all sizes to come can resume on "
            "each of them"
        )
    args.shampoo_tp_alignment = alignment


def _alignment(config: ShampooConfig, args: Any) -> int:
    return config.tp_alignment or args.tensor_model_parallel_size


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
        "tp_alignment": _alignment(config, args),
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
