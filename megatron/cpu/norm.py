"""Layer and RMS normalisation that work under sequence parallelism.

Megatron's wrapper of torch's norms refuses `--sequence-parallel`. All it lacks is a mark on the parameters: each rank
normalises its own part of the sequence, so its gradient of the scale and shift is a partial sum, which
`finalize_model_grads` adds up over tensor-parallel ranks for every parameter whose `sequence_parallel` is set.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.torch_norm import WrappedTorchNorm

_NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def build_norm(
    cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
) -> torch.nn.Module:
    """Build torch's norm over the last dimension, marked for the reduction of its gradients.

    Args:
        cls: the class it is built in the name of.
        config: Megatron's model configuration; gives the kind of norm and whether the sequence is split.
        hidden_size: length of the normalised dimension.
        eps: added to the variance or the mean square.
        unused: parameters of Megatron's interface that torch's norms do not have.

    Returns:
        The module.

    Raises:
        NotImplementedError: if the configuration asks for what torch's norms cannot do.
    """
    if config.normalization not in _NORMS:
        raise NotImplementedError(
            f"--normalization {config.normalization}: not available on CPU; allowed are {' and '.join(_NORMS)}"
        )
    if config.layernorm_zero_centered_gamma:
        raise NotImplementedError("--apply-layernorm-1p: torch's norms have no zero-centred scale; leave the flag out")
    if config.memory_efficient_layer_norm:
        raise NotImplementedError("memory_efficient_layer_norm needs Apex; leave it off on CPU")
    norm = _NORMS[config.normalization](normalized_shape=hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


def install() -> None:
    """Let Megatron's local layers build their norms with `build_norm`.

    Megatron 0.19 imports `WrappedTorchNorm` by name into many modules, so the class stays and its constructor changes.
    """
    WrappedTorchNorm.__new__ = staticmethod(build_norm)
