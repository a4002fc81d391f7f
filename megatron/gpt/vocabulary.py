"""The output layer's padding columns, kept out of the softmax.

Megatron pads the vocabulary to a multiple of `--make-vocab-size-divisible-by` times the tensor-parallel size. The
padding columns of the logits take part in the softmax, so an untrained model of 127 tokens starts at a loss of ln 128
on one rank and of ln 256 on two. Set to the lowest number they have no probability and no gradient, and the loss is
that of the true vocabulary on every layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_pg_rank


def mask_padding_columns(logits: torch.Tensor, first_column: int, vocab_size: int) -> torch.Tensor:
    """Set the logits of tokens that do not exist to the lowest number, in place.

    Args:
        logits: (..., columns), a contiguous slice of the padded vocabulary's columns.
        first_column: the token that the slice's first column stands for.
        vocab_size: number of true tokens.

    Returns:
        The same tensor.
    """
    first_padding = max(vocab_size - first_column, 0)
    if first_padding < logits.size(-1):
        logits[..., first_padding:] = torch.finfo(logits.dtype).min
    return logits


def padding_masker(vocab_size: int) -> Callable[[list[MegatronModule]], list[MegatronModule]]:
    """Make a hook for `GPTModelConfig.pre_wrap_hooks` that masks each output layer's padding.

    Args:
        vocab_size: number of true tokens, the tokenizer's.

    Returns:
        The hook: it takes and returns this rank's model chunks.
    """

    def mask(layer: ColumnParallelLinear, inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = outputs
        gathered = logits.size(-1) == layer.output_size
        first_column = 0 if gathered else get_pg_rank(layer.tp_group) * logits.size(-1)
        return mask_padding_columns(logits, first_column, vocab_size), bias

    def add_hooks(chunks: list[MegatronModule]) -> list[MegatronModule]:
        for chunk in chunks:
            if chunk.post_process and chunk.output_layer.output_size > vocab_size:
                chunk.output_layer.register_forward_hook(mask)
        return chunks

    return add_hooks
