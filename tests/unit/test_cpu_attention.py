"""The arithmetic of chunks and masks of context-parallel ranks, and heads of two widths."""

from __future__ import annotations

import pytest
import torch

from tests.child_process import run_in_child


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_gathered_chunks_are_sorted_by_position(num_ranks: int) -> None:
    def check() -> None:
        from megatron import cpu

        cpu.adapt_megatron_if_needed()
        from megatron.cpu.attention import causal_rows, in_natural_order

        length = 12 * num_ranks
        # The cut as Megatron's `get_batch_on_this_cp_rank` makes it: 2 c chunks, r and 2 c - 1 - r for rank r.
        chunks = torch.arange(length).view(2 * num_ranks, -1)
        held = [torch.cat([chunks[r], chunks[2 * num_ranks - 1 - r]]) for r in range(num_ranks)]
        assert in_natural_order(torch.cat(held), num_ranks).tolist() == list(range(length))
        for rank, positions in enumerate(held):
            mask = causal_rows(length, rank, num_ranks, torch.device("cpu"))
            assert mask.shape == (1, 1, len(positions), length)
            for row, position in enumerate(positions.tolist()):
                assert mask[0, 0, row].tolist() == [key > position for key in range(length)]

    run_in_child(check)
