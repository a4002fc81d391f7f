"""Small corpora, tokenizers and datasets for the data tests."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron.data_tools.dataset_files import DatasetWriter, token_dtype

ROOT = Path(__file__).resolve().parent.parent

EXCERPT = (
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\n"
    "The slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles\n"
    "And by opposing end them. To die: to sleep;\nNo more; and by a sleep to say we end\n"
)
"""From Hamlet; public domain."""

AWKWARD_TEXTS = (
    "plain words",
    "  leading,  double  and trailing spaces  ",
    "lines\n\n\twith tabs\r\n",
    "accents é ü, Greek αβγ, CJK 日本語, emoji 🎲",
    "\x00\x01\x7f",
    "x",
)


def write_jsonl(path: Path, texts: Iterable[str], key: str = "text") -> Path:
    """A JSONL file with one document per text."""
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def tokenizer_args(kind: str, **given: object) -> Namespace:
    """Parsed tokenizer flags with the defaults that Megatron's argument parser gives."""
    defaults: dict[str, object] = {
        "tokenizer_type": kind,
        "tokenizer_model": None,
        "vocab_file": None,
        "merge_file": None,
        "vocab_size": None,
        "special_tokens": None,
        "metadata_path": None,
        "chat_template": None,
        "tokenizer_sentencepiece_legacy": False,
        "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
        "tokenizer_hf_no_use_fast": False,
        "tokenizer_hf_no_include_special_tokens": False,
        "trust_remote_code": False,
        "null_tokenizer_eod_id": None,
        "null_tokenizer_pad_id": -1,
        "pad_vocab_size": False,
    }
    return Namespace(**defaults | given)


def write_gpt2_files(folder: Path) -> tuple[Path, Path]:
    """A small byte-level BPE in GPT-2's two files, trained on the excerpt."""
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([EXCERPT], vocab_size=320, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save_model(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def write_dataset(prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int = 127) -> str:
    """A dataset of the given ids; returns its prefix."""
    dtype = token_dtype(vocab_size)
    with DatasetWriter(prefix, dtype) as writer:
        for ids in documents:
            writer.add(np.asarray(ids, dtype).tobytes(), [len(ids)])
        writer.commit()
    return str(prefix)


def read_documents(prefix: str | Path) -> list[list[int]]:
    """All documents of a dataset, read by Megatron."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[k].tolist() for k in range(len(dataset))]


def run_tool(name: str, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `tools/NAME.py` as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


def files_in(folder: Path) -> set[str]:
    """Names of everything in a folder, hidden files included."""
    return {path.name for path in folder.iterdir()}
