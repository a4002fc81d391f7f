r"""Writes and reads `PREFIX.bin/.idx`, the format of `megatron.core.datasets.indexed_dataset.IndexedDataset`.

    .bin  token ids of all sequences, one after the other, uint16 or int32, little endian
    .idx  "MMIDIDX\0\0", uint64 version 1, uint8 dtype code, uint64 number of sequences,
          uint64 number of documents + 1, then int32 length of each sequence, int64 byte offset of each
          sequence, int64 index of the first sequence of each document and the end

A document is one sequence here. Source: megatron-core 0.19.2, `_IndexWriter` and `IndexedDatasetBuilder`;
a test compares the bytes with theirs.
"""

import contextlib
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from megatron.data_tools.errors import DataError

_HEADER = b"MMIDIDX\x00\x00"
_VERSION = 1
_DTYPE_CODES: dict[str, int] = {"int32": 4, "uint16": 8}
_LARGEST_UINT16_VOCABULARY = 65499
"""Megatron's `DType.optimal_dtype` takes uint16 below 65,500 ids."""
_BLOCK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """The dtype in which Megatron stores ids of a vocabulary of this size: uint16 or int32."""
    return np.dtype(np.uint16 if vocab_size <= _LARGEST_UINT16_VOCABULARY else np.int32)


class DatasetWriter:
    """Writes one `.bin/.idx` pair under temporary names; `commit` gives them their final names, else they go.

    A reader therefore never sees half a dataset: the old index goes first, then the new data and the new
    index come, and each is on the disk before it is renamed. Only a kill that cannot be caught leaves the
    temporary files (`.PREFIX.*.partial`) behind.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[np.generic]) -> None:
        """Opens the temporary data file beside the final one.

        Args:
            prefix: Path without `.bin`.
            dtype: Of the token ids, from `token_dtype`.

        Raises:
            DataError: If the folder cannot be made or written.
        """
        self.prefix = Path(prefix)
        self.dtype = dtype
        self.lengths = array("i")
        self._partial: dict[str, Path] = {}
        self._is_staged = False
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._data = self._open_partial(".bin")
        except OSError as error:
            raise DataError(f"{self.final('.bin')}: cannot be written: {error.strerror or error}") from error

    def final(self, suffix: str) -> Path:
        """Path of the finished `.bin` or `.idx`."""
        return self.prefix.with_name(self.prefix.name + suffix)

    def add(self, tokens: bytes, lengths: Sequence[int]) -> None:
        """Appends documents.

        Args:
            tokens: Ids of the documents, one after the other, as bytes of `dtype`.
            lengths: Number of tokens of each document.

        Raises:
            DataError: If the file cannot be written, as when the disk is full.
        """
        try:
            self._data.write(tokens)
        except OSError as error:
            raise self._write_error(".bin", error) from error
        self.lengths.extend(lengths)

    def stage(self) -> None:
        """Brings data and index to the disk under their temporary names.

        Raises:
            DataError: If they cannot be written.
        """
        suffix = ".bin"
        try:
            _flush_to_disk(self._data)
            suffix = ".idx"
            with self._open_partial(".idx") as stream:
                self._write_index(stream)
                _flush_to_disk(stream)
        except OSError as error:
            raise self._write_error(suffix, error) from error
        self._is_staged = True

    def commit(self) -> None:
        """Replaces the final files by the staged ones, and drops Megatron's index cache of the old data.

        Raises:
            DataError: If a file cannot be renamed.
        """
        if not self._is_staged:
            self.stage()
        try:
            self.final(".idx").unlink(missing_ok=True)
            # Megatron keys this cache by path and sample counts, not by content: with new data under an old
            # name it would hand out the sample index of the old data.
            shutil.rmtree(self.prefix / "cache", ignore_errors=True)
            for suffix in (".bin", ".idx"):
                os.replace(self._partial[suffix], self.final(suffix))
                del self._partial[suffix]
            _flush_folder(self.prefix.parent)
        except OSError as error:
            raise self._write_error(".idx", error) from error

    def discard(self) -> None:
        """Closes and removes the temporary files; final files stay as they are."""
        # Closing flushes what is buffered, which fails again on a full disk.
        with contextlib.suppress(OSError):
            self._data.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)
        self._partial.clear()

    def __enter__(self) -> "DatasetWriter":
        """Returns the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Removes whatever has not been committed."""
        self.discard()

    def _open_partial(self, suffix: str) -> IO[bytes]:
        handle, name = tempfile.mkstemp(
            prefix=f".{self.prefix.name}{suffix}.", suffix=".partial", dir=self.prefix.parent
        )
        self._partial[suffix] = Path(name)
        # mkstemp makes files private to the user; a dataset is shared like any other file.
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(handle, 0o666 & ~umask)
        return os.fdopen(handle, "wb")

    def _write_index(self, stream: IO[bytes]) -> None:
        lengths = np.frombuffer(self.lengths, dtype=np.int32) if self.lengths else np.zeros(0, np.int32)
        stream.write(_HEADER + struct.pack("<QB", _VERSION, _DTYPE_CODES[self.dtype.name]))
        stream.write(struct.pack("<QQ", len(lengths), len(lengths) + 1))
        stream.write(lengths.tobytes())
        start = 0
        for first in range(0, len(lengths), _BLOCK):
            sizes = lengths[first : first + _BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = np.cumsum(sizes) + start
            stream.write((ends - sizes).tobytes())
            start = int(ends[-1])
        for first in range(0, len(lengths) + 1, _BLOCK):
            stream.write(np.arange(first, min(first + _BLOCK, len(lengths) + 1), dtype=np.int64).tobytes())

    def _write_error(self, suffix: str, error: OSError) -> DataError:
        return DataError(
            f"{self.final(suffix)}: cannot be written: {error.strerror or error}; nothing new was left under that name"
        )


@dataclass(frozen=True, slots=True)
class DatasetIndex:
    """What an `.idx` file says, read without `megatron.core`."""

    prefix: str
    dtype: np.dtype[np.generic]
    lengths: np.ndarray
    """Tokens of each sequence, `(num_sequences,)` int32, mapped from the file."""


def read_index(prefix: str) -> DatasetIndex:
    """Reads the header of `PREFIX.idx` and maps its sequence lengths.

    Args:
        prefix: Path without `.idx`.

    Returns:
        The index.

    Raises:
        DataError: If either file is missing, or the index is not one.
    """
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise DataError(_missing_message(prefix, suffix))
    path = prefix + ".idx"
    head_size = len(_HEADER) + 9 + 16
    with open(path, "rb") as stream:
        head = stream.read(head_size)
    if len(head) < head_size or not head.startswith(_HEADER):
        raise DataError(f"{path}: not the index of a Megatron dataset (bad header)")
    version, code, num_sequences, _ = struct.unpack("<QBQQ", head[len(_HEADER) :])
    names = {value: name for name, value in _DTYPE_CODES.items()}
    if version != _VERSION or code not in names:
        raise DataError(f"{path}: unknown version {version} or dtype code {code}")
    if Path(path).stat().st_size < head_size + 4 * num_sequences:
        raise DataError(f"{path}: truncated; preprocess the data again")
    lengths = (
        np.memmap(path, np.int32, "r", offset=head_size, shape=(num_sequences,))
        if num_sequences
        else np.zeros(0, np.int32)
    )
    return DatasetIndex(prefix, np.dtype(names[code]), lengths)


def token_counts(prefix: str, vocab_size: int) -> np.ndarray:
    """How often each id occurs in a dataset, `(vocab_size,)` int64."""
    index = read_index(prefix)
    tokens = np.memmap(prefix + ".bin", index.dtype, "r")
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(tokens), _BLOCK):
        counts += np.bincount(tokens[first : first + _BLOCK], minlength=vocab_size)
    return counts


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy of the unigram distribution, -sum p ln p, in nats per token.

    It is the loss of the best model that knows how often each token occurs and nothing else: a language model
    below it has learned something about order.

    Args:
        counts: Occurrences of each id, `(vocab_size,)`.

    Returns:
        Nats per token; 0 for an empty count.
    """
    seen = counts[counts > 0].astype(np.float64)
    if not len(seen):
        return 0.0
    probabilities = seen / seen.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def _missing_message(prefix: str, suffix: str) -> str:
    message = f"{prefix}{suffix}: no such file; a dataset is named by its path without .bin/.idx"
    near = sorted(Path(prefix).parent.glob(f"{Path(prefix).name}*_document.idx"))
    if prefix.endswith((".bin", ".idx")):
        return f"{message}: did you mean {prefix[:-4]}?"
    return f"{message}: did you mean {str(near[0])[:-4]}?" if near else message


def _flush_to_disk(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
