"""Input files to records: one record is one document as raw bytes, with the file and line it starts on."""

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, cast

from megatron.data_tools.errors import DataError

InputFormat = Literal["auto", "jsonl", "text"]

JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
"""File names that `auto` reads as one JSON object per line; every other file is plain text."""

CHUNK_BYTES = 1 << 20
CHUNK_RECORDS = 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Record:
    """One document before decoding."""

    line: int
    """Line of the file on which the document begins, from 1."""
    raw: bytes
    """The JSON line, or the text."""


@dataclass(slots=True)
class Chunk:
    """Consecutive records of one file: the unit of work that travels to a worker process."""

    path: str
    is_json: bool
    records: list[Record] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes of input that these records came from."""

    @property
    def span(self) -> str:
        """Where the chunk lies, for messages: `file:first-last`."""
        return f"{self.path}:{self.records[0].line}-{self.records[-1].line}"


def expand_inputs(patterns: Sequence[str]) -> list[str]:
    """Files named by paths and glob patterns, in the order given; a pattern's files are sorted.

    Args:
        patterns: Paths, or patterns with `*`, `?`, `[...]` or `**`.

    Returns:
        Paths of existing files, each once.

    Raises:
        DataError: If a path does not exist, is a folder, or a pattern matches no file.
    """
    files: dict[str, None] = {}
    for pattern in patterns:
        if Path(pattern).is_file():
            files[pattern] = None
            continue
        if Path(pattern).is_dir():
            raise DataError(f"--input {pattern}: is a folder; name its files, as '{pattern}/*.jsonl'")
        matches = sorted(match for match in glob.glob(pattern, recursive=True) if Path(match).is_file())
        if not matches:
            raise DataError(f"--input {pattern}: no such file, and no file matches it as a pattern")
        files.update(dict.fromkeys(matches))
    return list(files)


def is_jsonl(path: str, input_format: InputFormat = "auto") -> bool:
    """Whether a file is read as JSON lines (else as plain text)."""
    if input_format == "auto":
        return path.removesuffix(".gz").endswith(JSONL_SUFFIXES)
    return input_format == "jsonl"


def read_chunks(
    paths: Sequence[str], input_format: InputFormat = "auto", separator: str | None = None
) -> Iterator[Chunk]:
    """Cuts the files into chunks of about 1 MiB; holds one chunk in memory, whatever the size of the files.

    Args:
        paths: Files in the order in which their documents are to be written; `.gz` is unpacked on the fly.
        input_format: `jsonl`, `text`, or `auto` (by file name, see `JSONL_SUFFIXES`).
        separator: For plain text: a line that equals this string ends a document; `""` stands for a blank
            line. None: the whole file is one document, and is read whole.

    Yields:
        Chunks in input order.

    Raises:
        DataError: If a file cannot be read.
    """
    for path in paths:
        is_json = is_jsonl(path, input_format)
        chunk = Chunk(path, is_json)
        try:
            with _open(path) as stream:
                records = _json_lines(stream) if is_json else _text_documents(stream, separator)
                for record, num_bytes in records:
                    chunk.num_bytes += num_bytes
                    if record is None:
                        continue
                    chunk.records.append(record)
                    if chunk.num_bytes >= CHUNK_BYTES or len(chunk.records) >= CHUNK_RECORDS:
                        yield chunk
                        chunk = Chunk(path, is_json)
        except (OSError, EOFError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error
        if chunk.records:
            yield chunk


def input_bytes(paths: Sequence[str]) -> int | None:
    """Total size of the files in bytes; None if one is compressed, as its real size is not known."""
    if any(path.endswith(".gz") for path in paths):
        return None
    return sum(Path(path).stat().st_size for path in paths)


def parse_record(chunk: Chunk, record: Record, json_keys: Sequence[str]) -> dict[str, str]:
    """Decodes one record to the text under each key; plain text stands under every key asked for.

    Args:
        chunk: The chunk that the record belongs to.
        record: The record.
        json_keys: Keys of the JSON object to read.

    Returns:
        Text by key.

    Raises:
        DataError: With file and line, if the record is not UTF-8, not a JSON object, lacks a key, or holds
            something else than a string there.
    """
    where = f"{chunk.path}:{record.line}"
    try:
        text = record.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 (byte {error.start}: {error.reason})") from None
    if not chunk.is_json:
        return dict.fromkeys(json_keys, text)
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); the file must hold one JSON object per line "
            "(for plain text pass --input-format text)"
        ) from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return {key: _text_under(value, key, where) for key in json_keys}


def _text_under(value: dict[str, object], key: str, where: str) -> str:
    if key not in value:
        raise DataError(f"{where}: no key '{key}'; the object has {sorted(value)} (choose with --json-keys)")
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{where}: key '{key}' holds {type(text).__name__}, expected a string")
    return text


def _open(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb"))


def _json_lines(stream: BinaryIO) -> Iterator[tuple[Record | None, int]]:
    for number, line in enumerate(stream, start=1):
        raw = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        yield (Record(number, raw) if raw.strip() else None), len(line)


def _text_documents(stream: BinaryIO, separator: str | None) -> Iterator[tuple[Record | None, int]]:
    if separator is None:
        raw = stream.read()
        yield Record(1, raw.removeprefix(_BYTE_ORDER_MARK)), len(raw)
        return
    mark = separator.encode("utf-8")
    lines: list[bytes] = []
    first, num_bytes, number = 1, 0, 0
    for number, line in enumerate(stream, start=1):
        content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        num_bytes += len(line)
        if (content.strip() if not mark else content.rstrip(b"\r\n")) == mark:
            yield (Record(first, b"".join(lines)) if lines else None), num_bytes
            lines, first, num_bytes = [], number + 1, 0
        else:
            lines.append(content)
    if lines:
        yield Record(first, b"".join(lines)), num_bytes
