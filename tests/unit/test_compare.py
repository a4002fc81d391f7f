"""`make compare`: its options, its search for learning rates, its figures, what it keeps, its course with stand-ins."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron.data_tools.errors import DataError
from megatron.data_tools.prepare import PrepareOptions, prepare
from megatron.experiments import compare_records
from megatron.experiments.compare_contenders import CONTENDERS, Run, Settings
from megatron.experiments.compare_data import Corpus, held_out_shares, load_corpus
from megatron.experiments.compare_figure import mean_curve
from megatron.experiments.compare_jobs import Jobs
from megatron.experiments.compare_measures import Sample, Summary, first_at, loss_at, summarise
from megatron.experiments.compare_records import (
    Measured,
    Outcome,
    Point,
    Record,
    Store,
    measure,
    read_lines,
    write_atomically,
)
from megatron.experiments.compare_report import HEADERS, Report, markdown, notes, rows, run_rows, to_json
from megatron.experiments.compare_search import MAX_EXTENSIONS, explore, needed
from megatron.experiments.compare_session import BusyFolderError, CompareOptions, run_comparison
from tests.data_helpers import EXCERPT
from tests.unit.test_demo_log import log_line
from tools import compare

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "commit": "0123456789abcdef",
    "is_modified": False,
    "sources": "same",
    "versions": {"python": "3.12", "torch": None},
    "hardware": {"processor": "a processor", "cores": 2, "memory_gib": 8.0},
}
CORPUS = Corpus(
    title="a corpus",
    digest="d",
    flags=("--train-data-path", "x"),
    facts={"title": "a corpus", "train_tokens": 1000, "vocabulary": 300, "held_out_tokens": 64},
)


def settings(**given: object) -> Settings:
    defaults: dict[str, object] = {"steps": 4, "eval_interval": 2, "seeds": (1, 2), "grids": {}}
    return Settings(**defaults | given)  # type: ignore[arg-type]


def record(
    run: Run,
    curve: Sequence[tuple[int, float, float]] = (),
    outcome: Outcome = "finished",
    reason: str = "",
    **given: object,
) -> Record:
    points = tuple(Point(*point) for point in curve)
    measured = Measured(
        outcome=outcome,
        reason=reason,
        train=tuple((point.step, point.loss) for point in points),
        train_loss_at_end=points[-1].loss if points else None,
        held_out=points,
        seconds=points[-1].seconds if points else 0.0,
        tokens_per_second=100 * points[-1].step / points[-1].seconds if points else None,
    )
    defaults: dict[str, object] = {
        "command": ("pretrain_gpt.py",),
        "folder": "runs/x",
        "wall_seconds": 1.0,
        "started": "2026-01-01T00:00:00+00:00",
        "load_average": 0.0,
        "environment": ENVIRONMENT,
    }
    return Record(run=run, measured=measured, **defaults | given)  # type: ignore[arg-type]


def run_of(optimizer: str = "adam", rate: float = 1e-3, seed: int = 1) -> Run:
    return Run(optimizer=optimizer, rate=rate, seed=seed)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizers", "adam,adamw"], "unknown optimizer 'adamw': choose from sgd, adam"),
        (["--optimizers", "adam,adam"], "adam is there twice"),
        (["--optimizers", ""], "unknown optimizer ''"),
        (["--grid", "adam"], "write NAME=RATE"),
        (["--grid", "adamw=1e-3"], "unknown optimizer 'adamw'"),
        (["--grid", "adam,sgd=1e-3"], "one optimizer to a grid"),
        (["--grid", "adam="], "'' is not a learning rate above 0"),
        (["--grid", "adam=1e-3,x"], "'x' is not a learning rate above 0"),
        (["--grid", "adam=1e-3,-1e-3"], "'-1e-3' is not a learning rate above 0"),
        (["--grid", "adam=nan"], "'nan' is not a learning rate above 0"),
        (["--grid", "adam=inf"], "'inf' is not a learning rate above 0"),
        (["--grid", "adam=1e-3,0.001"], "0.001 is there twice"),
        (["--optimizers", "sgd", "--grid", "adam=1e-3"], "'adam' is not among --optimizers sgd"),
        (["--grid", "adam=1e-3", "--grid", "adam=1e-2"], "'adam' is there twice"),
        (["--seeds", "1,0"], "'0' is not a seed"),
        (["--seeds", "1,1"], "1 is there twice"),
        (["--steps", "0"], "'0' is not an integer above 0"),
        (["--jobs", "two"], "'two' is not an integer above 0"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        compare.main(options)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


def test_grids_of_the_user_replace_the_default_ones() -> None:
    parser = compare.make_parser()
    args = parser.parse_args(["--optimizers", "sgd,adam", "--grid", "adam=1e-2,1e-3"])
    assert compare.make_grids(parser, args) == {"sgd": CONTENDERS["sgd"].rates, "adam": (1e-3, 1e-2)}


def test_every_contender_has_three_rates_or_more_in_order_and_our_methods_are_all_there() -> None:
    for contender in CONTENDERS.values():
        assert len(contender.rates) >= 3 and list(contender.rates) == sorted(set(contender.rates))
    ours = {contender.flags[-1] for contender in CONTENDERS.values() if contender.is_ours}
    assert ours == {"shampoo", "soap", "kl-soap", "kl-shampoo", "one-sided"}
    others = {contender.flags[1] for contender in CONTENDERS.values() if not contender.is_ours}
    assert others == {"sgd", "adam", "muon", "soap"}


def value_of(command: Sequence[str], flag: str) -> str:
    """The value that counts: the last."""
    return command[len(command) - 1 - list(reversed(command)).index(flag) + 1]


def test_a_command_has_the_rate_and_a_tenth_of_it_at_the_end_and_the_users_flags_last() -> None:
    chosen = settings(shampoo_flags=("--shampoo-block-size", "64"), flags=("--num-layers", "2"))
    command = chosen.command(run_of("shampoo-kl-soap", 3e-3, 7), ["--train-data-path", "x"])
    found = {flag: value_of(command, flag) for flag in ("--lr", "--min-lr", "--seed", "--shampoo-method")}
    assert found == {"--lr": "0.003", "--min-lr": "0.0003", "--seed": "7", "--shampoo-method": "kl-soap"}
    assert command[0] == "pretrain_gpt.py" and command[-2:] == ["--num-layers", "2"]
    assert value_of(command, "--shampoo-block-size") == "64"
    assert "--shampoo-block-size" not in chosen.command(run_of("soap"), [])


# The search for learning rates

Losses = Callable[[float], float | None]


class Ended:
    """A run that has ended, to the search."""

    def __init__(self, final_loss: float | None) -> None:
        self.final_loss = final_loss


def search(grid: Sequence[float], losses: Losses, seeds: Sequence[int] = (1, 2, 3)) -> list[Run]:
    """All runs that a search makes, in order."""
    results: dict[Run, Ended] = {}
    while wanted := needed("adam", grid, seeds, results):
        for run in wanted:
            assert run not in results
            results[run] = Ended(losses(run.rate))
    return list(results)


def rates(runs: Sequence[Run], seed: int = 1) -> list[float]:
    return [run.rate for run in runs if run.seed == seed]


def bowl(best: float) -> Losses:
    return lambda rate: 3 + abs(math.log(rate / best))


def test_the_best_rate_of_the_first_seed_is_run_with_the_other_seeds_alone() -> None:
    runs = search((1e-3, 3e-3, 1e-2), bowl(3e-3))
    assert rates(runs) == [1e-3, 3e-3, 1e-2]
    assert rates(runs, 2) == rates(runs, 3) == [3e-3]


@pytest.mark.parametrize(
    ("grid", "best", "added"),
    [
        ((1e-3, 3e-3, 1e-2), 1.5e-2, [3e-2]),
        ((1e-3, 3e-3, 1e-2), 2e-2, [3e-2, 1e-1]),
        ((1e-3, 3e-3, 1e-2), 2e-3, []),
        ((1e-3, 3e-3, 1e-2), 6e-4, [3e-4]),
        ((1e-3, 3e-3, 1e-2), 1e3, [3e-2, 1e-1]),
        ((1e-3, 3e-3, 1e-2), 1e-9, [3e-4, 1e-4]),
        ((1e-3, 2e-3, 4e-3), 1e3, [8e-3, 1.6e-2]),
        ((1e-3, 1e-2), 1e3, [1e-1, 1.0]),
        ((1e-3,), 1e3, []),
    ],
)
def test_a_grid_grows_towards_a_best_end_by_its_own_pattern_twice_at_most(
    grid: tuple[float, ...], best: float, added: list[float]
) -> None:
    assert rates(search(grid, bowl(best)))[len(grid) :] == pytest.approx(added)
    assert len(added) <= MAX_EXTENSIONS


def test_a_best_rate_at_an_end_after_all_extensions_is_marked() -> None:
    def exploration(best: float, grid: tuple[float, ...]) -> bool:
        results = {run: Ended(bowl(best)(run.rate)) for run in search(grid, bowl(best))}
        return explore("adam", grid, 1, results).is_at_end

    assert exploration(1e3, (1e-3, 3e-3, 1e-2))
    assert not exploration(2e-2, (1e-3, 3e-3, 1e-2))
    assert not exploration(3e-3, (1e-3, 3e-3, 1e-2))
    assert not exploration(1e3, (1e-3,))


def test_a_rate_that_diverges_is_not_chosen_and_ends_the_growth() -> None:
    runs = search((1e-3, 3e-3, 1e-2), lambda rate: None if rate > 1e-2 else -rate)
    assert rates(runs) == pytest.approx([1e-3, 3e-3, 1e-2, 3e-2])
    assert rates(runs, 2) == [1e-2]


def test_if_all_rates_diverge_there_is_nothing_more_to_run() -> None:
    runs = search((1e-3, 3e-3, 1e-2), lambda rate: None)
    assert len(runs) == 3


def test_the_search_waits_for_all_rates_of_the_grid() -> None:
    results = {run_of(rate=1e-3): Ended(3.0), run_of(rate=1e-2): Ended(2.0)}
    assert needed("adam", (1e-3, 3e-3, 1e-2), (1, 2), results) == (run_of(rate=3e-3),)


# Logs


def evaluation(step: int, loss: float | str, where: str = "", number: str = "-0") -> str:
    return f" validation{number} loss at iteration {step}{where} | lm loss value: {loss} | lm loss PPL: 9 | \n"


def test_evaluations_between_steps_and_at_the_end_are_read_and_no_others() -> None:
    training, evaluations = read_lines(
        [
            "  seq_length ...................................... 16\n",
            log_line(1, 6.9),
            log_line(2, 6.5),
            evaluation(2, "6.400000E+00"),
            "Evaluating iter 926/926\n",
            evaluation(3, "6.2E+00", number=""),
            evaluation(4, "6.1E+00", " on validation set"),
            evaluation(5, "1.0E+00", " on test set"),
            evaluation(6, "1.0E+00", number="-1"),
        ]
    )
    assert evaluations == {2: 6.4, 3: 6.2, 4: 6.1}
    assert [line.number for line in training.iterations] == [1, 2]


def measured(tmp_path: Path, lines: Sequence[str], status: int = 0, steps: int = 2) -> Measured:
    log = tmp_path / "train.log"
    log.write_text("".join(["  seq_length ...................................... 16\n", *lines]))
    return measure(log, status, steps)


STEPS = [log_line(1, 6.9, 3000.0), log_line(2, 6.5, 1000.0)]


def test_a_finished_run_has_curves_with_steps_and_seconds_of_training(tmp_path: Path) -> None:
    found = measured(tmp_path, [STEPS[0], evaluation(1, 6.6), STEPS[1], evaluation(2, 6.4)])
    assert found == Measured(
        outcome="finished",
        train=((1, 6.9), (2, 6.5)),
        train_loss_at_end=6.5,
        held_out=(Point(1, 3.0, 6.6), Point(2, 4.0, 6.4)),
        seconds=4.0,
        tokens_per_second=2 * 32 * 16 / 4,
    )


NAN = "[rank0]: RuntimeError: Rank 0, iteration 3: Unexpected result nan (message='found NaN in local forward loss')\n"


@pytest.mark.parametrize(
    ("lines", "status", "outcome", "reason"),
    [
        ([*STEPS, NAN], 1, "diverged", "a loss or gradient was not finite after 2 steps"),
        ([*STEPS, "[rank0]: TypeError: it broke\n"], 1, "failed", "status 1: TypeError: it broke"),
        (["pretrain_gpt.py: error: --lr: no\n"], 2, "failed", "status 2: pretrain_gpt.py: error: --lr: no"),
        ([*STEPS, evaluation(2, 6.4)], -9, "failed", "ended by signal 9"),
        (STEPS, 0, "failed", "the log ends at step 2 of 2, with no evaluation after it"),
        ([STEPS[0], evaluation(2, 6.4)], 0, "failed", "the log ends at step 1 of 2, with an evaluation after it"),
        ([*STEPS, evaluation(2, "nan")], 0, "diverged", "the held-out loss at the end is not finite"),
        ([*STEPS, evaluation(2, 7.8)], 0, "diverged", "held-out loss 7.800 at the end, training loss 6.900 at the"),
        ([*STEPS, evaluation(2, 7.5)], 0, "finished", ""),
    ],
)
def test_how_a_run_ended_is_told_from_its_status_and_log(
    tmp_path: Path, lines: list[str], status: int, outcome: str, reason: str
) -> None:
    found = measured(tmp_path, lines, status)
    assert found.outcome == outcome
    assert found.reason.startswith(reason) and bool(found.reason) == bool(reason)


# Figures

CURVE = [Point(10, 1.0, 6.0), Point(20, 3.0, 5.0), Point(30, 4.0, 4.0)]


def test_the_place_of_a_loss_is_interpolated_in_steps_and_in_seconds() -> None:
    assert first_at(CURVE, 5.5, "step") == pytest.approx(15.0)
    assert first_at(CURVE, 5.5, "seconds") == pytest.approx(2.0)
    assert first_at(CURVE, 4.0, "step") == pytest.approx(30.0)
    assert first_at(CURVE, 4.25, "seconds") == pytest.approx(3.75)


def test_a_loss_that_is_never_reached_has_no_place() -> None:
    assert first_at(CURVE, 3.999, "step") is None
    assert first_at([], 3.0, "step") is None


def test_a_loss_that_is_there_at_the_first_evaluation_has_its_place() -> None:
    assert first_at(CURVE, 6.5, "step") == 10.0


def test_the_first_of_several_places_counts() -> None:
    bumpy = [Point(0, 0.0, 6.0), Point(10, 1.0, 4.0), Point(20, 2.0, 7.0), Point(30, 3.0, 3.0)]
    assert first_at(bumpy, 5.0, "step") == pytest.approx(5.0)


def test_the_loss_at_a_time_is_interpolated_unknown_before_the_curve_and_the_last_after_it() -> None:
    assert loss_at(CURVE, 2.0) == pytest.approx(5.5)
    assert loss_at(CURVE, 4.0) == pytest.approx(4.0)
    assert loss_at(CURVE, 0.5) is None
    assert loss_at(CURVE, 100.0) == 4.0
    assert loss_at([], 1.0) is None


def test_a_sample_is_a_mean_and_half_its_range_over_what_exists() -> None:
    assert (Sample((1.0, 4.0, None)).mean, Sample((1.0, 4.0, None)).half_range) == (2.5, 1.5)
    assert (Sample((1.0,)).mean, Sample((1.0,)).half_range) == (1.0, None)
    assert (Sample((None,)).mean, Sample(()).mean) == (None, None)


def comparison(**given: object) -> tuple[list[Summary], Settings]:
    """AdamW and Shampoo with two seeds, an SGD that diverges; Shampoo reaches AdamW's loss with one seed of two."""
    chosen = settings(
        **{"grids": {"adam": (1e-3, 3e-3), "shampoo": (1e-3,), "sgd": (1.0, 3.0)}, "steps": 30, **given},
    )
    adam, slow = [(10, 10.0, 6.0), (20, 20.0, 5.0), (30, 30.0, 4.0)], [(10, 10.0, 6.0), (30, 30.0, 4.5)]
    good = [(10, 20.0, 5.0), (20, 40.0, 3.0), (30, 60.0, 2.0)]
    bad = [(10, 20.0, 5.0), (20, 40.0, 4.6), (30, 60.0, 4.2)]
    records = [
        record(run_of(rate=1e-3), slow),
        record(run_of(rate=3e-3), adam),
        record(run_of(rate=9e-3), slow),
        record(run_of(rate=3e-3, seed=2), adam),
        record(run_of("shampoo"), good),
        record(run_of("shampoo", seed=2), bad),
        record(run_of("sgd", 1.0), outcome="diverged", reason="a loss was not finite | badly"),
        record(run_of("sgd", 3.0), outcome="failed", reason="status 1: out of memory"),
    ]
    return summarise(["sgd", "adam", "shampoo"], chosen, {one.run: one for one in records}), chosen


def test_contenders_are_measured_against_adamw_seed_by_seed() -> None:
    summaries, _ = comparison()
    shampoo, adam, sgd = summaries
    assert (shampoo.name, adam.name, sgd.name) == ("shampoo", "adam", "sgd")
    assert (adam.rate, adam.is_at_end) == (3e-3, False)
    assert shampoo.held_out == Sample((2.0, 4.2))
    # AdamW ends at 4.0 after 30 steps and 30 s. Shampoo is there at step 15 and 30 s with a seed, never with the other.
    assert shampoo.steps_to_reference.values == (pytest.approx(0.5), None)
    assert shampoo.seconds_to_reference.values == (pytest.approx(1.0), None)
    assert shampoo.at_reference_seconds.values == (pytest.approx(4.0), pytest.approx(4.8))
    assert shampoo.speed.values == (pytest.approx(0.5), pytest.approx(0.5))
    assert adam.steps_to_reference.mean == adam.seconds_to_reference.mean == adam.speed.mean == 1.0
    assert sgd.rate is None and sgd.held_out.mean is None and len(sgd.losers) == 2


def test_without_adamw_nothing_is_measured_against_it() -> None:
    chosen = settings(grids={"sgd": (1.0,)})
    records = {run: record(run, [(10, 1.0, 5.0)]) for run in (run_of("sgd", 1.0, 1), run_of("sgd", 1.0, 2))}
    (sgd,) = summarise(["sgd"], chosen, records)
    assert sgd.speed.mean is None and sgd.steps_to_reference.mean is None and sgd.held_out.mean == 5.0
    row = dict(zip(HEADERS, rows([sgd], 2)[0], strict=True))
    assert row["steps to AdamW's loss"] == "" and row["held-out loss"] == "5.000 ± 0.000"


def report(**given: object) -> Report:
    summaries, chosen = comparison(**given)
    return Report(
        summaries=summaries,
        settings=chosen,
        corpus=CORPUS.facts,
        environment=ENVIRONMENT,
        command=["python", "tools/compare.py"],
    )


def test_the_table_has_a_row_for_a_contender_that_diverged_with_the_reason() -> None:
    cells = rows(report().summaries, 2)
    by_name = {line[0]: dict(zip(HEADERS, line, strict=True)) for line in cells}
    assert by_name["SGD"]["held-out loss"] == "none" and by_name["SGD"]["seeds"] == "0 of 2"
    remarks = by_name["SGD"]["remarks"]
    assert "no run of the grid 1 to 3 came to its end" in remarks
    assert "lr 1 seed 1 diverged: a loss was not finite" in remarks
    assert "lr 3 seed 1 failed: status 1: out of memory" in remarks
    assert by_name["AdamW"]["learning rate"] == "0.003"
    assert by_name["Shampoo"]["held-out loss"] == "3.100 ± 1.100"
    assert by_name["Shampoo"]["steps to AdamW's loss"] == "0.50 (not reached by 1)"
    assert by_name["Shampoo"]["remarks"] == "one rate, not tuned"


def test_no_run_is_left_out_of_the_table_of_runs() -> None:
    cells = run_rows(report().records)
    assert len(cells) == 8
    assert [line[:3] for line in cells if line[0] == "AdamW"] == [
        ("AdamW", "0.001", "1"), ("AdamW", "0.003", "1"), ("AdamW", "0.003", "2"), ("AdamW", "0.009", "1"),
    ]  # fmt: skip
    assert [line[-1] for line in cells if line[0] == "SGD"] == [
        "diverged: a loss was not finite | badly",
        "failed: status 1: out of memory",
    ]


def test_a_best_rate_at_an_end_of_the_grid_is_marked_in_the_table() -> None:
    chosen = settings(grids={"adam": (1e-3, 3e-3)}, seeds=(1,))
    falling = {rate: [(10, 1.0, 5 - math.log(rate))] for rate in (1e-3, 3e-3, 9e-3, 2.7e-2)}
    records = {run_of(rate=rate): record(run_of(rate=rate), curve) for rate, curve in falling.items()}
    row = dict(zip(HEADERS, rows(summarise(["adam"], chosen, records), 1)[0], strict=True))
    assert row["learning rate"] == "0.027 (!)"
    assert "(!) the best rate is an end of the grid 0.001 to 0.027" in row["remarks"]


def test_markdown_rows_have_as_many_cells_as_the_head() -> None:
    tables = [line for line in markdown(report()).splitlines() if line.startswith("| ")]
    widths = [line.replace("\\|", "").count("|") for line in tables]
    assert widths[:5] == [len(HEADERS) + 1] * 5
    assert len(set(widths[5:])) == 1 and len(widths) == 5 + 2 + 8


def test_the_results_are_plain_json_with_every_run() -> None:
    held = json.loads(json.dumps(to_json(report()), allow_nan=False))
    assert len(held["runs"]) == 8
    by_name = {one["name"]: one for one in held["optimizers"]}
    assert by_name["shampoo"]["steps_to_reference"] == {"values": [0.5, None], "mean": 0.5, "half_range": None}
    assert held["reference_seconds"]["mean"] == 30.0
    assert held["environment"]["commit"] == ENVIRONMENT["commit"]


def test_runs_by_other_sources_or_on_a_busy_machine_are_pointed_out() -> None:
    assert not [line for line in notes(report()) if line.startswith("Warning")]
    whole = report()
    first = whole.summaries[0]
    old = replace(first.runs[0], environment={**ENVIRONMENT, "sources": "old", "commit": "feed"}, load_average=9.0)
    whole = replace(whole, summaries=[replace(first, runs=(old, *first.runs[1:])), *whole.summaries[1:]])
    sources, busy = [line for line in notes(whole) if line.startswith("Warning")]
    assert "1 of 8 runs were made by other sources" in sources and "feed" in sources
    assert "load up to 9.0" in busy


def test_a_mean_curve_has_the_steps_that_all_seeds_have() -> None:
    shampoo, adam, sgd = report().summaries
    assert mean_curve(shampoo)[1] == (20, 40.0, pytest.approx(3.8), 3.0, 4.6)
    assert [point[0] for point in mean_curve(adam)] == [10, 20, 30]
    assert mean_curve(sgd) == []


# What is kept


def test_a_kept_run_is_found_again_as_it_was(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs", settings(), CORPUS)
    kept = record(run_of(), [(10, 1.0, 6.0), (20, 2.5, 5.0)])
    (tmp_path / "log").write_text("the log")
    store.keep(kept, tmp_path / "log")
    assert store.load(run_of()) == kept
    assert store.load(run_of(seed=2)) is None
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["run.json", "train.log"]


def test_a_run_is_another_one_with_other_flags_data_or_conditions(tmp_path: Path) -> None:
    def name(corpus: Corpus = CORPUS, folder: Path = tmp_path, **given: object) -> str:
        return Store(folder, settings(**given), corpus).name(run_of("shampoo"))

    variants = [
        name(), name(steps=5), name(eval_interval=1), name(flags=("--bf16",)), name(shampoo_flags=("--x",)),
        name(jobs=2), name(threads=2), name(replace(CORPUS, digest="e")),
    ]  # fmt: skip
    assert len(set(variants)) == len(variants)
    assert name(folder=tmp_path / "elsewhere") == name(seeds=(1, 5)) == name(replace(CORPUS, title="renamed")) == name()


def test_a_diverged_run_is_reused_and_a_failed_one_tried_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs", settings(), CORPUS)
    for seed, outcome in ((1, "diverged"), (2, "failed")):
        (tmp_path / "log").touch()
        store.keep(record(run_of(seed=seed), outcome=outcome, reason="why"), tmp_path / "log")  # type: ignore[arg-type]
    diverged = store.load(run_of(seed=1))
    assert diverged is not None and diverged.measured.reason == "why"
    assert store.load(run_of(seed=2)) is None


@pytest.mark.parametrize("content", ["", '{"format": 1, "run"', '{"format": 0}'])
def test_a_record_that_is_not_whole_or_of_another_format_is_no_record(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path, settings(), CORPUS)
    folder = tmp_path / store.name(run_of())
    folder.mkdir()
    (folder / "run.json").write_text(content)
    assert store.load(run_of()) is None


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_atomically(path, "old")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_records.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, "new, but only a part of it is on the disk")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# Data


def make_corpus(folder: Path) -> Path:
    """A corpus of 30 documents, two of them held out."""
    texts = "".join(json.dumps({"text": f"{number}: {EXCERPT * 4}"}) + "\n" for number in range(30))
    (folder / "texts.jsonl").write_text(texts)
    options = PrepareOptions(
        corpus="files", output=str(folder / "corpus"), inputs=[str(folder / "texts.jsonl")], vocab_size=320, workers=1
    )
    prepare(options)
    return folder / "corpus"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def test_held_out_text_is_shared_out_evenly_among_documents() -> None:
    assert held_out_shares([5000, 5000, 5000, 5000], 4096) == [1024] * 4
    assert held_out_shares([5000, 100, 5000, 5000], 4096) == [1332, 100, 1332, 1332]
    assert held_out_shares([5000, 5000, 5000], 2048) == [1024, 1024]
    assert held_out_shares([10, 20, 5000], 25) == [10, 15]
    assert sum(held_out_shares([7, 2000, 3, 900, 4000], 3001)) == 3001
    with pytest.raises(DataError, match="--eval-tokens 100: the validation split has 100 tokens"):
        held_out_shares([50, 50], 101)


def test_the_held_out_set_has_the_tokens_asked_for_and_is_cut_once(data: Path) -> None:
    corpus = load_corpus(data, 64)
    prefix = value_of(corpus.flags, "--valid-data-path")
    written = Path(f"{prefix}.bin")
    assert written.stat().st_size == 65 * 2
    assert written.read_bytes() == (data / "valid_text_document.bin").read_bytes()[: 65 * 2]
    before = written.stat().st_mtime_ns
    assert load_corpus(data, 64) == corpus and written.stat().st_mtime_ns == before
    assert value_of(load_corpus(data, 32).flags, "--valid-data-path") != prefix
    assert "--test-data-path" not in corpus.flags


def test_a_moved_corpus_is_found_and_a_changed_one_refused(data: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    subprocess.run(["cp", "-r", data, moved], check=True)
    corpus = load_corpus(moved, 64)
    assert corpus.digest == load_corpus(data, 64).digest
    for flag in ("--train-data-path", "--valid-data-path", "--tokenizer-model"):
        assert Path(value_of(corpus.flags, flag)).is_relative_to(moved)
    with open(moved / "train_text_document.bin", "ab") as stream:
        stream.write(b"xx")
    with pytest.raises(DataError, match=r"train_text_document\.bin is missing or was changed"):
        load_corpus(moved, 64)


# The course, with a stand-in for pretrain_gpt.py

STAND_IN = f"""
import math, os, sys, time
from pathlib import Path

def value(flag):
    return sys.argv[len(sys.argv) - sys.argv[::-1].index(flag)]

lr, steps, every = float(value("--lr")), int(value("--train-iters")), int(value("--eval-interval"))
with open("starts", "a") as starts:
    starts.write(f"{{value('--optimizer')}} {{lr:g}} {{value('--seed')}} {{os.environ['OMP_NUM_THREADS']}}\\n")
if lr > 0.5:
    sys.exit("[rank0]: RuntimeError: Unexpected result nan")
print("  seq_length ...................................... 16")
for step in range(1, steps + 1):
    loss = 7 - step / steps * (2 - abs(math.log10(lr / 3e-3)))
    line = {log_line(1, 0.5, 0.25).rstrip()!r}
    print(line.replace("       1/", f"{{step:8d}}/").replace("5.000000E-01", f"{{loss:E}}"))
    if step == 2 and Path("hold").exists() and f"{{lr:g}}" in Path("hold").read_text().split():
        print(os.getpid(), file=open("holding", "a"), flush=True)
        time.sleep(600)
    if step % every == 0:
        print(f" validation-0 loss at iteration {{step}} | lm loss value: {{loss:E}} | ")
print(f" validation-0 loss at iteration {{steps}} on validation set | lm loss value: {{loss:E}} | ")
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose training script is the stand-in."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "pretrain_gpt.py").write_text(STAND_IN)
    monkeypatch.chdir(tmp_path)  # a comparison changes the folder; this one comes back
    return root


def options(
    checkout: Path, data: Path, optimizers: tuple[str, ...] = ("adam", "sgd"), **given: object
) -> CompareOptions:
    grids = {"adam": (1e-3, 3e-3, 1e-2), "sgd": (1.0, 3.0)}
    return CompareOptions(
        root=checkout,
        optimizers=optimizers,
        settings=settings(**{"grids": {name: grids[name] for name in optimizers}, "jobs": 2, **given}),
        data=str(data),
        eval_tokens=64,
        archive=None,
        out="out",
        command=("python", "tools/compare.py"),
    )


def starts(checkout: Path) -> list[str]:
    """What the stand-in was started for since the last call."""
    path = checkout / "starts"
    lines = sorted(path.read_text().splitlines()) if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


QUIET = Console(quiet=True)
ADAM_STARTS = ["adam 0.001 1 1", "adam 0.003 1 1", "adam 0.003 2 1", "adam 0.01 1 1"]


def test_a_comparison_runs_what_it_needs_once_and_writes_all_files(checkout: Path, data: Path) -> None:
    assert run_comparison(options(checkout, data), QUIET)
    assert starts(checkout) == [*ADAM_STARTS, "sgd 1 1 1", "sgd 3 1 1"]
    out = checkout / "out"
    results = json.loads((out / "results.json").read_text())
    assert [(one["name"], one["rate"]) for one in results["optimizers"]] == [("adam", 3e-3), ("sgd", None)]
    assert results["optimizers"][0]["held_out"]["mean"] == pytest.approx(5.0)
    assert [point[0] for point in results["runs"][0]["measured"]["held_out"]] == [2, 4]
    assert "| SGD | none | none |" in (out / "table.md").read_text()
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "runs").glob("*/train.log"))) == 6
    assert not (out / "running").exists()
    assert run_comparison(options(checkout, data), QUIET)
    assert starts(checkout) == []


def test_another_seed_or_rate_runs_only_what_is_new(checkout: Path, data: Path) -> None:
    run_comparison(options(checkout, data, ("adam",)), QUIET)
    starts(checkout)
    run_comparison(options(checkout, data, ("adam",), seeds=(1, 2, 3)), QUIET)
    assert starts(checkout) == ["adam 0.003 3 1"]
    run_comparison(options(checkout, data, ("adam",), grids={"adam": (3e-4, 1e-3, 3e-3, 1e-2)}), QUIET)
    assert starts(checkout) == ["adam 0.0003 1 1"]


def test_a_comparison_in_which_nothing_finished_says_so(checkout: Path, data: Path) -> None:
    assert not run_comparison(options(checkout, data, ("sgd",)), QUIET)
    assert (checkout / "out" / "curves.png").exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_ends_all_runs_and_the_same_command_goes_on(
    checkout: Path, data: Path, number: signal.Signals
) -> None:
    script = f"import sys, pathlib; sys.path.insert(0, {str(ROOT)!r}); from tools import compare; "
    script += f"compare.ROOT = pathlib.Path({str(checkout)!r}); sys.exit(compare.main(sys.argv[1:]))"
    command = [
        *(sys.executable, "-c", script, "--optimizers", "adam", "--steps", "4", "--jobs", "2", "--seeds", "1,2"),
        *("--grid", "adam=1e-3,3e-3,1e-2", "--data", str(data), "--eval-tokens", "64", "--out", "out"),
    ]
    (checkout / "hold").write_text("0.003 0.01")
    running = subprocess.Popen(command, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert running.stdout is not None
    assert any(line.startswith("ended  adam lr 0.001") for line in running.stdout)
    pids: list[int] = []
    deadline = time.monotonic() + 120
    while len(pids) < 2 and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = (
            [int(line) for line in (checkout / "holding").read_text().split()]
            if (checkout / "holding").exists()
            else []
        )
    assert len(pids) == 2 and all(map(is_running, pids))
    running.send_signal(number)
    printed = running.communicate(timeout=120)[0]
    if number == signal.SIGKILL:  # nothing can be done then; the runs are ended here
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    else:
        assert running.returncode == 130 and "goes on from there" in printed
        assert not any(map(is_running, pids))
        assert not (checkout / "out" / "running").exists()
    (checkout / "hold").unlink()
    starts(checkout)
    assert subprocess.run(command, cwd=checkout, capture_output=True).returncode == 0
    assert starts(checkout) == ADAM_STARTS[1:]


def test_leaving_the_jobs_by_an_exception_ends_them(checkout: Path, tmp_path: Path) -> None:
    (checkout / "hold").write_text("0.001")
    command = settings().command(run_of(), [])
    with (
        pytest.raises(RuntimeError, match="something else"),
        Jobs(checkout, tmp_path / "running", {"OMP_NUM_THREADS": "1"}) as jobs,
    ):
        for seed in (1, 2):
            jobs.start(run_of(seed=seed), str(seed), command)
        pids = [job.process.pid for job in jobs.active]
        assert len(pids) == 2 and all(map(is_running, pids))
        raise RuntimeError("something else")
    assert not any(map(is_running, pids))


def test_two_comparisons_do_not_share_a_folder(checkout: Path, data: Path) -> None:
    import fcntl

    (checkout / "out").mkdir()
    with open(checkout / "out" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyFolderError, match="out: another comparison is writing there"):
            run_comparison(options(checkout, data), QUIET)
    assert starts(checkout) == []
