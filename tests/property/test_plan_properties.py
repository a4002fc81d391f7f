"""Properties of plans, for any model, layout, block size and cut of the shards.

Models are drawn as global matrices; every layout is carried out on them in numpy, element by element, with code that
knows nothing of how the plan finds its copies.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.shampoo.config import Method, MomentumPlacement, Ownership, ShampooConfig
from megatron.shampoo.plan.copies import StridedCopy, merge
from megatron.shampoo.plan.fragments import rectangles_of
from megatron.shampoo.plan.grid import cut
from megatron.shampoo.plan.owners import FULL, MOST_RECEIVED, block_cost
from megatron.shampoo.plan.parts import MatrixParameter, Part, Span
from megatron.shampoo.plan.plan import Plan, make_plan
from megatron.shampoo.plan.schedule import make_schedule, owned_numel, scatter_copies

FEW = settings(max_examples=80, deadline=None, derandomize=True)


# -- models and layouts


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A parameter of a model, before any layout: its kind, unit and sizes."""

    kind: str
    """plain, columns (cut by rows), rows (cut by columns), qkv, q-kv (keys and values in one part), gated."""
    unit: int
    rows: int
    """Rows of the plain matrix, of gate and up, or of a head."""
    width: int
    groups: int = 1
    """Query groups; a multiple of the alignment."""
    queries: int = 1
    """Query heads in a group."""
    by_head: bool = False
    """Whether blocks end where heads do."""
    sides: tuple[bool, bool] = (True, True)
    """Which factors its blocks have."""

    def global_parts(self) -> dict[str, tuple[int, int]]:
        """Shape of each part of the whole parameter."""
        if self.kind == "qkv":
            heads = self.groups * self.rows
            return {"q": (heads * self.queries, self.width), "k": (heads, self.width), "v": (heads, self.width)}
        if self.kind == "q-kv":
            heads = self.groups * self.rows
            return {"q": (heads * self.queries, self.width), "kv": (2 * heads, self.width)}
        names = ("gate", "up") if self.kind == "gated" else ("weight",)
        return dict.fromkeys(names, (self.rows, self.width))


def local_parameter(matrix: Matrix, parts: dict[str, np.ndarray], size: int, rank: int) -> np.ndarray:
    """What a tensor-parallel rank holds, from the global parts, as Megatron lays it out."""
    if matrix.kind == "plain":
        return parts["weight"]
    if matrix.kind == "rows":
        return np.split(parts["weight"], size, axis=1)[rank]
    if matrix.kind == "columns":
        return np.split(parts["weight"], size, axis=0)[rank]
    if matrix.kind == "gated":
        return np.concatenate([np.split(parts[name], size, axis=0)[rank] for name in ("gate", "up")])
    by_group = [np.split(parts[name], matrix.groups, axis=0) for name in matrix.global_parts()]
    mine = range(rank * matrix.groups // size, (rank + 1) * matrix.groups // size)
    return np.concatenate([heads[group] for group in mine for heads in by_group])


def describe(matrix: Matrix, number: int, size: int, rank: int, spans: tuple[Span, ...]) -> MatrixParameter:
    """The planner's view of a tensor-parallel rank's parameter."""
    tp_dim = {"plain": None, "rows": 1}.get(matrix.kind, 0)
    tp = {"tp_dim": tp_dim, "tp_size": size, "tp_rank": rank}
    runs: dict[str, dict[str, int]] = {"weight": {}, "gate": {}, "up": {"first_row": matrix.rows // size}}
    q, head = matrix.queries * matrix.rows, matrix.rows
    stride = q + 2 * head
    if matrix.kind in ("qkv", "q-kv"):
        runs = {
            "q": {"first_row": 0, "run_rows": q, "run_stride": stride},
            "k": {"first_row": q, "run_rows": head, "run_stride": stride},
            "v": {"first_row": q + head, "run_rows": head, "run_stride": stride},
            "kv": {"first_row": q, "run_rows": 2 * head, "run_stride": stride},
        }
    parts = tuple(
        Part(
            name=name,
            global_shape=shape,
            sides=matrix.sides,
            row_segments=shape[0] // head if matrix.by_head else 1,
            **tp,  # type: ignore[arg-type]
            **runs[name],  # type: ignore[arg-type]
        )
        for name, shape in matrix.global_parts().items()
    )
    rows, columns = (sum(part.local_shape[0] for part in parts), parts[0].local_shape[1])
    return MatrixParameter(name=f"m{number}", shape=(rows, columns), parts=parts, spans=spans, unit=matrix.unit)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the settings that must not depend on the layout."""

    matrices: tuple[Matrix, ...]
    alignment: int
    config: ShampooConfig
    seed: int

    def global_parts(self) -> list[dict[str, np.ndarray]]:
        """Every element of the model a number of its own."""
        counter = itertools.count()
        return [
            {
                name: np.array([next(counter) for _ in range(shape[0] * shape[1])], dtype=np.int64).reshape(shape)
                for name, shape in matrix.global_parts().items()
            }
            for matrix in self.matrices
        ]

    def plan(self, size: int, rank: int, num_ranks: int = 1, cuts: bool = False) -> Plan:
        """Plan of a tensor-parallel rank's data-parallel group; with `cuts` its parameters are cut anywhere."""
        generator = np.random.default_rng(self.seed)
        parameters = []
        for number, matrix in enumerate(self.matrices):
            whole = describe(matrix, number, size, rank, ())
            numel = whole.shape[0] * whole.shape[1]
            borders = [0, *sorted(generator.integers(0, numel + 1, num_ranks - 1).tolist()), numel]
            ranges = enumerate(itertools.pairwise(borders))
            spans = tuple(Span(dp_rank, start, stop) for dp_rank, (start, stop) in ranges if start < stop)
            parameters.append(dataclasses.replace(whole, spans=spans if cuts else ()))
        return make_plan(parameters, num_ranks, self.config, self.alignment)

    def sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the alignment."""
        return [size for size in range(1, self.alignment + 1) if self.alignment % size == 0]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    alignment = draw(st.sampled_from([1, 2, 3, 4, 6]))

    def matrix() -> Matrix:
        kind = draw(st.sampled_from(["plain", "columns", "rows", "qkv", "q-kv", "gated"]))
        small = st.integers(1, 4)
        unit = draw(st.integers(0, 2))
        sides = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
        if kind in ("qkv", "q-kv"):
            groups, queries = alignment * draw(st.integers(1, 2)), draw(st.integers(1, 3))
            by_head = kind == "qkv" and draw(st.booleans())
            return Matrix(kind, unit, draw(small), draw(st.integers(1, 7)), groups, queries, by_head, sides)
        rows, width = draw(st.integers(1, 11)), draw(st.integers(1, 11))
        if kind in ("columns", "gated"):
            rows = alignment * draw(small)
        if kind == "rows":
            width = alignment * draw(small)
        return Matrix(kind, unit, rows, width, sides=sides)

    matrices = tuple(matrix() for _ in range(draw(st.integers(1, 3))))
    config = ShampooConfig(
        method=draw(st.sampled_from(Method)),
        momentum_placement=draw(st.sampled_from(MomentumPlacement)),
        block_size=draw(st.integers(1, 6)),
        refresh_interval=draw(st.integers(1, 7)),
        ownership=draw(st.sampled_from(Ownership)),
    )
    return Case(matrices, alignment, config, draw(st.integers(0, 2**32 - 1)))


DATA_PARALLEL = st.integers(1, 5)


def block_in_part(plan: Plan, index: int) -> tuple[str, tuple[slice, slice]]:
    """Part name of a block, and its place in the global part."""
    block = plan.blocks[index]
    part = plan.parameters[block.parameter].parts[block.part]
    row, column = (part.local_offset[dim] + block.start[dim] for dim in (0, 1))
    return part.name, (slice(row, row + block.shape[0]), slice(column, column + block.shape[1]))


# -- carrying out copies, element by element


def elements(copy: StridedCopy) -> Iterator[tuple[int, int]]:
    """(source element, target element) pairs of a copy."""
    for place in itertools.product(*(range(length) for length in copy.size)):
        source = copy.source_offset + sum(k * stride for k, stride in zip(place, copy.source_stride, strict=True))
        target = copy.target_offset + sum(k * stride for k, stride in zip(place, copy.target_stride, strict=True))
        yield source, target


def carry_out(copies: Iterable[StridedCopy], sources: Sequence[np.ndarray], target: np.ndarray) -> None:
    """Every target element may be written once only, and no index may be out of range."""
    for copy in copies:
        for source, place in elements(copy):
            assert source >= 0 and place >= 0
            assert target[place] == -1, "an element is written twice"
            target[place] = sources[copy.source][source]


def blank(numel: int) -> np.ndarray:
    return np.full(numel, -1, dtype=np.int64)


# -- the grid


@FEW
@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 20))
def test_cut_tiles_the_dimension_with_near_equal_pieces(length: int, segments: int, block_size: int) -> None:
    pieces = cut(length * segments, segments, block_size)
    assert pieces[0][0] == 0 and pieces[-1][1] == length * segments
    assert all(one[1] == other[0] for one, other in itertools.pairwise(pieces))
    sizes = [stop - start for start, stop in pieces]
    assert max(sizes) <= block_size
    assert max(sizes) - min(sizes) <= 1
    assert len(pieces) == segments * -(-length // block_size)
    borders = {start for start, _ in pieces}
    assert all(length * k in borders for k in range(segments))


@FEW
@given(cases())
def test_every_element_is_in_exactly_one_block_which_is_its_global_rectangle(case: Case) -> None:
    parts = case.global_parts()
    for size in case.sizes():
        for rank in range(size):
            plan = case.plan(size, rank)
            held = [local_parameter(m, p, size, rank).ravel() for m, p in zip(case.matrices, parts, strict=True)]
            covered = [np.zeros(len(flat), dtype=int) for flat in held]
            for index, block in enumerate(plan.blocks):
                parameter = plan.parameters[block.parameter]
                found = blank(block.numel)
                for it in rectangles_of(parameter, block, 0, block.numel):
                    for row, column in itertools.product(range(it.rows), range(it.columns)):
                        place = it.parameter_offset + row * parameter.shape[1] + column
                        covered[block.parameter][place] += 1
                        found[it.block_offset + row * it.columns + column] = held[block.parameter][place]
                name, place_in_part = block_in_part(plan, index)
                np.testing.assert_array_equal(found.reshape(block.shape), parts[block.parameter][name][place_in_part])
            for counts in covered:
                assert (counts == 1).all()


@FEW
@given(cases())
def test_no_block_crosses_a_cut_of_the_alignment_or_outgrows_the_block_size(case: Case) -> None:
    for size in case.sizes():
        plan = case.plan(size, 0)
        for index, block in enumerate(plan.blocks):
            part = plan.parameters[block.parameter].parts[block.part]
            assert min(block.shape) >= 1
            assert max(block.shape) <= case.config.block_size
            assert block.sides == part.sides == case.matrices[block.parameter].sides
            if part.row_segments > 1:
                head, rows = case.matrices[block.parameter].rows, block_in_part(plan, index)[1][0]
                assert rows.start // head == (rows.stop - 1) // head
            if part.tp_dim is None:
                continue
            segment = part.global_shape[part.tp_dim] // case.alignment
            place = block_in_part(plan, index)[1][part.tp_dim]
            assert place.start // segment == (place.stop - 1) // segment


def global_grid(case: Case, size: int) -> list[tuple]:
    """All blocks of a layout with everything that must not depend on it, sorted."""
    found = []
    for rank in range(size):
        plan = case.plan(size, rank)
        for index, block in enumerate(plan.blocks):
            if case.matrices[block.parameter].kind == "plain" and rank > 0:
                continue  # every tensor-parallel rank has all of it
            name, (rows, columns) = block_in_part(plan, index)
            place = (rows.start, rows.stop, columns.start, columns.stop)
            turn = block.ordinal % case.config.refresh_interval
            found.append((plan.name_of(index), name, block.grid, place, block.ordinal, turn))
    return sorted(found)


@FEW
@given(cases())
def test_grid_names_and_refresh_turns_are_the_same_at_every_tensor_parallel_size(case: Case) -> None:
    one = global_grid(case, 1)
    assert len({entry[0] for entry in one}) == len(one), "a name is given twice"
    for size in case.sizes():
        assert global_grid(case, size) == one


@FEW
@given(cases(), DATA_PARALLEL, st.booleans())
def test_grid_and_refresh_turns_do_not_depend_on_data_parallelism(case: Case, num_ranks: int, cuts: bool) -> None:
    assert case.plan(1, 0, num_ranks, cuts).blocks == case.plan(1, 0).blocks


@FEW
@given(cases())
def test_a_pipeline_stage_has_the_turns_of_the_whole_model(case: Case) -> None:
    whole = {case_name: ordinal for case_name, _, _, _, ordinal, _ in global_grid(case, 1)}
    parameters = [describe(matrix, number, 1, 0, ()) for number, matrix in enumerate(case.matrices)]
    for unit in {matrix.unit for matrix in case.matrices}:
        stage = [parameter for parameter in parameters if parameter.unit == unit]
        plan = make_plan(stage, 1, case.config, case.alignment)
        assert {plan.name_of(i): block.ordinal for i, block in enumerate(plan.blocks)}.items() <= whole.items()


# -- fragments and owners


@FEW
@given(cases(), DATA_PARALLEL)
def test_fragments_make_up_the_block_and_lie_in_their_ranks_shard(case: Case, num_ranks: int) -> None:
    plan = case.plan(1, 0, num_ranks, cuts=True)
    for block, fragments in zip(plan.blocks, plan.fragments, strict=True):
        assert [it.start for it in fragments] + [block.numel] == [0] + [it.stop for it in fragments]
        assert [it.rank for it in fragments] == sorted({it.rank for it in fragments})
        parameter = plan.parameters[block.parameter]
        spans = {span.rank: span for span in parameter.spans}
        for fragment in fragments:
            span = spans[fragment.rank]
            for it in rectangles_of(parameter, block, fragment.start, fragment.stop):
                last = it.parameter_offset + (it.rows - 1) * parameter.shape[1] + it.columns
                assert span.start <= it.parameter_offset and last <= span.stop


@FEW
@given(cases(), DATA_PARALLEL)
def test_a_local_owner_holds_most_of_its_block(case: Case, num_ranks: int) -> None:
    plan = with_ownership(case, Ownership.LOCAL).plan(1, 0, num_ranks, cuts=True)
    assert len(plan.owners) == len(plan.blocks)
    for owner, fragments in zip(plan.owners, plan.fragments, strict=True):
        held = {fragment.rank: fragment.numel for fragment in fragments}
        assert held[owner] == max(held.values())
    for index, fragments in enumerate(plan.fragments):
        assert plan.is_cut(index) == plan.travels(index) == (len({fragment.rank for fragment in fragments}) > 1)


@FEW
@given(cases(), DATA_PARALLEL)
def test_balanced_owners_lower_the_largest_load_within_the_bound_on_travel(case: Case, num_ranks: int) -> None:
    local = with_ownership(case, Ownership.LOCAL).plan(1, 0, num_ranks, cuts=True)
    balanced = with_ownership(case, Ownership.BALANCED).plan(1, 0, num_ranks, cuts=True)
    costs = [block_cost(block.shape, block.sides, case.config) for block in local.blocks]
    room = FULL * sum(costs) / num_ranks
    assert sum(balanced.load()) == pytest.approx(sum(costs))
    # Only a rank without room gives a block away, to one that has less work than itself.
    assert max(balanced.load()) <= max(max(local.load()), room) + max(costs) + 1e-6 * sum(costs)
    received = [0] * num_ranks
    numel = sum(block.numel for block in balanced.blocks)
    for index, (owner, before) in enumerate(zip(balanced.owners, local.owners, strict=True)):
        elsewhere = sum(fragment.numel for fragment in balanced.fragments[index] if fragment.rank != owner)
        received[owner] += elsewhere if owner != before else 0
    assert max(received) <= MOST_RECEIVED * numel / num_ranks


def with_ownership(case: Case, ownership: Ownership) -> Case:
    return dataclasses.replace(case, config=dataclasses.replace(case.config, ownership=ownership))


@FEW
@given(cases(), DATA_PARALLEL)
def test_load_of_replicated_parameters_is_within_the_greedy_bound(case: Case, num_ranks: int) -> None:
    plan = case.plan(1, 0, num_ranks)
    costs = [block_cost(block.shape, block.sides, case.config) for block in plan.blocks]
    load = plan.load()
    assert sum(load) == pytest.approx(sum(costs))
    # Graham 1966: list scheduling is within the mean and the part of one job that others could have shared.
    assert max(load) <= sum(costs) / num_ranks + max(costs) * (1 - 1 / num_ranks) + 1e-6 * sum(costs)
    assert sum(owned_numel(plan, rank) for rank in range(num_ranks)) == sum(block.numel for block in plan.blocks)


# -- the schedule, carried out


def shards_of(plan: Plan, held: list[np.ndarray], rank: int) -> list[np.ndarray]:
    """The pieces of the flat parameters that a rank holds."""
    shards = []
    for parameter, flat in zip(plan.parameters, held, strict=True):
        span = next((it for it in parameter.spans if it.rank == rank), Span(rank, 0, 0))
        shards.append(flat[span.start : span.stop])
    return shards


@FEW
@given(cases(), DATA_PARALLEL)
def test_exchange_brings_every_element_to_its_owner_and_back(case: Case, num_ranks: int) -> None:
    parts = case.global_parts()
    for size, tp_rank in {(1, 0), (case.sizes()[-1], case.sizes()[-1] - 1)}:
        plan = case.plan(size, tp_rank, num_ranks, cuts=True)
        held = [local_parameter(m, p, size, tp_rank).ravel() for m, p in zip(case.matrices, parts, strict=True)]
        shards = [shards_of(plan, held, rank) for rank in range(num_ranks)]
        schedules = [make_schedule(plan, rank) for rank in range(num_ranks)]
        stacks = [[blank(len(s.blocks) * s.block_numel) for s in schedule.stacks] for schedule in schedules]
        packed = []
        for rank, schedule in enumerate(schedules):
            for copies, stack in zip(schedule.local, stacks[rank], strict=True):
                carry_out(copies, shards[rank], stack)
            buffer = blank(sum(message.numel for message in schedule.sends))
            carry_out(schedule.pack, shards[rank], buffer)
            assert (buffer >= 0).all()
            messages = np.split(buffer, np.cumsum([message.numel for message in schedule.sends])[:-1])
            packed.append(
                {m.peer: data for m, data in zip(schedule.sends, messages, strict=True)} if buffer.size else {}
            )
        for rank, schedule in enumerate(schedules):
            arrived = [packed[message.peer][rank] for message in schedule.receives]
            received = np.concatenate([blank(0), *arrived])
            for copies, stack in zip(schedule.unpack, stacks[rank], strict=True):
                carry_out(copies, [received], stack)
            for stack, data in zip(schedule.stacks, stacks[rank], strict=True):
                for index, block in zip(stack.blocks, data.reshape(-1, *stack.shape), strict=True):
                    assert plan.owners[index] == rank
                    assert plan.blocks[index].sides == stack.sides
                    name, place = block_in_part(plan, index)
                    np.testing.assert_array_equal(block, parts[plan.blocks[index].parameter][name][place])
        # Back: own elements from the stacks, the others from the message in the order of the message there.
        for rank, schedule in enumerate(schedules):
            returned = [blank(len(shard)) for shard in shards[rank]]
            for copies, stack in zip(schedule.local, stacks[rank], strict=True):
                put_back(copies, stack, returned)
            back = []
            for message in schedule.sends:
                owner = schedules[message.peer]
                outgoing = blank(sum(it.numel for it in owner.receives))
                for copies, stack in zip(owner.unpack, stacks[message.peer], strict=True):
                    put_back(copies, stack, [outgoing])
                start = sum(it.numel for it in owner.receives if it.peer < rank)
                back.append(outgoing[start : start + message.numel])
            put_back(schedule.pack, np.concatenate([blank(0), *back]), returned)
            for mine, original in zip(returned, shards[rank], strict=True):
                np.testing.assert_array_equal(mine, original)


def put_back(copies: Iterable[StridedCopy], target: np.ndarray, sources: Sequence[np.ndarray]) -> None:
    """A copy backwards; every source element may be written once only."""
    for copy in copies:
        for source, place in elements(copy):
            assert sources[copy.source][source] == -1
            sources[copy.source][source] = target[place]


@FEW
@given(cases(), DATA_PARALLEL)
def test_ranks_agree_on_every_message(case: Case, num_ranks: int) -> None:
    plan = case.plan(1, 0, num_ranks, cuts=True)
    schedules = [make_schedule(plan, rank) for rank in range(num_ranks)]
    sent = {(rank, m.peer): m.fragments for rank, s in enumerate(schedules) for m in s.sends}
    expected = {(m.peer, rank): m.fragments for rank, s in enumerate(schedules) for m in s.receives}
    assert sent == expected
    travelling = [
        fragment
        for fragments, owner in zip(plan.fragments, plan.owners, strict=True)
        for fragment in fragments
        if fragment.rank != owner
    ]
    assert sorted(map(repr, travelling)) == sorted(repr(it) for found in sent.values() for it in found)
    # Two payloads (one where the gradient itself is preconditioned) and a norm for each fragment there, a direction
    # back.
    payloads = 1 if case.config.momentum_placement is MomentumPlacement.AFTER else 2
    there = sum(payloads * fragment.numel + 1 for fragment in travelling)
    back = sum(fragment.numel for fragment in travelling)
    assert sum(schedule.exchanged_numel for schedule in schedules) == there + back
    for schedule in schedules:
        fragments = [fragment for message in schedule.receives for fragment in message.fragments]
        slots = sorted(pair for pairs in schedule.unpack_slots for pair in pairs)
        assert [number for number, _ in slots] == list(range(len(fragments)))
        for stack, pairs in zip(schedule.stacks, schedule.unpack_slots, strict=True):
            assert all(stack.blocks[slot] == fragments[number].block for number, slot in pairs)


@FEW
@given(cases(), DATA_PARALLEL)
def test_gathered_directions_return_to_their_place_where_parameters_are_replicated(case: Case, num_ranks: int) -> None:
    plan = case.plan(1, 0, num_ranks)
    assert plan.replicated
    held = [local_parameter(m, p, 1, 0).ravel() for m, p in zip(case.matrices, case.global_parts(), strict=True)]
    returned = [blank(len(flat)) for flat in held]
    for rank in range(num_ranks):
        schedule = make_schedule(plan, rank)
        assert schedule.sends == schedule.receives == ()
        stacks = []
        for stack, copies in zip(schedule.stacks, schedule.local, strict=True):
            stacks.append(blank(len(stack.blocks) * stack.block_numel))
            carry_out(copies, held, stacks[-1])
        flat = np.concatenate([blank(0), *stacks])
        assert len(flat) == owned_numel(plan, rank)
        put_back(scatter_copies(plan, rank), flat, returned)
    for mine, original in zip(returned, held, strict=True):
        np.testing.assert_array_equal(mine, original)


@FEW
@given(cases(), DATA_PARALLEL)
def test_every_rank_makes_the_same_plan(case: Case, num_ranks: int) -> None:
    plan = case.plan(1, 0, num_ranks, cuts=True)
    assert case.plan(1, 0, num_ranks, cuts=True).digest() == plan.digest()
    config = dataclasses.replace(case.config, refresh_interval=case.config.refresh_interval + 1)
    assert dataclasses.replace(case, config=config).plan(1, 0, num_ranks, cuts=True).digest() != plan.digest()
    first, *others = case.matrices
    sides = (True, False) if first.sides == (True, True) else (True, True)
    turned = dataclasses.replace(case, matrices=(dataclasses.replace(first, sides=sides), *others))
    assert turned.plan(1, 0, num_ranks, cuts=True).digest() != plan.digest()


# -- copies


COPIES = st.builds(
    lambda source, offsets, rows, columns, strides: StridedCopy(
        source, offsets[0], offsets[1], (rows, columns), (strides[0], 1), (strides[1], 1)
    ),
    st.integers(0, 1),
    st.tuples(st.integers(0, 30), st.integers(0, 30)),
    st.integers(1, 2),
    st.integers(1, 2),
    st.tuples(st.integers(2, 3), st.integers(2, 3)),
)


DISTANCES = st.lists(st.tuples(st.sampled_from([-2, 4, 6]), st.sampled_from([-2, 4, 6])), max_size=5)


def moves(copies: Iterable[StridedCopy]) -> list[tuple[int, int, int]]:
    """Every element that copies move: source buffer, source element, target element."""
    return sorted((copy.source, *pair) for copy in copies for pair in elements(copy))


def series(copy: StridedCopy, distances: Iterable[tuple[int, int]]) -> list[StridedCopy]:
    """A copy, and the same again at each of these distances (source, target) from the one before."""
    copies = [dataclasses.replace(copy, source_offset=40 + copy.source_offset, target_offset=40 + copy.target_offset)]
    for source, target in distances:
        last = copies[-1]
        offsets = {"source_offset": last.source_offset + source, "target_offset": last.target_offset + target}
        copies.append(dataclasses.replace(last, **offsets))  # type: ignore[arg-type]
    return copies


@settings(FEW, max_examples=300)
@given(st.lists(st.tuples(COPIES, DISTANCES), max_size=4))
def test_merge_keeps_every_element_move(drawn: list[tuple[StridedCopy, list[tuple[int, int]]]]) -> None:
    copies = [copy for first, distances in drawn for copy in series(first, distances)]
    merged = merge(copies)
    assert moves(merged) == moves(copies)
    assert all(min((*copy.source_stride, *copy.target_stride)) >= 0 for copy in merged)


@FEW
@given(COPIES, st.integers(2, 5), st.integers(1, 6), st.integers(1, 6))
def test_merge_joins_copies_at_a_constant_distance(copy: StridedCopy, count: int, source: int, target: int) -> None:
    assert len(merge(series(copy, [(source, target)] * (count - 1)))) == 1
