"""Options that several commands have. Imports nothing heavy."""

from __future__ import annotations

import argparse
import shlex


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def add_shampoo_flags(parser: argparse.ArgumentParser, part: str = "") -> None:
    """Add `--shampoo-flags`, a list of flags.

    Args:
        parser: of the command.
        part: what of the command it concerns, at the beginning of the help.
    """
    parser.add_argument(
        "--shampoo-flags",
        type=_words,
        default=[],
        metavar='="FLAGS"',
        help=f"{part}more flags for our methods, as one word after an equals sign",
    )
