"""One forward pass of a GPT on one microbatch: its batch, its logits' loss, and what is logged of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers

Batch = dict[str, torch.Tensor | None]
LossOutput = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

_ON_DEVICE = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")

_SPIKE_FACTOR = 10.0
"""A loss is called spiky when it exceeds the largest seen so far this many times (`--check-for-spiky-loss`)."""


def get_batch(data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None = None) -> Batch:
    """Read one microbatch on tensor-parallel rank 0 and give it to the group.

    Args:
        data_iterator: the data loader's iterator; read on tensor-parallel rank 0 only.
        vp_stage: the virtual pipeline stage the batch is for.

    Returns:
        `tokens`, `labels`, `position_ids` (batch, sequence) int64, `loss_mask` (batch, sequence) fp32, `attention_mask`
        (batch, 1, sequence, sequence) bool; None for what this pipeline stage does not need.

    Collective:
        All ranks of the tensor-parallel group.
    """
    args = get_args()
    first = mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    last = mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage)
    has_mtp = mtp_on_this_rank(mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage)
    if not (first or last or has_mtp):
        return dict.fromkeys(_ON_DEVICE)
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = dict.fromkeys(_ON_DEVICE)
    if tp_rank == 0:
        assert data_iterator is not None, "a rank that needs data was given no data loader"
        sample = next(data_iterator)
        batch.update({key: sample[key].cuda(non_blocking=True) for key in _ON_DEVICE if key in sample})
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=has_mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {key: batch.get(key) for key in _ON_DEVICE}


def _validate_loss(loss: torch.Tensor) -> None:
    """Hand the loss to Megatron's rerun machine, which tells a fault of the machine from one of the numbers."""
    args = get_args()
    rerun = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for kind, is_kind in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            rerun.validate_result(
                result=loss,
                rejection_func=is_kind,
                message=f"found {kind} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        rerun.validate_result(
            result=loss,
            rejection_func=partial(rerun.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss"),
            message="spiky loss",
            tolerance=0.0,
            fatal=False,
        )


def loss_function(loss_mask: torch.Tensor | None, token_losses: torch.Tensor) -> LossOutput:
    """Sum the losses of the tokens that count.

    Megatron divides by the number of tokens and averages over microbatches and data-parallel ranks.

    Args:
        loss_mask: (batch, sequence), 1 where the token counts; None on the stages that compute no loss.
        token_losses: (batch, sequence), cross entropy per token, nats.

    Returns:
        The sum over tokens, their number (int), and for the log `lm loss`: the pair (sum, number), which Megatron adds
        up over the global batch before it divides.
    """
    assert loss_mask is not None, "only the last pipeline stage computes the loss"
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(token_losses.reshape(-1).float() * mask)
    _validate_loss(loss)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.stack([loss.detach(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: GPTModel, return_schedule_plan: bool = False
) -> tuple[Any, partial[LossOutput]]:
    """Run the model on the next microbatch; what Megatron's schedules call.

    Args:
        data_iterator: this rank's data.
        model: this rank's (virtual) pipeline stage.
        return_schedule_plan: build the plan of overlapped expert-parallel communication instead of running.

    Returns:
        Token losses (batch, sequence) on the last stage, activations elsewhere (or the plan), and the loss function.

    Collective:
        All ranks of the tensor-parallel group.
    """
    timers = get_timers()
    straggler = StragglerDetector()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    with straggler:
        forward = model.build_schedule_plan if return_schedule_plan else model
        output = forward(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, partial(loss_function, batch["loss_mask"])
