"""The `.bin/.idx` files are Megatron's, byte for byte, and appear complete or not at all."""

import errno
import math
import os

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron.data_tools import dataset_files
from megatron.data_tools.dataset_files import DatasetWriter, read_index, token_counts, token_dtype, unigram_entropy
from megatron.data_tools.errors import DataError
from tests.data_helpers import files_in, read_documents, write_dataset

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize("vocab_size", [100, 65499, 65500, 200_000])
def test_the_files_equal_those_of_megatrons_builder(tmp_path, vocab_size, monkeypatch):
    monkeypatch.setattr(dataset_files, "_BLOCK", 2)
    write_dataset(tmp_path / "ours", DOCUMENTS, vocab_size)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=DType.optimal_dtype(vocab_size))
    for ids in DOCUMENTS:
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_megatron_reads_back_what_was_written(tmp_path):
    assert read_documents(write_dataset(tmp_path / "a", DOCUMENTS)) == DOCUMENTS


def test_our_reader_sees_the_same_lengths(tmp_path):
    index = read_index(write_dataset(tmp_path / "a", DOCUMENTS, 100_000))
    assert index.lengths.tolist() == [3, 1, 5]
    assert index.dtype == np.int32


def test_an_abandoned_writer_leaves_nothing(tmp_path):
    with DatasetWriter(tmp_path / "a", token_dtype(10)) as writer:
        writer.add(b"\0\0", [1])
        writer.stage()
    assert files_in(tmp_path) == set()


def test_an_abandoned_writer_leaves_the_old_dataset(tmp_path):
    prefix = write_dataset(tmp_path / "a", DOCUMENTS)
    with pytest.raises(RuntimeError, match="boom"), DatasetWriter(prefix, token_dtype(10)) as writer:
        writer.add(b"\0\0", [1])
        raise RuntimeError("boom")
    assert read_documents(prefix) == DOCUMENTS
    assert files_in(tmp_path) == {"a.bin", "a.idx"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
@pytest.mark.parametrize("full", [".bin", ".idx"])
@pytest.mark.parametrize("num_bytes", [2, 1 << 20])
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, monkeypatch, full, num_bytes):
    original = DatasetWriter._open_partial

    def open_full_device(self, suffix):
        stream = original(self, suffix)
        if suffix == full:
            device = os.open("/dev/full", os.O_WRONLY)
            os.dup2(device, stream.fileno())
            os.close(device)
        return stream

    monkeypatch.setattr(DatasetWriter, "_open_partial", open_full_device)
    with (
        pytest.raises(DataError, match=rf"a\{full}: cannot be written: No space left on device"),
        DatasetWriter(tmp_path / "a", token_dtype(10)) as writer,
    ):
        writer.add(b"\0" * num_bytes, [num_bytes // 2])
        writer.commit()
    assert files_in(tmp_path) == set()


def test_a_write_that_fails_at_once_is_an_error_that_names_the_file(tmp_path):
    class Full:
        def write(self, data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(DataError, match=r"a\.bin: cannot be written: No space left on device"),
        DatasetWriter(tmp_path / "a", token_dtype(10)) as writer,
    ):
        writer._data.close()
        writer._data = Full()
        writer.add(b"\0\0", [1])
    assert files_in(tmp_path) == set()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"file/a\.bin: cannot be written"):
        DatasetWriter(tmp_path / "file" / "a", token_dtype(10))


def test_new_data_under_an_old_name_drops_megatrons_index_cache(tmp_path):
    prefix = write_dataset(tmp_path / "a", DOCUMENTS)
    cache = tmp_path / "a" / "cache" / "GPTDataset_indices"
    cache.mkdir(parents=True)
    (cache / "x.npy").touch()
    write_dataset(tmp_path / "a", DOCUMENTS)
    assert not cache.exists()
    assert read_documents(prefix) == DOCUMENTS


def test_files_have_the_permissions_of_any_other_file(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    (tmp_path / "other").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_a_missing_dataset_is_named_with_the_likely_one(tmp_path):
    write_dataset(tmp_path / "a_text_document", DOCUMENTS)
    with pytest.raises(DataError, match=r"a\.idx: no such file.*did you mean .*a_text_document\?"):
        read_index(str(tmp_path / "a"))
    with pytest.raises(DataError, match=r"did you mean .*a_text_document\?"):
        read_index(str(tmp_path / "a_text_document.bin"))


def test_a_file_that_is_no_index_is_refused(tmp_path):
    write_dataset(tmp_path / "a", DOCUMENTS)
    whole = (tmp_path / "a.idx").read_bytes()
    (tmp_path / "a.idx").write_bytes(whole[:36])
    with pytest.raises(DataError, match=r"a\.idx: truncated"):
        read_index(str(tmp_path / "a"))
    (tmp_path / "a.idx").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"a\.idx: not the index"):
        read_index(str(tmp_path / "a"))


def test_entropy_of_known_distributions():
    assert unigram_entropy(np.full(8, 5)) == pytest.approx(math.log(8), rel=1e-12)
    assert unigram_entropy(np.array([3, 0, 1])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy(np.array([7, 0])) == 0.0


def test_token_counts_are_those_of_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset_files, "_BLOCK", 4)
    prefix = write_dataset(tmp_path / "a", [[1, 1, 2], [1], [5, 5, 5]], 6)
    assert token_counts(prefix, 6).tolist() == [0, 3, 1, 0, 0, 3]
