"""A run may resume with another learning rate or weight decay.

Megatron pairs the parameter groups of a checkpoint with its own by their settings, and counts rates among them: with
another `--lr` no group is found, even where `--override-opt-param-scheduler` says that the new rate is meant.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from megatron.shampoo.mcore.seams.registry import Function, Seam

RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
"""What a schedule scales a group by; not what a group is."""


def agree_on_rates(current: Sequence[dict[str, Any]], saved: list[dict[str, Any]], keep_saved: bool) -> None:
    """Give groups that are the same but for their rates the same rates, in place.

    Groups that only their rates tell apart are paired in their order.

    Args:
        current: parameter groups of this run.
        saved: those of the checkpoint; one of experts may be added, where they have no group of their own.
        keep_saved: whether the checkpoint's rates count (`--use-checkpoint-opt-param-scheduler`), or this run's.
    """
    left = list(saved)
    for group in current:
        partner = next((other for other in left if _identity(other) == _identity(group)), None)
        if partner is None:
            # Without expert parallelism experts are in the groups of the others.
            partner = next((other for other in saved if _identity(other, False) == _identity(group, False)), None)
            if partner is None:
                continue  # Megatron says what it misses
            partner = {**partner, "is_expert_parallel": group.get("is_expert_parallel")}
            saved.append(partner)
        left = [other for other in left if other is not partner]
        source, target = (partner, group) if keep_saved else (group, partner)
        for key in RATES:
            if key in source:
                target[key] = source[key]
            else:
                target.pop(key, None)


def _identity(group: dict[str, Any], with_expert: bool = True) -> tuple[Any, ...]:
    """What a group is; also whether it is one of experts."""
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    ignored = RATES if with_expert else (*RATES, "is_expert_parallel")
    keys = [key for key in param_group_identifier_keys if key not in ignored]
    return tuple(group[key] if key in group else group.get(f"pre_{key}") for key in keys)


def _keeps_saved() -> bool:
    from megatron.training import get_args

    return bool(get_args().use_checkpoint_opt_param_scheduler)


def wrap_load_state_dict(original: Function) -> Function:
    """For the distributed optimizer, which pairs groups in its own method."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        agree_on_rates(self.optimizer.param_groups, state_dict["optimizer"]["param_groups"], _keeps_saved())
        original(self, state_dict)

    return load_state_dict


def wrap_filter_and_reorder(original: Function) -> Function:
    """For the others."""

    @functools.wraps(original)
    def _filter_and_reorder_param_groups(current: list[dict[str, Any]], saved: list[dict[str, Any]]) -> Any:
        agree_on_rates(current, saved, _keeps_saved())
        return original(current, saved)

    return _filter_and_reorder_param_groups


def _rates_are_identity() -> bool:
    from megatron.core.optimizer.optimizer import param_group_identifier_keys

    return "max_lr" in param_group_identifier_keys


_REASON = "groups are paired by their rates, so that another --lr is a KeyError"

SEAMS = (
    Seam(
        name="rates_of_sharded_groups",
        target="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
        reason=_REASON,
        probe=_rates_are_identity,
        replace=wrap_load_state_dict,
    ),
    Seam(
        name="rates_of_groups",
        target="megatron.core.optimizer.optimizer.MegatronOptimizer._filter_and_reorder_param_groups",
        reason=_REASON,
        probe=_rates_are_identity,
        replace=wrap_filter_and_reorder,
    ),
)
