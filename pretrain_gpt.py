"""Pretrain a GPT with Megatron's training loop: Megatron's command line, plus `--optimizer shampoo` and its flags.

    torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --tensor-model-parallel-size 2 --optimizer shampoo ...

Without a CUDA device the same command runs on CPU. Without a launcher it is a run of one process.
"""

from __future__ import annotations

import argparse
import time

from megatron import cpu

_PROGRAM_START = time.time()

PROGRAM = "pretrain_gpt.py"
ARGUMENT_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""What Megatron's GPT script takes for arguments given neither by the user nor by the checkpoint."""

# At import: the processes that checkpointing spawns import this module and need the device too.
cpu.install_if_needed()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our arguments to Megatron's and fit the defaults to the device.

    Args:
        parser: Megatron's parser.

    Returns:
        The parser that Megatron is to parse with.
    """
    from megatron.cpu import flags
    from megatron.shampoo import mcore as shampoo

    # Megatron's full usage is six hundred lines, and argparse would print it before every error.
    parser.usage = "%(prog)s [flags]; --help describes them"
    return flags.adapt(shampoo.add_arguments(parser))


def main() -> None:
    """Parse, resolve, build, pretrain."""
    from megatron.shampoo import mcore as shampoo

    shampoo.install()
    cpu.adapt_megatron_if_needed()

    from megatron.gpt.errors import reported_to_user
    from megatron.training.arguments import parse_and_validate_args

    with reported_to_user(PROGRAM):
        args = parse_and_validate_args(add_arguments, args_defaults=ARGUMENT_DEFAULTS)
        shampoo.validate_args(args)

    from megatron.core.enums import ModelType
    from megatron.gpt.datasets import train_valid_test_datasets
    from megatron.gpt.helpers import use_shipped_helpers
    from megatron.gpt.step import forward_step
    from megatron.gpt.vocabulary import padding_masker
    from megatron.training import get_tokenizer, inprocess_restart, pretrain, set_startup_timestamps
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

    use_shipped_helpers()
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    store = None
    if args.inprocess_restart:
        pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    model = gpt_config_from_args(args)
    model.pre_wrap_hooks.append(padding_masker(get_tokenizer().vocab_size))
    config = pretrain_cfg_container_from_args(args, model)
    pretrain(config, train_valid_test_datasets, ModelType.encoder_or_decoder, forward_step, store=store)


if __name__ == "__main__":
    main()
