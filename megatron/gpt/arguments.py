"""What a run's arguments still need after Megatron's own parsing and validation."""

from __future__ import annotations

import argparse
import os

_TRACKER = "latest_checkpointed_iteration.txt"
"""The file in a checkpoint folder that names its latest iteration (Megatron 0.19, every `--ckpt-format`)."""


def tidy_help(parser: argparse.ArgumentParser) -> None:
    """Make `--help` work, and keep Megatron's usage of six hundred lines out of every error.

    In Megatron 0.19 the help of `--moe-paged-stash-buffer-size-factor-cuda` holds a bare percent sign, at which
    argparse stops the whole of `--help`.

    Args:
        parser: the parser holding all arguments.
    """
    parser.usage = "%(prog)s [flags]; --help describes them"
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except ValueError:
            assert action.help is not None
            action.help = action.help.replace("%", "%%")


def check_load(args: argparse.Namespace) -> None:
    """Say so at once when `--load` holds no checkpoint; Megatron builds the model first and ends with status 0.

    Args:
        args: Megatron's validated arguments.

    Raises:
        ValueError: if the user wants the run to end then (`--exit-on-missing-checkpoint`).
    """
    if args.load is None or args.non_persistent_ckpt_type is not None or args.pretrained_checkpoint is not None:
        return
    if args.ckpt_step is not None:
        missing = os.path.join(args.load, f"iter_{args.ckpt_step:07d}")
    else:
        missing = os.path.join(args.load, _TRACKER)
    if os.path.exists(missing):
        return
    what = f"--load {args.load}: holds no checkpoint, {missing} does not exist"
    if args.exit_on_missing_checkpoint:
        raise ValueError(
            f"{what}; check the path, or leave out --exit-on-missing-checkpoint to start from random weights"
        )
    if args.rank == 0:
        print(f"WARNING: {what}; starting from random weights (--exit-on-missing-checkpoint makes this an error)")
