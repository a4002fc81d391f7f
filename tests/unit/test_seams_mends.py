"""The mends of Megatron's faults, function by function, and the probes that say whether they are needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from megatron.shampoo.mcore.seams import bucket_padding, first_log_line, layer_wise, step_per_parameter
from megatron.shampoo.mcore.seams.registry import Seam, check_version
from megatron.shampoo.mcore.seams.step_per_parameter import (
    common_step,
    fill_empty_buckets,
    keeps_step_per_parameter,
    leave_step_alone,
    load_own_steps,
    number_buckets,
    state_dict_with_common_step,
)

MENDS = (*bucket_padding.SEAMS, *step_per_parameter.SEAMS, *first_log_line.SEAMS, *layer_wise.SEAMS)


class Plain(torch.optim.Optimizer):
    """An optimizer of another package: AdamW's state keys, not its class."""

    def __init__(self, params: list[torch.Tensor], key: str = "step") -> None:
        super().__init__(params, {"lr": 1.0})
        self.key = key

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault(self.key, torch.tensor(0.0)).add_(1)


def stepped(optimizer_class: type[Any], num_steps: int, num_params: int = 2, **options: Any) -> Any:
    """An optimizer over some one-element parameters that has taken some steps."""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(num_params)]
    optimizer = optimizer_class(params or [{"params": []}], **options)
    for _ in range(num_steps):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    return optimizer


def distributed(optimizer: Any) -> Any:
    """As much of a `DistributedOptimizer` as the functions read."""
    return SimpleNamespace(optimizer=optimizer, grad_scaler=None, ddp_config=SimpleNamespace(use_megatron_fsdp=False))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Plain])
def test_optimizers_are_told_by_their_state(optimizer_class: type[Any]) -> None:
    assert keeps_step_per_parameter(stepped(optimizer_class, 0))
    assert keeps_step_per_parameter(stepped(optimizer_class, 1))
    assert not keeps_step_per_parameter(stepped(Plain, 1, key="exp_avg"))
    assert not keeps_step_per_parameter(None)


def test_fused_optimizers_are_left_to_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "Adam", Plain)
    assert not keeps_step_per_parameter(stepped(Plain, 0))
    assert keeps_step_per_parameter(stepped(torch.optim.AdamW, 0))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, Plain])
@pytest.mark.parametrize(("num_steps", "num_params"), [(3, 2), (0, 2), (0, 0)])
def test_step_is_saved_in_the_groups(optimizer_class: type[Any], num_steps: int, num_params: int) -> None:
    state_dict = state_dict_with_common_step(lambda self: pytest.fail("Megatron's own was called"))
    saved = state_dict(distributed(stepped(optimizer_class, num_steps, num_params)))
    (group,) = saved["optimizer"]["param_groups"]
    assert group["step"] == num_steps and "params" not in group and "lr" in group
    assert set(saved["optimizer"]) == {"param_groups"}


def test_scaler_is_saved_when_there_is_one() -> None:
    state_dict = state_dict_with_common_step(lambda self: None)
    owner = distributed(stepped(Plain, 1))
    assert "grad_scaler" not in state_dict(owner)
    owner.grad_scaler = SimpleNamespace(state_dict=lambda: {"scale": 2.0})
    assert state_dict(owner)["grad_scaler"] == {"scale": 2.0}


def test_steps_that_differ_cannot_be_saved() -> None:
    optimizer = stepped(Plain, 2)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] += 1
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        common_step(optimizer)


def test_every_parameter_gets_the_saved_step_for_itself() -> None:
    optimizer = stepped(torch.optim.AdamW, 1)

    def original(self: Any, state_dict: Any) -> None:
        shared = torch.tensor(7.0)
        self.optimizer.param_groups[0]["step"] = 7
        for state in self.optimizer.state.values():
            state["step"] = shared

    load_own_steps(original)(distributed(optimizer), {"optimizer": {"param_groups": [{"step": 7}]}})
    first, second = (state["step"] for state in optimizer.state.values())
    assert first == second == 7 and first.data_ptr() != second.data_ptr()
    assert "step" not in optimizer.param_groups[0]


def test_tensors_are_copied_without_gradients_and_without_the_step() -> None:
    seen = {}

    def original(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        seen.update(tensors, gradients=torch.is_grad_enabled())

    stale = {"param": 1, "step": torch.tensor(9.0)}
    leave_step_alone(original)(distributed(stepped(Plain, 1)), "parameter", stale)
    assert seen == {"param": 1, "step": None, "gradients": False}
    leave_step_alone(original)(distributed(stepped(Plain, 1, key="exp_avg")), "parameter", stale)
    assert seen["step"] is stale["step"]


@pytest.mark.parametrize(("rank", "numel"), [(0, 64), (1, 0)])
def test_bucket_without_parameters_gets_an_entry(monkeypatch: pytest.MonkeyPatch, rank: int, numel: int) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    owner = SimpleNamespace(
        buffers=[SimpleNamespace(buckets=[SimpleNamespace(grad_data=torch.zeros(128), numel_unpadded=60)] * 2)],
        data_parallel_group=SimpleNamespace(rank=lambda: rank, size=lambda: 2),
        optimizer_state_keys=("exp_avg",),
        _get_state_key_dtype=lambda key: torch.float32,
    )
    held: list[dict[str, Any]] = [{"param": "a parameter"}]
    state = fill_empty_buckets(lambda self: {0: {"dtype": [[*held], []]}})(owner)
    filled, (entry,) = state[0]["dtype"]
    assert filled == held and entry["padding"] and entry["gbuf_local_end"] == numel
    assert {key for key, value in entry.items() if torch.is_tensor(value)} == ({"param", "exp_avg"} if numel else set())
    assert number_buckets(lambda self: state)(owner)[0]["dtype"] == {0: filled, 1: [entry]}


def test_ranges_move_up_by_the_padding_of_earlier_buckets() -> None:
    ranges = {"a": (0, 3, 0), "b": (64, 70, 0), "c": (128, 130, 1), "d": (256, 257, 2)}
    buckets = [(0, 70), (128, 2), (256, 1)]
    assert bucket_padding.unpadded_ranges(ranges, buckets) == {
        "a": (0, 3, 0), "b": (64, 70, 0), "c": (70, 72, 1), "d": (72, 73, 2),
    }  # fmt: skip


def test_buffers_show_their_padded_ranges_again_after_an_error() -> None:
    ranges = {"a": (0, 3, 0), "b": (128, 129, 1)}
    buckets = [SimpleNamespace(offset=0, numel_unpadded=3), SimpleNamespace(offset=128, numel_unpadded=1)]
    buffer = SimpleNamespace(param_index_map=ranges, buckets=buckets)
    with pytest.raises(KeyError), bucket_padding.unpadded([buffer]):
        assert buffer.param_index_map == {"a": (0, 3, 0), "b": (3, 4, 1)}
        raise KeyError
    assert buffer.param_index_map is ranges


@pytest.mark.parametrize("seam", MENDS, ids=lambda seam: seam.name)
def test_installed_megatron_needs_every_mend(seam: Seam) -> None:
    assert seam.needed()


@pytest.mark.parametrize("seam", step_per_parameter.SEAMS[:3], ids=lambda seam: seam.name)
def test_probe_sees_that_the_fault_is_mended(seam: Seam, monkeypatch: pytest.MonkeyPatch) -> None:
    method = seam.target.rsplit(".", 1)[1]
    mended = seam.replace(getattr(distrib_optimizer.DistributedOptimizer, method))
    monkeypatch.setattr(distrib_optimizer.DistributedOptimizer, method, mended)
    assert not seam.needed()


def test_names_are_unique_and_versions_checked() -> None:
    assert len({seam.name for seam in MENDS}) == len(MENDS)
    with pytest.raises(NotImplementedError):
        check_version(MENDS, "0.20.0")
