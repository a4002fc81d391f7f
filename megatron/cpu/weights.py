"""Initial weights that do not depend on how the model is split.

With `--use-cpu-initialization` each tensor-parallel rank of Megatron draws the whole weight and keeps its slice. Two
things still leak the layout into the numbers: the vocabulary is padded to a multiple of the tensor-parallel size, so
the embedding draws more numbers and every later weight starts elsewhere in the stream; and each expert-parallel rank
starts its own experts at the same place. Both are cured by giving each weight a stream of its own, seeded by one
number of the common stream: padding then only lengthens the weight's own draw.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import layers

_SEEDS = 2**31 - 1


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Draw, inside the context, from a stream seeded by the next number of the host's generator."""
    host = torch.default_generator
    seed = int(torch.randint(_SEEDS, (), device="cpu"))
    state = host.get_state()
    host.manual_seed(seed)
    try:
        yield
    finally:
        host.set_state(state)


def skip_streams(count: int) -> None:
    """Pass over the seeds of weights that other ranks hold.

    Args:
        count: number of weights.
    """
    for _ in range(count):
        torch.randint(_SEEDS, (), device="cpu")


def install() -> None:
    """Give each weight that Megatron 0.19 initialises on the host a stream of its own."""
    original = layers._initialize_affine_weight_cpu

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        with own_stream():
            return original(*args, **kwargs)

    layers._initialize_affine_weight_cpu = initialize
