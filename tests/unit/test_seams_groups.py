"""Parameter groups and chains of a checkpoint that was saved with other rates, or with another number of optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.shampoo.mcore.seams.chain_length import regrouped
from megatron.shampoo.mcore.seams.group_rates import agree_on_rates


def group(decay: float = 1.0, rate: float = 1e-3, expert: bool = False, decoupled: bool = False) -> dict[str, Any]:
    return {
        "wd_mult": decay, "max_lr": rate, "min_lr": rate / 10, "is_expert_parallel": expert,
        "is_decoupled_lr": decoupled, "lr_mult": 1.0, "params": [0],
    }  # fmt: skip


@pytest.mark.parametrize("keep_saved", [False, True])
def test_rates_of_the_same_group_agree(keep_saved: bool) -> None:
    current = [group(1.0, 1e-3), group(0.0, 1e-3), group(1.0, 2e-4, decoupled=True)]
    saved = [group(1.0, 4e-4, decoupled=True), group(0.0, 2e-3), group(1.0, 2e-3)]
    agree_on_rates(current, saved, keep_saved)
    expected = [2e-3, 2e-3, 4e-4] if keep_saved else [1e-3, 1e-3, 2e-4]
    assert [it["max_lr"] for it in current] == expected
    assert [it["min_lr"] for it in current] == [rate / 10 for rate in expected]
    assert saved[::-1] == [current[0], current[1], current[2]]


def test_groups_that_only_rates_tell_apart_keep_their_order() -> None:
    current, saved = [group(rate=1.0), group(rate=2.0)], [group(rate=3.0), group(rate=4.0)]
    agree_on_rates(current, saved, keep_saved=True)
    assert [it["max_lr"] for it in current] == [3.0, 4.0]


def test_a_rate_that_one_side_lacks_is_lacking() -> None:
    current, saved = [group()], [group()]
    del current[0]["min_lr"]
    agree_on_rates(current, saved, keep_saved=False)
    assert "min_lr" not in saved[0]


def test_experts_are_found_in_the_groups_of_the_others() -> None:
    current, saved = [group(1.0, expert=True), group(0.0, expert=True)], [group(1.0), group(0.0)]
    agree_on_rates(current, saved, keep_saved=False)
    assert saved[2:] == current


def test_an_unknown_group_is_left_to_megatron() -> None:
    current, saved = [group(0.5)], [group(1.0)]
    agree_on_rates(current, saved, keep_saved=False)
    assert saved == [group(1.0)] and current == [group(0.5)]


def common(*groups: dict[str, Any]) -> dict[str, Any]:
    return {
        "optimizer": {"param_groups": list(groups)},
        "grad_scaler": {"scale": 2.0},
        "param_state_sharding_type": "x",
    }


def test_two_saved_optimizers_become_one() -> None:
    asked = {"param_state": "tensors", "shampoo": "blocks"}
    dense, experts = group(), group(expert=True)
    found = regrouped({0: common(dense), 1: common(experts), **asked}, 1)
    assert found == {**common(dense, experts), **asked}


def test_one_saved_optimizer_becomes_two() -> None:
    asked = {0: {"param_state": "dense"}, 1: {"param_state": "experts"}}
    found = regrouped({**common(group()), **asked}, 2)
    assert found == {number: {**common(group()), **asked[number]} for number in (0, 1)}
    assert found[0]["optimizer"] is not found[1]["optimizer"], "each is changed by its own optimizer"


def test_the_same_number_is_left_alone() -> None:
    for state, count in (({0: common(group()), 1: common(group())}, 2), (common(group()), 1)):
        assert regrouped(state, count) is state
