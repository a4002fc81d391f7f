"""Setups for `tests.launch` that watch the optimizer inside a real run, or break it on purpose."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send", "recv",
)  # fmt: skip


def count() -> dict[str, Any]:
    """Count what the optimizer does: collectives inside its steps, blocks, root computations, bytes.

    Returns:
        Filled during the run: `collectives` [[name, ranks of the group, bytes]], one entry for each call inside a step;
        `optimizers` [{...}], the figures of each inner optimizer after its last step.
    """
    from megatron.shampoo.optimizer import Shampoo

    seen: dict[str, Any] = {"collectives": [], "optimizers": {}, "steps": 0}
    inside = [False]
    _wrap_collectives(lambda *call: seen["collectives"].append(list(call)) if inside[0] else None)
    original = Shampoo.step

    @functools.wraps(original)
    def step(self: Shampoo, closure: Any = None) -> Any:
        inside[0] = True
        try:
            return original(self, closure)
        finally:
            inside[0] = False
            name = self.plan.parameters[0].name if self.plan.parameters else ""
            steps = seen["optimizers"].get(name, {"steps": 0})["steps"] + 1
            seen["steps"] += 1
            seen["optimizers"][name] = _figures(self) | {"steps": steps}

    Shampoo.step = step  # type: ignore[method-assign]
    return seen


def _figures(optimizer: Any) -> dict[str, Any]:
    import torch.distributed as dist

    plan, group = optimizer.plan, optimizer.placement.group
    return {
        "group": [] if group is None else dist.get_process_group_ranks(group),
        "expert": bool(optimizer.param_groups and optimizer.param_groups[0]["is_expert_parallel"]),
        "replicated": plan.replicated,
        "balance": max(plan.load()) * plan.num_ranks / (sum(plan.load()) or 1.0),
        "parameters": [parameter.name for parameter in plan.parameters],
        "blocks": len(plan.blocks),
        "owned": sum(len(stack.blocks) for stack in optimizer.schedule.stacks),
        "cut": sum(plan.is_cut(index) for index in range(len(plan.blocks))),
        "roots": optimizer.num_root_computations,
        "planned_bytes": optimizer.planned_bytes,
        "bytes_sent": optimizer.bytes_sent,
        "grid": sorted(
            [plan.name_of(i), list(block.shape), block.ordinal, list(block.sides)]
            for i, block in enumerate(plan.blocks)
        ),
    }


def _wrap_collectives(report: Callable[[str, list[int], int], None]) -> None:
    import torch.distributed as dist

    def wrapped(name: str, original: Callable) -> Callable:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
            ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
            # The second tensor is what is sent by the calls that we use: (output, input, ...).
            tensors = [argument for argument in args if hasattr(argument, "element_size")]
            numel = tensors[-1].numel() * tensors[-1].element_size() if tensors else 0
            report(name, ranks, numel)
            return original(*args, **kwargs)

        return collective

    for name in COLLECTIVES:
        setattr(dist, name, wrapped(name, getattr(dist, name)))


def drop_fragment() -> None:
    """Negative control: the first fragment that a rank sends to an owner arrives as zeros."""
    from megatron.shampoo.collective.exchange import BlockExchange

    original = BlockExchange._packed

    def packed(self: Any, sources: Any) -> Any:
        flat = original(self, sources)
        if self.schedule.sends:
            flat[: self.schedule.sends[0].fragments[0].numel] = 0
        return flat

    BlockExchange._packed = packed  # type: ignore[method-assign]


def number_units_by_rank() -> None:
    """Negative control: layers and experts are numbered from the first that a rank holds, and so are refresh turns."""
    import dataclasses

    from megatron.shampoo import optimizer

    original = optimizer.make_plan

    def make_plan(parameters: Any, *args: Any) -> Any:
        first = {it.family: min(other.unit for other in parameters if other.family == it.family) for it in parameters}
        return original([dataclasses.replace(it, unit=it.unit - first[it.family]) for it in parameters], *args)

    optimizer.make_plan = make_plan


def count_frozen() -> dict[str, Any]:
    """Like `count`; the first layer's MLP and the embedding of positions are frozen."""
    from megatron.core.models.gpt import GPTModel

    original = GPTModel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        layers = [layer.mlp for layer in self.decoder.layers if layer.layer_number == 1]
        positions = [self.embedding.position_embeddings] if self.pre_process else []
        for module in (*layers, *positions):
            module.requires_grad_(False)

    GPTModel.__init__ = init  # type: ignore[method-assign]
    return count()


def spoil_gradient() -> dict[str, Any]:
    """At the third step, one element of one gradient on the last rank is not finite: NaN in a matrix.

    Returns:
        Filled during the run: `unchanged` [bool], for the third step whether every state and parameter of this rank
        was bit for bit the same before and after.
    """
    return _spoil(float("nan"), preconditioned=True)


def spoil_adamw_gradient() -> dict[str, Any]:
    """Likewise, plus infinity in a parameter that takes AdamW."""
    return _spoil(float("inf"), preconditioned=False)


def _spoil(value: float, preconditioned: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    from megatron.shampoo.mcore.build import shampoo_of

    seen: dict[str, Any] = {"calls": 0, "unchanged": []}
    copy, step = DistributedOptimizer._copy_model_grads_to_main_grads, ChainedOptimizer.step

    def spoiled(self: Any) -> None:
        copy(self)
        seen["calls"] += 1
        if seen["calls"] == 3 and dist.get_rank() == dist.get_world_size() - 1:
            inner = self.optimizer
            held = [it for group in inner.param_groups for it in group["params"] if it.grad is not None]
            chosen = next(it for it in held if inner.is_preconditioned(it) is preconditioned)
            chosen.grad.view(-1)[0] = value

    def watched(self: Any) -> Any:
        before = _snapshot(shampoo_of(self))
        result = step(self)
        if seen["calls"] == 3:
            after = _snapshot(shampoo_of(self))
            seen["unchanged"].append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        return result

    DistributedOptimizer._copy_model_grads_to_main_grads = spoiled  # type: ignore[method-assign]
    ChainedOptimizer.step = watched  # type: ignore[method-assign]
    return seen


def scale_one_gradient() -> None:
    """In the fourth step all gradients of all ranks are multiplied by the number in TEST_SCALE."""
    _scale_gradients(lambda calls: calls == 4)


def scale_all_gradients() -> None:
    """In every step all gradients of all ranks are multiplied by the number in TEST_SCALE."""
    _scale_gradients(lambda calls: True)


def _scale_gradients(is_due: Callable[[int], bool]) -> None:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    prepare, calls, scale = ChainedOptimizer.prepare_grads, [0], float(os.environ["TEST_SCALE"])

    def scaled(self: Any) -> bool:
        found_inf = prepare(self)
        calls[0] += 1
        if is_due(calls[0]):
            for parameter in self.get_parameters():
                parameter.grad.mul_(scale)
        return found_inf

    ChainedOptimizer.prepare_grads = scaled  # type: ignore[method-assign]


def flip_one_bit() -> None:
    """After the third step, the lowest bit of one element of one parameter flips on rank 1, in the model's copy."""
    import torch
    import torch.distributed as dist
    from megatron.training import training

    original, calls = training.train_step, [0]

    @functools.wraps(original)
    def train_step(forward: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(forward, data, model, *args, **kwargs)
        calls[0] += 1
        if calls[0] == 3 and dist.get_rank() == 1:
            parameter = dict(model[0].named_parameters())["module.decoder.final_layernorm.weight"]
            with torch.no_grad():
                parameter.view(torch.int32).view(-1)[5] ^= 1
        return result

    training.train_step = train_step


def count_replica_checks() -> dict[str, Any]:
    """Watch `--shampoo-check-replicas`.

    Returns:
        Filled during the run: `compared` [[size of the group, tensors]], one entry for each comparison.
    """
    from megatron.shampoo.mcore import replicas

    seen: dict[str, Any] = {"compared": []}
    original = replicas.drifted

    def drifted(tensors: Any, group: Any) -> Any:
        seen["compared"].append([group.size(), len(tensors)])
        return original(tensors, group)

    replicas.drifted = drifted
    return seen


def with_transformer_engine() -> None:
    """As if Transformer Engine's optimizers were installed: Megatron then expects the step in the parameter groups."""
    _with_fused_adam("USING_TE_OPTIMIZER")


def with_apex() -> None:
    """As if Apex's optimizers were installed."""
    _with_fused_adam("USING_APEX_OPTIMIZER")


def _with_fused_adam(switch: str) -> None:
    """A stand-in has the constructor of the fused Adams, which is all that is used of them; ours takes its place."""
    import torch
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    class FusedAdam(torch.optim.Optimizer):
        def __init__(
            self,
            params: Any,
            lr: float,
            weight_decay: float,
            betas: Any,
            eps: float,
            capturable: bool,
            adam_w_mode: bool,
        ) -> None:
            defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            super().__init__(params, defaults)

    optimizer.USING_PYTORCH_OPTIMIZER = False
    optimizer.Adam = FusedAdam  # type: ignore[misc]
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.Adam = FusedAdam  # type: ignore[misc,assignment]
    setattr(distrib_optimizer, switch, True)


def die_in_exchange() -> None:
    """Rank 1 is killed in the exchange of the third step, before it has sent anything."""
    _in_exchange(lambda: os.kill(os.getpid(), signal.SIGKILL))


def freeze_in_exchange() -> None:
    """Rank 1 stops for ever in the exchange of the third step."""
    _in_exchange(lambda: time.sleep(3600))


def _in_exchange(action: Callable[[], Any]) -> None:
    import torch.distributed as dist

    from megatron.shampoo.collective.exchange import BlockExchange

    original, calls = BlockExchange._all_to_all, [0]

    def all_to_all(self: Any, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5 and dist.get_rank() == 1:  # two in a step
            action()
        return original(self, *args)

    BlockExchange._all_to_all = all_to_all  # type: ignore[method-assign]


def hang_in_solver() -> None:
    """Rank 1 hangs in the QR of the third step, where Python cannot be reached."""
    import torch
    import torch.distributed as dist

    from megatron.shampoo.optimizer import Shampoo

    original, step, calls = torch.linalg.qr, Shampoo.step, [0]

    @functools.wraps(step)
    def counted(self: Shampoo, closure: Any = None) -> Any:
        calls[0] += 1
        return step(self, closure)

    def qr(*args: Any, **kwargs: Any) -> Any:
        if calls[0] == 3 and dist.get_rank() == 1:
            ctypes.CDLL(None).sleep(3600)  # a call into C that lets other threads run, as LAPACK's do
        return original(*args, **kwargs)

    Shampoo.step = counted  # type: ignore[method-assign]
    torch.linalg.qr = qr


def disagree() -> None:
    """Rank 1 is started with what TEST_ARGUMENTS holds in addition."""
    if os.environ["RANK"] == "1":
        sys.argv += os.environ["TEST_ARGUMENTS"].split()


def _snapshot(optimizers: list[Any]) -> list[Any]:
    tensors = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [parameter.detach().clone()]
                tensors += [value.clone() for value in optimizer.state[parameter].values()]
        tensors += [tensor.clone() for state in optimizer.states for tensor in state.state_dict().values()]
    return tensors


def fail_solver() -> None:
    """Every function that a solver needs raises, or gives NaN where it cannot raise on a CPU."""
    _break_solvers(lambda: True)


def fail_solver_for_a_while() -> None:
    """Likewise in the first eight steps of every optimizer."""
    from megatron.shampoo.optimizer import Shampoo

    original, steps = Shampoo.step, [0]

    @functools.wraps(original)
    def step(self: Shampoo, closure: Any = None) -> Any:
        steps[0] += 1
        return original(self, closure)

    Shampoo.step = step  # type: ignore[method-assign]
    _break_solvers(lambda: steps[0] <= 8)


def _break_solvers(is_broken: Callable[[], bool]) -> None:
    import torch

    power = torch.linalg.matrix_power

    def raising(original: Callable) -> Callable:
        def solver(*args: Any, **kwargs: Any) -> Any:
            if is_broken():
                raise torch.linalg.LinAlgError("planted failure")
            return original(*args, **kwargs)

        return solver

    for name in ("eigh", "qr"):
        setattr(torch.linalg, name, raising(getattr(torch.linalg, name)))
    torch.linalg.matrix_power = lambda matrix, exponent: power(matrix, exponent) * (torch.nan if is_broken() else 1)
