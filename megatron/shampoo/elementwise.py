"""The elementwise part of a step, on whole parameters or shards: AdamW for what is not preconditioned, weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.shampoo.config import WeightDecay

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
"""State of every parameter, under the names that `torch.optim.AdamW` uses: Megatron's checkpoints know them."""


def adamw_(
    group: dict[str, Any], parameters: list[Tensor], states: list[dict[str, Tensor]], mode: WeightDecay, peak: float
) -> None:
    """One AdamW step in place (Adam with an L2 penalty in that mode).

    Args:
        group: learning rate, betas, eps, weight decay.
        parameters: with gradients.
        states: their states, with the entries `ADAM_STATE`.
        mode: what the weight decay means.
        peak: the learning rate that the schedule scales, for `independent`; positive.
    """
    if not parameters:
        return
    step, first, second = ([state[key] for state in states] for key in ADAM_STATE)
    update = adam if mode is WeightDecay.L2 else adamw
    decay = group["weight_decay"]
    if mode is WeightDecay.INDEPENDENT:
        decay = decay / peak
    update(
        parameters,
        [parameter.grad for parameter in parameters],  # type: ignore[misc]
        first,
        second,
        [],
        step,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=decay,
        eps=group["eps"],
        maximize=False,
    )


def decay_(group: dict[str, Any], parameters: Sequence[Tensor], mode: WeightDecay, peak: float) -> None:
    """Shrink parameters in place by their weight decay; nothing in the L2 mode, where it is part of the gradient.

    Args:
        group: learning rate and weight decay.
        parameters: that are updated in this step.
        mode: `decoupled` 1 - lr wd, or `independent` 1 - wd lr / peak.
        peak: the learning rate that the schedule scales; positive.
    """
    if not parameters or group["weight_decay"] == 0 or mode is WeightDecay.L2:
        return
    rate = group["lr"] if mode is WeightDecay.DECOUPLED else group["lr"] / peak
    torch._foreach_mul_(list(parameters), 1.0 - rate * group["weight_decay"])


def penalised(
    group: dict[str, Any], gradients: list[Tensor], parameters: list[Tensor], mode: WeightDecay
) -> list[Tensor]:
    """Gradients with the L2 penalty's, g + wd w, in that mode; else as they are."""
    if mode is not WeightDecay.L2 or group["weight_decay"] == 0:
        return gradients
    weights = [parameter.to(gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]
    return list(torch._foreach_add(gradients, weights, alpha=group["weight_decay"]))
