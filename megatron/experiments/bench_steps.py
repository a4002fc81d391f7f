"""Whole training steps: seconds per step of real `pretrain_gpt.py` runs, interleaved.

    python -m megatron.experiments.bench_steps REQUEST.json RESULT.json

On CPU the runs of a layout train side by side and take their steps by turns, every other time in the opposite order,
so that a machine that slows down or speeds up does so for all alike; a step is forward, backward and optimizer. On CUDA
they run one after the other, and a step is what Megatron logs. `tools/bench.py` writes the request.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.demo.process import error_lines
from megatron.demo.training_log import TrainingLog
from megatron.experiments.bench_names import BASELINES, LAYOUTS, METHODS, MUON_NOTE, MUON_ON_CPU, WARM_UP
from megatron.experiments.bench_stats import summarize

SEQUENCE_LENGTH = 128
GLOBAL_BATCH = 32
MODEL = shlex.split(
    f"""--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length {SEQUENCE_LENGTH}
--max-position-embeddings {SEQUENCE_LENGTH} --position-embedding-type rope --untie-embeddings-and-output-weights
--attention-dropout 0 --hidden-dropout 0 --global-batch-size {GLOBAL_BATCH} --lr 1e-3 --lr-decay-style constant
--weight-decay 0.1 --clip-grad 1.0 --num-workers 0 --log-interval 1 --eval-iters 0 --eval-interval 100000"""
)
MOCK_DATA = ("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1023")
DISTRIBUTED = "--use-distributed-optimizer"
TIMEOUT_SECONDS = 900.0

_PREFIX = re.compile(r"^(\[rank\d+\]: )?([\w./-]+: )?error: |^\[rank\d+\]: ")


def flags_of(
    optimizer: str, layout: str, iterations: int, more: Sequence[str], for_ours: Sequence[str], *, on_cpu: bool
) -> list[str]:
    """Command line of one run.

    Args:
        optimizer: one of `OPTIMIZERS`.
        layout: key of `LAYOUTS`.
        iterations: steps.
        more: data, and the user's flags, which win.
        for_ours: the user's flags for our methods.
        on_cpu: whether the run is on CPU.

    Returns:
        Flags of `pretrain_gpt.py`.
    """
    if optimizer in METHODS:
        chosen = ["--optimizer", "shampoo", "--shampoo-method", optimizer, *for_ours]
    else:
        chosen = ["--optimizer", optimizer.removeprefix("megatron-")]
    if optimizer == "megatron-muon" and on_cpu:
        chosen += ["--muon-fp32-matmul-prec", MUON_ON_CPU]
    places = [flag for flag in LAYOUTS[layout].flags if not (optimizer == "sgd" and flag == DISTRIBUTED)]
    return [*MODEL, *places, *chosen, "--train-iters", str(iterations), *more]


def note_of(optimizer: str, layout: str, *, on_cpu: bool) -> str | None:
    """What `flags_of` has changed for an optimizer that could not run well as it is.

    Args:
        optimizer: one of `OPTIMIZERS`.
        layout: key of `LAYOUTS`.
        on_cpu: whether the run is on CPU.

    Returns:
        A note for the table, if there is one.
    """
    if optimizer == "sgd" and DISTRIBUTED in LAYOUTS[layout].flags:
        return "without the distributed optimizer, which refuses it"
    return MUON_NOTE if optimizer == "megatron-muon" and on_cpu else None


def read_seconds(logs: Sequence[Path]) -> list[float]:
    """Seconds of each step, from whichever rank has logged them.

    Args:
        logs: of the ranks.

    Returns:
        As many as iterations were logged.
    """
    found: list[float] = []
    for path in logs:
        with open(path, encoding="utf-8", errors="replace") as lines:
            found += [iteration.seconds for iteration in TrainingLog.of(lines).iterations]
    return found


def reason(logs: Sequence[Path], status: int) -> str:
    """Say why a run ended early.

    Args:
        logs: of the ranks.
        status: the exit status.

    Returns:
        The first line of a log that names an error, shortened.
    """
    if status < 0:
        return f"ended by signal {-status} (after {TIMEOUT_SECONDS:.0f} s it is killed)"
    lines = [line for path in logs for line in error_lines(path, 1)]
    named = [line for line in lines if "rror" in line] or lines or [f"ended with status {status}"]
    text = _PREFIX.sub("", named[0].strip())
    return text if len(text) <= 240 else text[:237] + "..."


def tokens_per_step(flags: Sequence[str]) -> int:
    """Tokens of the global batch, with the user's flags.

    Args:
        flags: of all runs, beside those of `flags_of`.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--global-batch-size", type=int, default=GLOBAL_BATCH)
    parser.add_argument("--seq-length", type=int, default=SEQUENCE_LENGTH)
    found, _ = parser.parse_known_args(list(flags))
    return int(found.global_batch_size * found.seq_length)


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of steps that were taken one after the other."""
    return statistics.median(one / other for one, other in zip(seconds, base, strict=True))


def rows_of(
    layout: str, measured: Mapping[str, Sequence[float]], reasons: Mapping[str, str], tokens: int, *, on_cpu: bool
) -> list[dict[str, Any]]:
    """Reduce a layout's measurements to rows of the table.

    Args:
        layout: key of `LAYOUTS`.
        measured: seconds of the measured steps of each optimizer that ran.
        reasons: why the others did not.
        tokens: of a step.
        on_cpu: whether the runs were on CPU.

    Returns:
        A row for each optimizer, in the order of the arguments.
    """
    rows: list[dict[str, Any]] = []
    for name, seconds in measured.items():
        summary = summarize(seconds)
        rows.append({
            "layout": layout,
            "optimizer": name,
            "seconds": summary.as_dict(),
            "tokens_per_second": tokens / summary.median,
            **{f"over_{base}": _ratio(seconds, measured[base]) for base in BASELINES if base in measured},
            "note": note_of(name, layout, on_cpu=on_cpu),
            "all_seconds": list(seconds),
        })  # fmt: skip
    return rows + [{"layout": layout, "optimizer": name, "reason": why} for name, why in reasons.items()]


def measure(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run everything.

    Args:
        request: entry, folder, layouts, optimizers, iterations, flags, flags for our methods.

    Returns:
        All rows.
    """
    from megatron.experiments.bench_ranks import Ranks

    ranks = Ranks(Path(request["entry"]), TIMEOUT_SECONDS)
    rows = []
    for layout in request["layouts"]:
        print(f"steps, {layout}: {', '.join(request['optimizers'])}", flush=True)
        refusal = ranks.refusal(LAYOUTS[layout].world_size)
        if refusal:
            rows += rows_of(layout, {}, dict.fromkeys(request["optimizers"], str(refusal)), 0, on_cpu=ranks.on_cpu)
            continue
        given = request["iterations"], request["flags"], request["shampoo_flags"]
        runs = {
            name: _Planned(
                flags_of(name, layout, *given, on_cpu=ranks.on_cpu),
                LAYOUTS[layout].world_size,
                Path(request["folder"]) / f"{layout}_{name}",
            )
            for name in request["optimizers"]
        }
        take = _by_turns if ranks.on_cpu else _one_after_the_other
        measured, reasons = take(ranks, runs, request["iterations"])
        for name, why in reasons.items():
            print(f"  {name} did not run: {why}", flush=True)
        rows += rows_of(layout, measured, reasons, tokens_per_step(request["flags"]), on_cpu=ranks.on_cpu)
    return rows


class _Planned(NamedTuple):
    """A run."""

    flags: list[str]
    world_size: int
    folder: Path


_Found = tuple[dict[str, list[float]], dict[str, str]]
"""Seconds of the measured steps of each optimizer that ran, and why the others did not."""


def _by_turns(ranks: Any, runs: Mapping[str, _Planned], iterations: int) -> _Found:
    """All side by side, one step of each after the other; every other time in the opposite order."""
    measured: dict[str, list[float]] = {name: [] for name in runs}
    reasons: dict[str, str] = {}
    started: dict[str, Any] = {}
    try:
        for name, run in runs.items():
            started[name] = ranks.start(*run)
        for number in range(iterations):
            for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
                seconds = started[name].step() if name not in reasons else None
                if seconds is not None:
                    measured[name].append(seconds)
                elif name not in reasons:
                    reasons[name] = reason(_logs(runs[name]), started[name].end())
            if (number + 1) % 10 == 0:
                print(f"  {number + 1} of {iterations} steps", flush=True)
        for name in [name for name in runs if name not in reasons]:
            status = started[name].end()
            if status:
                reasons[name] = reason(_logs(runs[name]), status)
    finally:
        for run in started.values():
            run.end(at_once=True)
    return {name: seconds[WARM_UP:] for name, seconds in measured.items() if name not in reasons}, reasons


def _one_after_the_other(ranks: Any, runs: Mapping[str, _Planned], iterations: int) -> _Found:
    measured: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for name, run in runs.items():
        status = ranks.run(*run)
        seconds = read_seconds(_logs(run))
        if status:
            reasons[name] = reason(_logs(run), status)
        elif len(seconds) != iterations:
            reasons[name] = f"logged {len(seconds)} of {iterations} steps, see {run.folder}"
        else:
            measured[name] = seconds[WARM_UP:]
    return measured, reasons


def _logs(run: _Planned) -> list[Path]:
    return sorted(run.folder.glob("*.log"))


def main() -> None:
    """Read the request, write the rows."""
    request, result = (Path(path) for path in sys.argv[1:])
    rows = measure(json.loads(request.read_text()))
    result.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
