"""Datasets written here feed Megatron's own datasets and samplers, in every way users were bitten by."""

import hashlib

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers import MegatronTokenizer

from megatron.data_tools.checks import check_blend
from tests.data_helpers import write_dataset

SEQ_LENGTH = 32


def build(blend, num_samples, split="100,0,0", **options):
    """Megatron's training dataset."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQ_LENGTH, blend=blend, split=split, reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False,
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=127), **options,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config).build()[0]


def random_documents(seed, number):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 126, rng.integers(1, 90)) for _ in range(number)]


@pytest.fixture
def prefixes(tmp_path):
    return [write_dataset(tmp_path / name, random_documents(seed, 60)) for seed, name in enumerate("ab")]


def test_one_epoch_of_samples_holds_every_token_once(prefixes):
    dataset = build(([prefixes[0]], None), None)
    stored = np.fromfile(prefixes[0] + ".bin", np.uint16)
    inputs = np.concatenate([dataset[k]["tokens"].numpy() for k in range(len(dataset))])
    assert len(stored) - len(inputs) <= SEQ_LENGTH
    missing = np.bincount(stored, minlength=127) - np.bincount(inputs, minlength=127)
    assert missing.min() >= 0
    assert missing.sum() == len(stored) - len(inputs)


@pytest.mark.parametrize("weights", [[0.001, 0.999], [0.999, 0.001], [1e-6, 1.0]])
@pytest.mark.parametrize("num_samples", [8, 1600])
def test_extreme_blend_weights_build_and_every_sample_is_there(prefixes, weights, num_samples):
    check_blend((prefixes, weights), "100,0,0", SEQ_LENGTH)
    dataset = build((prefixes, weights), num_samples)
    sources = [int(dataset[k]["dataset_id"]) for k in range(num_samples)]
    share = sources.count(0) / num_samples
    # Shares are met to within one sample and the builder's rounding up.
    assert abs(share - weights[0] / sum(weights)) <= 2 / num_samples


def test_mapped_and_plain_readers_give_the_same_samples(prefixes):
    mapped, plain = (build(([prefixes[0]], None), 100, mmap_bin_files=mapped) for mapped in (True, False))
    for k in range(100):
        assert mapped[k]["tokens"].tolist() == plain[k]["tokens"].tolist()


def test_new_data_under_an_old_name_is_what_training_reads(tmp_path):
    # Megatron's index cache lies beside the data and does not know its content.
    prefix = write_dataset(tmp_path / "a", [np.full(100, 1)] * 20)
    assert set(build(([prefix], None), 50)[0]["tokens"].tolist()) == {1}
    write_dataset(tmp_path / "a", [np.full(40, 2)] * 3)
    dataset = build(([prefix], None), 50)
    assert {token for k in range(50) for token in dataset[k]["tokens"].tolist()} == {2}


def batch_hashes(dataset, *, consumed, data_parallel_size, num_batches, global_batch=8):
    """Hash of each global batch, whatever the number of ranks that read it."""
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    samplers = [
        iter(
            MegatronPretrainingSampler(
                total_samples=len(dataset), consumed_samples=consumed, micro_batch_size=2, data_parallel_rank=rank,
                data_parallel_size=data_parallel_size,
            )
        )
        for rank in range(data_parallel_size)
    ]  # fmt: skip
    hashes = []
    for _ in range(num_batches):
        samples = [
            sample for _ in range(global_batch // (2 * data_parallel_size)) for s in samplers for sample in next(s)
        ]
        digest = hashlib.sha256(b"".join(dataset[k]["tokens"].numpy().tobytes() for k in samples))
        hashes.append(digest.hexdigest())
    return hashes


@pytest.mark.parametrize("data_parallel_size", [1, 2])
def test_a_resumed_run_reads_the_batches_of_the_unbroken_one(prefixes, data_parallel_size):
    # 160 samples are more than two epochs of this data, so the resume falls inside one.
    unbroken = batch_hashes(build(([prefixes[0]], None), 160), consumed=0, data_parallel_size=1, num_batches=20)
    again = build(([prefixes[0]], None), 160)
    resumed = batch_hashes(again, consumed=5 * 8, data_parallel_size=data_parallel_size, num_batches=15)
    assert resumed == unbroken[5:]
    assert len(set(unbroken)) == 20
