"""tools/bench.py: operation counts, statistics, tables, refusals, and a run of the optimizers alone."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron.experiments import bench_session, bench_steps
from megatron.experiments.bench_alone import Participant, check_blocks, make_gradients
from megatron.experiments.bench_floor import floor_of
from megatron.experiments.bench_flops import products, sides
from megatron.experiments.bench_names import METHODS, OPTIMIZERS, blocks, is_cut_evenly, matrices
from megatron.experiments.bench_optimizers import build, state_bytes
from megatron.experiments.bench_report import markdown, tables
from megatron.experiments.bench_session import BenchFailedError, BenchOptions, run_bench
from megatron.experiments.bench_stats import shares, summarize
from megatron.shampoo import Shampoo

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "bench.py"
CPU = torch.device("cpu")


# -- operations


@dataclasses.dataclass
class Tally:
    """Carries out products of shapes, entry by entry, and counts."""

    operations: int = 0

    def product(self, a: tuple[int, int], b: tuple[int, int], symmetric: bool = False) -> tuple[int, int]:
        assert a[1] == b[0]
        entries = sum(1 for _ in range(a[0]) for _ in range(b[1]))
        one_entry = sum(2 for _ in range(a[1]))  # a multiplication and an addition
        self.operations += entries * one_entry // 2 if symmetric else entries * one_entry
        return a[0], b[1]


def count_step(method: str, m: int, n: int, has: tuple[bool, bool], momentum_after: bool, is_refreshed: bool) -> int:
    """One step by the formulas, with shapes in the place of matrices."""
    tally, g, left, right = Tally(), (m, n), (m, m), (n, n)

    def both_sides(x: tuple[int, int]) -> None:
        if has[0]:
            x = tally.product(left, x)
        if has[1]:
            x = tally.product(x, right)
        assert x == g

    if method in ("shampoo", "one-sided", "soap"):
        if has[0]:
            tally.product(g, (n, m), symmetric=True)
        if has[1]:
            tally.product((n, m), g, symmetric=True)
        if method == "soap":
            both_sides(g)  # G into the basis
            if not momentum_after:
                both_sides(g)  # X
        both_sides(g)  # the roots, or back
        return tally.operations
    y = tally.product(g, right)
    tally.product(y, (n, m), symmetric=True)
    x = tally.product(left, g)
    tally.product((n, m), x, symmetric=True)
    if is_refreshed:
        y = tally.product(g, right)
    tally.product(left, y)
    if not momentum_after:
        both_sides(g)
    both_sides(g)
    return tally.operations


@pytest.mark.parametrize("momentum_after", [False, True])
@pytest.mark.parametrize("block", [(2, 2), (4, 6), (7, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_operations_are_those_of_the_formulas(method: str, block: tuple[int, int], momentum_after: bool) -> None:
    for has in [(True, True)] if method.startswith("kl") else [(True, True), (True, False), (False, True)]:
        steps = [count_step(method, *block, has, momentum_after, is_refreshed=step == 0) for step in range(4)]
        counted = products(method, block, has, momentum_after=momentum_after, interval=4)
        assert counted.total == sum(steps) / 4, has


def test_operations_of_a_square_block_by_hand() -> None:
    assert products("shampoo", (10, 10)).total == 6_000
    assert products("one-sided", (10, 10), (True, False)).total == 3_000
    assert products("soap", (10, 10)).total == 2_000 + 3 * 4_000
    assert products("kl-soap", (10, 10), interval=10).total == 6_000 + 2_000 + 200 + 2 * 4_000


def test_unknown_and_impossible_methods_have_no_operations() -> None:
    with pytest.raises(ValueError, match="allowed are shampoo"):
        products("newton", (2, 2))
    with pytest.raises(ValueError, match="needs both factors"):
        products("kl-soap", (2, 2), (True, False))


def test_one_sided_takes_the_smaller_side() -> None:
    assert sides("one-sided", (2048, 512)) == (False, True)
    assert sides("one-sided", (512, 2048)) == sides("one-sided", (512, 512)) == (True, False)
    assert sides("shampoo", (2048, 512)) == (True, True)


# -- sizes


def test_the_sizes_are_those_of_a_gpt() -> None:
    assert sum(m * n for m, n in matrices(512, 4)) == sum(m * n for m, n in matrices(1024, 1)) == 12_582_912
    cut = blocks(matrices(1024, 1))
    assert len(cut) == 48 and {shape for shape, _ in cut} == {(512, 512)}
    assert [width for width in (0, 1, 128, 129, 256, 300, 384, 512, 640, 1536) if is_cut_evenly(width)] == [
        1, 128, 256, 384, 512, 1536,
    ]  # fmt: skip


def test_other_blocks_than_the_optimizer_s_are_an_error() -> None:
    shapes = matrices(8, 1)
    optimizer = build("shampoo", [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes])
    assert isinstance(optimizer, Shampoo)
    check_blocks(optimizer, shapes)
    with pytest.raises(RuntimeError, match="the floor is of"):
        check_blocks(optimizer, matrices(8, 2))


# -- statistics


def test_a_summary_has_mean_median_and_nearest_rank() -> None:
    found = summarize([0.3, 0.1, 0.2, 1.0])
    assert (found.count, found.mean, found.median, found.p99) == (4, pytest.approx(0.4), 0.25, 1.0)
    assert found.spread == 4.0
    assert summarize([float(value) for value in range(1, 201)]).p99 == 198.0


def test_shares_add_up_to_one() -> None:
    found = shares([{"a": 1.0, "b": 1.0}, {"a": 3.0}], [4.0, 6.0])
    assert found == pytest.approx({"a": 0.4, "b": 0.1, "other": 0.5})


def test_state_is_counted_wherever_it_lies() -> None:
    double, floats = torch.zeros(3, dtype=torch.float64), torch.zeros(2, 2)
    assert state_bytes({"state": {0: {"step": 1, "a": double}}, "blocks": [{"b": floats}, (floats,)]}) == 24 + 16 + 16


def test_the_floor_is_operations_over_rates_and_the_roots() -> None:
    cut = [((4, 4), (4, 4)), ((4, 4), (4, 4)), ((2, 4), (2, 4))]
    found = floor_of("shampoo", cut, {(4, 4): 100.0, (2, 4): 10.0}, roots_seconds=5.0)
    square, wide = products("shampoo", (4, 4)).total, products("shampoo", (2, 4)).total
    assert found.flops == 2 * square + wide
    assert found.seconds == pytest.approx(2 * square / 100 + wide / 10 + 5)


# -- whole training steps


def log_of(seconds: list[float]) -> str:
    return "".join(
        f" [2026] iteration {number}/ {len(seconds)} | consumed samples: 32 | elapsed time per iteration (ms): "
        f"{1000 * value:.1f} | global batch size:    32 | lm loss: 6.9E+00 |\n"
        for number, value in enumerate(seconds, 1)
    )


def test_seconds_are_read_from_the_rank_that_logs(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("building\n")
    (tmp_path / "rank1.log").write_text(log_of([0.5, 0.25]))
    assert bench_steps.read_seconds(sorted(tmp_path.glob("*.log"))) == [0.5, 0.25]


def test_a_reason_is_the_line_with_the_error(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("one\npretrain_gpt.py: error: soap does not do this\n")
    assert bench_steps.reason([log], 1) == "soap does not do this"
    log.write_text("Traceback:\nValueError: no\nlater\n")
    assert bench_steps.reason([log], 1) == "ValueError: no"
    assert "signal 9" in bench_steps.reason([log], -9)


class FakeRanks:
    """Steps of a second each, but for the eleventh; refuses Muon at the second step."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.taken: list[str] = []
        self.ended: list[str] = []

    def refusal(self, world_size: int) -> str | None:
        return None

    @staticmethod
    def seconds(name: str) -> list[float]:
        return [1.0] * 10 + [2.0 if name == "sgd" else 3.0] + [1.0] * 2

    def start(self, flags: list[str], world_size: int, folder: Path) -> FakeRun:
        return FakeRun(self, flags[flags.index("--optimizer") + 1], folder)

    def run(self, flags: list[str], world_size: int, folder: Path) -> int:
        run = self.start(flags, world_size, folder)
        steps = [run.step() for _ in range(13)]
        if None not in steps:
            (folder / "rank0.log").write_text(log_of([step for step in steps if step is not None]))
        return run.end()


class FakeRun:
    def __init__(self, ranks: FakeRanks, name: str, folder: Path) -> None:
        self.ranks, self.name, self.folder, self.number = ranks, name, folder, 0
        folder.mkdir(parents=True)

    def step(self) -> float | None:
        if self.name == "muon" and self.number == 1:
            (self.folder / "rank0.log").write_text("AssertionError: not [this] layout\n")
            return None
        self.ranks.taken.append(self.name)
        self.number += 1
        return self.ranks.seconds(self.name)[self.number - 1]

    def end(self, *, at_once: bool = False) -> int:
        self.ranks.ended.append(self.name)
        return int(self.name == "muon")


@pytest.mark.parametrize("on_cpu", [True, False])
def test_steps_are_taken_by_turns_and_the_first_ten_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    ranks = FakeRanks(on_cpu)
    monkeypatch.setattr("megatron.experiments.bench_ranks.Ranks", lambda *arguments: ranks)
    rows = bench_steps.measure({
        "entry": "pretrain_gpt.py", "folder": str(tmp_path), "layouts": ["one"], "iterations": 13,
        "optimizers": ["sgd", "megatron-muon", "soap"], "flags": [],
        "shampoo_flags": ["--shampoo-block-size", "64"],
    })  # fmt: skip
    by_turns = ["sgd", "muon", "shampoo", "shampoo", "sgd", "sgd", "shampoo"]
    assert ranks.taken[:7] == (by_turns if on_cpu else ["sgd"] * 7)
    assert set(ranks.ended) == {"sgd", "muon", "shampoo"}
    assert [row["optimizer"] for row in rows] == ["sgd", "soap", "megatron-muon"]
    assert rows[0]["all_seconds"] == [2.0, 1.0, 1.0] and rows[1]["all_seconds"] == [3.0, 1.0, 1.0]
    assert rows[1]["seconds"]["median"] == rows[1]["over_sgd"] == 1.0 and "over_adam" not in rows[1]
    assert rows[1]["tokens_per_second"] == 32 * 128
    assert rows[2]["reason"] == "AssertionError: not [this] layout"


def test_ratios_are_those_of_steps_that_followed_each_other() -> None:
    measured = {"adam": [1.0, 10.0, 2.0], "soap": [2.0, 30.0, 8.0]}
    rows = bench_steps.rows_of("one", measured, {}, 4096, on_cpu=True)
    assert rows[1]["over_adam"] == 3.0 != rows[1]["seconds"]["median"] / rows[0]["seconds"]["median"]


def test_every_optimizer_gets_its_own_flags() -> None:
    def flags(optimizer: str, layout: str = "one", on_cpu: bool = True) -> str:
        more, for_ours = ["--lr", "5"], ["--shampoo-block-size", "64"]
        return " ".join(bench_steps.flags_of(optimizer, layout, 12, more, for_ours, on_cpu=on_cpu))

    for name in OPTIMIZERS:
        assert flags(name).endswith("--train-iters 12 --lr 5")
        assert ("--shampoo-block-size 64" in flags(name)) == (name in METHODS)
    assert "--optimizer shampoo --shampoo-method kl-soap" in flags("kl-soap")
    assert "--optimizer soap " in flags("megatron-soap") and "--shampoo-method" not in flags("megatron-soap")
    assert "--muon-fp32-matmul-prec" in flags("megatron-muon")
    assert "--muon-fp32-matmul-prec" not in flags("megatron-muon", on_cpu=False)
    assert "--use-distributed-optimizer" in flags("adam", "dp2")
    assert "--use-distributed-optimizer" not in flags("sgd", "dp2")
    assert bench_steps.note_of("sgd", "dp2", on_cpu=True) and not bench_steps.note_of("sgd", "tp2", on_cpu=True)


def run_with_ranks(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, with the `ranks` of the entry in this folder."""
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom megatron.experiments import bench_ranks\n"
        "folder = Path(sys.argv[1])\n"
        "ranks = bench_ranks.Ranks(folder / 'entry.py', 60)\n" + script
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(
        "import os, time\n"
        "def main():\n"
        "    print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "    if os.environ['RANK'] == '1': raise SystemExit('no such flag')\n"
        "    time.sleep(100)\n"
    )
    script = (
        "bench_ranks.GRACE_SECONDS = 0.2\n"
        "run = ranks.start(['--flag'], 2, folder / 'run')\n"
        "assert run.step() is None\n"
        "print('status', run.end())\n"
    )
    done = run_with_ranks(tmp_path, script)
    assert done.stdout.splitlines()[-1:] == ["status 1"], done.stderr
    assert (tmp_path / "run/rank1.log").read_text() == "rank 1 of 2\nno such flag\n"
    assert (tmp_path / "run/rank0.log").read_text() == "rank 0 of 2\n"


def test_runs_take_steps_by_turns_and_die_with_the_benchmark(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text(
        "import os, sys, time\n"
        "from megatron.training import training\n"
        "def step(): time.sleep(0.05 * (1 + int(os.environ['RANK']))); print('step', flush=True)\n"
        "training.train_step = step\n"
        "def main():\n"
        "    for _ in range(int(sys.argv[1])): training.train_step()\n"
    )
    script = (
        "one, two = (ranks.start([number], 2, folder / number) for number in '12')\n"
        "assert 0.1 <= one.step() < 60\n"
        "assert (folder / '2/rank1.log').read_text() == ''\n"
        "assert 0.1 <= two.step() < 60 and one.end() == 0\n"
        "print(*two.running, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = run_with_ranks(tmp_path, script)
    waiting = [int(pid) for pid in done.stdout.split()]
    assert len(waiting) == 2, done.stderr
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in waiting):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "the benchmark has ended" in (tmp_path / "2/rank0.log").read_text()


# -- tables


def test_tables_show_numbers_reasons_and_floors() -> None:
    measured = {"sgd": [0.1, 0.1], "soap": [0.15, 0.15]}
    steps = bench_steps.rows_of("one", measured, {"megatron-soap": "it [does] not"}, 4096, on_cpu=True)
    row: dict[str, Any] = {"optimizer": "soap", "seconds": summarize([0.2]).as_dict(), "note": None}
    ours = {
        **row, "staggered": False, "shares": {"refresh": 0.25, "other": 0.75}, "roots_per_step": 9.6,
        "floor": {"products_seconds": 0.03, "roots_seconds": 0.05, "seconds": 0.08}, "over_floor": 2.5,
        "state_bytes_per_parameter": 40.0,
    }  # fmt: skip
    adam = {**row, "optimizer": "adam", "state_bytes_per_parameter": 8.0, "peak_bytes": 3 * 2**20}
    width = {
        "width": 512, "layers": 4, "parameters": 12_582_912, "device": "cpu", "threads": 2,
        "product_flops_per_second": {"512x512": 1e11}, "rows": [adam, ours],
    }  # fmt: skip
    output = io.StringIO()
    console = Console(file=output, width=200)
    results = {"steps": steps, "optimizer": [width]}
    for table in tables(results):
        console.print(table)
    printed = output.getvalue()
    for text in ("150.0", "0.667", "27,307", "did not run: it [does] not", "soap, not staggered", "512x512 at 100.0"):
        assert text in printed, printed
    for text in ("30.0 + 50.0", "2.50", "40.0", "25.0%", "9.6"):
        assert text in printed, printed
    lines = markdown(results).splitlines()
    assert [line.count("|") for line in lines if line.startswith("|-")] == [10, 12, 5]  # under the head of each table
    assert {line.count("|") for line in lines} == {0, 10, 12, 5}, lines
    assert "| soap | 2 | 150.0 | 150.0 |" in " ".join(" ".join(lines).split())


def test_what_was_measured_stays_when_a_later_part_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(options: BenchOptions, name: str, module: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
        if name == "steps_dp2":
            raise BenchFailedError("killed")
        return {"rows": bench_steps.rows_of(request["layouts"][0], {"sgd": [0.1]}, {}, 4096, on_cpu=True)}

    monkeypatch.setattr(bench_session, "_work", work)
    options = BenchOptions(
        root=TOOL.parent.parent, parts=["steps"], layouts=["one", "dp2"], optimizers=["sgd"], widths=[], layers=[],
        step_iterations=12, optimizer_iterations=20, out=tmp_path / "bench", data_flags=[], flags=[], shampoo_flags=[],
        command="bench",
    )  # fmt: skip
    with pytest.raises(BenchFailedError):
        run_bench(options, Console(file=io.StringIO()))
    assert [row["layout"] for row in json.loads((options.out / "results.json").read_text())["steps"]] == ["one"]
    assert "| sgd" in (options.out / "tables.md").read_text()
    assert (options.out / "bench.png").stat().st_size > 1000


# -- the command


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parts everything", "argument --parts: 'everything': allowed are steps, optimizer"),
        ("--optimizers adam,lion", "argument --optimizers: 'lion': allowed are sgd, adam"),
        ("--layouts one,tp8", "argument --layouts: 'tp8': allowed are one, dp2, tp2, pp2"),
        ("--widths 512,600", "argument --widths: '600': allowed are"),
        ("--iters 10", "argument --iters: '10': allowed is an integer of at least 11"),
        ("--iters 25", "argument --iters: 25 leaves 15 steps"),
        ("--data nowhere", "prepare_corpus.py"),
        ("--parts optimizer --shampoo-flags=--shampoo-epsilon", "argument --shampoo-flags: concerns steps"),
        ("--shampoo-flags='", "No closing quotation"),
        ("-- --train-iters 9", "argument flags: --train-iters ends a run before or after the others"),
        ("-- --exit-interval=2", "argument flags: --exit-interval=2 ends a run"),
    ],
)
def test_unknown_names_and_numbers_are_refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        tool.main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_tokens_are_those_of_the_users_batch() -> None:
    assert bench_steps.tokens_per_step([]) == 32 * 128
    assert bench_steps.tokens_per_step(["--lr", "1", "--global-batch-size", "128", "--seq-length=64"]) == 128 * 64


# -- the optimizer alone


@pytest.mark.parametrize(("staggered", "roots"), [(True, [0] * 4 + [2] * 6), (False, [0] * 9 + [12])])
def test_blocks_refresh_once_an_interval_by_turns_or_together(staggered: bool, roots: list[int]) -> None:
    shapes = matrices(8, 1)
    participant = Participant("shampoo", shapes, CPU, staggered=staggered, age=10)
    for gradients in make_gradients(shapes, CPU) * 5:
        participant.step(gradients, is_measured=len(participant.seconds) < 10)
    assert sorted(participant.roots) == roots


def test_a_quick_run_of_the_optimizers_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--quick", "--parts", "optimizer", "--widths", "32", "--layers", "1"]
    command += ["--optimizers", "sgd,soap", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert "steps" not in results and (tmp_path / "bench.png").stat().st_size > 1000
    (width,) = results["optimizer"]
    assert (width["width"], width["layers"], width["parameters"]) == (32, 1, 12 * 32 * 32)
    sgd, ours, together = width["rows"]
    assert sgd["state_bytes_per_parameter"] == 4.0 and "floor" not in sgd
    assert sgd["peak_bytes"] > 100 * 2**20
    assert (ours["staggered"], together["staggered"]) == (True, False)
    for row in (ours, together):
        assert row["seconds"]["count"] == len(row["all_seconds"]) == 10
        assert row["roots_per_step"] == row["roots_per_step_alone"] == 1.2
        assert sum(row["shares"].values()) == pytest.approx(1.0)
        assert {"moments", "accumulate", "refresh", "apply"} <= set(row["shares"])
        shapes = [(32, 32)] * 4 + [(128, 32), (32, 128)]
        assert row["floor"]["flops"] == sum(products("soap", shape).total for shape in shapes)
        assert row["over_floor"] == pytest.approx(row["seconds"]["mean"] / row["floor"]["seconds"])
    assert "soap, not staggered" in done.stdout
