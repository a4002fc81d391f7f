"""Runs Megatron where torch sees no CUDA device: CPU tensors, gloo, the same command line.

`install_if_needed` presents the CPU as `torch.cuda` and must run before Megatron is imported, also in the processes
that checkpointing spawns, which is why an entry script calls it at import. `adapt_megatron_if_needed` then replaces the
few functions of Megatron that assume a GPU. Where CUDA is available neither does anything.
"""

from __future__ import annotations

import functools

from megatron.cpu import environment


@functools.cache
def _cuda_is_missing() -> bool:
    """Ask torch once, before `torch.cuda.is_available` is replaced."""
    import torch

    return not torch.cuda.is_available()


def is_needed() -> bool:
    """Say whether this process runs Megatron on CPU.

    Returns:
        True where torch found no CUDA device.
    """
    return _cuda_is_missing()


@functools.cache
def install_if_needed() -> bool:
    """Present the CPU as `torch.cuda` if there is no CUDA device; a second call does nothing.

    Returns:
        Whether it was needed.
    """
    if not is_needed():
        return False
    environment.set_environment()
    environment.keep_freed_memory()
    environment.share_cores()
    environment.set_rendezvous()
    from megatron.cpu import platform

    platform.present_cpu_as_cuda()
    return True


@functools.cache
def adapt_megatron_if_needed() -> bool:
    """Replace the functions of Megatron that assume a GPU; a second call does nothing.

    Returns:
        Whether it was needed.
    """
    if not install_if_needed():
        return False
    from megatron.cpu import attention, latent_attention, moe, norm, weights

    attention.install()
    latent_attention.install()
    moe.install()
    norm.install()
    weights.install()
    return True
