"""Glue between Megatron and the optimizer: the only package of ours that imports Megatron's training code."""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Install the seams into Megatron; called once, before arguments are parsed.

    Raises:
        NotImplementedError: the installed megatron-core is not a version that the seams were tested with.
    """
    from megatron.shampoo.mcore.seams import install_mends
    from megatron.shampoo.mcore.seams import optimizer as ours
    from megatron.shampoo.mcore.seams.registry import install as install_seams

    install_mends()
    install_seams(ours.SEAMS)


def validate_args(args: Any) -> None:
    """Check our arguments against Megatron's, and the checkpoint to resume from, before the model is built.

    Args:
        args: Megatron's, after its own validation.

    Raises:
        ValueError: a value or a combination that cannot be; names the flag, what is allowed and what to do.
        NotImplementedError: a legal combination that is not supported.
    """
    from megatron.shampoo.mcore import resume, validation
    from megatron.shampoo.mcore.arguments import resolve_

    config = validation.validate_args(args)
    if config is not None:
        resolve_(args, config)
        # A checkpoint should move to another layout without the user having known a flag when it was saved.
        args.dist_ckpt_optim_fully_reshardable = True
        resume.check_resume(args, config)
