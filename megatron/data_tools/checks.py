"""Refuses data that Megatron's dataset builder cannot split: it would loop for ever, or fail after hours.

Facts of megatron-core 0.19.2: `BlendedMegatronDatasetBuilder` gives part i of `--split` the sequences from
round(begin_i N) to round(end_i N) of each prefix. With no sequence in a part, `GPTDataset._get_num_epochs`
adds 0 tokens in an endless loop. A part shorter than one sequence yields samples that repeat its text within
themselves. A validation part left out while `--eval-iters` is above 0 fails at the first evaluation.
"""

import argparse
from collections.abc import Sequence

from megatron.data_tools.dataset_files import DatasetIndex, read_index
from megatron.data_tools.errors import DataError

PARTS = ("training", "validation", "test")
"""In the order of `--split`."""
_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")
_BLOCK = 1 << 20

Blend = tuple[Sequence[str], Sequence[float] | None]
"""Dataset prefixes and their weights, as Megatron's `get_blend_from_list` returns them."""


def check_split(args: argparse.Namespace) -> None:
    """Refuses parts of the data that hold no whole sequence; call it before the datasets are built.

    It reads the `.idx` files of the prefixes that Megatron's arguments name, no further than needed. Mock
    data and object storage are left to Megatron.

    Args:
        args: Megatron's validated arguments.

    Raises:
        DataError: A ValueError naming flag, dataset, what the part holds, what it needs and what to do.
    """
    if args.mock_data:
        return
    from megatron.training.utils import get_blend_and_blend_per_split

    blend, blend_per_split = get_blend_and_blend_per_split(args)
    wants_validation = bool(args.full_validation or args.eval_iters)
    if blend is not None:
        check_blend(blend, args.split, args.seq_length)
        present = [bounds is not None for bounds in _split_matrix(args.split)]
    elif blend_per_split is not None:
        for part_blend, flag in zip(blend_per_split, _FLAGS, strict=True):
            if part_blend is not None:
                _check_whole_prefixes(part_blend, flag, args.seq_length)
        present = [part_blend is not None for part_blend in blend_per_split]
    else:
        return
    where = f"--split {args.split}" if blend is not None else "the --*-data-path flags"
    if not present[0] and not args.skip_train:
        raise DataError(f"{where}: no training data; give the first part a share, or pass --skip-train")
    if not present[1] and wants_validation:
        raise DataError(
            f"{where}: no validation data, but --eval-iters {args.eval_iters} asks for it; "
            "give it a share or --valid-data-path, or pass --eval-iters 0"
        )


def check_blend(blend: Blend, split: str, seq_length: int) -> None:
    """Refuses a `--split` under which a part of a dataset holds less than one sequence.

    Args:
        blend: Prefixes and weights.
        split: Shares of training, validation and test, for example "969, 30, 1".
        seq_length: Tokens of a sequence; a sample takes one more.

    Raises:
        DataError: For the first part that is too small.
    """
    matrix = _split_matrix(split)
    for prefix in blend[0]:
        if _is_object_storage(prefix):
            continue
        index = read_index(prefix)
        for part, bounds in zip(PARTS, matrix, strict=True):
            if bounds is None:
                continue
            begin, end = (round(bound * len(index.lengths)) for bound in bounds)
            num_tokens = _tokens_up_to(index, begin, end, seq_length + 1)
            if num_tokens < seq_length + 1:
                no_evaluation = " and pass --eval-iters 0" if part == "validation" else ""
                raise DataError(
                    f"--split {split}: the {part} part of {prefix} ({len(index.lengths)} documents) gets "
                    f"{end - begin} documents with {num_tokens} tokens, less than one sequence "
                    f"({seq_length + 1} tokens at --seq-length {seq_length}). Give it a larger share or more "
                    f"documents, or a share of 0{no_evaluation}, or name separate datasets with "
                    "--train-data-path and --valid-data-path"
                )


def _check_whole_prefixes(blend: Blend, flag: str, seq_length: int) -> None:
    for prefix in blend[0]:
        if _is_object_storage(prefix):
            continue
        index = read_index(prefix)
        num_tokens = _tokens_up_to(index, 0, len(index.lengths), seq_length + 1)
        if num_tokens < seq_length + 1:
            raise DataError(
                f"{flag} {prefix}: {num_tokens} tokens, less than one sequence ({seq_length + 1} tokens at "
                f"--seq-length {seq_length}); use more text or shorter sequences"
            )


def _split_matrix(split: str) -> list[tuple[float, float] | None]:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return matrix


def _is_object_storage(prefix: str) -> bool:
    from megatron.core.datasets.object_storage_utils import is_object_storage_path

    return bool(is_object_storage_path(prefix))


def _tokens_up_to(index: DatasetIndex, begin: int, end: int, enough: int) -> int:
    """Tokens in sequences [begin, end), or the first sum found that is at least `enough`."""
    total = 0
    for first in range(begin, end, _BLOCK):
        total += int(index.lengths[first : min(first + _BLOCK, end)].sum(dtype="int64"))
        if total >= enough:
            break
    return total
