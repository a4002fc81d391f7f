"""Whatever the texts, the dataset holds exactly them, and does not depend on how the work was cut."""

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data_tools import documents
from megatron.data_tools.dataset_files import read_index, token_counts, unigram_entropy
from megatron.data_tools.encoding import Encoder, encode_in_order
from megatron.data_tools.preprocess import PreprocessOptions, preprocess
from megatron.data_tools.tokenizer_files import byte_to_character, train_sentencepiece, write_byte_tokenizer
from megatron.data_tools.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, TextTokenizer
from tests.data_helpers import EXCERPT, write_dataset, write_jsonl

# Surrogates are no text; "<" keeps hypothesis from spelling the special token.
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=200), max_size=20)


@cache
def tokenizer(kind: str) -> TextTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        if kind == "bytes":
            return HuggingFaceTokenizer(str(write_byte_tokenizer(folder)))
        return SentencePieceTokenizer(str(train_sentencepiece([EXCERPT], Path(folder) / "sp.model", 300)))


def pair(prefix: str) -> tuple[bytes, bytes]:
    return Path(prefix + ".bin").read_bytes(), Path(prefix + ".idx").read_bytes()


def run(folder: str, path: Path, name: str, kind: str = "bytes", **options: object) -> str:
    asked = {"inputs": [str(path)], "output_prefix": f"{folder}/{name}", "append_eod": True, "workers": 1, **options}
    return preprocess(PreprocessOptions(**asked), tokenizer(kind))[0].prefix


@settings(max_examples=50, deadline=None)
@given(texts=TEXTS)
def test_bytes_come_back_as_the_texts(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder) / "a.jsonl", ["x", *texts])
        prefix = run(folder, path, "a")
        lengths = read_index(prefix).lengths
        tokens = np.fromfile(prefix + ".bin", np.uint16)
        found = [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
        assert found == [[*text.encode(), 256] for text in ["x", *texts] if text]
        counts = token_counts(prefix, 257)
        assert counts.sum() == len(tokens)
        assert 0 <= unigram_entropy(counts) <= np.log(257)


@settings(max_examples=30, deadline=None)
@given(texts=TEXTS, chunk_bytes=st.integers(1, 2000), chunk_records=st.integers(1, 30))
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_the_cut_into_chunks_does_not_show(kind: str, texts: list[str], chunk_bytes: int, chunk_records: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = write_jsonl(Path(folder) / "a.jsonl", ["x", *texts])
        whole = run(folder, path, "whole", kind)
        patch.setattr(documents, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(documents, "CHUNK_RECORDS", chunk_records)
        assert pair(run(folder, path, "cut", kind)) == pair(whole)


@settings(max_examples=5, deadline=None)
@given(texts=TEXTS, workers=st.integers(2, 4))
def test_the_number_of_workers_does_not_show(texts: list[str], workers: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "CHUNK_RECORDS", 2)
        path = write_jsonl(Path(folder) / "a.jsonl", ["x", *texts])
        one, many = (run(folder, path, f"w{n}", "sentencepiece", workers=n) for n in (1, workers))
        assert pair(one) == pair(many)


@settings(max_examples=50, deadline=None)
@given(texts=TEXTS, separator=st.sampled_from(["", "----"]))
def test_separated_text_files_hold_what_was_joined(texts: list[str], separator: str) -> None:
    lines = [text.replace("\n", " ").replace("\r", " ").strip() for text in texts]
    bodies = [line for line in lines if line and line != separator]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_text(f"\n{separator}\n".join(bodies), encoding="utf-8", newline="")
        encoder = Encoder(tokenizer("bytes"), ("text",), append_eod=False)
        chunks = documents.read_chunks([str(path)], "text", separator)
        found = b"".join(result.by_key["text"].tokens for result in encode_in_order(encoder, chunks, 1))
    ended = [body + "\n" for body in bodies[:-1]] + bodies[-1:]
    assert np.frombuffer(found, np.uint16).astype(np.uint8).tobytes() == "".join(ended).encode()


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=50), vocab_size=st.sampled_from([100, 100_000]))
def test_the_index_holds_the_lengths(lengths: list[int], vocab_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_dataset(Path(folder) / "a", [range(n) for n in lengths], vocab_size)
        assert read_index(prefix).lengths.tolist() == lengths


def test_stand_ins_for_bytes_are_gpt2s() -> None:
    characters = byte_to_character()
    assert len(set(characters.values())) == 256
    assert (characters[ord(" ")], characters[ord("\n")], characters[ord("a")]) == ("Ġ", "Ċ", "a")
    assert json.loads(json.dumps(characters[0xAD])) == "Ń"
