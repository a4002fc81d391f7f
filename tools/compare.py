"""Compares optimizers on one small GPT: every one tuned on a grid of learning rates, the best rate on several seeds.

    make compare
    python tools/compare.py --optimizers adam,shampoo,shampoo-soap --steps 400
    python tools/compare.py --grid adam=1e-3,3e-3,1e-2 --shampoo-flags="--shampoo-block-size 64" -- --num-layers 2

Runs pretrain_gpt.py itself, one process a run, on CPU. Runs that have ended are kept and reused, so an interrupted
comparison goes on where it was. Flags after -- go to every run of pretrain_gpt.py, and win.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.experiments.command_line import add_shampoo_flags
from megatron.experiments.compare_contenders import CONTENDERS, Settings, parse_grid, parse_optimizers, parse_seeds

ROOT = Path(__file__).resolve().parent.parent


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    lines = "\n".join(
        f"  {one.name:20} {one.label:20} lr {', '.join(f'{rate:g}' for rate in one.rates)}"
        for one in CONTENDERS.values()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"optimizers, and the learning rates that are tried:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--steps", type=_positive, default=200, metavar="N", help="of every run (default: 200)")
    parser.add_argument(
        "--seeds",
        type=parse_seeds,
        default=(1234, 4321),
        metavar="N,...",
        help="the first chooses the learning rate (default: 1234,4321)",
    )
    parser.add_argument(
        "--optimizers", type=parse_optimizers, default=tuple(CONTENDERS), metavar="NAME,...", help="default: all"
    )
    parser.add_argument(
        "--grid",
        type=parse_grid,
        action="append",
        default=[],
        metavar="NAME=RATE,...",
        help="learning rates of an optimizer; repeatable",
    )
    parser.add_argument(
        "--eval-interval",
        type=_positive,
        metavar="N",
        help="steps between evaluations on held-out text (default: a tenth of the steps)",
    )
    parser.add_argument(
        "--eval-tokens",
        type=_positive,
        default=16384,
        metavar="N",
        help="held-out tokens, the same at every evaluation (default: 16384)",
    )
    parser.add_argument(
        "--jobs",
        type=_positive,
        default=min(2, cores),
        metavar="N",
        help="runs at a time (default: 2, or 1 where there is one core)",
    )
    parser.add_argument("--threads", type=_positive, default=1, metavar="N", help="of every run (default: 1)")
    add_shampoo_flags(parser)
    parser.add_argument(
        "--data",
        default="data/compare",
        metavar="DIR",
        help="corpus of tools/prepare_corpus.py; State of the Union if missing (default: data/compare of the checkout)",
    )
    parser.add_argument(
        "--archive", metavar="FILE", help="the corpus' package file, if this machine cannot download it"
    )
    parser.add_argument(
        "--out", default="runs/compare", metavar="DIR", help="runs and results (default: runs/compare of the checkout)"
    )
    parser.add_argument("flags", nargs="*", help="of pretrain_gpt.py, after --")
    return parser


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer above 0")
    return value


def make_grids(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """Put the user's learning rates in the place of the default ones."""
    grids = {name: CONTENDERS[name].rates for name in args.optimizers}
    given = [name for name, _ in args.grid]
    for name in given:
        if name not in grids:
            parser.error(f"argument --grid: '{name}' is not among --optimizers {','.join(args.optimizers)}")
        if given.count(name) > 1:
            parser.error(f"argument --grid: '{name}' is there twice")
    return grids | dict(args.grid)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status: 0, or 1 after an error or if no run came to its end, or 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    args = parser.parse_args(argv)
    settings = Settings(
        steps=args.steps,
        eval_interval=args.eval_interval or max(1, args.steps // 10),
        seeds=args.seeds,
        grids=make_grids(parser, args),
        jobs=args.jobs,
        threads=args.threads,
        shampoo_flags=tuple(args.shampoo_flags),
        flags=tuple(args.flags),
    )

    from rich.console import Console

    from megatron.data_tools.errors import DataError
    from megatron.experiments.compare_session import BusyFolderError, CompareOptions, run_comparison

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    options = CompareOptions(
        root=ROOT,
        optimizers=args.optimizers,
        settings=settings,
        data=args.data,
        eval_tokens=args.eval_tokens,
        archive=args.archive,
        out=args.out,
        command=("python", "tools/compare.py", *argv),
    )
    try:
        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 150)  # of a file or pipe it is a guess
        is_any_finished = run_comparison(options, console)
    except (DataError, BusyFolderError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"interrupted; all runs have been stopped. Those that had ended are in {args.out}/runs, and the same "
            "command goes on from there.",
            file=sys.stderr,
        )
        return 130
    return 0 if is_any_finished else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
