"""A part of the data without a whole sequence is refused, where Megatron's builder would loop or fail later."""

import signal
from argparse import Namespace

import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers import MegatronTokenizer

from megatron.data_tools.checks import check_blend, check_split
from megatron.data_tools.errors import DataError
from tests.data_helpers import write_dataset

SEQ_LENGTH = 32


class EndlessError(Exception):
    """The builder did not end."""


def build(blend, split, sizes=(20, 4, 4), seconds=30):
    """Megatron's own datasets, unless they take longer than a small one ever does."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQ_LENGTH, blend=blend, split=split, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=127),
    )  # fmt: skip

    def stop(*_):
        raise EndlessError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def args(**given):
    defaults = {
        "mock_data": False, "data_path": None, "data_args_path": None, "train_data_path": None, "valid_data_path": None,
        "test_data_path": None, "per_split_data_args_path": None, "split": None, "seq_length": SEQ_LENGTH,
        "full_validation": False, "eval_iters": 1, "skip_train": False,
    }  # fmt: skip
    return Namespace(**defaults | given)


@pytest.fixture
def twenty(tmp_path):
    """20 documents of 100 tokens."""
    return write_dataset(tmp_path / "twenty", [range(100)] * 20)


@pytest.fixture
def short(tmp_path):
    """One document of 10 tokens, less than a sequence."""
    return write_dataset(tmp_path / "short", [range(10)])


@pytest.mark.parametrize("split", ["100,0,0", "80,10,10", "90,10", "969, 31"])
def test_splits_that_megatron_builds_pass(twenty, split):
    check_blend(([twenty], None), split, SEQ_LENGTH)
    assert all(dataset is None or len(dataset) > 0 for dataset in build(([twenty], None), split))


@pytest.mark.parametrize(("split", "part"), [("999,1,0", "validation"), ("969, 30, 1", "test"), ("1,99,0", "training")])
@pytest.mark.parametrize("sizes", [(20, 4, 4), (0, 0, 0)])
def test_a_part_without_a_document_is_refused_where_megatron_never_ends(twenty, split, part, sizes):
    with pytest.raises(EndlessError):
        build(([twenty], None), split, sizes, seconds=1)
    with pytest.raises(
        DataError, match=rf"--split {split}: the {part} part of .*twenty \(20 documents\) gets 0 documents"
    ):
        check_blend(([twenty], None), split, SEQ_LENGTH)


def test_a_part_shorter_than_a_sequence_is_refused_where_megatron_repeats_its_text(short):
    sample = build(([short], None), "100,0,0")[0][0]["tokens"].tolist()
    assert sorted(sample[:10]) == sorted(sample[10:20]) == list(range(10))
    with pytest.raises(
        DataError, match=r"1 documents with 10 tokens, less than one sequence \(33 tokens at --seq-length 32\)"
    ):
        check_blend(([short], None), "100,0,0", SEQ_LENGTH)


@pytest.mark.parametrize(("num_tokens", "fits"), [(33, True), (32, False)])
def test_one_sequence_and_its_last_label_are_enough(tmp_path, num_tokens, fits):
    prefix = write_dataset(tmp_path / "a", [range(num_tokens)])
    if fits:
        check_blend(([prefix], None), "1,0,0", SEQ_LENGTH)
    else:
        with pytest.raises(DataError, match="with 32 tokens"):
            check_blend(([prefix], None), "1,0,0", SEQ_LENGTH)


def test_every_prefix_of_a_blend_is_checked(twenty, short):
    with pytest.raises(DataError, match=r"part of .*short"):
        check_split(args(data_path=["0.5", twenty, "0.5", short], split="100,0,0", eval_iters=0))


def test_separate_datasets_are_checked(twenty, short):
    check_split(args(train_data_path=[twenty], valid_data_path=[twenty]))
    with pytest.raises(DataError, match=r"--valid-data-path .*short: 10 tokens, less than one sequence"):
        check_split(args(train_data_path=[twenty], valid_data_path=[short]))


@pytest.mark.parametrize("flag", ["--data-path", "--train-data-path"])
def test_a_missing_dataset_is_named(tmp_path, flag):
    given = {flag[2:].replace("-", "_"): [str(tmp_path / "none")]}
    with pytest.raises(DataError, match=r"none\.idx: no such file"):
        check_split(args(**given, split="100,0,0", eval_iters=0))


def test_evaluation_without_validation_data_is_refused(twenty):
    for data in ({"data_path": [twenty], "split": "100,0,0"}, {"train_data_path": [twenty]}):
        check_split(args(**data, eval_iters=0))
        with pytest.raises(DataError, match=r"no validation data, but --eval-iters 5 .*pass --eval-iters 0"):
            check_split(args(**data, eval_iters=5))


def test_training_without_training_data_is_refused(twenty):
    for data in ({"data_path": [twenty], "split": "0,100,0"}, {"valid_data_path": [twenty]}):
        check_split(args(**data, skip_train=True))
        with pytest.raises(DataError, match="no training data"):
            check_split(args(**data))


def test_mock_data_and_object_storage_are_left_to_megatron():
    check_split(args(mock_data=True))
    check_split(args(data_path=["s3://bucket/none"], split="100,0,0", eval_iters=0))
