"""Training on shards, or on replicas, equals training on one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.shampoo import ShampooConfig
from tests.distributed._helpers import Model, Trainer, assemble, run_ranks, train_alone

STEPS = 10
MODEL = Model(((12, 10), (7,), (10, 12), (9, 5), (4,), (6, 6)))


def config(grafting: str | None = "adam", block_size: int = 4, start_step: int = 1, **settings: Any) -> ShampooConfig:
    return ShampooConfig(
        block_size=block_size,
        refresh_interval=3,
        start_step=start_step,
        grafting=grafting,  # type: ignore[arg-type]
        epsilon=1e-4,
        **settings,
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "soap": {"method": "soap"},
    "soap, qr": {"method": "soap", "solver": "qr", "refresh_tolerance": 0.05},
    "soap on the right": {"method": "soap", "side": "right"},
    "kl-soap": {"method": "kl-soap"},
    "kl-shampoo": {"method": "kl-shampoo"},
    "one-sided": {"method": "one-sided", "grafting": "none"},
    "two square roots": {"root": 2, "grafting": "none"},
    "no long sides": {"max_dim": 10, "grafting": "none"},
    "nesterov": {"nesterov": True, "bias_correction": False, "grafting": "none"},
    "directions averaged": {"momentum_placement": "after", "grafting": "none"},
    "soap, directions averaged": {"method": "soap", "momentum_placement": "after", "nesterov": True},
    "penalty": {"weight_decay_mode": "l2", "grafting": "none"},
    "independent decay": {"weight_decay_mode": "independent", "grafting": "none"},
    "bf16 factors": {"method": "kl-soap", "factor_dtype": "bf16"},
    "bf16": {"grafting": "none", "factor_dtype": "bf16", "root_dtype": "bf16"},
}
"""Ungrafted and unclipped: bit for bit."""
ROUNDED: dict[str, dict[str, Any]] = {
    "adagrad": {"grafting": "adagrad"},
    "rmsprop on one-sided": {"grafting": "rmsprop", "method": "one-sided"},
    "adam on soap": {"grafting": "adam", "method": "soap", "start_step": 3},
    "directions averaged, grafted, late": {"grafting": "adam", "momentum_placement": "after", "start_step": 3},
    "directions averaged, sgd, late": {"grafting": "sgd", "momentum_placement": "after", "start_step": 4},
    "clipped": {"method": "soap", "update_rms_clip": 0.5},
    "newton": {"solver": "newton", "grafting": "none"},
    "newton-db": {"solver": "newton-db", "grafting": "none"},
}
"""With norms of batches in them, which round by the size of the batch: of steps, directions, factors or residuals."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout and settings."""

    num_ranks: int
    config: ShampooConfig
    borders: tuple[int, ...] | None = None
    """Of the shards; None for parameters that every rank holds whole."""
    model: Model = MODEL
    exact: bool = True
    """Bit for bit. Not where blocks are grafted on several ranks: the square norm of a cut block's grafting step is the
    sum of its fragments' square norms, and torch's norm of a batch of blocks rounds by the size of the batch."""


def equal(num_ranks: int, model: Model = MODEL) -> tuple[int, ...]:
    return tuple(model.equal_borders(num_ranks))


def build_cases() -> dict[str, Case]:
    cases = {}
    for num_ranks in (1, 2, 3, 4):
        whole = num_ranks == 1
        for grafting in ("adam", "sgd", "none"):
            exact = whole or grafting == "none"
            cases[f"{grafting}, {num_ranks} equal shards"] = Case(
                num_ranks, config(grafting), equal(num_ranks), exact=exact
            )
            cases[f"{grafting}, {num_ranks} replicas"] = Case(num_ranks, config(grafting), exact=exact)
        cases[f"start step, {num_ranks} equal shards"] = Case(
            num_ranks, config("sgd", start_step=4), equal(num_ranks), exact=whole
        )
        cases[f"start step, {num_ranks} replicas"] = Case(num_ranks, config(start_step=4), exact=whole)
    for name, options in OPTIONS.items():
        exact = config(**{"grafting": None, "update_rms_clip": 0.0, **options})
        cases[f"{name}, 3 equal shards"] = Case(3, exact, equal(3))
        cases[f"{name}, 2 replicas"] = Case(2, exact)
    for name, options in ROUNDED.items():
        rounded = config(**{"grafting": None, **options})
        cases[f"{name}, 3 equal shards"] = Case(3, rounded, equal(3), exact=False)
        cases[f"{name}, 2 replicas"] = Case(2, rounded, exact=False)
    starts, end = MODEL.starts(), MODEL.numel()
    cases["shards between parameters"] = Case(3, config("none"), (0, starts[2], starts[3], end))
    cases["uneven shards"] = Case(4, config("none"), (0, 17, 120, 301, end))
    cases["shard of one element"] = Case(3, config("none"), (0, 55, 56, end))
    cases["first rank holds nothing"] = Case(3, config("none"), (0, 0, 100, end))
    cases["last ranks hold nothing"] = Case(4, config("none"), (0, 140, end, end, end))
    cases["one rank holds padding alone"] = Case(3, config("none"), (0, 120, 123, end))
    cases["one rank holds a vector alone"] = Case(3, config("none"), (0, 123, 130, end))
    one_block = Model(((8, 8),))
    cases["more ranks than blocks, shards"] = Case(4, config("none", 8), equal(4, one_block), one_block)
    cases["more ranks than blocks, shards, grafted"] = Case(
        4, config("adam", 8), equal(4, one_block), one_block, exact=False
    )
    cases["more ranks than blocks, replicas"] = Case(4, config("none", 8), None, one_block)
    # The first matrix, most of the work, lies on rank 0 alone, and ranks 2 and 3 hold vectors and padding.
    large = Model(((16, 16), (7,), (6, 6), (40,), (40,)))
    for number, name in enumerate(("none", "adam", "adam, start step")):
        settings = {"grafting": name.split(",")[0], "start_step": 4 if number == 2 else 1, "ownership": "balanced"}
        cases[f"balanced, {name}"] = Case(
            4, config(**settings), (0, 260, 320, 366, large.numel()), large, exact=number == 0
        )
    cases["balanced, soap"] = Case(
        4, config(None, method="soap", ownership="balanced"), (0, 260, 320, 366, large.numel()), large, exact=False
    )
    no_matrix = Model(((8,), (5,)))
    cases["no matrices"] = Case(2, config(), equal(2, no_matrix), no_matrix)
    return cases


CASES = build_cases()


def train_all() -> dict[str, Any]:
    """On every rank: train all cases in groups of their sizes."""
    groups = {num_ranks: dist.new_group(range(num_ranks)) for num_ranks in (1, 2, 3, 4)}
    found = {}
    for name, case in CASES.items():
        if dist.get_rank() >= case.num_ranks:
            continue
        trainer = Trainer(case.model, case.config, groups[case.num_ranks], case.borders)
        skipped = 0
        for step in range(STEPS):
            trainer.step(step)
            skipped += trainer.optimizer.metrics.skipped
        plan, roots = trainer.optimizer.plan, (trainer.optimizer.num_root_computations, skipped)
        found[name] = (trainer.result(), len(plan.blocks), roots, plan.owners, [it.sides for it in plan.blocks])
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_ranks(train_all, 4)


def close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], exact: bool, name: str) -> None:
    tolerance = 0.0 if exact else 1e-6
    for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            mine,
            theirs,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, index=index: f"{name}, parameter {index}: {text}",
        )


class TestTrainedOnFourProcesses:
    """One world of four processes; cases with fewer ranks run in a group of its first ranks."""

    @pytest.mark.parametrize("name", list(CASES))
    def test_parameters_equal_those_of_one_process(self, trained: list[dict[str, Any]], name: str) -> None:
        case = CASES[name]
        expected = train_alone(case.model, case.config, STEPS)
        results = [trained[rank][name][0] for rank in range(case.num_ranks)]
        if case.borders is None:
            for rank, result in enumerate(results):
                close(assemble(case.model, [result]), expected, case.exact, f"rank {rank}")
        else:
            close(assemble(case.model, results), expected, case.exact, name)

    @pytest.mark.parametrize("name", list(CASES))
    def test_every_root_is_computed_by_one_rank(self, trained: list[dict[str, Any]], name: str) -> None:
        case = CASES[name]
        _, num_blocks, _, owners, sides = trained[0][name]
        interval, start = case.config.refresh_interval, case.config.start_step
        doublings = {step for step in (1, 2, 4, 8) if step < interval}
        steps = [
            sum(
                step == start or (step > start and ((step + block) % interval == 0 or step in doublings))
                for step in range(1, STEPS + 1)
            )
            for block in range(num_blocks)
        ]
        for rank in range(case.num_ranks):
            owned = [steps[block] * sum(sides[block]) for block, owner in enumerate(owners) if owner == rank]
            computed, skipped = trained[rank][name][2]
            assert computed + skipped == sum(owned)
            assert (skipped > 0) <= (case.config.refresh_tolerance > 0)

    def test_cut_blocks_are_covered(self, trained: list[dict[str, Any]]) -> None:
        # The table would prove little if shards fell between blocks, or if one rank owned everything.
        for num_ranks in (2, 3, 4):
            assert set(trained[0][f"adam, {num_ranks} equal shards"][3]) == set(range(num_ranks))
        assert set(trained[0]["more ranks than blocks, shards"][3]) != {0, 1, 2, 3}
        assert set(trained[0]["balanced, adam"][3]) == {0, 1, 2, 3}, "ranks that hold no matrix own blocks"
