"""The two commands as users run them: what they print, how they end, what they leave."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from megatron.data_tools.tokenizer_files import train_sentencepiece, write_byte_tokenizer
from tests.data_helpers import EXCERPT, ROOT, files_in, read_documents, run_tool, write_gpt2_files, write_jsonl

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Flags of each tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece([EXCERPT], folder / "sp.model", 300)
    write_byte_tokenizer(folder / "bytes")
    vocab, merges = write_gpt2_files(folder)
    return {
        "bytes": ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder / "bytes"),
        "sentencepiece": ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "sp.model"),
        "gpt2": ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", vocab, "--merge-file", merges),
        "null": NULL,
    }


def preprocess(folder, *args, output="out", **env):
    return run_tool("preprocess_data", "--output-prefix", folder / output / "a", *args, **env)


# Help.


@pytest.mark.parametrize("tool", ["preprocess_data", "prepare_corpus"])
def test_help_needs_none_of_the_heavy_packages(tool):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(ROOT / "tools" / f"{tool}.py"), "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "--output" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "megatron.data_tools.errors" in imported
    heavy = {"torch", "transformers", "tokenizers", "sentencepiece", "megatron.core", "megatron.training", "apex"}
    assert not heavy & imported


def test_the_tools_run_from_any_folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["1 2"])
    args = ["--input", path, "--output-prefix", "a", "--workers", "1", *NULL]
    subprocess.run([sys.executable, ROOT / "tools" / "preprocess_data.py", *args], cwd=tmp_path, check=True)
    assert read_documents(tmp_path / "a_text_document") == [[1, 2]]


# Results.


def test_documents_sizes_and_ends_are_right(tmp_path):
    # The reported faults: an empty first document (IndexError), and lengths taken before the end was appended.
    path = write_jsonl(tmp_path / "a.jsonl", ["", "1 2 3", "", "   ", "4"])
    done = preprocess(tmp_path, "--input", path, "--append-eod", "--workers", "1", *NULL)
    assert done.returncode == 0, done.stderr
    assert read_documents(tmp_path / "out" / "a_text_document") == [[1, 2, 3, 99], [4, 99]]
    assert "2 documents, 6 tokens; 3 empty documents left out" in done.stdout


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "gpt2"])
def test_white_space_is_text(tmp_path, tokenizers, kind):
    path = write_jsonl(tmp_path / "a.jsonl", ["", "normal", "", "   "])
    done = preprocess(
        tmp_path, "--input", path, "--append-eod", "--workers", "1", *tokenizers[kind], HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 0, done.stderr
    normal, spaces = read_documents(tmp_path / "out" / "a_text_document")
    assert normal[-1] == spaces[-1]
    assert len(spaces) > 1
    assert "2 empty documents left out" in done.stdout


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "gpt2", "null"])
def test_output_is_the_same_for_any_workers_and_partitions(tmp_path, tokenizers, kind):
    # Several chunks, which differ.
    texts = [f"{k} {k % 7} 5" if kind == "null" else f"{k} {EXCERPT}" for k in range(100)] * 25
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    for workers, partitions in ((1, 1), (2, 1), (3, 2)):
        args = ("--input", path, "--append-eod", "--workers", str(workers), "--partitions", str(partitions))
        done = preprocess(tmp_path, *args, *tokenizers[kind], output=f"{workers}-{partitions}", HF_HUB_OFFLINE="1")
        assert done.returncode == 0, done.stderr
        assert files_in(tmp_path / f"{workers}-{partitions}") == {"a_text_document.bin", "a_text_document.idx"}
    for name in ("a_text_document.bin", "a_text_document.idx"):
        assert len({(tmp_path / run / name).read_bytes() for run in ("1-1", "2-1", "3-2")}) == 1
    assert "--partitions 2 has no effect" in done.stderr


def test_several_files_and_patterns_keep_their_order(tmp_path):
    for name, text in (("b", "2"), ("a", "1"), ("c", "3")):
        write_jsonl(tmp_path / f"{name}.jsonl", [text])
    (tmp_path / "plain.txt").write_text("4")
    inputs = ("--input", tmp_path / "plain.txt", tmp_path / "*.jsonl")
    assert preprocess(tmp_path, *inputs, "--workers", "1", *NULL).returncode == 0
    assert read_documents(tmp_path / "out" / "a_text_document") == [[4], [1], [2], [3]]


def test_progress_lines_give_both_rates(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["1"] * 5000)
    done = preprocess(tmp_path, "--input", path, "--workers", "1", "--log-interval", "2000", *NULL)
    lines = [line for line in done.stderr.splitlines() if line.startswith("processed")]
    assert len(lines) == 3
    assert all("documents/s" in line and "MB/s" in line for line in lines)
    assert lines[-1].startswith("processed 5,000 documents, 0.1 MB")


# Errors.


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2: not valid JSON"),
        ('{"body": ""}', "a.jsonl:2: no key 'text'"),
        ('{"text": "1 x"}', "a.jsonl:2: the tokenizer failed: ValueError"),
        ('{"text": "1 100"}', "a.jsonl:2: token ids 1 to 100 do not fit a vocabulary of 100"),
    ],
)
def test_a_broken_line_is_named_and_nothing_is_left(tmp_path, workers, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n' + line + "\n")
    done = preprocess(tmp_path, "--input", tmp_path / "a.jsonl", "--workers", workers, *NULL)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert files_in(tmp_path / "out") == set()


def test_end_of_document_without_such_a_token_is_an_error_only_if_asked_for(tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([EXCERPT]), model_prefix=str(tmp_path / "sp"), vocab_size=60, eos_id=-1,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path = write_jsonl(tmp_path / "a.jsonl", ["to be"])
    flags = ("--workers", "1", "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", tmp_path / "sp.model")
    done = preprocess(tmp_path, "--input", path, "--append-eod", *flags)
    assert done.returncode == 1
    assert "error: --append-eod: the tokenizer has no end-of-document token" in done.stderr
    assert preprocess(tmp_path, "--input", path, *flags).returncode == 0


def test_gpt2_without_its_files_names_flags_and_alternative(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    done = preprocess(tmp_path, "--input", path, "--tokenizer-type", "GPT2BPETokenizer")
    assert done.returncode == 1
    assert "--vocab-file is missing" in done.stderr
    assert "--tokenizer-type HuggingFaceTokenizer --tokenizer-model" in done.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_file_that_cannot_grow_ends_in_an_error_and_leaves_nothing(tmp_path, workers):
    # A limit on file size fails in write(2), where a full disk does.
    path = write_jsonl(tmp_path / "a.jsonl", ["1 2 3 4 5 6 7 8"] * 20_000)
    args = ["--input", path, "--output-prefix", tmp_path / "out" / "a", "--workers", workers, *NULL]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "preprocess_data.py", *args],
        capture_output=True, text=True, timeout=120, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )  # fmt: skip
    assert done.returncode == 1
    assert "a_text_document.bin: cannot be written: File too large" in done.stderr
    assert files_in(tmp_path / "out") == set()


def start_long_run(folder):
    """A run in a process group of its own, which has written something and is far from its end."""
    (folder / "a.jsonl").write_text('{"text": "1 2 3 4 5 6 7 8"}\n' * 1_000_000)
    args = ["--input", folder / "a.jsonl", "--output-prefix", folder / "out" / "a", "--workers", "2", *NULL]
    process = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "preprocess_data.py", *args],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: process.poll() is None and any(p.stat().st_size for p in (folder / "out").glob(".*partial")))
    return process


def wait_for(condition):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_is_gone(process):
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_nothing_and_no_process(tmp_path, number, status):
    process = start_long_run(tmp_path)
    # A terminal sends Ctrl-C to the whole group, a scheduler its signal to the program.
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert process.wait(100) == status
    assert files_in(tmp_path / "out") == set()
    wait_for(lambda: group_is_gone(process))


def test_workers_end_when_their_parent_is_killed(tmp_path):
    process = start_long_run(tmp_path)
    process.kill()
    process.wait(100)
    wait_for(lambda: group_is_gone(process))


def test_memory_does_not_grow_with_the_input(tmp_path):
    line = '{"text": "' + " ".join(str(k % 100) for k in range(3000)) + '"}\n'
    peaks = []
    for megabytes in (5, 40):
        path = tmp_path / "a.jsonl"
        with open(path, "w") as stream:
            stream.writelines(line for _ in range(megabytes * 1_000_000 // len(line)))
        code = (
            "import resource, sys; sys.path.insert(0, 'tools'); import preprocess_data\n"
            "if __name__ == '__main__':\n"
            "    status = preprocess_data.main(sys.argv[1:])\n"
            "    print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
            "    sys.exit(status)\n"
        )
        script = tmp_path / "measure.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, script, "--input", path, "--output-prefix", tmp_path / "a", "--workers", "2", *NULL],
            capture_output=True, text=True, timeout=240, check=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tools'}"},
        )  # fmt: skip
        peaks.append(int(done.stdout.split("peak")[1]) / 1024)
    assert peaks[1] < peaks[0] + 10, f"peak MiB for 5 and 40 MB: {peaks}"


# prepare_corpus.


def test_prepare_corpus_prints_what_training_needs_and_reuses_it(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"{k} {EXCERPT}" for k in range(40)])
    args = (
        "files",
        "--input",
        tmp_path / "a.jsonl",
        "--output",
        tmp_path / "out",
        "--vocab-size",
        "320",
        "--workers",
        "1",
    )
    first = run_tool("prepare_corpus", *args)
    assert first.returncode == 0, first.stderr
    assert "vocabulary: 320 ids" in first.stdout
    assert "nats per token" in first.stdout
    flags = (tmp_path / "out" / "data_args.txt").read_text().strip()
    assert flags in first.stdout
    assert "--tokenizer-type SentencePieceTokenizer" in flags
    second = run_tool("prepare_corpus", *args)
    assert "is complete, nothing to do" in second.stdout
    assert flags in second.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["stdlib", "--tokenizer", "bytes", "--vocab-size", "9"], "--vocab-size is for --tokenizer sentencepiece"),
        (["files"], "corpus 'files' needs --input"),
        (["shakespeare", "--archive", "/none"], "--archive /none: no such file"),
        (["stdlib", "--tokenizer-archive", "x"], "--tokenizer-archive is for --tokenizer gpt2"),
    ],
)
def test_prepare_corpus_refuses_what_makes_no_sense(tmp_path, args, message):
    done = run_tool("prepare_corpus", *args, "--output", tmp_path / "out")
    assert done.returncode == 1
    assert f"error: {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_prepare_corpus_without_its_package_tool_says_so(tmp_path):
    done = run_tool("prepare_corpus", "sotu", "--output", tmp_path / "out", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "error: npm is not on PATH" in done.stderr
