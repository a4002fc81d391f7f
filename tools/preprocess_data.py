"""Tokenizes JSONL or plain-text files into the `.bin/.idx` pairs that Megatron trains on.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod

writes data/corpus_text_document.bin and .idx; train with --data-path data/corpus_text_document and the same
tokenizer flags. The output is the same for every number of workers. See docs/data.md.
"""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.data_tools.errors import DataError
from megatron.data_tools.preprocess import PreprocessOptions, preprocess
from megatron.data_tools.tokenizers import add_tokenizer_arguments, build


def make_parser() -> argparse.ArgumentParser:
    """The command line: Megatron's flags and two of ours for plain text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="files or quoted patterns, in the order to keep; .gz too",
    )
    data.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (default: text)")
    data.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text"),
        default="auto",
        help="auto: .jsonl, .json and .ndjson hold one JSON object per line, other files are plain text",
    )
    data.add_argument(
        "--document-separator",
        metavar="LINE",
        help="plain text: a line equal to this ends a document, '' stands for a blank line (default: a file is one "
        "document)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output-prefix", required=True, metavar="PATH", help="files become PATH_KEY_document.bin/.idx"
    )
    output.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add_tokenizer_arguments(parser)
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--workers", type=int, metavar="N", help="worker processes (default: one per processor)")
    runtime.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="accepted for Megatron's scripts, without effect: input is streamed and needs no partitions",
    )
    runtime.add_argument(
        "--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)"
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the tool.

    Args:
        argv: Command line without the program's name; None takes the process's own.

    Returns:
        Exit status: 0, or 1 after an error message.
    """
    args = make_parser().parse_args(argv)
    # An exit by exception lets the writers remove their temporary files.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        if args.partitions < 1:
            raise DataError(f"--partitions {args.partitions}: at least 1")
        if args.partitions > 1:
            print(f"--partitions {args.partitions} has no effect: input is streamed, in one pass", file=sys.stderr)
        workers = {} if args.workers is None else {"workers": args.workers}
        options = PreprocessOptions(
            inputs=args.input,
            output_prefix=args.output_prefix,
            json_keys=args.json_keys,
            append_eod=args.append_eod,
            input_format=args.input_format,
            document_separator=args.document_separator,
            log_interval=args.log_interval,
            **workers,
        )
        for summary in preprocess(options, build(args)):
            skipped = f"; {summary.num_empty:,} empty documents left out" if summary.num_empty else ""
            counts = f"{summary.num_documents:,} documents, {summary.num_tokens:,} tokens{skipped}"
            print(f"{summary.prefix}.bin/.idx: {counts}")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
