"""How parameters are taken apart into logical matrices: the same matrices, factors and blocks at every TP size."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron.shampoo import Shampoo, ShampooConfig
from megatron.shampoo.mcore import report
from megatron.shampoo.mcore.routing import Route, TensorParallel, routes_of
from megatron.shampoo.placement import Placement
from megatron.shampoo.plan.fragments import rectangles_of
from megatron.shampoo.plan.parts import MatrixParameter
from megatron.shampoo.plan.plan import Plan, make_plan

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
SIZES = (1, 2, 4)
CUT = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1}
"""The dimension that Megatron cuts."""


class Model:
    """The matrices of one transformer layer, global, every element a number of its own."""

    def __init__(
        self,
        hidden: int = 64,
        heads: int = 8,
        groups: int = 4,
        head: int = 8,
        ffn: int = 48,
        *,
        gated: bool = False,
        output_gate: bool = False,
    ) -> None:
        self.groups = groups
        self.config = SimpleNamespace(
            num_query_groups=groups, kv_channels=head, num_attention_heads=heads, gated_linear_unit=gated,
            attention_output_gate=output_gate, num_moe_experts=None, expert_model_parallel_size=1,
        )  # fmt: skip
        counter = itertools.count()

        def matrix(rows: int, columns: int) -> np.ndarray:
            return np.array([next(counter) for _ in range(rows * columns)], dtype=np.int64).reshape(rows, columns)

        self.attention = {"q": matrix(heads * head, hidden)}
        if output_gate:
            self.attention["gate"] = matrix(heads * head, hidden)
        self.attention |= {"k": matrix(groups * head, hidden), "v": matrix(groups * head, hidden)}
        self.fc1 = {name: matrix(ffn, hidden) for name in (("gate", "up") if gated else ("weight",))}
        self.proj, self.fc2 = matrix(hidden, heads * head), matrix(hidden, ffn)

    def local(self, name: str, size: int, rank: int) -> np.ndarray:
        """What a tensor-parallel rank holds of a parameter, as Megatron lays it out."""
        if name == "linear_qkv":
            by_group = [np.split(part, self.groups) for part in self.attention.values()]
            mine = range(rank * self.groups // size, (rank + 1) * self.groups // size)
            return np.concatenate([heads[group] for group in mine for heads in by_group])
        if name == "linear_fc1":
            return np.concatenate([np.split(part, size)[rank] for part in self.fc1.values()])
        return np.split({"linear_proj": self.proj, "linear_fc2": self.fc2}[name], size, axis=CUT[name])[rank]

    def expected(self, name: str, part: str) -> np.ndarray:
        """The whole logical matrix."""
        if name == "linear_qkv" and part == "kv":
            pairs = zip(*(np.split(self.attention[key], self.groups) for key in "kv"), strict=True)
            return np.concatenate([half for pair in pairs for half in pair])
        if name == "linear_qkv" and part == "weight":
            return self.local(name, 1, 0)
        whole = {"linear_proj": {"weight": self.proj}, "linear_fc2": {"weight": self.fc2}, "linear_fc1": self.fc1}
        return (whole | {"linear_qkv": self.attention})[name][part]

    def chunk(self, size: int, rank: int) -> nn.Module:
        """A module tree with Megatron's names and the attributes that it gives to parameters."""
        layer = nn.Module()
        layer.layer_number = 1
        layer.self_attention, layer.mlp = nn.Module(), nn.Module()
        for owner, name in (
            (layer.self_attention, "linear_proj"), (layer.self_attention, "linear_qkv"), (layer.mlp, "linear_fc1"),
            (layer.mlp, "linear_fc2"),
        ):  # fmt: skip
            weight = nn.Parameter(torch.from_numpy(self.local(name, size, rank)).double())
            weight.tensor_model_parallel, weight.partition_dim = True, CUT[name]  # type: ignore[attr-defined]
            module = nn.Module()
            module.weight = weight
            owner.add_module(name, module)
        chunk = nn.Module()
        chunk.decoder = nn.Module()
        chunk.decoder.layers = nn.ModuleList([layer])
        return chunk

    def routes(self, settings: ShampooConfig, size: int = 1, rank: int = 0) -> dict[str, Route]:
        """By the parameter's short name."""
        place = TensorParallel(size=size, rank=rank, expert_size=1, expert_rank=0, expert_parallel_rank=0)
        found = routes_of([self.chunk(size, rank)], self.config, place, settings)
        return {route.name.split(".")[-2]: route for route in found}


def planned(routes: dict[str, Route], settings: ShampooConfig, size: int) -> Plan:
    parameters = [
        MatrixParameter(
            name=route.name,
            shape=tuple(route.parameter.shape),  # type: ignore[arg-type]
            parts=route.parts,
            family=route.family,
            unit=route.unit,
        )
        for route in routes.values()
        if route.is_preconditioned
    ]
    return make_plan(parameters, 1, settings, settings.tp_alignment or size)


def grid(model: Model, settings: ShampooConfig, size: int) -> dict[str, tuple]:
    """Every block of a layout by its name: what it holds, its sides and its turn; filled in over all ranks."""
    found: dict[str, tuple] = {}
    for rank in range(size):
        routes = model.routes(settings, size, rank)
        plan = planned(routes, settings, size)
        weights = {route.name: route.parameter.detach().flatten() for route in routes.values()}
        for index, block in enumerate(plan.blocks):
            parameter = plan.parameters[block.parameter]
            flat = torch.full((block.numel,), -1.0, dtype=torch.float64)
            for it in rectangles_of(parameter, block, 0, block.numel):
                shape = (it.rows, it.columns)
                source = weights[parameter.name].as_strided(shape, (parameter.shape[1], 1), it.parameter_offset)
                flat.as_strided(shape, (it.columns, 1), it.block_offset).copy_(source)
            part = parameter.parts[block.part]
            place = tuple(start + offset for start, offset in zip(block.start, part.local_offset, strict=True))
            name = plan.name_of(index)
            assert name not in found
            held = flat.long().numpy().reshape(block.shape)
            found[name] = (parameter.name, part.name, place, held.tolist(), block.sides, block.ordinal)
    return found


def assembled(model: Model, settings: ShampooConfig, size: int) -> dict[tuple[str, str], np.ndarray]:
    """Every logical matrix, put together from its blocks; elements that no block has are -1."""
    found: dict[tuple[str, str], np.ndarray] = {}
    for parameter, part, (row, column), held, _, _ in grid(model, settings, size).values():
        key = (parameter.split(".")[-2], part)
        block = np.array(held)
        whole = found.setdefault(key, np.full_like(model.expected(*key), -1))
        target = whole[row : row + block.shape[0], column : column + block.shape[1]]
        assert (target == -1).all(), "two blocks hold an element"
        target[:] = block
    return found


MODELS = {
    "grouped queries": {"heads": 8, "groups": 4},
    "all heads": {"heads": 8, "groups": 8, "head": 32},
    "one query a group, wide": {"heads": 4, "groups": 4, "head": 64},
    "gated": {"heads": 8, "groups": 4, "gated": True},
    "output gate": {"heads": 8, "groups": 4, "output_gate": True},
}
QKV_PARTS = {
    "grouped queries": {"split": ["q", "kv"], "heads": ["q", "k", "v"], "fused": ["weight"]},
    "all heads": {"split": ["q", "k", "v"], "heads": ["q", "k", "v"], "fused": ["weight"]},
    "one query a group, wide": {"split": ["q", "k", "v"], "heads": ["q", "k", "v"], "fused": ["weight"]},
    "gated": {"split": ["q", "kv"], "heads": ["q", "k", "v"], "fused": ["weight"]},
    "output gate": {
        "split": ["q", "gate", "kv"],
        "heads": ["q", "gate", "k", "v"],
        "fused": ["weight"],
    },
}
"""With an alignment of 4 and blocks of 64: keys of 32 rows have blocks of 8, those of 256 rows blocks of 64 anyway."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("qkv", ["split", "heads", "fused"])
@pytest.mark.parametrize("name", list(MODELS))
def test_parts_are_the_logical_matrices(name: str, qkv: str, size: int) -> None:
    model, settings = Model(**MODELS[name]), ShampooConfig(block_size=64, qkv=qkv, tp_alignment=4)  # type: ignore[arg-type]
    routes = model.routes(settings, size)
    assert [part.name for part in routes["linear_qkv"].parts] == QKV_PARTS[name][qkv]
    for short, route in routes.items():
        for part in route.parts:
            assert part.global_shape == model.expected(short, part.name).shape
    found = assembled(model, settings, size)
    assert {key for key in found if key[0] == "linear_qkv"} == {("linear_qkv", part) for part in QKV_PARTS[name][qkv]}
    for key, whole in found.items():
        np.testing.assert_array_equal(whole, model.expected(*key), err_msg=str(key))


@pytest.mark.parametrize("method", ["shampoo", "one-sided"])
@pytest.mark.parametrize("block_size", [5, 16, 64])
@pytest.mark.parametrize("qkv", ["split", "heads", "fused"])
@pytest.mark.parametrize("name", list(MODELS))
def test_blocks_factors_and_turns_are_the_same_at_every_tensor_parallel_size(
    name: str, qkv: str, block_size: int, method: str
) -> None:
    model = Model(**MODELS[name])  # type: ignore[arg-type]
    settings = ShampooConfig(method=method, block_size=block_size, qkv=qkv, tp_alignment=4)  # type: ignore[arg-type]
    one, *others = (grid(model, settings, size) for size in SIZES)
    assert len(one) > 4
    for other in others:
        assert {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)} == set()


@pytest.mark.parametrize("block_size", [3, 8, 64])
@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_heads_end_where_heads_do(size: int, block_size: int) -> None:
    model = Model(heads=8, groups=4, head=8, output_gate=True)
    settings = ShampooConfig(block_size=block_size, qkv="heads", tp_alignment=4)  # type: ignore[arg-type]
    rows = [
        (place[0], place[0] + len(held) - 1)
        for parameter, _, place, held, _, _ in grid(model, settings, size).values()
        if parameter == QKV
    ]
    assert all(first // 8 == last // 8 for first, last in rows)
    assert {first for first, _ in rows} >= {8 * head for head in range(8)}


@pytest.mark.parametrize("qkv", ["split", "heads", "fused"])
def test_other_parameters_do_not_look_at_the_setting(qkv: str) -> None:
    model = Model(gated=True)
    usual, chosen = (model.routes(ShampooConfig(qkv=it, block_size=16)) for it in ("split", qkv))  # type: ignore[arg-type]
    for name in ("linear_proj", "linear_fc1", "linear_fc2"):
        assert chosen[name].parts == usual[name].parts


# -- whether keys and values stay together


def cost(shape: tuple[int, int], settings: ShampooConfig, products: float) -> float:
    """Multiply-adds per step of a matrix with two factors, as the cost model of docs/optimizer.md has them."""
    pieces = [
        [length * (i + 1) // count - length * i // count for i in range(count)]
        for length in shape
        for count in [-(-length // settings.block_size)]
    ]
    return sum(
        products * m * n * (m + n) + 10 * (m**3 + n**3) / settings.refresh_interval
        for m, n in itertools.product(*pieces)
    )


@pytest.mark.parametrize(("method", "products"), [("shampoo", 2.0), ("soap", 4.0), ("kl-shampoo", 5.0)])
@pytest.mark.parametrize("interval", [1, 10, 1000])
def test_keys_and_values_stay_together_where_the_cost_model_says_so(
    method: str, products: float, interval: int
) -> None:
    decisions = set()
    for hidden, head, groups, block_size in itertools.product((24, 64, 96), (2, 8, 24), (1, 2, 4), (16, 32, 128)):
        model = Model(hidden, 4, groups, head, ffn=8)
        settings = ShampooConfig(method=method, block_size=block_size, refresh_interval=interval)  # type: ignore[arg-type]
        rows = groups * head
        together = cost((2 * rows, hidden), settings, products) < 2 * cost((rows, hidden), settings, products)
        parts = [part.name for part in model.routes(settings)["linear_qkv"].parts]
        assert parts == (["q", "kv"] if together else ["q", "k", "v"]), (hidden, head, groups, block_size)
        decisions.add(together)
    assert decisions == {True, False}


@pytest.mark.parametrize("alignment", [4, 8])
def test_the_decision_is_the_same_at_every_tensor_parallel_size(alignment: int) -> None:
    decisions = set()
    for hidden, head, groups, block_size in itertools.product((32, 96), (2, 8, 24), (4, 8), (16, 32, 128)):
        model = Model(hidden, 8, groups, head, ffn=16)
        settings = ShampooConfig(block_size=block_size, tp_alignment=alignment)
        routes = [model.routes(settings, size)["linear_qkv"] for size in SIZES]
        names = [[part.name for part in route.parts] for route in routes]
        assert names[0] == names[1] == names[2]
        decisions.add(len(names[0]))
    assert decisions == {2, 3}


def test_keys_and_values_do_not_lose_a_factor_by_staying_together() -> None:
    # 32 + 32 rows: longer than 48 together, not alone. Without a left factor they would be cheaper, and worse.
    route = Model(hidden=40, heads=4, groups=4, head=8).routes(ShampooConfig(max_dim=48))["linear_qkv"]
    assert [(part.name, part.sides) for part in route.parts] == [(name, (True, True)) for name in "qkv"]
    # 8 + 8 rows: cheaper together, as long as the width has a factor too.
    model = Model(hidden=40, heads=4, groups=4, head=2)
    for max_dim, names in ((None, ["q", "kv"]), (40, ["q", "kv"]), (39, ["q", "k", "v"]), (8, ["q", "k", "v"])):
        parts = model.routes(ShampooConfig(max_dim=max_dim))["linear_qkv"].parts
        assert [part.name for part in parts] == names
        assert all(part.sides[0] for part in parts)


# -- sides


SIDES = {
    # proj 64 x 48, fc1 256 x 64, fc2 64 x 256, q 48 x 64, k and v 24 x 64
    "both": ({"method": "shampoo"}, {"linear_proj": "LR", "linear_fc1": "LR", "linear_fc2": "LR", "q": "LR"}),
    "left": ({"side": "left"}, {"linear_proj": "L", "linear_fc1": "L", "linear_fc2": "L", "q": "L"}),
    "right": ({"side": "right"}, {"linear_proj": "R", "linear_fc1": "R", "linear_fc2": "R", "q": "R"}),
    "smaller": (
        {"method": "one-sided"},
        {"linear_proj": "R", "linear_fc1": "R", "linear_fc2": "L", "q": "L"},
    ),
    "no side above 64": ({"max_dim": 64}, {"linear_proj": "LR", "linear_fc1": "R", "linear_fc2": "L", "q": "LR"}),
    "no side above 63": ({"max_dim": 63}, {"linear_proj": "R", "linear_fc1": "", "linear_fc2": "", "q": "L"}),
    "no side above 47": ({"max_dim": 47}, {"linear_proj": "", "linear_fc1": "", "linear_fc2": "", "q": ""}),
    "none at all": ({"max_dim": 0}, {"linear_proj": "", "linear_fc1": "", "linear_fc2": "", "q": ""}),
    "smaller, and none above 63": (
        {"method": "one-sided", "max_dim": 63},
        {"linear_proj": "R", "linear_fc1": "", "linear_fc2": "", "q": "L"},
    ),
    "smaller is too long": (
        {"side": "left", "max_dim": 63},
        {"linear_proj": "", "linear_fc1": "", "linear_fc2": "", "q": "L"},
    ),
    "soap above 64": (
        {"method": "soap", "max_dim": 64},
        {"linear_proj": "LR", "linear_fc1": "R", "linear_fc2": "L", "q": "LR"},
    ),
    "kl needs both": (
        {"method": "kl-soap", "max_dim": 64},
        {"linear_proj": "LR", "linear_fc1": "", "linear_fc2": "", "q": "LR"},
    ),
}


@pytest.mark.parametrize("case", list(SIDES))
def test_sides_are_those_of_the_logical_matrix_at_every_tensor_parallel_size(case: str) -> None:
    # At TP 4 a rank has 64 x 64 of fc1, 64 x 12 of the projection and 12 x 64 of the queries.
    given, expected = SIDES[case]
    model = Model(hidden=64, heads=4, groups=4, head=12, ffn=256)
    settings = ShampooConfig(tp_alignment=4, **given)  # type: ignore[arg-type]
    for size in SIZES:
        routes = model.routes(settings, size, rank=size - 1)
        found = {name: sides_of(route, "weight") for name, route in routes.items()}
        found["q"] = sides_of(routes["linear_qkv"], "q")
        assert {name: found[name] for name in expected} == expected
        for name, route in routes.items():
            reason = f"a side above --shampoo-max-dim {given.get('max_dim')}"
            assert route.reason == ("" if expected.get(name, expected["q"]) else reason)
            assert route.is_preconditioned == (route.reason == "")


def sides_of(route: Route, name: str) -> str:
    """Letters of the factors of a part."""
    part = next((part for part in route.parts if part.name == name), None)
    return "".join(letter for letter, has in zip("LR", part.sides, strict=True) if has) if part else ""


def test_of_two_equal_sides_the_left_one_is_the_smaller() -> None:
    model = Model(hidden=64, heads=8, groups=4, head=8)
    settings = ShampooConfig(method="one-sided", tp_alignment=4)  # type: ignore[arg-type]
    for size in SIZES:
        assert sides_of(model.routes(settings, size)["linear_proj"], "weight") == "L"


def test_a_projection_with_a_part_that_has_no_factor_takes_adamw_as_a_whole() -> None:
    # Queries of 64 x 40 have none, keys and values of 16 x 40 would have one.
    model = Model(hidden=40, heads=16, groups=4, head=4)
    route = model.routes(ShampooConfig(max_dim=32, qkv="heads"))["linear_qkv"]  # type: ignore[arg-type]
    assert not route.is_preconditioned
    assert route.reason == "a side above --shampoo-max-dim 32"


# -- what is refused


def test_query_groups_that_ranks_do_not_divide_are_refused_by_name() -> None:
    model = Model(groups=4)
    model.config.num_query_groups = 3
    with pytest.raises(NotImplementedError, match=rf"{QKV}: 3 query groups on 2 .* use --shampoo-qkv fused"):
        model.routes(ShampooConfig(), size=2)
    assert model.routes(ShampooConfig(qkv="fused"), size=2)["linear_qkv"].is_preconditioned  # type: ignore[arg-type]


@pytest.mark.parametrize("qkv", ["split", "heads"])
def test_rows_that_are_not_queries_keys_and_values_are_refused_by_name(qkv: str) -> None:
    model = Model(heads=8, groups=4, head=8)
    model.config.kv_channels = 16
    with pytest.raises(NotImplementedError, match=rf"{QKV}: 128 rows are not those of"):
        model.routes(ShampooConfig(qkv=qkv))  # type: ignore[arg-type]


# -- the report


def report_of(model: Model, settings: ShampooConfig, size: int = 1) -> dict[str, str]:
    """Route and parts of each parameter, as the report has them; and the lines below them."""
    routes = model.routes(settings, size)
    plan = planned(routes, settings, size)
    chosen = [route for route in routes.values() if route.is_preconditioned]
    weights = [route.parameter for route in chosen]
    placement = Placement(
        parameters=plan.parameters,
        shards=tuple(weights),
        group=None,
        tp_alignment=settings.tp_alignment or size,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    optimizer = Shampoo([{"params": weights}], config=settings, placement=placement)
    lines = [report._line(route, [optimizer]) for route in routes.values()]
    share = report._Share(lines=lines, cut=0, travelling=0, num_blocks=len(plan.blocks), sent_bytes=0, balance=1.0)
    text = report._text([share], [optimizer])
    found = {name: next(line for line in text.splitlines() if name in line) for name in routes}
    found["rest"] = text[text.index("  preconditioned:") :]
    return found


def test_the_report_names_parts_blocks_and_sides() -> None:
    model = Model(hidden=64, heads=4, groups=4, head=12, ffn=256)
    lines = report_of(model, ShampooConfig(max_dim=64, block_size=32, tp_alignment=4), size=2)
    assert lines["linear_proj"].endswith("1 x 64x24        Shampoo: weight 64x48 in 2x4 blocks of 32x12")
    assert lines["linear_fc1"].endswith("Shampoo: weight 256x64 in 8x2 blocks of 32x32 (right factor alone)")
    assert lines["linear_fc2"].endswith("Shampoo: weight 64x256 in 2x8 blocks of 32x32 (left factor alone)")
    assert lines["linear_qkv"].endswith(
        "Shampoo: q 48x64 in 4x2 blocks of 12x32, k 48x64 in 4x2 blocks of 12x32, v 48x64 in 4x2 blocks of 12x32"
    )


def test_the_report_counts_factors_and_names_the_method() -> None:
    model = Model(hidden=64, heads=8, groups=8, head=8, ffn=256)
    both = report_of(model, ShampooConfig(block_size=64))["rest"]
    # q, k, v and the projection are 64 x 64, fc1 and fc2 four such blocks: 12 blocks, two factors each.
    assert "12 blocks" in both and "factors: 24, about 2.4 refreshed per step (every 10 steps, by turns)" in both
    assert "method: shampoo with grafting adam; solver " in both
    one = report_of(model, ShampooConfig(method="one-sided", block_size=64))["rest"]  # type: ignore[arg-type]
    assert "12 blocks" in one and "factors: 12, about 1.2 refreshed per step" in one
    soap = report_of(model, ShampooConfig(method="soap", solver="qr", max_dim=64, block_size=64))["rest"]  # type: ignore[arg-type]
    assert "factors: 16," in soap
    assert "method: soap with grafting none, update RMS at most 2; solver qr" in soap


def test_the_report_says_why_a_matrix_takes_adamw() -> None:
    lines: dict[str, Any] = report_of(
        Model(hidden=64, heads=4, groups=4, head=12, ffn=256), ShampooConfig(max_dim=63, block_size=64)
    )
    assert lines["linear_fc1"].endswith("AdamW (a side above --shampoo-max-dim 63)")
    assert lines["linear_proj"].endswith("Shampoo: weight 64x48 in 1x1 blocks of 64x48 (right factor alone)")
