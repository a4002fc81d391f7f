"""What a run of ``pretrain_gpt.py`` under `tests.launch` records, written on the ranks and read by the test.

Per iteration: loss, gradient norm, learning rate, whether the step was skipped, on request the parameter norm. At the
end, on request, every parameter under its global name, which `gather_parameters` puts together from all ranks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


class Recorder:
    """Records one rank's run by wrapping ``megatron.training.training.train_step``."""

    def __init__(self, directory: Path, rank: int, wanted: Iterable[str]) -> None:
        """Prepare an empty record.

        Args:
            directory: where `write` and `finish` put ``rank<r>.json`` and ``rank<r>.pt``.
            rank: global rank.
            wanted: any of ``parameters`` (dump them at the end) and ``params_norm`` (at each iteration).
        """
        self.path = directory / f"rank{rank}.json"
        self.wanted = frozenset(wanted)
        self.record: dict[str, Any] = {
            "rank": rank, "iterations": [], "losses": [], "grad_norms": [], "learning_rates": [],
            "skipped": [], "params_norms": [], "setup": None,
        }  # fmt: skip
        self.model: list[Any] = []
        self.position: dict[str, int] = {}

    def install(self) -> None:
        """Wrap ``train_step``; called in the rank before the entry's ``main``."""
        from megatron.training import training

        original = training.train_step

        @functools.wraps(original)
        def recorded(
            forward_step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(forward_step, data, model, optimizer, scheduler, *args, **kwargs)
            self.model = model
            self.add(result, optimizer, kwargs["iteration"] + 1)
            return result

        training.train_step = recorded

    def add(self, result: tuple[Any, ...], optimizer: Any, iteration: int) -> None:
        """Append one iteration to the record.

        Args:
            result: what ``train_step`` returned; losses are there on the last pipeline stage only.
            optimizer: Megatron's optimizer.
            iteration: counted from 1, as Megatron logs it.
        """
        losses, skipped, grad_norm = result[0], result[1], result[5]
        if not self.position:
            self.position = parallel_position()
        self.record["iterations"].append(iteration)
        if losses:
            self.record["losses"].append(float(next(iter(losses.values()))))
        self.record["grad_norms"].append(None if grad_norm is None else float(grad_norm))
        self.record["skipped"].append(bool(skipped))
        self.record["learning_rates"].append([float(group["lr"]) for group in optimizer.param_groups])
        if "params_norm" in self.wanted:
            from megatron.training.utils import calc_params_l2_norm

            self.record["params_norms"].append(float(calc_params_l2_norm(self.model)))

    def finish(self) -> None:
        """Dump the parameters if that is wanted; called when ``main`` has returned."""
        if "parameters" in self.wanted:
            import torch

            torch.save(
                {"position": self.position, "parameters": list(local_parameters(self.model))},
                self.path.with_suffix(".pt"),
            )

    def write(self) -> None:
        """Write the record, also that of a run that failed."""
        self.path.write_text(json.dumps(self.record | {"position": self.position}))


def parallel_position() -> dict[str, int]:
    """This rank's coordinates and the group sizes: tp, pp, dp, ep, etp and tp_size, ...; dp counts the context too."""
    from megatron.core import parallel_state as mpu

    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(with_context_parallel=True),
        "ep": mpu.get_expert_model_parallel_rank(),
        "etp": mpu.get_expert_tensor_parallel_rank(),
        "tp_size": mpu.get_tensor_model_parallel_world_size(),
        "pp_size": mpu.get_pipeline_model_parallel_world_size(),
        "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=True),
        "ep_size": mpu.get_expert_model_parallel_world_size(),
        "etp_size": mpu.get_expert_tensor_parallel_world_size(),
    }


def local_parameters(model: list[Any]) -> Iterator[dict[str, Any]]:
    """This rank's parameters.

    Args:
        model: the model chunks of this pipeline stage, as Megatron wraps them.

    Yields:
        name (layers counted from 0 over all stages, experts over all ranks), data, partition_dim (-1: replicated over
        tensor-parallel ranks), stride (2: the slice holds its share of gate and of up, one after the other), expert
        (whether it belongs to one of a layer's experts).
    """
    from megatron.core.utils import unwrap_model

    expert_rank = parallel_position()["ep"]

    for chunk in unwrap_model(model):
        layer_names = {
            name: re.sub(r"\d+$", str(module.layer_number - 1), name)
            for name, module in chunk.named_modules()
            if re.search(r"\.layers\.\d+$", name)
        }
        for name, param in chunk.named_parameters():
            layer = next((local for local in layer_names if name.startswith(local + ".")), None)
            sliced = getattr(param, "tensor_model_parallel", False)
            name = name if layer is None else layer_names[layer] + name.removeprefix(layer)
            expert = re.search(r"\.local_experts\.(\d+)\.", name)
            if expert is not None:
                number = expert_rank * _experts_per_rank(chunk) + int(expert[1])
                name = f"{name[: expert.start()]}.local_experts.{number}.{name[expert.end() :]}"
            tied = name == OUTPUT and getattr(param, "shared_embedding", False)
            yield {
                "name": EMBEDDING if tied else name,
                "data": param.detach().clone(),
                "partition_dim": param.partition_dim if sliced else -1,
                "stride": param.partition_stride if sliced else 1,
                "expert": expert is not None,
            }


def _experts_per_rank(chunk: Any) -> int:
    return chunk.config.num_moe_experts // chunk.config.expert_model_parallel_size


def join_slices(slices: list[torch.Tensor], partition_dim: int, stride: int) -> torch.Tensor:
    """Put the tensor-parallel slices of one parameter together.

    Args:
        slices: by tensor-parallel rank.
        partition_dim: the dimension that was cut, or -1 when each slice is the whole.
        stride: how many parts each slice holds one after the other (gate and up: 2).

    Returns:
        The parameter as one process would hold it.
    """
    import torch

    if partition_dim < 0:
        return slices[0]
    parts = [piece.chunk(stride, partition_dim) for piece in slices]
    return torch.cat([piece[part] for part in range(stride) for piece in parts], partition_dim)


def gather_parameters(paths: Iterable[Path]) -> dict[str, torch.Tensor]:
    """Assemble the whole model's parameters from the dumps of all ranks.

    Args:
        paths: every rank's ``rank<r>.pt``.

    Returns:
        Parameters by global name. A tied output layer is not listed beside its embedding.

    Raises:
        AssertionError: replicas differ: data-parallel ones, tensor-parallel ones, or the tied embedding's two.
    """
    import torch

    slices: dict[str, dict[int, torch.Tensor]] = {}
    cuts: dict[str, tuple[int, int]] = {}
    for path in paths:
        dump = torch.load(path, weights_only=True)
        for entry in dump["parameters"]:
            name, rank = entry["name"], dump["position"]["etp" if entry["expert"] else "tp"]
            cuts[name] = (entry["partition_dim"], entry["stride"])
            slice_index = rank if entry["partition_dim"] >= 0 else 0
            first = slices.setdefault(name, {}).setdefault(slice_index, entry["data"])
            assert torch.equal(first, entry["data"]), f"{name}: replicas differ ({Path(path).name})"
    return {name: join_slices([held[rank] for rank in sorted(held)], *cuts[name]) for name, held in slices.items()}
