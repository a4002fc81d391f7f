"""The corpus of `make compare`: made if it is not there, checked, and a fixed held-out set cut from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data_tools.dataset_files import DatasetWriter, read_index
from megatron.data_tools.encoding import default_num_workers
from megatron.data_tools.errors import DataError
from megatron.data_tools.fetch import file_sha256
from megatron.data_tools.prepare import MANIFEST, PrepareOptions, prepare

CORPUS = "sotu"
VOCABULARY = 1024
SHARE = 1024
"""Tokens of a document in the held-out set, at least, so that most predictions have a context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Data of a comparison."""

    title: str
    digest: str
    """Hash of all files."""
    flags: tuple[str, ...]
    """Of `pretrain_gpt.py`."""
    facts: dict[str, Any]
    """For the report: vocabulary, tokens."""


def load_corpus(folder: Path, eval_tokens: int, archive: str | None = None) -> Corpus:
    """Find the corpus, or make the benchmark's.

    Args:
        folder: as `tools/prepare_corpus.py` makes it; if it holds no finished corpus, the State of the Union addresses
            are prepared there.
        eval_tokens: predicted tokens of the held-out set.
        archive: the package of the addresses, fetched by hand.

    Returns:
        The corpus.

    Raises:
        DataError: it cannot be made, was changed, or has too little held-out text.
    """
    path = folder / MANIFEST
    if path.is_file():
        manifest = json.loads(path.read_text(encoding="utf-8"))
    else:
        options = PrepareOptions(
            corpus=CORPUS,
            output=str(folder),
            vocab_size=VOCABULARY,
            workers=default_num_workers(),
            archive=archive,
        )
        manifest = prepare(options)
    for name, digest in manifest["files"].items():
        if not (folder / name).is_file() or file_sha256(folder / name) != digest:
            raise DataError(f"{folder / name} is missing or was changed; delete {path} and prepare the corpus again")
    digest = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()
    flags = _rebased(manifest, folder)
    if "--valid-data-path" not in flags or "--tokenizer-type" not in flags:
        raise DataError(f"{folder}: a comparison needs a validation split and a tokenizer; this corpus lacks one")
    held_out = _held_out(flags["--valid-data-path"], f"held_out_{eval_tokens}_{digest[:12]}", eval_tokens)
    used = {"--train-data-path": flags["--train-data-path"], "--valid-data-path": held_out}
    used |= {name: value for name, value in flags.items() if name.startswith("--tokenizer")}
    facts = {
        "corpus": manifest["request"]["corpus"],
        "title": manifest["title"],
        "vocabulary": manifest["vocab_size"],
        "unigram_entropy_nats": manifest["unigram_entropy_nats"],
        "train_tokens": manifest["splits"]["train"]["tokens"],
        "held_out_tokens": eval_tokens,
        "held_out_of": manifest["splits"]["valid"]["tokens"],
        "sha256": digest,
    }
    return Corpus(
        title=manifest["title"], digest=digest, flags=tuple(part for pair in used.items() for part in pair), facts=facts
    )


def _rebased(manifest: dict[str, Any], folder: Path) -> dict[str, str]:
    """The corpus' flags, with paths as they are now: the folder may have been named from elsewhere, or moved."""
    made_in = Path(manifest["request"]["output"])
    args = manifest["data_args"]
    flags = dict(zip(args[::2], args[1::2], strict=True))
    return {
        name: str(folder / Path(value).relative_to(made_in)) if Path(value).is_relative_to(made_in) else value
        for name, value in flags.items()
    }


def _held_out(validation: str, name: str, num_tokens: int) -> str:
    """Cut the held-out set unless it is there; the writer renames the index last."""
    prefix = Path(validation).with_name(name)
    if prefix.with_name(f"{name}.idx").is_file():
        return str(prefix)
    index = read_index(validation)
    shares = held_out_shares(index.lengths.tolist(), num_tokens + 1)  # a sample takes one token more, as its last label
    tokens = np.memmap(f"{validation}.bin", index.dtype, "r")
    starts = np.concatenate([[0], np.cumsum(index.lengths, dtype=np.int64)])
    with DatasetWriter(prefix, index.dtype) as writer:
        for start, share in zip(starts, shares, strict=False):
            writer.add(tokens[start : start + share].tobytes(), [share])
        writer.commit()
    return str(prefix)


def held_out_shares(lengths: Sequence[int], wanted: int) -> list[int]:
    """Share a held-out set out among documents: as many of the first ones as give `SHARE` tokens each, alike.

    Args:
        lengths: of the documents, which are in random order.
        wanted: tokens in all.

    Returns:
        Tokens to take from the start of each document; the documents after the last are left out.

    Raises:
        DataError: there are fewer tokens.
    """
    if sum(lengths) < wanted:
        raise DataError(f"--eval-tokens {wanted - 1}: the validation split has {sum(lengths):,} tokens; ask for fewer")
    number = max(1, min(len(lengths), wanted // SHARE))
    while sum(lengths[:number]) < wanted:
        number += 1
    shares = [0] * number
    left = wanted
    # Short documents first, so that what they lack is shared out among those that are left.
    for done, place in enumerate(sorted(range(number), key=lambda place: lengths[place])):
        shares[place] = min(lengths[place], -(-left // (number - done)))
        left -= shares[place]
    return shares
