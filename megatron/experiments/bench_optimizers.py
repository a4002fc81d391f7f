"""The optimizers of the benchmark, made for one process: torch's, Megatron's from emerging-optimizers, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.experiments.bench_names import BLOCK_SIZE, METHODS, MUON_ON_CPU, REFRESH_INTERVAL
from megatron.shampoo import Shampoo, ShampooConfig

LR = 1e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1

STRIDES = {"megatron-soap": 10}
"""Rounds to one step of an optimizer, where it is not 1. Megatron's SOAP decomposes every whole matrix in every step:
its steps are all alike, and each takes many times as long as any other's."""


def build(name: str, parameters: list[Tensor], *, staggered: bool = True, age: int = 0) -> torch.optim.Optimizer:
    """Make an optimizer.

    Args:
        name: one of `OPTIMIZERS`.
        parameters: matrices.
        staggered: of ours: blocks refresh by turns; False lets all refresh in the same steps.
        age: of ours: gradients that blocks count from. One interval old, they refresh on their turns alone.

    Returns:
        The optimizer. Megatron's have the settings that Megatron's flags default to.

    Raises:
        ImportError: Megatron's, without emerging-optimizers.
    """
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=WEIGHT_DECAY, foreach=True)
    if name == "adam":
        return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=False, foreach=True)
    if name == "megatron-soap":
        from emerging_optimizers.soap import SOAP

        # Source: OptimizerConfig of megatron-core 0.19 (soap_use_kl_shampoo).
        return _optimizer(SOAP(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, use_kl_shampoo=True))
    if name == "megatron-muon":
        from emerging_optimizers.orthogonalized_optimizers import Muon

        # Source: as above; Muon's own defaults are the same. For the precision see `bench_names.MUON_ON_CPU`.
        on_cpu = parameters[0].device.type == "cpu"
        precision = MUON_ON_CPU if on_cpu else "medium"
        made = Muon(parameters, lr=LR, momentum=0.95, weight_decay=WEIGHT_DECAY, fp32_matmul_prec=precision)
        return _optimizer(made)
    assert name in METHODS, name
    config = ShampooConfig(method=name, block_size=BLOCK_SIZE, refresh_interval=REFRESH_INTERVAL)
    ours = Shampoo(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, config=config)
    for state in ours.states:
        state.num_updates += age
        if not staggered:
            state.turn.zero_()
    return ours


def _optimizer(made: Any) -> torch.optim.Optimizer:
    """The package has no types."""
    assert isinstance(made, torch.optim.Optimizer)
    return made


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state dict.

    Args:
        state: a tensor, or mappings and sequences of such.

    Returns:
        Their bytes.
    """
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(state_bytes(value) for value in state.values())
    if isinstance(state, (list, tuple)):
        return sum(state_bytes(value) for value in state)
    return 0
