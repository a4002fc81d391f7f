"""What travels between ranks: how often, how much, in which group, and that it matters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.shampoo import ShampooConfig
from megatron.shampoo.config import Method
from tests.distributed._helpers import Model, Trainer, assemble, run_ranks, train_alone

MODEL = Model(((12, 10), (7,), (10, 12)))
CONFIG = ShampooConfig(block_size=4, refresh_interval=2, grafting="none", epsilon=1e-4)  # type: ignore[arg-type]
STEPS = 5
NUM_RANKS = 3
METHODS: dict[str, dict[str, Any]] = {
    **{method.value: {"method": method} for method in Method},
    "averaged directions": {"momentum_placement": "after"},
    "averaged directions, late": {"momentum_placement": "after", "start_step": 3},
}

COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, Any, int]]]:
    """Every collective called inside: name, group, and bytes that leave this rank for others."""
    calls: list[tuple[str, Any, int]] = []
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def wrap(name: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            outgoing = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else None
            size = 0 if outgoing is None else outgoing.numel() * outgoing.element_size()
            calls.append((name, kwargs.get("group"), size))
            return originals[name](*args, **kwargs)

        return wrapped

    for name in COLLECTIVES:
        setattr(dist, name, wrap(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@contextlib.contextmanager
def first_fragment_zeroed() -> Iterator[None]:
    """Rank 0 sends zeros for the gradient of the first fragment of its first message to an owner."""
    original, count = dist.all_to_all_single, 0

    def broken(incoming: Tensor, outgoing: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if count % 2 == 0 and dist.get_rank() == 0:  # every other exchange goes to the owners
            outgoing = outgoing.clone()
            outgoing[:8] = 0
        count += 1
        return original(incoming, outgoing, *args, **kwargs)

    dist.all_to_all_single = broken
    try:
        yield
    finally:
        dist.all_to_all_single = original


def count_collectives(sharded: bool, config: ShampooConfig = CONFIG) -> dict[str, Any]:
    group, _other = dist.new_group(range(NUM_RANKS)), dist.new_group(range(NUM_RANKS))
    trainer = Trainer(MODEL, config, group, MODEL.equal_borders(NUM_RANKS) if sharded else None)
    by_step = []
    for step in range(STEPS):
        with recorded() as calls:
            trainer.step(step)
        by_step.append([(name, used is group, size) for name, used, size in calls])
    optimizer = trainer.optimizer
    return {
        "calls": by_step,
        "planned": 4 * optimizer.schedule.exchanged_numel,
        "planned_bytes": optimizer.planned_bytes,
        "counted": optimizer.bytes_sent,
        "travels": 4 * sum(message.numel for message in optimizer.schedule.sends),
        "cut": sum(optimizer.plan.is_cut(block) for block in range(len(optimizer.plan.blocks))),
        "owned": [optimizer.plan.owners.count(rank) for rank in range(NUM_RANKS)],
        "result": trainer.result(),
    }


def train_with_a_fault() -> Any:
    trainer = Trainer(MODEL, CONFIG, dist.new_group(range(NUM_RANKS)), MODEL.equal_borders(NUM_RANKS))
    with first_fragment_zeroed():
        for step in range(STEPS):
            trainer.step(step)
    return trainer.result()


def refused() -> list[str]:
    """Messages of the errors that plans unequal among the ranks raise."""
    group, last = dist.new_group(range(NUM_RANKS)), dist.get_rank() == NUM_RANKS - 1
    borders = MODEL.equal_borders(NUM_RANKS)
    other_borders = [0, 50, 100, MODEL.numel()]
    other_model = Model(((12, 10), (7,), (10, 13)))
    unequal: list[tuple[Model, ShampooConfig, list[int]]] = [
        (MODEL, ShampooConfig(block_size=3) if last else CONFIG, borders),
        (MODEL, ShampooConfig(block_size=4, refresh_interval=7) if last else CONFIG, borders),
        (MODEL, CONFIG, other_borders if last else borders),
        # Blocks and messages are the same, what is done with them is not.
        (MODEL, dataclasses.replace(CONFIG, method="soap") if last else CONFIG, borders),
        (MODEL, dataclasses.replace(CONFIG, epsilon=1e-3) if last else CONFIG, borders),
        (MODEL, dataclasses.replace(CONFIG, update_rms_clip=1.0) if last else CONFIG, borders),
        (other_model, CONFIG, other_model.equal_borders(NUM_RANKS)) if last else (MODEL, CONFIG, borders),
    ]
    messages = []
    for model, config, cuts in unequal:
        try:
            Trainer(model, config, group, cuts)
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def everything() -> dict[str, Any]:
    return {
        "sharded": count_collectives(sharded=True),
        "replicated": count_collectives(sharded=False),
        "methods": {
            name: count_collectives(sharded=True, config=dataclasses.replace(CONFIG, **settings))
            for name, settings in METHODS.items()
        },
        "faulty": train_with_a_fault(),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(everything, NUM_RANKS)


class TestExchangeOnThreeProcesses:
    """One world of three processes."""

    def test_shards_use_one_all_to_all_each_way_in_their_group_and_nothing_else(
        self, ranks: list[dict[str, Any]]
    ) -> None:
        assert ranks[0]["sharded"]["cut"] > 0
        for rank in ranks:
            for step in rank["sharded"]["calls"]:
                assert [(name, in_group) for name, in_group, _ in step] == [("all_to_all_single", True)] * 2

    def test_bytes_are_those_of_the_plan(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            found = rank["sharded"]
            assert found["planned"] == found["planned_bytes"]
            assert [sum(size for _, _, size in step) for step in found["calls"]] == [found["planned"]] * STEPS
            assert found["counted"] == STEPS * found["planned"]
        assert sum(rank["sharded"]["planned"] for rank in ranks) > 0

    @pytest.mark.parametrize("method", list(METHODS))
    def test_every_method_sends_its_payloads_by_the_same_two_calls(
        self, ranks: list[dict[str, Any]], method: str
    ) -> None:
        for rank in ranks:
            found, usual = rank["methods"][method], rank["sharded"]
            for step in found["calls"]:
                assert [(name, in_group) for name, in_group, _ in step] == [("all_to_all_single", True)] * 2
            # The gradient travels once where it is itself what is preconditioned.
            saved = usual["travels"] if method == "averaged directions" else 0
            assert found["planned"] == found["planned_bytes"] == usual["planned"] - saved
            assert [sum(size for _, _, size in step) for step in found["calls"]] == [found["planned"]] * STEPS
        assert sum(rank["sharded"]["travels"] for rank in ranks) > 0

    def test_replicas_use_one_all_gather_in_their_group_and_nothing_else(self, ranks: list[dict[str, Any]]) -> None:
        for rank in ranks:
            for step in rank["replicated"]["calls"]:
                assert [(name, in_group) for name, in_group, _ in step] == [("all_gather_into_tensor", True)]
            sizes = [step[0][2] for step in rank["replicated"]["calls"]]
            # Messages of an all-gather have one length: that of the rank with the most.
            assert sizes == [rank["replicated"]["planned_bytes"]] * STEPS
            assert rank["replicated"]["counted"] == sum(sizes)

    def test_owners_of_replicas_are_balanced(self, ranks: list[dict[str, Any]]) -> None:
        assert ranks[0]["replicated"]["owned"] == [6, 6, 6]

    def test_a_fragment_that_is_lost_is_noticed(self, ranks: list[dict[str, Any]]) -> None:
        expected = train_alone(MODEL, CONFIG, STEPS)
        intact = assemble(MODEL, [rank["sharded"]["result"] for rank in ranks])
        faulty = assemble(MODEL, [rank["faulty"] for rank in ranks])
        for mine, theirs in zip(intact, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert max(float((mine - theirs).abs().max()) for mine, theirs in zip(faulty, expected, strict=True)) > 1e-3

    def test_unequal_plans_are_refused_on_every_rank_naming_the_ranks_that_differ(
        self, ranks: list[dict[str, Any]]
    ) -> None:
        for rank in ranks:
            assert len(rank["refused"]) == 7
            for message in rank["refused"]:
                assert message.startswith("data-parallel ranks [2] have other Shampoo blocks or settings")
