"""Pretrain a GPT with Megatron's training loop: Megatron's command line, plus `--optimizer shampoo` and its flags.

    torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --optimizer shampoo ...

Without a CUDA device the same command runs on CPU. Without a launcher it is a run of one process.
"""

from __future__ import annotations

import argparse
import time
import warnings
from typing import TYPE_CHECKING

from megatron import cpu

if TYPE_CHECKING:
    from megatron.cpu.flags import CpuArgumentParser

_PROGRAM_START = time.time()

PROGRAM = "pretrain_gpt.py"
ARGUMENT_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's GPT script takes for arguments given neither by the user nor by the checkpoint."""

# At import: the processes that checkpointing spawns import this module and need the device too.
cpu.install_if_needed()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser | CpuArgumentParser:
    """Fit the defaults to the device; the optimizer's flags have come with a seam into Megatron's parser.

    Args:
        parser: Megatron's parser.

    Returns:
        The parser that Megatron is to parse with.
    """
    from megatron.cpu import flags
    from megatron.gpt.arguments import tidy_help

    tidy_help(parser)
    return flags.adapt(parser)


def main() -> None:
    """Parse, resolve, build, pretrain."""
    from megatron.shampoo import mcore as shampoo

    shampoo.install()
    cpu.adapt_megatron_if_needed()

    from megatron.training.arguments import parse_and_validate_args

    from megatron.data_tools.checks import check_split
    from megatron.data_tools.seams import mend_gpt2_bpe_tokenizer
    from megatron.gpt.arguments import check_load
    from megatron.gpt.errors import reported_to_user

    mend_gpt2_bpe_tokenizer()
    # Megatron would report every use of --tokenizer-type as an override.
    warnings.filterwarnings("ignore", "Overriding default arguments for tokenizer_type")
    with reported_to_user(PROGRAM):
        args = parse_and_validate_args(add_arguments, args_defaults=ARGUMENT_DEFAULTS)
        shampoo.validate_args(args)
        check_split(args)
        check_load(args)

    from megatron.core.enums import ModelType
    from megatron.training import get_tokenizer, inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    from megatron.gpt.datasets import train_valid_test_datasets
    from megatron.gpt.helpers import use_shipped_helpers
    from megatron.gpt.step import forward_step
    from megatron.gpt.vocabulary import padding_masker

    use_shipped_helpers()
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    store = None
    if args.inprocess_restart:
        pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    with reported_to_user(PROGRAM):
        model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(padding_masker(get_tokenizer().vocab_size))
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, train_valid_test_datasets, ModelType.encoder_or_decoder, forward_step, store=store)


if __name__ == "__main__":
    main()
