"""DistributedOptimizer resumes optimizers that keep their step per parameter, as ``torch.optim.AdamW`` does.

Megatron's code is written for the fused Adam of Transformer Engine or Apex, whose step is in the parameter groups.
Without them it uses ``torch.optim.AdamW`` and cannot load what it saves: the step is looked for on ranks that have
none, asked of checkpoints that keep it elsewhere, and in the end shared, one tensor for all parameters, so that one
optimizer step counts it up once per parameter.

What counts is where the step is, not the class: any optimizer whose state has an entry ``step`` for every parameter is
treated in the same way, also where Transformer Engine is installed.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron.shampoo.mcore.seams.registry import Function, Seam

CLASS = "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer"


def keeps_step_per_parameter(optimizer: Any) -> bool:
    """Whether the inner optimizer's step is in its state; before its first step the fused Adams alone are told apart.

    Args:
        optimizer: what `DistributedOptimizer` has as ``optimizer``.

    Returns:
        False also for the stub of a rank without parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    fused = (distrib_optimizer.Adam,) if distrib_optimizer.HAVE_APEX_OR_TE else ()
    if isinstance(optimizer, (*fused, distrib_optimizer.HybridDeviceOptimizer)):
        return False
    return all("step" in state for state in optimizer.state.values())


def common_step(optimizer: torch.optim.Optimizer) -> int:
    """The step that all parameters of this rank have reached; 0 before the first, or on a rank without any.

    Args:
        optimizer: keeps its step per parameter.

    Returns:
        The step.

    Raises:
        ValueError: parameters have reached different steps; checkpoints have room for one.
    """
    steps = {int(state["step"]) for state in optimizer.state.values()}
    if len(steps) > 1:
        raise ValueError(
            f"parameters have taken different numbers of optimizer steps, {sorted(steps)}: cannot save them"
        )
    return steps.pop() if steps else 0


def state_dict_with_common_step(original: Function) -> Function:
    """Save the one step in the parameter groups, on ranks without any state too.

    Args:
        original: ``DistributedOptimizer.state_dict``.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def state_dict(self: Any) -> dict[str, Any]:
        if not keeps_step_per_parameter(self.optimizer):
            return original(self)
        step = common_step(self.optimizer)
        inner = {key: value for key, value in self.optimizer.state_dict().items() if key != "state"}
        inner["param_groups"] = [
            {key: value for key, value in group.items() if key != "params"} | {"step": step}
            for group in inner["param_groups"]
        ]
        return {"optimizer": inner} | ({"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {})

    return state_dict


def load_own_steps(original: Function) -> Function:
    """Give every parameter a step tensor of its own, with the number that was saved.

    The parameter groups do not keep it: nobody would count it up there.

    Args:
        original: ``DistributedOptimizer.load_state_dict``.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        if self.ddp_config.use_megatron_fsdp or not keeps_step_per_parameter(self.optimizer):
            original(self, state_dict)
            return
        step = max(group["step"] for group in state_dict["optimizer"]["param_groups"])
        original(self, state_dict)
        for group in self.optimizer.param_groups:
            group.pop("step", None)
        for state in self.optimizer.state.values():
            # What torch has put on the right device, where there is one to go by.
            state["step"] = torch.full_like(state.get("step", torch.zeros((), dtype=torch.float32)), step)

    return load_state_dict


def leave_step_alone(original: Function) -> Function:
    """Copy a parameter's tensors from a checkpoint without asking it for the step, which is in the groups.

    Gradients are off: the main parameters of fp32 models are views of model parameters that require them.

    Args:
        original: ``DistributedOptimizer._set_main_param_and_optimizer_states``.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        if keeps_step_per_parameter(self.optimizer):
            tensors = {**tensors, "step": None}  # what is no tensor is not copied
        original(self, model_param, tensors)

    return _set_main_param_and_optimizer_states


def fill_empty_buckets(original: Function) -> Function:
    """Save a bucket of which this rank holds no parameter, only padding or the gap between two parameters.

    Args:
        original: ``DistributedOptimizer.get_parameter_state_dp_reshardable``, whose caller refuses an empty list.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def get_parameter_state_dp_reshardable(self: Any) -> dict[Any, Any]:
        state = original(self)
        rank, size = self.data_parallel_group.rank(), self.data_parallel_group.size()
        for buffer_index, buffer in enumerate(self.buffers):
            for buckets in state[buffer_index].values():
                for bucket, entries in zip(buffer.buckets, buckets, strict=True):
                    if not entries:
                        numel = bucket.grad_data.numel() // size
                        in_checkpoint = rank * numel < bucket.numel_unpadded
                        entries.append(padding_entry(self, numel if in_checkpoint else 0))
        return state

    return get_parameter_state_dp_reshardable


def number_buckets(original: Function) -> Function:
    """Hand the buckets' state over as a dict by bucket number instead of as a list.

    Checkpointing splits the state into what is stored and what is not, and merges it again after the load; lists lose
    what is empty on one side and cannot be merged, dicts can.

    Args:
        original: ``DistributedOptimizer.sharded_param_state_dp_reshardable``.

    Returns:
        The method that takes its place.
    """

    @functools.wraps(original)
    def sharded_param_state_dp_reshardable(self: Any, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        state = original(self, *args, **kwargs)
        for buffer_index in range(len(self.buffers)):
            state[buffer_index] = {dtypes: dict(enumerate(buckets)) for dtypes, buckets in state[buffer_index].items()}
        return state

    return sharded_param_state_dp_reshardable


def padding_entry(distributed: Any, numel: int) -> dict[str, Any]:
    """An entry of a bucket's state that holds no parameter.

    Args:
        distributed: the DistributedOptimizer, which knows the state's keys and data types.
        numel: elements that the checkpoint expects from this rank; with 0 the entry has no tensors.

    Returns:
        The entry, in the form in which Megatron marks padding.
    """
    tensors = {"param": torch.float32} | {
        key: distributed._get_state_key_dtype(key) for key in distributed.optimizer_state_keys
    }
    entry: dict[str, Any] = {"gbuf_local_start": 0, "gbuf_local_end": numel, "padding": True}
    device = torch.cuda.current_device()
    return entry | {key: torch.zeros(numel, dtype=dtype, device=device) for key, dtype in tensors.items() if numel}


class _Inner(torch.optim.Optimizer):
    """The inner optimizer that the probes give to Megatron's functions: two parameters, each with its step."""

    def __init__(self, num_steps: int) -> None:  # not torch's, which imports its compiler
        self.state: Any = {index: {"step": torch.tensor(float(num_steps), device="cpu")} for index in range(2)}
        self.param_groups: list[dict[str, Any]] = [{"params": [torch.zeros(1, device="cpu")] * 2}]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "param_groups": [{"params": [0, 1]}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def _distributed(inner: _Inner) -> Any:
    """The attributes of a `DistributedOptimizer` that the probed functions read."""
    return SimpleNamespace(
        optimizer=inner,
        grad_scaler=None,
        config=SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=False, fp16=False),
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        model_param_group_index_map={"parameter": (0, 0)},
    )


def does_not_save_step() -> bool:
    """Whether `DistributedOptimizer.state_dict` fails without state, or leaves a step that is there out."""
    inner = _Inner(num_steps=3)
    if DistributedOptimizer.state_dict(_distributed(inner))["optimizer"]["param_groups"][0].get("step") != 3:
        return True
    inner.state = {}
    try:
        DistributedOptimizer.state_dict(_distributed(inner))
    except AssertionError:
        return True
    return False


def does_not_load_own_steps() -> bool:
    """Whether `DistributedOptimizer.load_state_dict` gives parameters no step, or one tensor for all of them."""
    inner = _Inner(num_steps=0)
    saved = {"optimizer": {"param_groups": [{"step": 3}]}}
    DistributedOptimizer.load_state_dict(_distributed(inner), saved)
    first, second = inner.state.values()
    return first["step"] is second["step"] or first["step"] != 3


def asks_checkpoint_for_step() -> bool:
    """Whether copying a parameter's tensors fails when the step is not among them."""
    inner = _Inner(num_steps=0)
    inner.state = {inner.param_groups[0]["params"][0]: {"step": torch.tensor(0.0, device="cpu")}}
    tensors = {"param": torch.ones(1, device="cpu")}
    try:
        DistributedOptimizer._set_main_param_and_optimizer_states(_distributed(inner), "parameter", tensors)
    except KeyError:
        return True
    return False


def refuses_empty_buckets() -> bool:
    """Whether the dp_reshardable format still refuses a bucket of which a rank holds no parameter."""
    constants = DistributedOptimizer.sharded_param_state_dp_reshardable.__code__.co_consts
    return "empty bucket encountered" in constants


SEAMS = (
    Seam(
        name="save the step of optimizers that keep it per parameter",
        target=f"{CLASS}.state_dict",
        reason="saving and loading fail on ranks without optimizer state, and on all before the first step",
        probe=does_not_save_step,
        replace=state_dict_with_common_step,
    ),
    Seam(
        name="load one step tensor per parameter",
        target=f"{CLASS}.load_state_dict",
        reason="after a load all parameters share one step tensor, which each of them counts up",
        probe=does_not_load_own_steps,
        replace=load_own_steps,
    ),
    Seam(
        name="load parameter state without the step",
        target=f"{CLASS}._set_main_param_and_optimizer_states",
        reason="fully reshardable checkpoints fail to load with KeyError: 'step'; the other format loads a stale step",
        probe=asks_checkpoint_for_step,
        replace=leave_step_alone,
    ),
    Seam(
        name="save buckets of which a rank holds only padding",
        target=f"{CLASS}.get_parameter_state_dp_reshardable",
        reason="small buckets over many ranks end in AssertionError: empty bucket encountered",
        probe=refuses_empty_buckets,
        replace=fill_empty_buckets,
    ),
    Seam(
        name="load buckets of which a rank holds only padding",
        target=f"{CLASS}.sharded_param_state_dp_reshardable",
        reason="what is not stored of such a bucket cannot be merged with what is: lists of different lengths",
        probe=refuses_empty_buckets,
        replace=number_buckets,
    ),
)
