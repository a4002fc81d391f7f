"""The device's random stream is Megatron's: apart from the host's, forked by tensor-parallel rank, replayed exactly."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import functional

from megatron import cpu
from tests.child_process import run_in_child

SEED = 1234
OFFSET = 2718
"""Megatron's distance between the seeds of the default and the model-parallel stream."""


def mask(size: int = 64) -> list[float]:
    return functional.dropout(torch.ones(size), 0.5).tolist()


def seeded_mask(seed: int, size: int = 64) -> list[float]:
    """The mask that torch's CPU kernel draws from a fresh generator."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return torch.empty(size).bernoulli_(0.5).mul_(2.0).tolist()


def seed_rank(tp_rank: int) -> Any:
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker(force_reset=True)
    torch.manual_seed(SEED)
    random.model_parallel_cuda_manual_seed(SEED, tp_rank=tp_rank, ep_rank=0, etp_rank=tp_rank)
    return random


def test_dropout_draws_from_the_device_and_leaves_the_host_alone() -> None:
    def check() -> None:
        cpu.install_if_needed()
        torch.manual_seed(SEED)
        expected_on_host = torch.rand(4).tolist()
        torch.manual_seed(SEED)
        query = torch.ones(1, 1, 4, 8)
        draws = {
            "functional": mask,
            "module": lambda: torch.nn.Dropout(0.5)(torch.ones(64)).tolist(),
            "torch": lambda: torch.dropout(torch.ones(64), 0.5, True).tolist(),
            "attention": lambda: functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5).tolist(),
            "factory": lambda: torch.rand(4, device="cuda").tolist(),
        }
        for name, draw in draws.items():
            state = torch.cuda.get_rng_state()
            first, second = draw(), draw()
            assert first != second, f"{name} does not advance the device's stream"
            torch.cuda.set_rng_state(state)
            assert (draw(), draw()) == (first, second), f"{name} is not replayed"
        assert torch.rand(4).tolist() == expected_on_host

    run_in_child(check)


def test_host_draws_leave_the_device_alone() -> None:
    def check() -> None:
        cpu.install_if_needed()
        torch.manual_seed(SEED)
        expected = mask()
        torch.manual_seed(SEED)
        torch.rand(7)
        torch.nn.init.normal_(torch.empty(9))
        assert mask() == expected

    # After this torch takes the child for one that cannot use CUDA, and must seed the device all the same.
    torch.cuda.is_available()
    run_in_child(check)


def test_model_parallel_stream_differs_by_rank_and_the_default_one_does_not() -> None:
    def check() -> None:
        cpu.install_if_needed()
        complaints: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = complaints.append  # type: ignore[method-assign]
        logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
        seen = {}
        for tp_rank in (0, 1):
            random = seed_rank(tp_rank)
            outside = [mask()]
            with random.get_cuda_rng_tracker().fork():
                inside = [mask(), mask()]
            outside.append(mask())
            with random.get_cuda_rng_tracker().fork():
                inside.append(mask())
            seen[tp_rank] = outside, inside
        # Megatron complains when the host's stream moves inside a fork.
        assert not complaints
        assert seen[0][0] == seen[1][0]
        assert all(a != b for a, b in zip(seen[0][1], seen[1][1], strict=True))
        # The seeds are Megatron's own.
        assert seen[0][0][0] == seeded_mask(SEED)
        assert [seen[rank][1][0] for rank in (0, 1)] == [seeded_mask(SEED + OFFSET + rank) for rank in (0, 1)]
        # Each stream goes on where it was left.
        assert seen[0][0] == [seeded_mask(SEED, 128)[:64], seeded_mask(SEED, 128)[64:]]

    run_in_child(check)


def test_recomputed_activations_get_the_masks_of_the_first_pass() -> None:
    def check() -> None:
        cpu.install_if_needed()
        random = seed_rank(0)

        def layer(x: torch.Tensor) -> torch.Tensor:
            with random.get_cuda_rng_tracker().fork():
                x = functional.dropout(x, 0.5)
            return functional.dropout(x, 0.5)

        x = torch.ones(256, requires_grad=True)
        out = random.checkpoint(layer, False, x)
        mask()  # what other layers draw before this one's backward pass
        out.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, out.detach())
        assert 0 < (out == 0).sum() < 256

    run_in_child(check)


def test_streams_saved_and_loaded_go_on_bit_for_bit() -> None:
    def check() -> None:
        cpu.install_if_needed()
        random = seed_rank(1)
        tracker = random.get_cuda_rng_tracker()
        saved = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()

        def draw() -> tuple[list[float], ...]:
            with tracker.fork():
                inside = mask()
            return torch.rand(3).tolist(), mask(), inside

        expected = draw(), draw()
        torch.set_rng_state(saved[0])
        torch.cuda.set_rng_state(saved[1])
        tracker.set_states(saved[2])
        assert (draw(), draw()) == expected

    run_in_child(check)
