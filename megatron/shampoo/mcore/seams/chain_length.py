"""A fully reshardable checkpoint moves between runs with and without expert parallelism.

With expert parallelism Megatron has two optimizers in its chain, one of them for experts, and stores the common part of
their states as entries 0 and 1; without it there is one, whose entries stand by themselves. The tensors have the same
keys either way, but loading insists on the number of entries.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from megatron.shampoo.mcore.seams.registry import Function, Seam

COMMON = ("optimizer", "grad_scaler", "param_state_sharding_type")
"""Entries of a distributed optimizer's state that are the same on all ranks, and not tensors of parameters."""


def regrouped(state: dict[Any, Any], num_optimizers: int) -> dict[Any, Any]:
    """Give every optimizer of the chain its entries, whatever the length of the chain that saved them.

    Args:
        state: what the checkpoint had in common, in the form of the chain that saved it, and what this chain has asked
            for, in the form of this one.
        num_optimizers: length of this chain.

    Returns:
        For one optimizer its entries, for more a dict of them by number.
    """
    numbered = {key: entries for key, entries in state.items() if isinstance(key, int)}
    alone = {key: entries for key, entries in state.items() if not isinstance(key, int)}
    if num_optimizers == 1 and numbered:
        common = _joined([entries for _, entries in sorted(numbered.items())])
        return {**common, **alone}
    common = {key: alone[key] for key in COMMON if key in alone}
    if num_optimizers > 1 and common:
        return {key: {**copy.deepcopy(common), **entries} for key, entries in numbered.items()}
    return state


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The common entries of several optimizers as those of one: the first's, with the parameter groups of all."""
    common = {key: parts[0][key] for key in COMMON if key in parts[0]}
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    return {**common, "optimizer": {**common["optimizer"], "param_groups": groups}}


def wrap_load_state_dict(original: Function) -> Function:
    """Regroup before Megatron hands the entries out."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[Any, Any]) -> None:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        if all(isinstance(child, DistributedOptimizer) for child in self.chained_optimizers):
            state_dict = regrouped(state_dict, len(self.chained_optimizers))
        original(self, state_dict)

    return load_state_dict


SEAMS = (
    Seam(
        name="chain_length",
        target="megatron.core.optimizer.optimizer.ChainedOptimizer.load_state_dict",
        reason="a checkpoint saved with expert parallelism cannot be loaded without it, and the other way round",
        probe=lambda: True,
        replace=wrap_load_state_dict,
    ),
)
