"""The CPU answers for torch.cuda, and where CUDA is there nothing changes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megatron import cpu
from megatron.cpu.streams import Event, Stream
from tests.child_process import run_in_child

CUDA_NAMES = ["cuda", "cuda:0", "cuda:3", torch.device("cuda"), torch.device("cuda", 1), 0, 1]


def torch_attributes() -> dict[str, Any]:
    """Everything of torch that the platform could change, by name."""
    owners = {
        "torch": vars(torch),
        "torch.cuda": vars(torch.cuda),
        "torch.cuda.random": vars(torch.cuda.random),
        "torch.cuda.nvtx": vars(torch.cuda.nvtx),
        "torch.accelerator": vars(torch.accelerator),
        "torch.Tensor": vars(torch.Tensor),
        "torch.nn.Module": vars(torch.nn.Module),
        "environment": dict(os.environ),
    }
    return {f"{owner}.{name}": value for owner, names in owners.items() for name, value in names.items()} | {
        "modes": torch._C._len_torch_function_stack()
    }


def changes(before: dict[str, Any]) -> set[str]:
    after = torch_attributes()
    # "is", for functions; an equal string read anew from the environment is no change.
    return {
        name
        for name in before.keys() | after.keys()
        if before.get(name) is not after.get(name)
        and not (isinstance(before.get(name), str | int) and before.get(name) == after.get(name))
    }


@pytest.mark.parametrize("cuda_is_there", [True, False])
def test_torch_is_changed_only_where_cuda_is_missing(cuda_is_there: bool) -> None:
    def check() -> None:
        for name in ("TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "RANK", "MASTER_PORT"):
            os.environ.pop(name, None)
        torch.cuda.is_available = lambda: cuda_is_there  # type: ignore[assignment]
        before = torch_attributes()
        assert cpu.install_if_needed() is not cuda_is_there
        assert cpu.is_needed() is not cuda_is_there
        if cuda_is_there:
            assert changes(before) == set()
            return
        expected = {"torch.cuda.Stream", "torch.Tensor.cuda", "environment.TORCHDYNAMO_DISABLE", "modes"}
        assert expected <= changes(before)

    run_in_child(check)


@pytest.mark.parametrize("cuda_is_there", [True, False])
def test_megatron_and_its_parser_are_changed_only_where_cuda_is_missing(cuda_is_there: bool) -> None:
    def check() -> None:
        import argparse

        from megatron.core.tensor_parallel import layers
        from megatron.core.transformer.moe import token_dispatcher
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        from megatron.cpu import flags

        def seams() -> list[Any]:
            return [
                layers._initialize_affine_weight_cpu,
                token_dispatcher.maybe_move_tensor_to_cpu,
                SequentialMLP.__init__,
                WrappedTorchNorm.__new__,
            ]

        torch.cuda.is_available = lambda: cuda_is_there  # type: ignore[assignment]
        before = seams()
        assert cpu.adapt_megatron_if_needed() is not cuda_is_there
        kept = [old is new for old, new in zip(before, seams(), strict=True)]
        assert kept == [cuda_is_there] * len(before)
        parser = argparse.ArgumentParser()
        parser.add_argument("--transformer-impl", default="transformer_engine")
        parser.add_argument("--context-parallel-size", type=int, default=1)
        parsed = flags.adapt(parser).parse_args([])
        assert parsed.transformer_impl == ("transformer_engine" if cuda_is_there else "local")

    run_in_child(check)


def test_what_is_asked_for_on_cuda_is_made_on_the_cpu() -> None:
    def check() -> None:
        cpu.install_if_needed()
        host = torch.ones(2)
        for device in [*CUDA_NAMES, torch.cuda.current_device()]:
            made = [
                torch.empty(2, device=device),
                torch.tensor([1.0], device=device),
                torch.rand(2, device=device),
                host.to(device),
                host.to(device=device, dtype=torch.bfloat16),
                host.new_zeros(3, device=device),
                torch.nn.Linear(2, 2).to(device).weight,
                torch.nn.Linear(2, 2, device=device).weight,
            ]
            assert {str(tensor.device) for tensor in made} == {"cpu"}, device
        assert host.cuda() is host
        assert host.pin_memory() is host
        assert torch.nn.Linear(2, 2).cuda(0).weight.device == torch.device("cpu")

    run_in_child(check)


def test_tensors_bear_the_type_names_that_megatron_sorts_parameters_by() -> None:
    def check() -> None:
        cpu.install_if_needed()
        names = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
        for dtype, name in names.items():
            assert torch.nn.Parameter(torch.ones(1, dtype=dtype)).type() == f"torch.cuda.{name}Tensor"
        assert torch.ones(1).type(torch.float16).dtype == torch.float16

    run_in_child(check)


def test_there_is_one_device_per_local_rank() -> None:
    def check() -> None:
        cpu.install_if_needed()
        os.environ.update(LOCAL_RANK="1", LOCAL_WORLD_SIZE="3")
        assert (torch.cuda.current_device(), torch.cuda.device_count()) == (1, 3)
        assert len(torch.cuda.default_generators) == 3

    run_in_child(check)


def test_memory_is_the_process_memory() -> None:
    def check() -> None:
        cpu.install_if_needed()
        before = torch.cuda.memory_allocated()
        block = torch.ones(64 * 2**20 // 4)
        grown = torch.cuda.memory_allocated() - before
        assert 0.9 * block.nbytes < grown < 1.5 * block.nbytes
        assert torch.cuda.max_memory_allocated() >= before + 0.9 * block.nbytes
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > before
        assert torch.cuda.get_device_properties(0).total_memory > torch.cuda.memory_allocated()

    run_in_child(check)


def test_data_loader_reads_with_workers_and_pinning_asked_for() -> None:
    def check() -> None:
        cpu.install_if_needed()
        data = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, pin_memory=True)
        assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]

    run_in_child(check)


def test_events_measure_the_time_between_them() -> None:
    start, end = Stream().record_event(), Event()
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(end)
    end.record()
    assert start.elapsed_time(end) > 0
    assert end.elapsed_time(start) < 0
