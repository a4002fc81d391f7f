"""Elementwise moments of lists of shards, Nesterov momentum, and the steps whose norms are grafted."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adam import adam

from megatron.shampoo.config import Grafting


def update_second_(gradients: list[Tensor], second: list[Tensor], beta: float, grafting: Grafting) -> None:
    """Second moments in place: v <- b2 v + (1-b2) g^2; for AdaGrad the sum v <- v + g^2.

    Args:
        gradients: g, one tensor for each shard.
        second: v, of the same shapes.
        beta: b2.
        grafting: which optimizer's.

    Source: Kingma and Ba 2014 (arXiv:1412.6980); Duchi et al. 2011 for the sum.
    """
    if grafting is Grafting.ADAGRAD:
        torch._foreach_addcmul_(second, gradients, gradients)
        return
    torch._foreach_mul_(second, beta)
    torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta)


def update_first_(values: list[Tensor], first: list[Tensor], beta: float) -> None:
    """First moments in place: m <- b1 m + (1-b1) x.

    Args:
        values: x, gradients or search directions.
        first: m, of the same shapes.
        beta: b1.
    """
    torch._foreach_lerp_(first, values, 1.0 - beta)


def looked_ahead(values: list[Tensor], first: list[Tensor], beta: float) -> list[Tensor]:
    """Nesterov momentum b1 m + (1-b1) x, with m the moment that holds x already.

    Args:
        values: x.
        first: m.
        beta: b1.

    Returns:
        New tensors. Their weights sum to 1 - b1^(t+1).

    Source: Dozat 2016, Incorporating Nesterov Momentum into Adam.
    """
    return list(torch._foreach_lerp(first, values, 1.0 - beta))


def momentum_weight(beta: float, step: int, nesterov: bool) -> float:
    """Sum 1 - b1^t of the weights in a first moment after t steps, or 1 - b1^(t+1) with Nesterov's look ahead."""
    return 1.0 - beta ** (step + 1 if nesterov else step)


def grafting_steps(
    x: list[Tensor],
    second: list[Tensor],
    weights: tuple[list[float], list[float]],
    eps: float,
) -> list[Tensor]:
    """Steps (x / w1) / (sqrt(v / w2) + eps), before the learning rate.

    Args:
        x: momenta or gradients.
        second: v.
        weights: w1 and w2 of each shard, the sums of the averages' weights; 1 where nothing is corrected.
        eps: added to the denominator.

    Returns:
        One new tensor for each shard.

    Source: Kingma and Ba 2014 (arXiv:1412.6980), algorithm 1.
    """
    denominators = torch._foreach_sqrt(second)
    torch._foreach_div_(denominators, [weight**0.5 for weight in weights[1]])
    torch._foreach_add_(denominators, eps)
    torch._foreach_mul_(denominators, weights[0])
    return list(torch._foreach_div(x, denominators))


def adam_steps_(
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    counts: list[Tensor],
    betas: tuple[float, float],
    eps: float,
) -> list[Tensor]:
    """Update both moments in place and give Adam's steps, before the learning rate, in one pass over memory.

    The same as `update_first_`, `update_second_` and `grafting_steps` with both corrections.

    Args:
        gradients: one tensor for each shard.
        first: m, updated.
        second: v, updated.
        counts: numbers of steps, `()` float32, raised by one.
        betas: decay of both.
        eps: added to the denominator.

    Returns:
        One new tensor for each shard.

    Source: Kingma and Ba 2014 (arXiv:1412.6980), algorithm 1.
    """
    steps = [torch.zeros_like(gradient) for gradient in gradients]
    # Adam's step from zero, with a learning rate that does not turn its sign.
    adam(
        steps,
        gradients,
        first,
        second,
        [],
        counts,
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=-1.0,
        weight_decay=0.0,
        eps=eps,
        maximize=False,
    )
    return steps


def can_fuse(*lists: list[Tensor]) -> bool:
    """Whether `adam_steps_` may be used: on CPU, where each operation of a list is a pass over memory for itself.

    Args:
        lists: all that it reads and writes. Its kernel wants one type, and walks memory in order whatever the strides.
    """
    dtypes = {tensor.dtype for tensors in lists for tensor in tensors}
    return len(dtypes) == 1 and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() for tensors in lists for tensor in tensors
    )
