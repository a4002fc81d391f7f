"""Trains a small GPT with Shampoo on 4 CPU processes: corpus, training, loss curve, in about 4 minutes on 2 cores.

    make demo
    make demo DEMO="--optimizer adam --lr 3e-3"

The corpus is made once; every call trains anew, in a folder of its own. Flags that are not the demo's own go to
pretrain_gpt.py after those of examples/cpu_demo/train.sh, and so win.
"""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="demo.py [--data DIR] [--runs DIR] [pretrain_gpt.py's flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--data",
        default="data/demo",
        metavar="DIR",
        help="corpus, made if missing (default: data/demo of the checkout)",
    )
    parser.add_argument(
        "--runs", default="runs/demo", metavar="DIR", help="the runs' folders (default: runs/demo in the checkout)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status: 0, or 1 after an error message, or 130 if interrupted.
    """
    args, flags = make_parser().parse_known_args(argv)

    from rich.console import Console

    from megatron.data_tools.errors import DataError
    from megatron.demo.session import DemoOptions, RunFailedError, run_demo

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        run_demo(DemoOptions(root=ROOT, data=args.data, runs=args.runs, flags=flags), Console())
    except (DataError, RunFailedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
