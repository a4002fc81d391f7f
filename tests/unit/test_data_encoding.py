"""Documents become ids, in order, in any number of processes; what fails is named, and nothing hangs."""

import os
import signal
from dataclasses import dataclass

import numpy as np
import pytest

from megatron.data_tools.documents import Chunk, Record
from megatron.data_tools.encoding import Encoder, encode_chunk, encode_in_order
from megatron.data_tools.errors import DataError
from megatron.data_tools.preprocess import PreprocessOptions, preprocess
from tests.data_helpers import files_in, read_documents, write_jsonl


@dataclass(frozen=True)
class Letters:
    """One id per letter; certain texts make it misbehave."""

    vocab_size: int = 256
    eod: int | None = 255

    def encode(self, text):
        if text == "raise":
            raise ZeroDivisionError("the tokenizer's own words")
        if text == "panic":
            raise Panic("a panic that is no Exception")
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return [ord(letter) for letter in text]


class Panic(BaseException):
    """Like the panics of Rust extensions."""


def chunk_of(*texts):
    return Chunk("a.txt", is_json=False, records=[Record(k, text.encode()) for k, text in enumerate(texts, start=1)])


def encoder(append_eod=False, **tokenizer):
    return Encoder(Letters(**tokenizer), ("text",), append_eod)


def test_lengths_count_the_end_of_document_token():
    documents = encode_chunk(encoder(append_eod=True), chunk_of("ab", "c")).by_key["text"]
    assert documents.lengths == [3, 2]
    assert np.frombuffer(documents.tokens, np.uint16).tolist() == [97, 98, 255, 99, 255]


@pytest.mark.parametrize("append_eod", [False, True])
def test_documents_without_a_token_are_left_out_and_counted(append_eod):
    documents = encode_chunk(encoder(append_eod), chunk_of("", "ab", "", "   ")).by_key["text"]
    assert documents.lengths == ([3, 4] if append_eod else [2, 3])
    assert documents.num_empty == 2


def test_a_tokenizer_without_end_of_document_is_refused_only_if_it_is_asked_for():
    with pytest.raises(DataError, match=r"--append-eod: the tokenizer has no end-of-document token"):
        encoder(append_eod=True, eod=None)
    assert encode_chunk(encoder(eod=None), chunk_of("ab")).by_key["text"].lengths == [2]


@pytest.mark.parametrize("vocab_size", [98, 97])
def test_ids_outside_the_vocabulary_are_refused_with_their_place(vocab_size):
    with pytest.raises(DataError, match=rf"a\.txt:2: token ids 97 to 98 do not fit a vocabulary of {vocab_size}"):
        encode_chunk(encoder(vocab_size=vocab_size), chunk_of("", "ab"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("text", "message"), [("raise", "ZeroDivisionError: the tokenizer's own words"), ("panic", "Panic: a panic")]
)
def test_a_failing_tokenizer_is_named_with_file_and_line(tmp_path, workers, text, message):
    path = write_jsonl(tmp_path / "a.jsonl", ["fine"] * 3000 + [text] + ["fine"] * 3000)
    options = PreprocessOptions(inputs=[str(path)], output_prefix=str(tmp_path / "out" / "a"), workers=workers)
    with pytest.raises(DataError, match=rf"a\.jsonl:3001: the tokenizer failed: {message}"):
        preprocess(options, Letters())
    assert files_in(tmp_path / "out") == set()


def test_a_killed_worker_is_an_error_and_no_hang(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["fine"] * 3000 + ["kill"] + ["fine"] * 3000)
    options = PreprocessOptions(inputs=[str(path)], output_prefix=str(tmp_path / "out" / "a"), workers=2)
    with pytest.raises(DataError, match=r"a worker process died while tokenizing, at or before .*a\.jsonl:\d+-\d+"):
        preprocess(options, Letters())
    assert files_in(tmp_path / "out") == set()


def test_no_more_than_three_chunks_per_worker_are_read_ahead():
    num_read = 0

    def chunks():
        nonlocal num_read
        for _ in range(50):
            num_read += 1
            yield chunk_of("ab")

    results = encode_in_order(encoder(), chunks(), 2)
    ahead = []
    for num_done, _ in enumerate(results):
        ahead.append(num_read - num_done)
    assert len(ahead) == 50
    assert max(ahead) == 6


def test_keys_become_datasets_of_their_own(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "ab", "a": "c", "n": 1}\n{"q": "d", "a": "", "n": 1}\n')
    options = PreprocessOptions(inputs=[str(path)], output_prefix=str(tmp_path / "o"), json_keys=["q", "a"], workers=1)
    summaries = preprocess(options, Letters())
    assert [read_documents(summary.prefix) for summary in summaries] == [[[97, 98], [100]], [[99]]]
    assert [(s.num_documents, s.num_tokens, s.num_empty) for s in summaries] == [(2, 3, 0), (1, 1, 1)]


def test_input_without_any_token_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    options = PreprocessOptions(inputs=[str(path)], output_prefix=str(tmp_path / "out" / "a"), workers=1)
    with pytest.raises(
        DataError, match=r"no document of .*a\.jsonl has a token under key 'text' \(2 empty documents\)"
    ):
        preprocess(options, Letters())
    assert files_in(tmp_path / "out") == set()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"workers": 0}, "--workers 0: at least 1"),
        ({"log_interval": 0}, "--log-interval 0: at least 1"),
        ({"json_keys": ["a", "a"]}, "--json-keys a a: give each key once"),
    ],
)
def test_values_that_make_no_sense_are_refused(tmp_path, wrong, message):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    with pytest.raises(DataError, match=message):
        preprocess(PreprocessOptions(inputs=[str(path)], output_prefix=str(tmp_path / "o"), **wrong), Letters())
