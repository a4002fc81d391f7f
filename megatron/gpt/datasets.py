"""Training, validation and test data of a GPT: Megatron's own datasets, built from its own arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers import MegatronTokenizerBase
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Datasets = Sequence[GPTDataset | None]


def dataset_config(args: argparse.Namespace, tokenizer: MegatronTokenizerBase) -> GPTDatasetConfig:
    """Translate Megatron's data arguments into the configuration of its datasets.

    Args:
        args: Megatron's validated arguments.
        tokenizer: the run's tokenizer; gives the end-of-document token and the width of token ids.

    Returns:
        The configuration; without any data path it describes mock data.
    """
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        data_parallel_size=args.data_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )


def reads_data(vp_stage: int | None = None) -> bool:
    """Say whether this rank reads samples itself.

    The first pipeline stage needs the tokens, the last the labels, a stage with multi-token prediction both; within a
    tensor-parallel group one rank reads and broadcasts.

    Args:
        vp_stage: the virtual pipeline stage asked for.

    Returns:
        True if the rank reads.
    """
    if mpu.get_tensor_model_parallel_rank() != 0:
        return False
    args = get_args()
    return is_first_or_last_pipeline_stage(vp_stage) or mtp_on_this_rank(
        mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def train_valid_test_datasets(num_samples: Sequence[int | None], vp_stage: int | None = None) -> Datasets:
    """Build the three datasets; the provider that `pretrain` calls.

    Args:
        num_samples: samples wanted for training, validation and test; None for one epoch.
        vp_stage: the virtual pipeline stage the data is for.

    Returns:
        The datasets, None where this rank reads none.

    Collective:
        All ranks; rank 0 writes the index caches that the others then read.
    """
    args = get_args()
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0(f"> building train, validation, and test datasets ({dataset_type.__name__}) ...")
    builder = BlendedMegatronDatasetBuilder(
        dataset_type,
        num_samples,
        partial(reads_data, vp_stage=vp_stage),
        dataset_config(args, get_tokenizer()),
    )
    return builder.build()


# Megatron builds data on tensor-parallel rank 0 alone unless the provider says that it decides for itself.
train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]
