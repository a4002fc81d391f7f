"""Draws the loss curves of Megatron runs over each other.

    python tools/plot_log.py runs/demo/1/train.log --output loss.png
    python tools/plot_log.py shampoo.log adam.log --labels Shampoo AdamW --axis seconds --output time.png

A run is a file with Megatron's output or a folder written by --tensorboard-dir.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.demo.curves import NoCurveError, read_curve
from megatron.demo.figure import draw


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="log file or TensorBoard folder")
    parser.add_argument("--output", type=Path, default=Path("loss.png"), metavar="FILE", help="default: loss.png")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="one for each run (default: the paths)")
    parser.add_argument("--axis", choices=("iteration", "seconds"), default="iteration", help="default: iteration")
    parser.add_argument(
        "--smooth", type=int, default=1, metavar="N", help="mean over N log lines, raw losses pale behind (default: 1)"
    )
    parser.add_argument(
        "--line", nargs=2, action="append", default=[], metavar=("NAME", "NATS"), help="a horizontal line; repeatable"
    )
    parser.add_argument("--title", help="above the figure")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status: 0, or 1 after an error message.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    labels = args.labels or [None] * len(args.runs)
    if len(labels) != len(args.runs):
        parser.error(f"--labels has {len(labels)} names for {len(args.runs)} runs; give one for each")
    if args.smooth < 1:
        parser.error(f"--smooth {args.smooth}: at least 1")
    try:
        lines = {name: float(value) for name, value in args.line}
    except ValueError as error:
        parser.error(f"--line: {error}; give a name and a number of nats per token")
    try:
        curves = [read_curve(run, label) for run, label in zip(args.runs, labels, strict=True)]
        draw(curves, args.output, axis=args.axis, smooth=args.smooth, lines=lines, title=args.title)
    except NoCurveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {args.output}: cannot be drawn: {error}", file=sys.stderr)
        return 1
    for curve in curves:
        validation = f", validation {list(curve.validation.values())[-1]:.4f}" if curve.validation else ""
        print(
            f"{curve.label}: {len(curve.losses)} log lines to iteration {curve.iterations[-1]}, "
            f"loss {curve.losses[0]:.4f} to {curve.losses[-1]:.4f}{validation}, {curve.seconds[-1]:.1f} s"
        )
    print(f"figure: {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
