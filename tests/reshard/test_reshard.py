"""A checkpoint moves: whatever layout saved it, every layout continues the run.

`make reshard` tries every pair and prints a table; `make test` tries those that are marked quick.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import Launcher
from tests.reshard.cases import PAIRS, SAVED, Pair
from tests.reshard.runs import Saved, differing, tensors_in
from tests.tiny import Layout

TOLERANCES = {"loss": 1e-5, "parameter": 1e-4}
"""Relative, between two layouts; the same layout continues bit for bit."""
HALF = {"loss": 1e-3, "parameter": 4e-2}
"""Likewise, in bfloat16."""

Runs = Callable[[str, Layout, tuple[str, ...]], Saved]


@pytest.fixture(scope="module")
def saved(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Unbroken runs, each made when it is first asked for."""
    made: dict[str, Saved] = {}

    def run(model: str, layout: Layout, flags: tuple[str, ...] = ()) -> Saved:
        key = repr((model, layout, flags))
        if key not in made:
            made[key] = Saved(launcher, tmp_path_factory.mktemp("saved"), model, layout, flags)
        return made[key]

    return run


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Pair:
    """The pair; only quick ones without `--all-pairs`."""
    found: Pair = request.param
    if not found.quick and not request.config.getoption("all_pairs"):
        pytest.skip("runs in `make reshard`")
    return found


# Pairs from one checkpoint run on one worker, which makes the checkpoint once.
@pytest.mark.parametrize(
    "pair",
    [pytest.param(it, id=str(it), marks=pytest.mark.xdist_group(f"{it.group}: {it.saved}")) for it in PAIRS],
    indirect=True,
)
def test_a_run_continues_on_another_layout(
    saved: Runs, pair: Pair, record_property: Callable[[str, object], None]
) -> None:
    run = saved(pair.model, pair.saved, pair.flags)
    resumed = run.resume(pair.loaded).check()
    worst = run.worst(resumed)
    record_property("pair", [pair.group, str(pair.saved), str(pair.loaded), worst["loss"], worst["parameter"]])
    bounds = HALF if "--bf16" in pair.flags else TOLERANCES
    if pair.saved == pair.loaded:
        bounds = dict.fromkeys(bounds, 0.0)
    assert all(worst[name] <= bounds[name] for name in bounds), worst


@pytest.mark.parametrize(
    ("model", "layout", "other"),
    [
        ("Llama", Layout(tp=2, dp=2, sp=True), Layout(pp=2, vpp=2)),
        ("GPT", Layout(dp=3), Layout(tp=4)),
        ("MoE", Layout(dp=2, ep=2), Layout(tp=2, sp=True)),
    ],
    ids=str,
)
def test_what_is_loaded_is_what_was_saved(
    saved: Runs, tmp_path: Path, model: str, layout: Layout, other: Layout
) -> None:
    """Loaded elsewhere and saved again without a step: every tensor is bit for bit the same."""
    run = saved(model, layout, ())
    again = ("--train-iters", SAVED, "--save", tmp_path, "--save-interval", "1000", "--override-opt-param-scheduler")
    assert run.resume(other, *again).check().records[-1]["iterations"] == []
    before, after = (tensors_in(folder / f"iter_{SAVED:07d}") for folder in (run.folder, tmp_path))
    assert sum(key.startswith("optimizer.shampoo.") for key in before) > 20
    assert differing(before, after) == []


def test_blocks_of_unequal_sizes_move_too(launcher: Launcher, tmp_path: Path) -> None:
    """Rows and columns that blocks of 20 do not divide: chunks are padded in the checkpoint."""
    run = Saved(launcher, tmp_path, "Llama", Layout(dp=2), ("--shampoo-block-size", "20"))
    worst = run.worst(run.resume(Layout(tp=2)).check())
    assert all(worst[name] <= TOLERANCES[name] for name in TOLERANCES), worst


def test_the_alignment_comes_from_the_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    """Saved with the default on two tensor-parallel ranks; one goes on with the same blocks, four would cut them."""
    run = Saved(launcher, tmp_path, "Llama", Layout(tp=2), ())
    at = run.flags.index("--shampoo-tp-alignment")
    run.flags[at : at + 2] = []
    run.unbroken = run.train(Layout(tp=2), "--save", tmp_path, "--save-interval", SAVED).check()
    worst = run.worst(run.resume(Layout()).check())
    assert all(worst[name] <= TOLERANCES[name] for name in TOLERANCES), worst
    refused = run.resume(Layout(tp=4))
    assert all(refused.returncodes)
    assert (
        "--tensor-model-parallel-size 4: the checkpoint's blocks are cut for --shampoo-tp-alignment 2" in refused.output
    )


def test_a_damaged_checkpoint_is_named(launcher: Launcher, tmp_path: Path) -> None:
    """Megatron's `--verify-integrity` covers the factors too; the same flag finds nothing in a sound one."""
    run = Saved(launcher, tmp_path, "Llama", Layout(dp=2), ("--verify-integrity",))
    assert max(run.worst(run.resume(Layout(dp=2)).check()).values()) == 0
    shard = max((tmp_path / f"iter_{SAVED:07d}").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    resumed = run.resume(Layout(dp=2))
    assert all(resumed.returncodes) and shard.name in resumed.output


# -- negative controls: the comparison sees what it is there for


def swap_two_blocks() -> None:
    """The factors of the first two blocks of every stack change places on their way from the checkpoint."""
    from megatron.shampoo.mcore import checkpoint

    original = checkpoint.load_blocks

    def load_blocks(optimizer: Any, loaded: Any) -> None:
        original(optimizer, loaded)
        for state in optimizer.states:
            for side in state.sides:
                for tensor in (side.factor, side.inverse, side.basis):
                    tensor[:2] = tensor[:2].flip(0)

    checkpoint.load_blocks = load_blocks


def test_swapped_factors_are_seen(saved: Runs) -> None:
    run = saved("Llama", Layout(dp=2), ())
    worst = run.worst(run.resume(Layout(tp=2), setup=f"{__name__}:swap_two_blocks").check())
    assert worst["loss"] > 10 * TOLERANCES["loss"] and worst["parameter"] > 10 * TOLERANCES["parameter"], worst


def test_a_tensor_that_differs_in_one_bit_is_seen(saved: Runs) -> None:
    tensors = tensors_in(saved("Llama", Layout(dp=2), ()).folder / f"iter_{SAVED:07d}")
    other = {key: tensor.clone() for key, tensor in tensors.items()}
    key = next(key for key in tensors if key.endswith("left.factor"))
    other[key].view(torch.int32).view(-1)[3] ^= 1
    assert differing(tensors, other) == [key]
