"""Loads the tokenizer that Megatron's flags name, as a small object that can be sent to worker processes.

Megatron's own builder (`megatron.core.tokenizers.utils.build_tokenizer`) cannot be imported without torch and
the whole of `megatron.core`, seconds for every worker. The classes here call the same libraries in the same way;
tests compare ids, vocabulary size and end-of-document id with Megatron's for each type.
"""

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.data_tools.errors import DataError
from megatron.data_tools.tokenizer_files import write_gpt2_folder

SENTENCEPIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
"""Megatron builds the same class for all three."""

TOKENIZER_TYPES = (*SENTENCEPIECE_TYPES, "HuggingFaceTokenizer", "GPT2BPETokenizer", "NullTokenizer")
"""The `--tokenizer-type` choices of the data tools, a subset of Megatron's, by the same names."""


class TextTokenizer(Protocol):
    """What preprocessing needs to know of a tokenizer. Implementations can be pickled."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, without Megatron's padding."""
        ...

    @property
    def eod(self) -> int | None:
        """Id that ends a document, or None if the tokenizer has none."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class NullTokenizer:
    """Reads ids that are written out in the text, separated by single spaces."""

    vocab_size: int
    eod: int | None

    def encode(self, text: str) -> Sequence[int]:
        """Ids in the text; the empty text has none."""
        return [int(word) for word in text.split(" ")] if text.strip() else []


class SentencePieceTokenizer:
    """A SentencePiece model file."""

    def __init__(self, model_file: str) -> None:
        """Loads the model.

        Args:
            model_file: Value of `--tokenizer-model`.

        Raises:
            DataError: If the file is not a SentencePiece model.
        """
        import sentencepiece

        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.Load(model_file)
        except (RuntimeError, OSError) as error:
            raise DataError(f"--tokenizer-model {model_file}: not a SentencePiece model: {error}") from error
        self.vocab_size: int = self._processor.get_piece_size()
        eos = self._processor.eos_id()
        self.eod: int | None = eos if eos >= 0 else None

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""
        return self._processor.encode_as_ids(text)


class HuggingFaceTokenizer:
    """A HuggingFace tokenizer folder, loaded with `AutoTokenizer` as Megatron does.

    A "fast" tokenizer then keeps only its Rust object: what `AutoTokenizer` returns would import torch in every
    worker.
    """

    def __init__(self, folder: str, *, use_fast: bool = True, include_special_tokens: bool = True) -> None:
        """Loads the folder.

        Args:
            folder: Value of `--tokenizer-model`: a folder, or a name known to the local hub cache or the hub.
            use_fast: As `--tokenizer-hf-no-use-fast` says.
            include_special_tokens: As `--tokenizer-hf-no-include-special-tokens` says.

        Raises:
            DataError: If no tokenizer can be loaded from there.
        """
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(folder, use_fast=use_fast)
        except Exception as error:
            raise DataError(f"--tokenizer-model {folder}: no HuggingFace tokenizer: {error}") from error
        self.vocab_size: int = len(loaded)
        # Megatron takes the separator where there is no end-of-sequence token.
        end = loaded.eos_token or loaded.sep_token
        self.eod: int | None = None if end is None else loaded.convert_tokens_to_ids(end)
        self._include_special_tokens = include_special_tokens
        self._fast: Any = getattr(loaded, "backend_tokenizer", None)
        self._slow: Any = None if self._fast is not None else loaded
        if self._fast is not None:
            self._fast.no_truncation()
            self._fast.no_padding()

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a text."""
        if self._fast is not None:
            return self._fast.encode(text, add_special_tokens=self._include_special_tokens).ids
        return self._slow(text, add_special_tokens=self._include_special_tokens).input_ids


def local_gpt2_bpe(vocab_file: str | None, merge_file: str | None) -> HuggingFaceTokenizer:
    """GPT-2's byte-pair encoding from two local files; never asks a model hub.

    Args:
        vocab_file: Value of `--vocab-file`.
        merge_file: Value of `--merge-file`.

    Returns:
        The tokenizer.

    Raises:
        DataError: If a file is not given or does not exist, or the files do not belong together.
    """
    check_gpt2_files(vocab_file, merge_file)
    with tempfile.TemporaryDirectory() as folder:
        return HuggingFaceTokenizer(str(write_gpt2_folder(folder, str(vocab_file), str(merge_file))))


def check_gpt2_files(vocab_file: str | None, merge_file: str | None) -> None:
    """Refuses `GPT2BPETokenizer` without its two files, naming the flags and what else works.

    Args:
        vocab_file: Value of `--vocab-file`.
        merge_file: Value of `--merge-file`.

    Raises:
        DataError: If a file is not given, does not exist, or is not GPT-2's format.
    """
    remedy = (
        "give both GPT-2 files (vocab.json and merges.txt), or a tokenizer folder with --tokenizer-type "
        "HuggingFaceTokenizer --tokenizer-model FOLDER"
    )
    for flag, value in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
        if not value:
            raise DataError(f"--tokenizer-type GPT2BPETokenizer: {flag} is missing; {remedy}")
        if not Path(value).is_file():
            raise DataError(f"{flag} {value}: no such file; {remedy}")
    try:
        with open(str(vocab_file), encoding="utf-8") as stream:
            vocabulary = json.load(stream)
    except ValueError as error:
        raise DataError(f"--vocab-file {vocab_file}: not JSON ({error}); {remedy}") from None
    with open(str(merge_file), "rb") as merges:
        is_text_of_pairs = all(len(line.split()) == 2 for line in itertools.islice(merges, 50))
    if not isinstance(vocabulary, dict) or not is_text_of_pairs:
        raise DataError(f"--vocab-file {vocab_file} --merge-file {merge_file}: not GPT-2's formats; {remedy}")


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds Megatron's tokenizer flags, with Megatron's names and meanings, to a tool's parser."""
    group = parser.add_argument_group("tokenizer (the same flags go to pretrain_gpt.py)")
    group.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="kind of tokenizer")
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="SentencePiece .model file, or HuggingFace tokenizer folder"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="number of ids of NullTokenizer; the last one ends a document"
    )
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true", help="use the Python implementation")
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="leave out the tokens that a HuggingFace tokenizer puts around every text",
    )


def build(args: argparse.Namespace) -> TextTokenizer:
    """Builds the tokenizer that the flags of `add_tokenizer_arguments` name.

    Args:
        args: Parsed flags.

    Returns:
        The tokenizer.

    Raises:
        DataError: If a flag that the type needs is missing or wrong.
    """
    kind = args.tokenizer_type
    if kind == "NullTokenizer":
        if args.vocab_size is None or args.vocab_size < 2:
            raise DataError(
                f"--vocab-size {args.vocab_size}: --tokenizer-type NullTokenizer needs it, at least 2 "
                "(the last id ends a document)"
            )
        return NullTokenizer(args.vocab_size, args.vocab_size - 1)
    if kind == "GPT2BPETokenizer":
        return local_gpt2_bpe(args.vocab_file, args.merge_file)
    if kind not in TOKENIZER_TYPES:
        raise DataError(f"--tokenizer-type {kind}: choose from {', '.join(TOKENIZER_TYPES)}")
    if not args.tokenizer_model:
        raise DataError(f"--tokenizer-type {kind} needs --tokenizer-model")
    if kind in SENTENCEPIECE_TYPES:
        if not os.path.isfile(args.tokenizer_model):
            raise DataError(f"--tokenizer-model {args.tokenizer_model}: no such file")
        return SentencePieceTokenizer(args.tokenizer_model)
    return HuggingFaceTokenizer(
        args.tokenizer_model,
        use_fast=not args.tokenizer_hf_no_use_fast,
        include_special_tokens=not args.tokenizer_hf_no_include_special_tokens,
    )
