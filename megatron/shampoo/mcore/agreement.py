"""Ranks that were started with different settings are refused at the start, by name, where they would hang later."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from megatron.shampoo.config import ShampooConfig, flag_of
from megatron.shampoo.mcore.arguments import config_of, is_ours

_COMPARED = (
    *("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "seed", "bf16", "fp16"),
    *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
    *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size", "ddp_num_buckets"),
    *("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32", "check_for_nan_in_loss_and_grad"),
)
"""Megatron's arguments that decide what the optimizer's ranks send each other, or make them train different models.

Not all of its arguments: folders, ports and numbers of worker processes may well be a node's own."""


def check_same_settings(args: Any) -> None:
    """Compare what ranks have to agree on, with any optimizer: one rank may have been started with another one.

    Args:
        args: Megatron's, validated.

    Raises:
        ValueError: on every rank, with the flags that differ, their values and ranks.

    Collective: every rank.
    """
    if dist.get_world_size() == 1:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _settings(args))
    flags = dict.fromkeys(flag for settings in everyone for flag in settings)
    differing = []
    for flag in flags:
        ranks_of: dict[str, list[int]] = {}
        for rank, settings in enumerate(everyone):
            ranks_of.setdefault(settings.get(flag, "not used"), []).append(rank)
        if len(ranks_of) > 1:
            differing.append(
                f"{flag} is " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            )
    if differing:
        raise ValueError(f"ranks were started with different settings: {'; '.join(differing)}. Give all ranks the same")


def _settings(args: Any) -> dict[str, str]:
    """Values by flag, as text."""
    values = {"--optimizer": args.second_order_optimizer or args.optimizer}
    values |= {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in _COMPARED}
    if is_ours(args):
        config = config_of(args)
        values |= {flag_of(field.name): getattr(config, field.name) for field in dataclasses.fields(ShampooConfig)}
    return {flag: str(value) for flag, value in values.items()}


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
