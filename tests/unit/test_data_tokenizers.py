"""The data tools and Megatron's training give every text the same ids, for each type, without a network."""

import json

import pytest
from megatron.core.tokenizers.utils.build_tokenizer import SUPPORTED_TOKENIZERS, build_tokenizer

from megatron.data_tools.errors import DataError
from megatron.data_tools.seams import mend_gpt2_bpe_tokenizer
from megatron.data_tools.tokenizer_files import (
    BYTE_VOCAB_SIZE,
    train_sentencepiece,
    write_byte_tokenizer,
    write_gpt2_folder,
)
from megatron.data_tools.tokenizers import (
    SENTENCEPIECE_TYPES,
    TOKENIZER_TYPES,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    build,
    local_gpt2_bpe,
)
from tests.data_helpers import AWKWARD_TEXTS, EXCERPT, tokenizer_args, write_gpt2_files


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a tokenizer asked the network"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    train_sentencepiece([EXCERPT], folder / "sp.model", 300)
    write_byte_tokenizer(folder / "bytes")
    write_gpt2_folder(folder / "gpt2", *write_gpt2_files(folder / "files"))
    return folder


@pytest.fixture
def flags(folder, request):
    """Namespaces of tokenizer flags by a short name."""
    files = {"vocab_file": str(folder / "files" / "vocab.json"), "merge_file": str(folder / "files" / "merges.txt")}
    return {
        **{kind: tokenizer_args(kind, tokenizer_model=str(folder / "sp.model")) for kind in SENTENCEPIECE_TYPES},
        "bytes": tokenizer_args("HuggingFaceTokenizer", tokenizer_model=str(folder / "bytes")),
        "HuggingFaceTokenizer": tokenizer_args("HuggingFaceTokenizer", tokenizer_model=str(folder / "gpt2")),
        "GPT2BPETokenizer": tokenizer_args("GPT2BPETokenizer", **files),
        "NullTokenizer": tokenizer_args("NullTokenizer", vocab_size=127),
    }[request.param]


ALL = [*TOKENIZER_TYPES, "bytes"]


@pytest.mark.parametrize("flags", ALL, indirect=True)
def test_ids_and_sizes_equal_those_of_training(flags):
    mend_gpt2_bpe_tokenizer()
    ours, theirs = build(flags), build_tokenizer(flags)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    texts = (
        ["0 5 126", "7"] if flags.tokenizer_type == "NullTokenizer" else [EXCERPT, *AWKWARD_TEXTS, "a<|endoftext|>b"]
    )
    for text in texts:
        assert list(ours.encode(text)) == list(theirs.tokenize(text))


def test_every_type_is_one_of_megatrons():
    assert set(TOKENIZER_TYPES) <= set(SUPPORTED_TOKENIZERS)


@pytest.mark.parametrize("include", [True, False])
def test_special_tokens_around_a_text_follow_the_flag_as_in_training(folder, include):
    path = folder / f"with_start_{include}"
    write_byte_tokenizer(path)
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    flags = tokenizer_args(
        "HuggingFaceTokenizer", tokenizer_model=str(path), tokenizer_hf_no_include_special_tokens=not include
    )
    expected = [256, 97, 98] if include else [97, 98]
    assert list(build(flags).encode("ab")) == list(build_tokenizer(flags).tokenize("ab")) == expected


def test_byte_ids_are_utf8_bytes(folder):
    tokenizer = HuggingFaceTokenizer(str(folder / "bytes"))
    for text in (*AWKWARD_TEXTS, EXCERPT * 20):
        assert list(tokenizer.encode(text)) == list(text.encode("utf-8"))
    assert tokenizer.vocab_size == BYTE_VOCAB_SIZE
    assert tokenizer.eod == 256


def test_trained_sentencepiece_gives_every_text_back(folder):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model"))
    for text in (*AWKWARD_TEXTS[:4], EXCERPT, "    indented\n        code"):
        assert processor.decode(processor.encode(text)) == text


def test_sentencepiece_training_is_deterministic(folder, tmp_path):
    train_sentencepiece([EXCERPT], tmp_path / "again.model", 300)
    assert (tmp_path / "again.model").read_bytes() == (folder / "sp.model").read_bytes()


@pytest.mark.parametrize(("size", "message"), [(100, "at least 261 pieces"), (5000, "cannot train")])
def test_a_vocabulary_that_cannot_be_trained_is_refused(tmp_path, size, message):
    with pytest.raises(DataError, match=f"--vocab-size {size}: .*{message}"):
        train_sentencepiece([EXCERPT], tmp_path / "x.model", size)
    assert not list(tmp_path.iterdir())


def test_gpt2_files_give_gpt2s_whole_vocabulary(folder):
    with open(folder / "files" / "vocab.json") as stream:
        vocabulary = json.load(stream)
    tokenizer = local_gpt2_bpe(str(folder / "files" / "vocab.json"), str(folder / "files" / "merges.txt"))
    assert tokenizer.vocab_size == len(vocabulary)
    assert tokenizer.eod == vocabulary["<|endoftext|>"]
    assert len(tokenizer.encode(" question")) < len(" question")


def test_megatron_needs_the_seam_to_build_gpt2_from_files(folder):
    # The claim that the seam's docstring makes about megatron-core 0.19.2; when this fails, drop the seam.
    from megatron.core.tokenizers.text.libraries.megatron_hf_tokenizer import MegatronHFTokenizer

    mend_gpt2_bpe_tokenizer()
    mended = MegatronHFTokenizer.__init__
    mend_gpt2_bpe_tokenizer()
    assert MegatronHFTokenizer.__init__ is mended
    bare = MegatronHFTokenizer.__new__(MegatronHFTokenizer)
    with pytest.raises((ValueError, OSError), match="gpt2"):
        mended.__wrapped__(
            bare, "GPT2BPETokenizer", str(folder / "files" / "vocab.json"), str(folder / "files" / "merges.txt")
        )


@pytest.mark.parametrize("missing", ["vocab_file", "merge_file"])
@pytest.mark.parametrize("value", [None, "/nonexistent/file"])
@pytest.mark.parametrize("builder", [build, build_tokenizer])
def test_missing_gpt2_files_name_the_flag_and_what_works(folder, missing, value, builder):
    mend_gpt2_bpe_tokenizer()
    files = {"vocab_file": str(folder / "files" / "vocab.json"), "merge_file": str(folder / "files" / "merges.txt")}
    flag = "--" + missing.replace("_", "-")
    with pytest.raises(ValueError, match=rf"{flag}.*--tokenizer-type HuggingFaceTokenizer --tokenizer-model"):
        builder(tokenizer_args("GPT2BPETokenizer", **files | {missing: value}))


def test_swapped_gpt2_files_are_refused(folder):
    files = folder / "files"
    with pytest.raises(DataError, match="--vocab-file"):
        local_gpt2_bpe(str(files / "merges.txt"), str(files / "vocab.json"))


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("NullTokenizer", {}, "--vocab-size None: --tokenizer-type NullTokenizer needs it"),
        ("SentencePieceTokenizer", {}, "--tokenizer-type SentencePieceTokenizer needs --tokenizer-model"),
        ("SentencePieceTokenizer", {"tokenizer_model": "/none"}, "--tokenizer-model /none: no such file"),
        ("HuggingFaceTokenizer", {"tokenizer_model": "/none"}, "--tokenizer-model /none: no HuggingFace tokenizer"),
        ("TikTokenizer", {"tokenizer_model": "x"}, "--tokenizer-type TikTokenizer: choose from"),
    ],
)
def test_flags_that_name_no_tokenizer_are_refused(kind, given, message):
    with pytest.raises(DataError, match=message):
        build(tokenizer_args(kind, **given))


def test_a_file_that_is_no_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "x.model").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"x\.model: not a SentencePiece model"):
        build(tokenizer_args("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "x.model")))


def test_tokenizers_without_an_end_of_document_say_so(folder, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([EXCERPT]), model_prefix=str(tmp_path / "no_eos"), vocab_size=30, eos_id=-1,
        model_type="char", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    assert SentencePieceTokenizer(str(tmp_path / "no_eos.model")).eod is None
    path = write_byte_tokenizer(tmp_path / "no_eos")
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    assert HuggingFaceTokenizer(str(path)).eod is None
