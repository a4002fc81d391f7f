"""The device's own random stream, kept apart from the host's.

On a GPU Megatron draws from two generators: the host's, which initialises weights (`--use-cpu-initialization`) and
seeds data loaders and is equal on all tensor-parallel ranks, and the device's, which makes dropout masks and which
`get_cuda_rng_tracker().fork()` switches between the default stream (equal over tensor-parallel ranks) and the
model-parallel one (different on each). Here the device is a CPU too, and torch's CPU kernels draw from the host
generator alone. So the device's stream lives in a generator of its own, which Megatron seeds, forks, saves and restores
as it would the GPU's, and which is swapped into the host generator for the length of every operation of the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

device_generator = torch.Generator("cpu")
"""The present state of the device's random stream; what `torch.cuda.default_generators` presents."""

DEVICE_DRAWS: frozenset[Callable] = frozenset(
    {
        functional.dropout,
        functional.alpha_dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.feature_alpha_dropout,
        functional.gumbel_softmax,
        functional.multi_head_attention_forward,
        functional.rrelu,
        functional.scaled_dot_product_attention,
        torch.dropout,
        torch.dropout_,
        torch.native_dropout,
        torch.feature_dropout,
        torch.alpha_dropout,
    }
)
"""Operations that draw only in a forward pass, hence on the device, whatever tensors they are given."""

FACTORY_DRAWS: frozenset[Callable] = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.rand_like, torch.randn_like}
)
"""Operations that draw on the device when they are asked for a tensor there."""


@contextlib.contextmanager
def draw_from_device() -> Iterator[None]:
    """Let random operations inside the context advance the device's stream and leave the host's where it was."""
    host = torch.default_generator
    host_state = host.get_state()
    host.set_state(device_generator.get_state())
    try:
        yield
    finally:
        device_generator.set_state(host.get_state())
        host.set_state(host_state)
