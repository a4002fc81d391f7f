"""Multi-latent attention of Megatron's local layers under tensor parallelism.

Where the down projection is column-parallel, as the local layers make it, Megatron gathers its output and hands the
rotary part of the keys, which all heads share, to each rank's heads. The gather's backward pass keeps a rank's slice of
the gradient without the other ranks' heads, so the training run depends on the tensor-parallel size. Seen in
megatron-core 0.19.2 (`MLASelfAttention.get_query_key_value_tensors`). Transformer Engine's layers repeat the down
projection on every rank and do not take this way.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig


def whole_latent(kv_combined: torch.Tensor, config: MLATransformerConfig) -> torch.Tensor:
    """Gather the latent keys and values so that backwards the rotary part is summed over tensor-parallel ranks.

    Args:
        kv_combined: `(sequence, batch, (latent + rotary width) / t)`, or already whole.
        config: of the model.

    Returns:
        `(sequence, batch, latent + rotary width)`; with sequence parallelism this rank's `sequence / t`, whose rotary
        part Megatron itself gathers and sums.

    Collective: every rank of the tensor-parallel group.
    """
    widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if kv_combined.size(-1) == sum(widths):
        return kv_combined
    whole: torch.Tensor = gather_from_tensor_model_parallel_region(kv_combined)
    if config.sequence_parallel:
        return scatter_to_sequence_parallel_region(whole)
    # The latent part's gradient is summed by the up projection.
    latent, rotary = torch.split(whole, widths, dim=-1)
    return torch.cat([latent, copy_to_tensor_model_parallel_region(rotary)], dim=-1)


def install() -> None:
    """Replace what Megatron takes for the gathered latent keys and values."""
    original = MLASelfAttention._qkv_down_projection

    @functools.wraps(original)
    def down_projection(self: MLASelfAttention, hidden_states: torch.Tensor) -> tuple[Any, torch.Tensor]:
        q_compressed, kv_combined = original(self, hidden_states)
        return q_compressed, whole_latent(kv_combined, self.config)

    MLASelfAttention._qkv_down_projection = down_projection
