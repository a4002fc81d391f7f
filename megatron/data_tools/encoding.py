"""Records to token ids in worker processes; results come back in input order, with bounded memory."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

import numpy as np

from megatron.data_tools.dataset_files import token_dtype
from megatron.data_tools.documents import Chunk, Record, parse_record
from megatron.data_tools.errors import DataError
from megatron.data_tools.tokenizers import TextTokenizer

_CHUNKS_IN_FLIGHT_PER_WORKER = 3


@dataclass(frozen=True, slots=True)
class Encoder:
    """Everything a worker needs to turn records into ids."""

    tokenizer: TextTokenizer
    json_keys: tuple[str, ...]
    append_eod: bool

    def __post_init__(self) -> None:
        """Refuses `--append-eod` for a tokenizer that has no such token."""
        if self.append_eod and self.tokenizer.eod is None:
            raise DataError(
                "--append-eod: the tokenizer has no end-of-document token (no eos); use one that has, "
                "or leave the flag out"
            )

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of the ids on disk."""
        return token_dtype(self.tokenizer.vocab_size)


@dataclass(slots=True)
class EncodedDocuments:
    """Documents of one chunk under one JSON key, ready to be written."""

    tokens: bytes = b""
    lengths: list[int] = field(default_factory=list)
    num_empty: int = 0
    """Documents without a single token, which are left out."""


@dataclass(slots=True)
class EncodedChunk:
    """Result for one chunk."""

    by_key: dict[str, EncodedDocuments]
    num_documents: int
    num_bytes: int


def encode_chunk(encoder: Encoder, chunk: Chunk) -> EncodedChunk:
    """Tokenizes the records of a chunk.

    Args:
        encoder: Tokenizer and options.
        chunk: Records of one file.

    Returns:
        Ids by JSON key.

    Raises:
        DataError: With file and line, if a record or the tokenizer is at fault.
    """
    by_key = {key: EncodedDocuments() for key in encoder.json_keys}
    pieces: dict[str, list[bytes]] = {key: [] for key in encoder.json_keys}
    for record in chunk.records:
        for key, text in parse_record(chunk, record, encoder.json_keys).items():
            ids = _encode_text(encoder, text, chunk, record)
            if not len(ids):
                by_key[key].num_empty += 1
                continue
            pieces[key].append(ids.tobytes())
            by_key[key].lengths.append(len(ids))
    for key, parts in pieces.items():
        by_key[key].tokens = b"".join(parts)
    return EncodedChunk(by_key, len(chunk.records), chunk.num_bytes)


def encode_in_order(encoder: Encoder, chunks: Iterator[Chunk], num_workers: int) -> Iterator[EncodedChunk]:
    """Encodes chunks in parallel and yields the results in the order of the input.

    At most three chunks per worker are read ahead, so memory does not grow with the input.

    Args:
        encoder: Tokenizer and options.
        chunks: The input.
        num_workers: Processes; 1 works in this one.

    Yields:
        Results, one per chunk.

    Raises:
        DataError: If a record or the tokenizer is at fault, or a worker process dies.
    """
    if num_workers == 1:
        for chunk in chunks:
            yield encode_chunk(encoder, chunk)
        return
    # Spawned workers start without the threads and locks of this process; forked ones can deadlock on them.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (encoder,))
    waiting: deque[tuple[str, Future[EncodedChunk]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk.span, pool.submit(_work, chunk)))
            if len(waiting) >= num_workers * _CHUNKS_IN_FLIGHT_PER_WORKER:
                yield waiting.popleft()[1].result()
        while waiting:
            yield waiting.popleft()[1].result()
    except BrokenProcessPool as error:
        last = waiting[-1][0] if waiting else "the last chunk"
        raise DataError(
            f"a worker process died while tokenizing, at or before {last}; the system kills processes when "
            "memory runs out: try fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode_text(encoder: Encoder, text: str, chunk: Chunk, record: Record) -> np.ndarray:
    where = f"{chunk.path}:{record.line}"
    tokenizer = encoder.tokenizer
    try:
        ids = np.asarray(tokenizer.encode(text), dtype=np.int64)
    except (KeyboardInterrupt, SystemExit):
        raise
    # Panics of Rust tokenizers are no Exception.
    except BaseException as error:
        raise DataError(f"{where}: the tokenizer failed: {type(error).__name__}: {error}") from None
    if not len(ids):
        return ids
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise DataError(f"{where}: token ids {low} to {high} do not fit a vocabulary of {tokenizer.vocab_size}")
    if encoder.append_eod and tokenizer.eod is not None:
        ids = np.append(ids, tokenizer.eod)
    return ids.astype(encoder.dtype)


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    _worker_encoder = encoder
    # Ctrl-C reaches the whole group; the parent alone reports it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism; threads inside them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Ends an orphan: a pool's worker waits for ever on its queue if the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(chunk: Chunk) -> EncodedChunk:
    if _worker_encoder is None:
        raise RuntimeError("a worker was not started through _start_worker")
    return encode_chunk(_worker_encoder, chunk)


def default_num_workers() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_num_workers(num_workers: int, json_keys: Sequence[str]) -> None:
    """Refuses a number of workers or a list of keys that make no sense.

    Args:
        num_workers: Value of `--workers`.
        json_keys: Value of `--json-keys`.

    Raises:
        DataError: If there is no worker, no key, or a key twice.
    """
    if num_workers < 1:
        raise DataError(f"--workers {num_workers}: at least 1")
    if not json_keys or len(set(json_keys)) != len(json_keys):
        raise DataError(f"--json-keys {' '.join(json_keys)}: give each key once")
