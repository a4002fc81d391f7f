"""Fingerprints of tensors: against a plain computation, and what they must and must not depend on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.shampoo.collective import replicas
from megatron.shampoo.collective.replicas import fingerprint

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.uint8: torch.uint8}


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (tensor * 50).abs().to(dtype) if dtype is torch.uint8 else tensor.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (9, 5)], ids=str)
def test_it_is_the_sum_that_it_says(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(replicas, "_PIECE", 7)
    tensor = values(shape, dtype)
    bits = tensor.contiguous().view(-1).view(DTYPES[dtype]).tolist()
    expected = 0
    for start in range(0, max(1, len(bits)), 7):
        piece = bits[start : start + 7]
        expected = (expected * 6364136223846793005 + sum((2 * i + 1) * x for i, x in enumerate(piece))) % 2**64
    assert int(fingerprint(tensor)) % 2**64 == expected


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(list(DTYPES)), element=st.integers(0, 44), data=st.data())
def test_every_single_bit_counts(dtype: torch.dtype, element: int, data: st.DataObject) -> None:
    tensor = values((9, 5), dtype)
    size = 8 * tensor.element_size()
    flipped = tensor.clone()
    bit = data.draw(st.integers(0, size - 1))
    bytes_of = flipped.view(-1).view(torch.uint8)
    bytes_of[element * tensor.element_size() + bit // 8] ^= 1 << (bit % 8)
    assert int(fingerprint(flipped)) != int(fingerprint(tensor))
    assert int(fingerprint(tensor.clone())) == int(fingerprint(tensor))


def test_order_counts_and_memory_layout_does_not() -> None:
    tensor = values((9, 5), torch.float32)
    assert int(fingerprint(tensor.roll(1, 0))) != int(fingerprint(tensor))
    assert int(fingerprint(tensor.t().contiguous().t())) == int(fingerprint(tensor))
    assert int(fingerprint(torch.tensor([0.0]))) != int(fingerprint(torch.tensor([-0.0])))
    nan = torch.full((4,), torch.nan)
    assert int(fingerprint(nan)) == int(fingerprint(nan.clone())), "bits, not values"
