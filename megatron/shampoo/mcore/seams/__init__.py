"""Seams: where Megatron has to behave differently and has no hook, one function of ours takes the place of one of its.

`registry` says what a seam is and installs it; every other file holds the seams of one subject, each with the name of
Megatron's function and the reason. The mends here are for faults that any optimizer meets.
"""

from __future__ import annotations


def install_mends() -> list[str]:
    """Install the mends of Megatron's faults; to be called once per process, before arguments are parsed.

    A mend that is in place already, or that this Megatron does not need, is passed over.

    Returns:
        Names of the seams that this call applied.

    Raises:
        NotImplementedError: the installed megatron-core is not one that the seams were tested with.
    """
    from megatron.shampoo.mcore.seams import (
        bucket_padding,
        chain_length,
        first_log_line,
        group_rates,
        layer_wise,
        step_per_parameter,
    )
    from megatron.shampoo.mcore.seams.registry import install

    mends = (bucket_padding, step_per_parameter, first_log_line, layer_wise, group_rates, chain_length)
    return install([seam for module in mends for seam in module.SEAMS])
