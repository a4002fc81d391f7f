"""The course of the benchmark: its parts as child processes, results, tables, figure."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron.demo.process import error_lines, running
from megatron.experiments import bench_steps
from megatron.experiments.bench_names import METHODS, RIVALS
from megatron.experiments.bench_report import draw, markdown, tables
from megatron.experiments.machine import describe

LAST_LINES = 15


class BenchFailedError(RuntimeError):
    """A part of the benchmark ended early; the message says where and how."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """What to measure; the command line checks the values."""

    root: Path
    """The checkout."""
    parts: Sequence[str]
    layouts: Sequence[str]
    optimizers: Sequence[str]
    widths: Sequence[int]
    layers: Sequence[int]
    """Of each width."""
    step_iterations: int
    """Steps of a training run."""
    optimizer_iterations: int
    """Steps of the optimizers alone."""
    out: Path
    data_flags: Sequence[str]
    flags: Sequence[str]
    """More flags of `pretrain_gpt.py`."""
    shampoo_flags: Sequence[str]
    """Likewise, for our methods alone."""
    command: str


def run_bench(options: BenchOptions, console: Console) -> list[str]:
    """Measure, print the tables, write `results.json`, `tables.md` and `bench.png`.

    Args:
        options: what to measure.
        console: where the tables go; progress goes to standard error.

    Returns:
        What should have run and did not: baselines and our own.

    Raises:
        BenchFailedError: a part ended early.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "command": options.command,
        "machine": describe(options.root),
        "options": {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(options)
            if field.name not in ("root", "out", "command")
        },
    }
    for layout in options.layouts if "steps" in options.parts else ():
        results.setdefault("steps", []).extend(_steps(options, layout))
        _write(results, options.out)
    for number, width in enumerate(options.widths if "optimizer" in options.parts else ()):
        found = _alone(options, width, options.layers[number], with_turns=number == 0)
        results.setdefault("optimizer", []).append(found)
        _write(results, options.out)
    for table in tables(results):
        console.print(table)
    for note in _notes(options):
        console.print(note, highlight=False)
    return [
        f"{row['optimizer']} on {row['layout']}: {row['reason']}"
        for row in results.get("steps", [])
        if "reason" in row and row["optimizer"] not in RIVALS
    ]


def _write(results: dict[str, Any], out: Path) -> None:
    """Write what there is so far, after every layout and width: what ends the next one does not take it along."""
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "tables.md").write_text(markdown(results))
    draw(results, out / "bench.png")


def _notes(options: BenchOptions) -> list[str]:
    found = []
    if "optimizer" in options.parts:
        found.append(
            "floor: matrix products that the method cannot do without, a symmetric one counted half, at the speed of "
            "batched float32 products on this machine; and the refreshes of one step on average, by themselves."
        )
        found.append(
            "not staggered: every block refreshes in the same step. megatron-soap takes one step in ten rounds: its "
            "steps are all alike. peak: of a process of its own."
        )
    return [*found, f"{options.out}: every step in results.json, these tables in tables.md, the figure in bench.png"]


def _steps(options: BenchOptions, layout: str) -> list[dict[str, Any]]:
    request = {
        "entry": str(options.root / "pretrain_gpt.py"),
        "folder": str((options.out / "steps").resolve()),
        "layouts": [layout],
        "optimizers": list(options.optimizers),
        "iterations": options.step_iterations,
        "shampoo_flags": list(options.shampoo_flags),
        "flags": [*(options.data_flags or bench_steps.MOCK_DATA), *options.flags],
    }
    found = _work(options, f"steps_{layout}", ["megatron.experiments.bench_steps"], request)
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def _alone(options: BenchOptions, width: int, layers: int, *, with_turns: bool) -> dict[str, Any]:
    """Measure one width; without staggering too at the first one: the turns do not depend on the width."""
    sizes = {"width": width, "layers": layers}
    chosen = [(name, True) for name in options.optimizers]
    chosen += [(name, False) for name in options.optimizers if name in METHODS and with_turns]
    module = "megatron.experiments.bench_alone"
    request = {**sizes, "optimizers": chosen, "steps": options.optimizer_iterations}
    found = _work(options, f"width{width}", [module, "measure"], request)
    rows = [row for row in found["rows"] if "reason" not in row and row.get("staggered", True)]
    request = {**sizes, "optimizers": [row["optimizer"] for row in rows]}
    peaks = _work(options, f"width{width}_memory", [module, "memory"], request)["peak_bytes"]
    for row in rows:
        row["peak_bytes"] = peaks[row["optimizer"]]
    return found


def _work(options: BenchOptions, name: str, module: Sequence[str], request: dict[str, Any]) -> dict[str, Any]:
    """Run a module of this package on a request in a process of its own; its output is shown and kept."""
    folder = options.out / "work"
    folder.mkdir(exist_ok=True)
    asked, answer, log = (folder / f"{name}.{kind}" for kind in ("request.json", "result.json", "log"))
    asked.write_text(json.dumps(request))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", *module, str(asked.resolve()), str(answer.resolve())]
    with running(command, log=log, cwd=options.root, env={"PYTHONUNBUFFERED": "1"}) as (process, lines):
        for line in lines:
            print(line, end="", file=sys.stderr, flush=True)
    if process.returncode or not answer.exists():
        last = "\n".join(f"  {line}" for line in error_lines(log, LAST_LINES))
        raise BenchFailedError(f"{name} ended with status {process.returncode}; from {log}:\n{last}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found
