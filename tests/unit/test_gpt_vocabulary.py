"""Padding columns of the logits have no probability and no gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron.gpt.vocabulary import mask_padding_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradient_are_those_of_the_true_vocabulary(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = torch.randn(6, 16, dtype=dtype, requires_grad=True)
    targets = torch.tensor([0, 3, 10, 9, 1, 7])
    loss = functional.cross_entropy(mask_padding_columns(weights * 1, 0, 11).float(), targets)
    (gradient,) = torch.autograd.grad(loss, weights)
    expected = functional.cross_entropy(weights[:, :11].float(), targets)
    (expected_gradient,) = torch.autograd.grad(expected, weights)
    # Rows of 16 and of 11 columns are summed in other vector registers: equal but for rounding on some processors.
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-8)
    assert not gradient[:, 11:].any()


def test_each_slice_of_the_vocabulary_masks_its_own_columns() -> None:
    whole = mask_padding_columns(torch.zeros(2, 12), 0, 7)
    slices = [mask_padding_columns(torch.zeros(2, 4), first, 7) for first in (0, 4, 8)]
    assert torch.equal(torch.cat(slices, dim=-1), whole)
    assert (whole == 0).sum().item() == 2 * 7
