"""Times optimizers against each other on this machine: whole training steps on several layouts, and their steps alone.

    make bench
    make bench BENCH="--parts optimizer --optimizers adam,soap,megatron-soap --widths 512"
    make bench BENCH="--parts steps --iters 110 --layouts one,dp2 --shampoo-flags='--shampoo-block-size 128'"

`steps`: real pretrain_gpt.py runs of a small GPT (4 layers, width 128, global batch 32) that take their steps by turns;
ratios are medians of those of steps that followed each other. `optimizer`: the step of the optimizer alone, on the
matrices of a GPT of each width with random gradients, interleaved step by step, beside a floor measured in the same
run. Runs on CPU, or on CUDA where there is one. The defaults take about an hour on two idle cores. Tables go to
standard output and DIR/tables.md, every step to DIR/results.json, the figure to DIR/bench.png, after each layout and
width.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.experiments.bench_names import (  # noqa: E402
    LAYOUTS,
    OPTIMIZERS,
    PARTS,
    REFRESH_INTERVAL,
    WARM_UP,
    is_cut_evenly,
)
from megatron.experiments.command_line import add_shampoo_flags  # noqa: E402


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """What is measured unless flags say otherwise."""

    layouts: tuple[str, ...] = tuple(LAYOUTS)
    step_iterations: int = 60
    optimizer_iterations: int = WARM_UP + 2 * REFRESH_INTERVAL
    widths: tuple[int, ...] = (512, 1024)
    parameters: int = 4 * 12 * 512**2
    """Of every width: as many layers as fit into it, at least one."""


QUICK = Defaults(
    layouts=("one",), step_iterations=12, optimizer_iterations=WARM_UP + REFRESH_INTERVAL,
    widths=(32,), parameters=12 * 32**2,
)  # fmt: skip


ENDS_A_RUN = ("--train-iters", "--train-samples", "--exit-interval", "--exit-duration-in-mins")
"""Flags of `pretrain_gpt.py` under which the runs would not all take the same steps."""


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=_some_of(PARTS), default=PARTS, metavar="LIST", help=f"comma-separated: {', '.join(PARTS)}"
    )
    parser.add_argument("--layouts", type=_some_of(LAYOUTS), metavar="LIST", help=f"of steps: {', '.join(LAYOUTS)}")
    parser.add_argument(
        "--optimizers",
        type=_some_of(OPTIMIZERS),
        default=OPTIMIZERS,
        metavar="LIST",
        help=f"any of {', '.join(OPTIMIZERS)}; ratios are to sgd and adam, where these are among them",
    )
    parser.add_argument(
        "--iters",
        type=_at_least(WARM_UP + 1),
        help=f"steps of a run, the first {WARM_UP} of which are not measured (60 of steps, 30 of optimizer; of "
        f"optimizer the measured ones are whole refresh intervals: a multiple of {REFRESH_INTERVAL})",
    )
    parser.add_argument(
        "--widths", type=_widths, metavar="LIST", help="of optimizer: hidden sizes of the GPT (512,1024)"
    )
    parser.add_argument(
        "--layers", type=_at_least(1), help="of optimizer, for every width (as many as make 12.6 M parameters)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="of steps: a folder of tools/prepare_corpus.py (mock data)",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs/bench", metavar="DIR", help="results (runs/bench)")
    parser.add_argument(
        "--quick", action="store_true", help="other defaults, for a smoke run: one process, few steps, a tiny width"
    )
    add_shampoo_flags(parser, "of steps: ")
    parser.add_argument("flags", nargs="*", help="of steps: more flags of pretrain_gpt.py, after --; they win")
    return parser


def _some_of(allowed: Sequence[str] | dict[str, Any]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r}: allowed are {', '.join(allowed)}")
        return found

    return names


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed is an integer of at least {least}")
        return int(text)

    return number


def _widths(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        if not part.isdecimal() or not is_cut_evenly(int(part)):
            raise argparse.ArgumentTypeError(f"{part!r}: allowed are 1 to 128, 256, 384 and multiples of 512")
        found.append(int(part))
    return tuple(dict.fromkeys(found))


def main(argv: list[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status: 0, or 1 after an error message or if a baseline or one of ours did not run, or 130 if interrupted.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    defaults = QUICK if args.quick else Defaults()
    alone = args.iters or defaults.optimizer_iterations
    if "optimizer" in args.parts and (alone - WARM_UP) % REFRESH_INTERVAL:
        parser.error(
            f"argument --iters: {alone} leaves {alone - WARM_UP} steps of optimizer to measure: allowed are multiples "
            f"of the refresh interval {REFRESH_INTERVAL}, or --parts steps"
        )
    if args.shampoo_flags and "steps" not in args.parts:
        parser.error("argument --shampoo-flags: concerns steps, which --parts leaves out")
    for flag in (*args.flags, *args.shampoo_flags):
        if flag.split("=")[0] in ENDS_A_RUN:
            parser.error(f"argument flags: {flag} ends a run before or after the others: allowed is --iters")
    data_flags: list[str] = []
    if args.data is not None:
        listed = args.data / "data_args.txt"
        if not listed.exists():
            parser.error(f"argument --data: {args.data} has no data_args.txt; make it with tools/prepare_corpus.py")
        data_flags = listed.read_text().split()
    widths = args.widths or defaults.widths

    from rich.console import Console

    from megatron.experiments.bench_session import BenchFailedError, BenchOptions, run_bench

    options = BenchOptions(
        root=ROOT,
        parts=args.parts,
        layouts=args.layouts or defaults.layouts,
        optimizers=args.optimizers,
        widths=widths,
        layers=[args.layers or max(1, defaults.parameters // (12 * width * width)) for width in widths],
        step_iterations=args.iters or defaults.step_iterations,
        optimizer_iterations=alone,
        out=args.out,
        data_flags=data_flags,
        flags=args.flags,
        shampoo_flags=args.shampoo_flags,
        command=shlex.join(["tools/bench.py", *(sys.argv[1:] if argv is None else argv)]),
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        missing = run_bench(options, Console(width=None if sys.stdout.isatty() else 200))
    except (BenchFailedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    for line in missing:
        print(f"error: {line}", file=sys.stderr)
    return 1 if missing else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
