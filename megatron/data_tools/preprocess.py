"""The pipeline of `tools/preprocess_data.py`: input files to one `.bin/.idx` pair for each JSON key."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from megatron.data_tools.dataset_files import DatasetWriter
from megatron.data_tools.documents import InputFormat, expand_inputs, input_bytes, read_chunks
from megatron.data_tools.encoding import Encoder, check_num_workers, default_num_workers, encode_in_order
from megatron.data_tools.errors import DataError
from megatron.data_tools.progress import Progress
from megatron.data_tools.tokenizers import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessOptions:
    """What to read and where to write."""

    inputs: Sequence[str]
    """Files or glob patterns."""
    output_prefix: str
    """Files become `PREFIX_KEY_document.bin/.idx`."""
    json_keys: Sequence[str] = ("text",)
    """Keys of the JSON objects; each becomes a dataset of its own."""
    append_eod: bool = False
    """End every document with the tokenizer's end-of-document id."""
    workers: int = field(default_factory=default_num_workers)
    """Processes. The output does not depend on it."""
    input_format: InputFormat = "auto"
    """`auto` goes by file name."""
    document_separator: str | None = None
    """For plain text, see `documents.read_chunks`."""
    log_interval: int = 1000
    """Documents between two progress lines where output is no terminal."""


@dataclass(slots=True)
class DatasetSummary:
    """What was written for one JSON key."""

    prefix: str
    """Value for `--data-path`."""
    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    """Documents left out because they have no token."""


def preprocess(options: PreprocessOptions, tokenizer: TextTokenizer) -> list[DatasetSummary]:
    """Tokenizes the input and writes the datasets; either all of them are complete at the end, or none changed.

    Args:
        options: Input and output.
        tokenizer: From `tokenizers.build`.

    Returns:
        One summary for each JSON key, in the order given.

    Raises:
        DataError: If the input, the tokenizer or the disk is at fault, or no document has a token.
    """
    check_num_workers(options.workers, options.json_keys)
    if options.log_interval < 1:
        raise DataError(f"--log-interval {options.log_interval}: at least 1")
    encoder = Encoder(tokenizer, tuple(options.json_keys), options.append_eod)
    paths = expand_inputs(options.inputs)
    summaries = {key: DatasetSummary(f"{options.output_prefix}_{key}_document") for key in options.json_keys}
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(DatasetWriter(summary.prefix, encoder.dtype)) for key, summary in summaries.items()
        }
        progress = stack.enter_context(Progress(input_bytes(paths), options.log_interval))
        chunks = read_chunks(paths, options.input_format, options.document_separator)
        for result in encode_in_order(encoder, chunks, options.workers):
            for key, documents in result.by_key.items():
                writers[key].add(documents.tokens, documents.lengths)
                summaries[key].num_documents += len(documents.lengths)
                summaries[key].num_tokens += sum(documents.lengths)
                summaries[key].num_empty += documents.num_empty
            progress.advance(result.num_documents, result.num_bytes)
        for key, summary in summaries.items():
            if not summary.num_documents:
                raise DataError(
                    f"no document of {', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''} has a token under key "
                    f"'{key}' ({summary.num_empty} empty documents); nothing was written"
                )
        for writer in writers.values():
            writer.stage()
        for writer in writers.values():
            writer.commit()
    return list(summaries.values())
