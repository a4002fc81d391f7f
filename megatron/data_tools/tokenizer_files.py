"""Writes tokenizers to disk, in folders that Megatron's own `--tokenizer-type` choices load without a network."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from megatron.data_tools.errors import DataError

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB_SIZE = 257
"""256 byte values and the end of a document."""


def byte_to_character() -> dict[int, str]:
    """The printable stand-in that byte-level BPE uses for each byte value.

    Visible Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on.

    Returns:
        Character by byte value, 256 entries.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019, section 2.2.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + k) for k, byte in enumerate(hidden)}


def write_byte_tokenizer(folder: str | Path) -> Path:
    """Writes a byte-level tokenizer: id = byte value, 256 = end of document.

    It is a byte-level BPE without merges, so `--tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER`
    works in unmodified Megatron, whose own byte-level class has no `--tokenizer-type`.

    Args:
        folder: Made if missing.

    Returns:
        The folder.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in byte_to_character().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    # Cut into short pieces: BPE's cost grows faster than the length of a piece.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\s\S]{1,256}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    path = _make_folder(folder)
    tokenizer.save(str(path / "tokenizer.json"))
    _write_config(path, "PreTrainedTokenizerFast", {})
    return path


def write_gpt2_folder(folder: str | Path, vocab_file: str | Path, merge_file: str | Path) -> Path:
    """Makes a HuggingFace folder out of GPT-2's two vocabulary files.

    Args:
        folder: Made if missing.
        vocab_file: `vocab.json` (also published as `encoder.json`).
        merge_file: `merges.txt` (also published as `vocab.bpe`).

    Returns:
        The folder; it holds copies.
    """
    path = _make_folder(folder)
    shutil.copyfile(vocab_file, path / "vocab.json")
    shutil.copyfile(merge_file, path / "merges.txt")
    _write_config(path, "GPT2Tokenizer", {"bos_token": END_OF_TEXT, "add_prefix_space": False})
    return path


def train_sentencepiece(texts: Iterable[str], model_file: str | Path, vocab_size: int) -> Path:
    """Trains a SentencePiece BPE model that gives every text back exactly.

    Bytes stand in for characters that are not in the vocabulary, nothing is normalized, and runs of spaces are
    pieces of their own (source code needs them). One thread: the same texts give the same file.

    Args:
        texts: Documents.
        model_file: Ends in `.model`.
        vocab_size: Pieces, the 256 bytes and 4 special ones (unknown, start, end, newline) among them.

    Returns:
        The model file.

    Raises:
        DataError: If the texts do not yield so many pieces, or the size leaves no room for any.
    """
    import sentencepiece

    path = Path(model_file)
    _make_folder(path.parent)
    smallest = 256 + 4 + 1
    if vocab_size < smallest:
        raise DataError(f"--vocab-size {vocab_size}: a SentencePiece vocabulary needs at least {smallest} pieces")
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "wb") as stream:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(line for text in texts for line in text.split("\n") if line),
                model_writer=stream,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                character_coverage=1.0,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                user_defined_symbols=["\n"],
                max_sentence_length=1 << 16,
                num_threads=1,
                minloglevel=2,
            )
        partial.replace(path)
    except RuntimeError as error:
        raise DataError(
            f"--vocab-size {vocab_size}: SentencePiece cannot train such a vocabulary on this text: {error}"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def _make_folder(folder: str | Path) -> Path:
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _write_config(folder: Path, tokenizer_class: str, more: dict[str, object]) -> None:
    config = {
        "tokenizer_class": tokenizer_class,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        # Documents are longer than any context; the training sequence length cuts them.
        "model_max_length": 10**9,
        **more,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
