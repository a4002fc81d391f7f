"""Plans at the size of real runs, and what a plan refuses."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from megatron.shampoo.config import Method, ShampooConfig
from megatron.shampoo.methods import factor_sides
from megatron.shampoo.plan.copies import StridedCopy, merge
from megatron.shampoo.plan.grid import check_alignment
from megatron.shampoo.plan.owners import block_cost
from megatron.shampoo.plan.parts import MatrixParameter, Part, Span
from megatron.shampoo.plan.plan import Plan, make_plan
from megatron.shampoo.plan.schedule import make_schedule

LAYERS, HIDDEN = 24, 1024
SHAPES = {
    "qkv": (3 * HIDDEN, HIDDEN),
    "proj": (HIDDEN, HIDDEN),
    "fc1": (4 * HIDDEN, HIDDEN),
    "fc2": (HIDDEN, 4 * HIDDEN),
}


def gpt(num_ranks: int, sharded: bool, config: ShampooConfig, others: int = 0) -> list[MatrixParameter]:
    """The matrices of a 24-layer GPT; with `sharded` one flat buffer of them is cut into equal shards.

    Before the matrices the buffer holds `others` elements that are not preconditioned, the embeddings say.
    """
    shapes = [(f"layers.{layer}.{name}", layer, shape) for layer in range(LAYERS) for name, shape in SHAPES.items()]
    shard = -(-(others + sum(rows * columns for _, _, (rows, columns) in shapes)) // num_ranks)
    parameters, start = [], others
    for name, layer, shape in shapes:
        stop = start + shape[0] * shape[1]
        spans = []
        for rank in range(start // shard, -(-stop // shard)):
            low, high = max(start, rank * shard), min(stop, (rank + 1) * shard)
            spans.append(Span(rank, low - start, high - start))
        part = Part(name="weight", global_shape=shape, sides=factor_sides(shape, config))
        parameters.append(
            MatrixParameter(name=name, shape=shape, parts=(part,), spans=tuple(spans) if sharded else (), unit=layer)
        )
        start = stop
    return parameters


def plan_gpt(num_ranks: int, block_size: int, sharded: bool = True, others: int = 0, **settings: Any) -> Plan:
    config = ShampooConfig(block_size=block_size, **settings)
    return make_plan(gpt(num_ranks, sharded, config, others), num_ranks, config, 1)


def imbalance(load: list[float]) -> float:
    return max(load) * len(load) / sum(load)


def test_a_thousand_ranks_with_blocks_smaller_than_a_shard_are_balanced() -> None:
    plan = plan_gpt(1024, 128)
    assert sum(block.numel for block in plan.blocks) == LAYERS * 12 * HIDDEN**2
    assert all(fragments for fragments in plan.fragments)
    load = plan.load()
    # 18 blocks of 128 x 128 to a shard. A shard border cuts a whole row of 8 or 32 blocks, and all of them go to the
    # side that holds most: at worst one rank has 32.
    assert max(load) <= 32 / 18 * sum(load) / len(load) + 1
    assert len(plan.owners) == len(plan.blocks) == LAYERS * 12 * 64
    assert max(plan.owners.count(rank) for rank in range(1024)) == 32


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("method", ["shampoo", "one-sided", "kl-soap"])
def test_one_node_is_balanced(num_ranks: int, sharded: bool, method: str) -> None:
    load = plan_gpt(num_ranks, 512, sharded, method=method).load()
    assert max(load) <= 1.1 * sum(load) / len(load)


EMBEDDINGS = 51200 * HIDDEN


@pytest.mark.parametrize("block_size", [256, 512])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 64])
def test_balanced_ownership_brings_work_to_ranks_that_hold_embeddings(num_ranks: int, block_size: int) -> None:
    local = plan_gpt(num_ranks, block_size, others=EMBEDDINGS)
    balanced = plan_gpt(num_ranks, block_size, others=EMBEDDINGS, ownership="balanced")
    assert imbalance(local.load()) > 1.15
    assert imbalance(balanced.load()) <= 1.10
    assert sum(balanced.load()) == pytest.approx(sum(local.load()))


def test_balanced_ownership_helps_a_rank_that_holds_every_block() -> None:
    plan = plan_gpt(4, 512, others=3 * LAYERS * 12 * HIDDEN**2, ownership="balanced")
    assert {fragment.rank for fragments in plan.fragments for fragment in fragments} == {3}
    assert imbalance(plan.load()) <= 1.10
    received = [sum(message.numel for message in make_schedule(plan, rank).receives) for rank in range(4)]
    assert received[3] == 0 < min(received[:3]) <= max(received) <= 1.25 * LAYERS * 12 * HIDDEN**2 / 4


def test_balanced_ownership_moves_nothing_where_work_is_even_already() -> None:
    local, balanced = (plan_gpt(8, 512, ownership=ownership) for ownership in ("local", "balanced"))
    assert imbalance(local.load()) <= 1.05
    assert balanced.owners == local.owners


def test_refreshes_of_a_rank_stay_spread_over_the_turns() -> None:
    plan = plan_gpt(4, 256, others=EMBEDDINGS, ownership="balanced")
    for rank in range(4):
        turns = [0] * 10
        for block, owner in zip(plan.blocks, plan.owners, strict=True):
            turns[block.ordinal % 10] += owner == rank
        assert max(turns) <= 1.2 * sum(turns) / len(turns), (rank, turns)


def test_balanced_ownership_of_many_blocks_and_ranks_is_within_the_bounds() -> None:
    plan = plan_gpt(1024, 128, others=EMBEDDINGS, ownership="balanced")
    assert imbalance(plan.load()) <= 20 / 18 + 1e-6  # 18 equal blocks to a rank on average
    mean = LAYERS * 12 * HIDDEN**2 / 1024
    received = [0] * 1024
    for index, owner in enumerate(plan.owners):
        received[owner] += sum(fragment.numel for fragment in plan.fragments[index] if fragment.rank != owner)
    assert max(received) <= 1.25 * mean


@pytest.mark.parametrize("method", [*Method])
def test_a_factor_costs_by_its_own_length_and_what_is_left_out_costs_nothing(method: Method) -> None:
    config = ShampooConfig(method=method)
    both, left, right, neither = (
        block_cost((64, 256), sides, config) for sides in ((True, True), (True, False), (False, True), (False, False))
    )
    assert neither == 0 < 4 * left < right < both == left + right
    seldom = dataclasses.replace(config, refresh_interval=100)
    assert block_cost((64, 256), (True, True), seldom) < both


def test_blocks_of_one_shape_with_other_sides_are_stacks_of_their_own() -> None:
    # qkv and fc1 have their factor on the columns, fc2 and the square projection on the rows.
    plan = plan_gpt(1, 512, method="one-sided")
    stacks = make_schedule(plan, 0).stacks
    assert {(stack.shape, stack.sides) for stack in stacks} == {
        ((512, 512), (True, False)),
        ((512, 512), (False, True)),
    }
    counts = {stack.sides: len(stack.blocks) for stack in stacks}
    assert counts == {(True, False): LAYERS * (4 + 16), (False, True): LAYERS * (12 + 16)}


def test_a_thousand_ranks_with_blocks_larger_than_a_shard_own_at_most_one() -> None:
    plan = plan_gpt(1024, 1024)
    assert len(plan.blocks) == LAYERS * 12
    # A block of 2^20 elements covers at least two whole shards of 294,912, and one of these owns it.
    assert max(plan.owners.count(rank) for rank in range(1024)) == 1
    idle = next(rank for rank in range(1024) if rank not in plan.owners)
    schedule = make_schedule(plan, idle)
    assert schedule.stacks == schedule.receives == ()
    assert len(schedule.sends) > 0


def test_a_thousand_ranks_with_replicated_parameters_are_within_the_greedy_bound() -> None:
    plan = plan_gpt(1024, 256, sharded=False)
    load = plan.load()
    assert len(plan.blocks) == LAYERS * 12 * 16
    # 4,608 equal blocks: five to most ranks, where 4.5 is the mean.
    assert max(load) / (sum(load) / len(load)) == pytest.approx(5 / 4.5)


def test_copies_of_a_rank_are_few() -> None:
    # One view for the blocks of a whole parameter, not one for each of its blocks.
    schedule = make_schedule(plan_gpt(1, 128), 0)
    assert len(schedule.stacks) == 1
    assert len(schedule.stacks[0].blocks) == LAYERS * 12 * 64
    assert len(schedule.local[0]) == len(SHAPES) * LAYERS


def test_merge_joins_a_grid_of_blocks_into_one_copy() -> None:
    # A 4 x 6 matrix in blocks of 2 x 3.
    grid = [StridedCopy(0, 12 * i + 3 * j, 12 * i + 6 * j, (2, 3), (6, 1), (3, 1)) for i in range(2) for j in range(2)]
    assert merge(grid) == [StridedCopy(0, 0, 0, (2, 2, 2, 3), (12, 3, 6, 1), (12, 6, 3, 1))]


def whole(parts: tuple[Part, ...], rows: int, spans: tuple[Span, ...] = ()) -> MatrixParameter:
    return MatrixParameter(name="layers.3.fc1", shape=(rows, 4), parts=parts, spans=spans)


def part(rows: int, first: int, columns: int = 4) -> Part:
    return Part(name=f"p{first}", global_shape=(rows, columns), first_row=first)


@pytest.mark.parametrize(
    "parts",
    [
        (part(3, 0),),
        (part(5, 0),),
        (part(2, 0), part(2, 1)),
        (part(2, 0), part(1, 3)),
        (part(2, 0), part(2, 0)),
        (part(2, 0), part(1, 1), part(3, 1)),
        (part(4, 0, columns=3),),
        (),
    ],
    ids=["gap at the end", "too long", "overlap", "gap", "twice", "overlap that adds up", "columns", "none"],
)
def test_parts_that_do_not_tile_the_parameter_are_refused(parts: tuple[Part, ...]) -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.fc1 .* not tiled by its parts"):
        whole(parts, rows=4)


@pytest.mark.parametrize(
    "borders",
    [
        [(0, 0, 8), (1, 9, 16)],
        [(0, 0, 9), (1, 8, 16)],
        [(0, 0, 15)],
        [(0, 1, 16)],
        [(1, 8, 16), (0, 0, 8)],
        [(0, 0, 4), (1, 4, 8), (0, 8, 16)],
    ],
    ids=["gap", "overlap", "short", "late", "order", "a rank twice"],
)
def test_spans_that_do_not_tile_the_parameter_are_refused(borders: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.fc1.* spans?: "):
        whole((part(4, 0),), 4, tuple(Span(*border) for border in borders))


def tensor_parallel(length: int, tp_size: int) -> MatrixParameter:
    parts = (Part(name="weight", global_shape=(length, 4), tp_dim=0, tp_size=tp_size),)
    return MatrixParameter(name="layers.3.fc1", shape=(length // tp_size, 4), parts=parts)


@pytest.mark.parametrize(
    ("parameter", "alignment", "message"),
    [
        (lambda: tensor_parallel(12, 4), 6, "--shampoo-tp-alignment 6 is not a multiple of the tensor-parallel size 4"),
        (lambda: tensor_parallel(12, 2), 8, "--shampoo-tp-alignment 8 does not divide the 12 rows"),
    ],
)
def test_alignment_that_cannot_be_met_is_refused_with_the_remedy(
    parameter: Callable[[], MatrixParameter], alignment: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        make_plan([parameter()], 1, ShampooConfig(), alignment)
    assert "layers.3.fc1" in str(error.value)


def test_alignments_that_the_message_offers_work() -> None:
    parameter = tensor_parallel(12, 2)
    with pytest.raises(ValueError) as error:
        check_alignment(parameter, 8)
    offered = [int(number) for number in str(error.value).split("these work: ")[1].split(", ")]
    assert offered == [2, 4, 6, 12]
    for alignment in offered:
        check_alignment(parameter, alignment)


def test_sharded_and_replicated_parameters_do_not_mix() -> None:
    with pytest.raises(ValueError, match="a plan holds one kind"):
        make_plan([whole((part(4, 0),), 4, (Span(0, 0, 16),)), whole((part(4, 0),), 4)], 1, ShampooConfig(), 1)
