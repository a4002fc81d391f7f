"""What `tools/bench.py` can measure: names, layouts, the fixed sizes. Imports nothing heavy, for the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

PARTS = ("steps", "optimizer")
"""Whole training steps; the step of the optimizer alone."""

BASELINES = ("sgd", "adam")
"""Megatron's (torch's, where the optimizer is alone): the others are given as ratios to them."""

RIVALS = ("megatron-soap", "megatron-muon")
"""Megatron's `--optimizer soap` and `muon`, from the package emerging-optimizers."""

METHODS = ("shampoo", "soap", "kl-soap", "kl-shampoo", "one-sided")
"""Ours: values of `--shampoo-method`."""

OPTIMIZERS = (*BASELINES, *RIVALS, *METHODS)

MUON_ON_CPU = "high"
"""Precision of the products of Megatron's Muon on CPU, in the place of `medium`, which is bfloat16 products: a CPU
without instructions for these takes fifty times as long."""

MUON_NOTE = "float32 products, since bfloat16 is slow on CPU"

WARM_UP = 10
"""First steps of a run that are not measured: allocations, caches and the refreshes of the first interval."""

REFRESH_INTERVAL = 10
"""Steps from one refresh of a block to the next; mean and spread are over whole intervals."""

BLOCK_SIZE = 512
"""Largest side of a block where the optimizer is alone."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A parallel layout of whole training steps."""

    title: str
    world_size: int
    flags: tuple[str, ...]
    """Flags of `pretrain_gpt.py`; the global batch is 32 on every layout."""


LAYOUTS = {
    "one": Layout(title="one process", world_size=1, flags=("--micro-batch-size", "32")),
    "dp2": Layout(
        title="data parallel 2, distributed optimizer",
        world_size=2,
        flags=("--micro-batch-size", "16", "--use-distributed-optimizer"),
    ),
    "tp2": Layout(
        title="tensor parallel 2",
        world_size=2,
        flags=("--micro-batch-size", "32", "--tensor-model-parallel-size", "2"),
    ),
    "pp2": Layout(
        title="pipeline parallel 2",
        world_size=2,
        flags=("--micro-batch-size", "32", "--pipeline-model-parallel-size", "2"),
    ),
}


def matrices(width: int, layers: int) -> list[tuple[int, int]]:
    """Shapes of the hidden matrices of a GPT, fused ones taken apart: query, key, value, projection, both of the MLP.

    Args:
        width: hidden size.
        layers: transformer layers.

    Returns:
        (rows, columns) of each.
    """
    layer = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    return layer * layers


def blocks(shapes: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Blocks of matrices whose sides are at most `BLOCK_SIZE` or multiples of it.

    Args:
        shapes: of the matrices.

    Returns:
        The shape of each block and that of its matrix.
    """
    found = []
    for shape in shapes:
        pieces = [-(-side // BLOCK_SIZE) for side in shape]
        block = (shape[0] // pieces[0], shape[1] // pieces[1])
        found += [(block, shape)] * (pieces[0] * pieces[1])
    return found


def is_cut_evenly(width: int) -> bool:
    """Whether all blocks of a GPT of this width are equal cuts: its sides fit a block or are multiples of one.

    Args:
        width: hidden size; the other side of the MLP's matrices is four times as long.
    """
    return width >= 1 and all(side <= BLOCK_SIZE or side % BLOCK_SIZE == 0 for side in (width, 4 * width))
