"""Blocks preconditioned and roots computed are as many as predicted, in every precision and kind of optimizer."""

from __future__ import annotations

import math

import pytest

from tests.launch import Launcher
from tests.tiny import Layout, tiny_gpt, tiny_llama

ITERS, START, INTERVAL, SIDE = 9, 3, 6, 32
SHAMPOO = [
    "--optimizer", "shampoo", "--shampoo-block-size", str(SIDE), "--shampoo-refresh-interval", str(INTERVAL),
    "--shampoo-start-step", str(START),
]  # fmt: skip
LAYERS, HIDDEN = 2, 64
MATRICES = 3 * [(HIDDEN, HIDDEN)] + [(HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN)]
"""Of one layer: q, k, v, projection, fc1, fc2."""


def predicted_blocks() -> int:
    return LAYERS * sum(math.prod(math.ceil(side / SIDE) for side in matrix) for matrix in MATRICES)


def predicted_roots(num_steps: int, sides: int = 2, start: int = START) -> int:
    """One a side for each block at the first preconditioned step, by turns, and at 1, 2, ... of the first interval."""
    return sides * sum(
        step == start or (step + ordinal) % INTERVAL == 0 or (step in (1, 2, 4, 8) and step < INTERVAL)
        for ordinal in range(predicted_blocks())
        for step in range(start, num_steps + 1)
    )


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed optimizer", "replicated"])
@pytest.mark.parametrize("precision", [[], ["--bf16"], ["--fp16", "--initial-loss-scale", "256"]], ids=str)
def test_blocks_and_roots_are_as_predicted(launcher: Launcher, distributed: bool, precision: list[str]) -> None:
    layout = Layout(dp=2, distributed=distributed)
    flags = [*tiny_gpt(iters=ITERS), *layout.flags, *SHAMPOO, *precision]
    result = launcher.run(flags, world_size=2, setup="tests.probes:count").check()
    assert not any(result.records[0]["skipped"])
    figures = [record["setup"]["optimizers"] for record in result.records]
    assert all(len(of_rank) == 1 for of_rank in figures)
    ranks = [next(iter(of_rank.values())) for of_rank in figures]
    assert ranks[0]["blocks"] == ranks[1]["blocks"] == predicted_blocks()
    assert ranks[0]["owned"] + ranks[1]["owned"] == predicted_blocks()
    assert ranks[0]["roots"] + ranks[1]["roots"] == predicted_roots(ITERS)
    assert ranks[0]["parameters"] == [
        f"decoder.layers.{layer}.{name}.weight"
        for layer in range(LAYERS)
        for name in ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    ]


METHODS = {
    "soap": (["--shampoo-method", "soap", "--shampoo-start-step", "1"], 2, 1),
    "soap, grafted": (["--shampoo-method", "soap", "--shampoo-grafting", "adam"], 2, START),
    "kl-soap by qr": (["--shampoo-method", "kl-soap", "--shampoo-solver", "qr", "--shampoo-start-step", "1"], 2, 1),
    "kl-shampoo": (["--shampoo-method", "kl-shampoo", "--shampoo-start-step", "1"], 2, 1),
    "one-sided": (["--shampoo-method", "one-sided"], 1, START),
    "left alone, newton": (["--shampoo-side", "left", "--shampoo-solver", "newton"], 1, START),
}


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_has_the_blocks_and_roots_that_are_predicted(launcher: Launcher, method: str) -> None:
    flags, sides, start = METHODS[method]
    layout = Layout(dp=2)
    args = [*tiny_gpt(iters=ITERS), *layout.flags, *SHAMPOO, *flags]
    result = launcher.run(args, world_size=2, setup="tests.probes:count").check()
    ranks = [next(iter(record["setup"]["optimizers"].values())) for record in result.records]
    assert ranks[0]["blocks"] == ranks[1]["blocks"] == predicted_blocks()
    assert ranks[0]["owned"] + ranks[1]["owned"] == predicted_blocks()
    assert ranks[0]["roots"] + ranks[1]["roots"] == predicted_roots(ITERS, sides, start)
    assert f"  factors: {sides * predicted_blocks()}, about " in result.logs[0].read_text()
    assert result.losses[-1] < result.losses[0]


# Keys and values of 64 x 64, in the alignment's segments 16 x 64: cheaper together where the 64 columns have a factor.
PARTS = [
    ("shampoo", "split", {"q", "kv"}), ("shampoo", "heads", {"q", "k", "v"}), ("shampoo", "fused", {"weight"}),
    ("one-sided", "split", {"q", "k", "v"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "qkv", "parts"), PARTS)
def test_a_fixed_alignment_has_the_same_blocks_at_every_tensor_parallel_size(
    launcher: Launcher, method: str, qkv: str, parts: set[str]
) -> None:
    flags = [*tiny_llama(iters=1, query_groups=4), *SHAMPOO, "--shampoo-tp-alignment", "4", "--shampoo-qkv", qkv]
    flags += ["--shampoo-method", method, "--shampoo-block-size", "64"]
    grids = []
    for size in (1, 2, 4):
        args = [*flags, *Layout(tp=size).flags]
        result = launcher.run(args, world_size=size, setup="tests.probes:count").check()
        grids.append(
            {repr(row) for r in result.records for found in r["setup"]["optimizers"].values() for row in found["grid"]}
        )
    assert grids[0] == grids[1] == grids[2]
    assert {row.split("linear_qkv.weight[")[1].split(" ")[0] for row in grids[0] if "linear_qkv" in row} == parts


MOE = [
    *tiny_llama(iters=3), "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48",
    "--moe-shared-expert-intermediate-size", "32", "--moe-token-dispatcher-type", "allgather",
]  # fmt: skip


def test_experts_have_the_same_blocks_and_turns_wherever_they_are(launcher: Launcher) -> None:
    grids, reports = [], []
    for size in ("1", "2"):
        flags = [*MOE, *Layout(dp=2).flags, *SHAMPOO, "--expert-model-parallel-size", size]
        result = launcher.run(flags, world_size=2, setup="tests.probes:count").check()
        grids.append(
            {repr(row) for r in result.records for found in r["setup"]["optimizers"].values() for row in found["grid"]}
        )
        report = result.logs[0].read_text()
        reports.append(sorted(report[report.index("----- shampoo") : report.index("  blocks cut")].splitlines()))
    assert grids[0] == grids[1]
    assert any("local_experts.3.mlp" in row or "local_experts.3.linear_fc1" in row for row in grids[0])
    assert reports[0] == reports[1]
    assert any("router" in line and "AdamW (router)" in line for line in reports[0])


def test_the_report_names_the_sides_and_what_is_too_long(launcher: Launcher) -> None:
    flags = [*tiny_gpt(iters=1), *Layout(tp=2).flags, *SHAMPOO, "--shampoo-max-dim", "64"]
    result = launcher.run(flags, world_size=2).check()
    report = result.logs[0].read_text()
    report = report[report.index("----- shampoo") : report.index("----- end of shampoo")]
    assert "Shampoo: weight 256x64 in 8x2 blocks of 32x32 (right factor alone)" in report
    assert "Shampoo: weight 64x256 in 2x8 blocks of 32x32 (left factor alone)" in report
    assert "Shampoo: weight 64x64 in 2x2 blocks of 32x32\n" in report
    result = launcher.run([*flags, "--shampoo-max-dim", "63"], world_size=2).check()
    report = result.logs[0].read_text()
    report = report[report.index("----- shampoo") : report.index("----- end of shampoo")]
    assert report.count("AdamW (a side above --shampoo-max-dim 63)") == 4
    assert "  preconditioned: 0 of" in report
    assert len(result.losses) == 1


def test_the_report_names_every_route(launcher: Launcher) -> None:
    layout = Layout(tp=2, pp=2)
    result = launcher.run([*tiny_gpt(), *layout.flags, *SHAMPOO, "--train-iters", "1"], world_size=4).check()
    report = result.logs[0].read_text()
    report = report[report.index("----- shampoo") : report.index("----- end of shampoo")]
    assert "embedding.word_embeddings.weight" in report and "AdamW (embedding)" in report
    assert "q 64x64 in 2x2 blocks of 32x32, k 64x64" in report
    assert "decoder.layers.*.mlp.linear_fc2.weight" in report and "  2 x 64x128" in report
    assert f"(one tensor-parallel rank), {predicted_blocks()} blocks" in report
    assert "blocks cut by shard borders: 0 of" in report and "travel to their owner: 0;" in report
    assert "owners: local" in report
    assert report.count("decoder.final_layernorm.weight") == 1
