"""Records come out of files whole, in order, and with the place they came from."""

import gzip

import pytest

from megatron.data_tools import documents
from megatron.data_tools.documents import Chunk, Record, expand_inputs, parse_record, read_chunks
from megatron.data_tools.errors import DataError


def texts_of(path, **options):
    return [
        (record.line, parse_record(chunk, record, ("text",))["text"])
        for chunk in read_chunks([str(path)], **options)
        for record in chunk.records
    ]


def test_json_lines_keep_their_line_numbers_over_blank_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n  \n{"text": "two"}')
    assert texts_of(path) == [(1, "one"), (4, "two")]


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n')
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfone")
    assert texts_of(tmp_path / "a.jsonl") == texts_of(tmp_path / "b.txt") == [(1, "one")]


def test_a_compressed_file_reads_like_the_plain_one(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write('{"text": "one"}\n')
    assert texts_of(tmp_path / "a.jsonl.gz") == [(1, "one")]
    assert documents.input_bytes([str(tmp_path / "a.jsonl.gz")]) is None


def test_a_truncated_compressed_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-10])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: cannot be read"):
        texts_of(path)


def test_a_plain_text_file_is_one_document(tmp_path):
    (tmp_path / "a.md").write_text("one\n\ntwo\n")
    assert texts_of(tmp_path / "a.md") == [(1, "one\n\ntwo\n")]


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("<end>", [(1, "a\n\nb\n"), (5, "c\n")]),
        ("", [(1, "a\n"), (3, "b\n<end>\nc\n")]),
        ("none", [(1, "a\n\nb\n<end>\nc\n")]),
    ],
)
def test_a_separator_line_ends_a_document(tmp_path, separator, expected):
    (tmp_path / "a.txt").write_text("a\n\nb\n<end>\nc\n")
    assert texts_of(tmp_path / "a.txt", separator=separator) == expected


def test_the_format_follows_the_name_unless_it_is_given(tmp_path):
    (tmp_path / "a.txt").write_text('{"text": "one"}\n')
    assert texts_of(tmp_path / "a.txt") == [(1, '{"text": "one"}\n')]
    assert texts_of(tmp_path / "a.txt", input_format="jsonl") == [(1, "one")]


def test_chunks_are_bounded_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHUNK_BYTES", 100)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{k}"}}\n' for k in range(100)))
    chunks = list(read_chunks([str(path), str(path)]))
    assert max(chunk.num_bytes for chunk in chunks) < 100 + 20
    assert sum(chunk.num_bytes for chunk in chunks) == 2 * path.stat().st_size
    assert [record.line for chunk in chunks for record in chunk.records] == 2 * list(range(1, 101))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", r"a\.jsonl:7: not valid JSON .*one JSON object per line"),
        (b"[" * 100_000, r"a\.jsonl:7: not valid JSON"),
        (b"[1]", r"a\.jsonl:7: expected a JSON object, found list"),
        (b'{"body": "x"}', r"a\.jsonl:7: no key 'text'; the object has \['body'\] \(choose with --json-keys\)"),
        (b'{"text": null}', r"a\.jsonl:7: key 'text' holds NoneType, expected a string"),
        (b'{"text": "\xff"}', r"a\.jsonl:7: not valid UTF-8 \(byte 10"),
    ],
)
def test_a_broken_record_is_named_by_file_and_line(raw, message):
    with pytest.raises(DataError, match=message):
        parse_record(Chunk("a.jsonl", is_json=True), Record(7, raw), ("text",))


def test_patterns_are_sorted_and_each_file_comes_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).touch()
    found = expand_inputs([str(tmp_path / "c.txt"), str(tmp_path / "*.jsonl"), str(tmp_path / "a.jsonl")])
    assert found == [str(tmp_path / name) for name in ("c.txt", "a.jsonl", "b.jsonl")]


@pytest.mark.parametrize(("name", "message"), [("", "is a folder"), ("none", "no such file"), ("*.x", "no such file")])
def test_an_input_that_is_no_file_is_refused(tmp_path, name, message):
    with pytest.raises(DataError, match=f"--input .*{message}"):
        expand_inputs([str(tmp_path / name)])
