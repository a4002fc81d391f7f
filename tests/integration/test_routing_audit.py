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


def predicted_roots(num_steps: int) -> int:
    """Two for each block at the first preconditioned step, by turns, and at steps 2, 4, ... of the first interval."""
    return sum(
        2
        for ordinal in range(predicted_blocks())
        for step in range(START, num_steps + 1)
        if step == START or (step + ordinal) % INTERVAL == 0 or (step in (2, 4, 8) and step < INTERVAL)
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


def test_the_report_names_every_route(launcher: Launcher) -> None:
    layout = Layout(tp=2, pp=2)
    result = launcher.run([*tiny_gpt(), *layout.flags, *SHAMPOO, "--train-iters", "1"], world_size=4).check()
    report = result.logs[0].read_text()
    report = report[report.index("----- shampoo") : report.index("----- end of shampoo")]
    assert "embedding.word_embeddings.weight" in report and "AdamW (embedding)" in report
    assert "q 64x64 in 2x2 blocks of 32x32, k 64x64" in report
    assert "decoder.layers.*.mlp.linear_fc2.weight" in report and "  2 x 64x128" in report
    assert f"(one tensor-parallel rank), {predicted_blocks()} blocks" in report
    assert "blocks cut by shard borders: 0 of" in report
    assert report.count("decoder.final_layernorm.weight") == 1
