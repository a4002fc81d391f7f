"""Seconds per training step of several optimizers on one model, in interleaved rounds of real pretrain_gpt.py runs.

    python tools/step_time.py --data data/demo --rounds 3

One process each; medians over the steps of all rounds but the first ten of each, and ratios to the first optimizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"elapsed time per iteration \(ms\): ([0-9.]+)")
WARM_UP = 10
MODEL = shlex.split(
    """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 16 --global-batch-size 32
--lr 1e-3 --lr-decay-style constant --clip-grad 1.0 --num-workers 0 --log-interval 1 --eval-iters 0
--eval-interval 100000"""
)


def main() -> None:
    """Time, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data/demo", help="folder made by tools/prepare_corpus.py")
    parser.add_argument("--optimizers", default="sgd,adam,shampoo", help="comma-separated; the first is the measure")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each optimizer, in turn")
    parser.add_argument("--iters", type=int, default=40, help=f"steps of a run, more than {WARM_UP}")
    parser.add_argument("flags", nargs="*", help="more flags of pretrain_gpt.py, after --; they win")
    args = parser.parse_args()
    if args.iters <= WARM_UP:
        parser.error(f"--iters {args.iters}: allowed is more than {WARM_UP}, the steps that are left out")
    data = args.data / "data_args.txt"
    if not data.exists():
        parser.error(f"--data {args.data}: no data_args.txt there; make it with tools/prepare_corpus.py")
    seconds: dict[str, list[float]] = {name: [] for name in args.optimizers.split(",")}
    for number in range(args.rounds):
        for name, measured in seconds.items():
            print(f"round {number + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
            measured += run(name, args.iters, [*data.read_text().split(), *args.flags])
    show(seconds)


def run(optimizer: str, iters: int, flags: list[str]) -> list[float]:
    """Seconds of each step of one run, without the first ones.

    Raises:
        SystemExit: the run failed; with the end of its log.
    """
    command = [sys.executable, "pretrain_gpt.py", *MODEL, "--optimizer", optimizer, "--train-iters", str(iters), *flags]
    env = {"OMP_NUM_THREADS": str(os.cpu_count() or 1), **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return [float(found) / 1000 for found in STEP.findall(done.stdout)][WARM_UP:]


def show(seconds: dict[str, list[float]]) -> None:
    """Print medians, 99th percentiles and ratios."""
    from rich.console import Console
    from rich.table import Table

    table = Table("optimizer", "steps", "median s/step", "p99/p50", *(f"over {name}" for name in list(seconds)[:-1]))
    medians = {name: statistics.median(measured) for name, measured in seconds.items()}
    for name, measured in seconds.items():
        spread = sorted(measured)[min(len(measured) - 1, int(0.99 * len(measured)))] / medians[name]
        ratios = [f"{medians[name] / medians[other]:.3f}" for other in list(seconds)[:-1]]
        table.add_row(name, str(len(measured)), f"{medians[name]:.4f}", f"{spread:.2f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
