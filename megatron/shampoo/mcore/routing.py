"""Which of a model's parameters are preconditioned, under which global name, and what parts they hold."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from megatron.shampoo.config import Qkv, ShampooConfig
from megatron.shampoo.methods import factor_sides
from megatron.shampoo.plan.grid import grid_of
from megatron.shampoo.plan.owners import block_cost
from megatron.shampoo.plan.parts import Part

_LAYER = re.compile(r"\.layers\.\d+$")
_LOCAL_EXPERT = re.compile(r"(\.experts\.local_experts\.)(\d+)(\.)")
_GROUPED_EXPERT = re.compile(r"(\.experts\.linear_fc[12]\.weight)(\d+)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Route:
    """What happens to one parameter."""

    name: str
    """Global name: layers and experts numbered over all stages and expert-parallel ranks."""
    is_expert: bool
    family: str
    """What its unit is; layers of multi-token prediction are numbered apart from the decoder's."""
    unit: int
    """Global index of its layer; for an expert, of the expert among all layers' experts."""
    parameter: Tensor
    parts: tuple[Part, ...]
    """Empty: AdamW."""
    reason: str
    """Why AdamW, or empty."""

    @property
    def is_preconditioned(self) -> bool:
        """Whether the parameter takes Shampoo."""
        return bool(self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """Sizes and ranks that decide a parameter's slice."""

    size: int
    rank: int
    expert_size: int
    expert_rank: int
    expert_parallel_rank: int
    """Rank among the expert-parallel ranks, which number the experts."""


def routes_of(
    model_chunks: Sequence[Any], config: Any, tensor_parallel: TensorParallel, settings: ShampooConfig
) -> list[Route]:
    """Routes of all trainable parameters of this rank's model chunks.

    Args:
        model_chunks: Megatron's, in the order of the optimizer.
        config: the model's `TransformerConfig`.
        tensor_parallel: this rank's place.
        settings: which sides have factors, and how a fused projection is taken apart.

    Returns:
        In the order of the model's own parameters, which is the same on every rank of a data-parallel group.

    Raises:
        NotImplementedError: a parameter whose slices are not understood; names it.
    """
    routes = []
    for chunk in model_chunks:
        layers = _layer_numbers(chunk)
        for local_name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                routes.append(_route(local_name, parameter, layers, config, tensor_parallel, settings))
    return routes


def names_of(model_chunks: Sequence[Any], config: Any, expert_parallel_rank: int) -> dict[int, str]:
    """Global names of all parameters of this rank's model chunks, by the parameters' `id`.

    Args:
        model_chunks: Megatron's.
        config: the model's `TransformerConfig`.
        expert_parallel_rank: rank among the expert-parallel ranks, which number the experts.
    """
    names = {}
    for chunk in model_chunks:
        layers = _layer_numbers(chunk)
        for local_name, parameter in chunk.named_parameters():
            names[id(parameter)] = _name_and_unit(local_name, layers, config, expert_parallel_rank)[0]
    return names


def _layer_numbers(chunk: Any) -> dict[str, int]:
    """Global number (from 0) of each layer module, by its local name."""
    return {
        name: module.layer_number - 1
        for name, module in chunk.named_modules()
        if _LAYER.search(name) and hasattr(module, "layer_number")
    }


def _route(
    local_name: str,
    parameter: Tensor,
    layers: dict[str, int],
    config: Any,
    tensor_parallel: TensorParallel,
    settings: ShampooConfig,
) -> Route:
    name, unit = _name_and_unit(local_name, layers, config, tensor_parallel.expert_parallel_rank)
    expert = is_expert(name)
    reason = _adamw_reason(name, parameter)
    parts = () if reason else _parts(name, parameter, config, tensor_parallel, settings)
    if parts and any(min(part.global_shape) == 1 for part in parts):
        parts, reason = (), "a side of 1"
    parts = tuple(dataclasses.replace(part, sides=factor_sides(part.global_shape, settings)) for part in parts)
    if not all(any(part.sides) for part in parts):
        parts, reason = (), f"a side above --shampoo-max-dim {settings.max_dim}"
    return Route(
        name=name,
        is_expert=expert,
        family=("mtp-" if name.startswith("mtp.") else "") + ("expert" if expert else "layer"),
        unit=unit,
        parameter=parameter,
        parts=parts,
        reason=reason,
    )


def _name_and_unit(local_name: str, layers: dict[str, int], config: Any, expert_parallel_rank: int) -> tuple[str, int]:
    """Global name; and the number of the layer, or of an expert among all layers' experts."""
    name, unit = _global_name(local_name, layers)
    if not is_expert(name):
        return name, unit
    name, number = _global_expert(name, config, expert_parallel_rank)
    return name, unit * (config.num_moe_experts or 1) + number


def _global_name(local_name: str, layers: dict[str, int]) -> tuple[str, int]:
    """Name with the layer numbered globally and wrapper prefixes removed; and the layer's number."""
    prefix = max((layer for layer in layers if local_name.startswith(layer + ".")), key=len, default=None)
    unit = 0 if prefix is None else layers[prefix]
    name = local_name
    if prefix is not None:
        name = re.sub(r"\d+$", str(unit), prefix) + local_name.removeprefix(prefix)
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name, unit


def is_expert(name: str) -> bool:
    """Whether a parameter is an expert's own, by its name: Megatron marks experts only where they are spread out."""
    return ".experts." in name


def _global_expert(name: str, config: Any, expert_parallel_rank: int) -> tuple[str, int]:
    """Name with the expert numbered globally, and its number."""
    num_local = (config.num_moe_experts or 1) // config.expert_model_parallel_size
    base = expert_parallel_rank * num_local
    for pattern in (_LOCAL_EXPERT, _GROUPED_EXPERT):
        found = pattern.search(name)
        if found:
            expert = base + int(found.group(2))
            return f"{name[: found.start(2)]}{expert}{name[found.end(2) :]}", expert
    return name, 0


def _adamw_reason(name: str, parameter: Tensor) -> str:
    if parameter.ndim != 2:
        return f"{parameter.ndim}-D"
    if getattr(parameter, "is_embedding_or_output_parameter", False) or "embedding" in name:
        return "embedding" if "embedding" in name else "output layer"
    if name.startswith("output_layer.") or ".output_layer." in name:
        return "output layer"
    if name.endswith(".router.weight"):
        return "router"
    return ""


def _parts(
    name: str, parameter: Tensor, config: Any, tensor_parallel: TensorParallel, settings: ShampooConfig
) -> tuple[Part, ...]:
    expert = is_expert(name)
    size = tensor_parallel.expert_size if expert else tensor_parallel.size
    rank = tensor_parallel.expert_rank if expert else tensor_parallel.rank
    cut: dict[str, Any] = {"tp_dim": _tp_dim(parameter), "tp_size": size, "tp_rank": rank}
    if cut["tp_dim"] is None:
        cut = {"tp_dim": None, "tp_size": 1, "tp_rank": 0}
    if name.endswith("self_attention.linear_qkv.weight") and settings.qkv is not Qkv.FUSED:
        return _attention_parts(name, parameter, config, cut, settings)
    rows, columns = _global_shape(parameter, cut)
    gated = getattr(config, "gated_linear_unit", False) and ".linear_fc1.weight" in name
    if gated and rows % 2 == 0:
        half = rows // 2
        return _interleaved(parameter, columns, cut, [("gate", half), ("up", half)], num_groups=1)
    return (Part(name="weight", global_shape=(rows, columns), **cut),)


def _attention_parts(
    name: str, parameter: Tensor, config: Any, cut: dict[str, Any], settings: ShampooConfig
) -> tuple[Part, ...]:
    """Q, K and V (and the output gate) of a fused projection, stored interleaved by query group."""
    groups, head = config.num_query_groups, config.kv_channels
    if groups % cut["tp_size"]:
        raise NotImplementedError(
            f"{name}: {groups} query groups on {cut['tp_size']} tensor-parallel ranks; use --shampoo-qkv fused, or "
            f"--num-query-groups that are a multiple of --tensor-model-parallel-size"
        )
    heads = config.num_attention_heads // groups
    rows = [("q", heads * head), ("k", head), ("v", head)]
    if getattr(config, "attention_output_gate", False):
        rows.insert(1, ("gate", heads * head))
    sizes = [(part, groups * count) for part, count in rows]
    if sum(size for _, size in sizes) != _global_shape(parameter, cut)[0]:
        raise NotImplementedError(f"{name}: {_global_shape(parameter, cut)[0]} rows are not those of {dict(sizes)}")
    parts = _interleaved(parameter, parameter.shape[1], cut, sizes, num_groups=groups)
    if settings.qkv is Qkv.HEADS:
        return tuple(dataclasses.replace(part, row_segments=part.global_shape[0] // head) for part in parts)
    *others, keys, values = parts
    merged = dataclasses.replace(
        keys,
        name="kv",
        global_shape=(2 * keys.global_shape[0], keys.global_shape[1]),
        run_rows=2 * (keys.run_rows or 0),
    )
    # Keys and values lie side by side in their group. Where they are narrow, one factor for the two is cheaper; but not
    # at the price of a factor, where the two together are longer than --shampoo-max-dim.
    alignment = settings.tp_alignment or cut["tp_size"]
    keeps = sum(factor_sides(merged.global_shape, settings)) == sum(factor_sides(keys.global_shape, settings))
    if keeps and _cost([merged], alignment, settings) < _cost([keys, values], alignment, settings):
        return (*others, merged)
    return parts


def _cost(parts: Iterable[Part], alignment: int, settings: ShampooConfig) -> float:
    """Work of the blocks of whole parts by the cost model; without a bound where the alignment does not fit."""
    total = 0.0
    for part in parts:
        if part.tp_dim is not None and part.global_shape[part.tp_dim] % alignment:
            return float("inf")
        rows, columns = grid_of(part, settings.block_size, alignment)
        sides = factor_sides(part.global_shape, settings)
        total += sum(block_cost((r1 - r0, c1 - c0), sides, settings) for r0, r1 in rows for c0, c1 in columns)
    return total


def _interleaved(
    parameter: Tensor, columns: int, cut: dict[str, Any], sizes: Iterable[tuple[str, int]], num_groups: int
) -> tuple[Part, ...]:
    """Parts whose rows alternate within each of `num_groups` groups, and within each tensor-parallel slice."""
    sizes = list(sizes)
    local_groups = max(1, num_groups // cut["tp_size"])
    stride = parameter.shape[0] // local_groups
    parts, first = [], 0
    for name, rows in sizes:
        run = rows // cut["tp_size"] // local_groups if cut["tp_dim"] == 0 else rows // local_groups
        parts.append(
            Part(
                name=name,
                global_shape=(rows, columns),
                first_row=first,
                run_rows=run,
                run_stride=stride,
                **cut,
            )
        )
        first += run
    return tuple(parts)


def _tp_dim(parameter: Tensor) -> int | None:
    """Dimension that Megatron cuts, or may cut at another size; None for a replicated parameter."""
    dim = getattr(parameter, "partition_dim", -1)
    return dim if getattr(parameter, "tensor_model_parallel", False) and dim in (0, 1) else None


def _global_shape(parameter: Tensor, cut: dict[str, Any]) -> tuple[int, int]:
    rows, columns = parameter.shape
    size = cut["tp_size"]
    return (rows * size if cut["tp_dim"] == 0 else rows, columns * size if cut["tp_dim"] == 1 else columns)
