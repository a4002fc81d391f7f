"""Presents this machine's CPU as `torch.cuda`, one device per local rank.

Megatron asks torch for its device in five ways: it calls functions of `torch.cuda`, passes a CUDA device to factory
functions, moves tensors with `.cuda()` and `.to()`, compares `tensor.type()` with the names of CUDA tensors, and draws
random numbers on the device. Each is answered here in one place, for a device whose memory is the host's.
"""

from __future__ import annotations

import contextlib
import os
import resource
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.cpu import rng
from megatron.cpu.streams import Event, Stream

CPU = torch.device("cpu")


def local_rank() -> int:
    """Read this process's index among those on this machine.

    Returns:
        `LOCAL_RANK` of the launcher, 0 without one.
    """
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))


def local_world_size() -> int:
    """Read how many processes of the run share this machine.

    Returns:
        `LOCAL_WORLD_SIZE` of the launcher, else enough for this local rank, at least 1.
    """
    return int(os.environ.get("LOCAL_WORLD_SIZE", local_rank() + 1))


def resident_bytes(*args: Any, **kwargs: Any) -> int:
    """Measure the memory this process holds now.

    Args:
        args: the device, as `torch.cuda.memory_allocated` takes it; ignored.
        kwargs: likewise.

    Returns:
        Resident set size, bytes; on a system without `/proc`, the peak so far.
    """
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_resident_bytes()


def peak_resident_bytes(*args: Any, **kwargs: Any) -> int:
    """Measure the most memory this process has held.

    Args:
        args: the device, as `torch.cuda.max_memory_allocated` takes it; ignored.
        kwargs: likewise.

    Returns:
        Peak resident set size, bytes.
    """
    # Linux counts ru_maxrss in KiB, macOS in bytes.
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def machine_bytes() -> int:
    """Measure this machine's memory.

    Returns:
        Physical memory, bytes.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_stats(*args: Any, **kwargs: Any) -> Mapping[str, int]:
    """Answer `torch.cuda.memory_stats` with the process's memory; counters of the caching allocator are 0."""
    now, peak = resident_bytes(), peak_resident_bytes()
    figures = {
        "allocated_bytes.all.current": now,
        "allocated_bytes.all.peak": peak,
        "reserved_bytes.all.current": now,
        "reserved_bytes.all.peak": peak,
    }
    return defaultdict(int, figures)


def _properties(*args: Any) -> types.SimpleNamespace:
    """Answer `torch.cuda.get_device_properties`: a device older than any GPU, with the machine's memory."""
    return types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=machine_bytes(), multi_processor_count=os.cpu_count()
    )


def is_cuda_device(device: Any) -> bool:
    """Say whether a device argument names a CUDA device.

    Args:
        device: what a caller passed as `device`: an index, a name, a `torch.device`, or anything else.

    Returns:
        True for an index, "cuda", "cuda:N" and the like.
    """
    if isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, torch.device) and device.type == "cuda"


def _backward(
    tensor: torch.Tensor,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Do what `tensor.backward` does, by the function that does not ask modes again."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)


class DeviceMode(TorchFunctionMode):
    """Sends what torch functions are asked to do on a CUDA device to the CPU, drawing from the device's stream."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run `func` with a CUDA `device` replaced.

        Args:
            func: the torch function called.
            types: the tensor subclasses involved.
            args: its positional arguments.
            kwargs: its named arguments.

        Returns:
            What `func` returns.
        """
        on_device = False
        if kwargs and is_cuda_device(kwargs.get("device")):
            on_device = True
            kwargs = {**kwargs, "device": CPU}
        elif func is torch.Tensor.to and len(args) > 1 and is_cuda_device(args[1]):
            args = (args[0], CPU, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizers sort parameters by the names of CUDA's tensor types.
            return func(*args).replace("torch.", "torch.cuda.")
        elif func is torch.Tensor.backward:
            # A mode is off while it handles a call, and a backward pass may recompute activations.
            with self:
                return _backward(*args, **(kwargs or {}))
        if kwargs and kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}  # pinned memory serves copies to a GPU
        if func in rng.DEVICE_DRAWS or (on_device and func in rng.FACTORY_DRAWS):
            with rng.draw_from_device():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _null_device(*args: Any) -> Iterator[None]:
    """Stand in for the context manager `torch.cuda.device`."""
    yield


def _constant(value: Any) -> Callable[..., Any]:
    """Make a function that returns `value`; each a new object, as torch's compiler tables require."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return value

    return function


_WITHOUT_EFFECT = (
    "check_error",
    "empty_cache",
    "ipc_collect",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "set_device",
    "set_stream",
    "synchronize",
)
"""Functions of `torch.cuda` that have nothing to do here."""

_GPU_ONLY_WARNINGS = (
    "'pin_memory' argument is set as true but no accelerator is found",
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "Only transformer-engine",
)
"""How warnings begin that each rank would print and that say nothing more than that there is no GPU."""


def _cuda_functions() -> dict[str, Any]:
    """List what `torch.cuda` is to contain.

    Streams and events are objects without effect, memory is the process's, the random functions stay torch's own and
    find the device's generator in `default_generators`.
    """
    stream = Stream()
    return {
        **{name: _constant(None) for name in _WITHOUT_EFFECT},
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        # torch.manual_seed passes over the device in a child of a process that counted CUDA devices.
        "_is_in_bad_fork": _constant(False),
        "is_current_stream_capturing": _constant(False),
        "current_device": lambda: local_rank(),
        "device_count": lambda: local_world_size(),
        "default_generators": _DeviceGenerators(),
        "device": _null_device,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "current_stream": _constant(stream),
        "default_stream": _constant(stream),
        "memory_allocated": resident_bytes,
        "memory_reserved": lambda *args, **kwargs: resident_bytes(),
        "device_memory_used": lambda *args, **kwargs: resident_bytes(),
        "max_memory_allocated": peak_resident_bytes,
        "max_memory_reserved": lambda *args, **kwargs: peak_resident_bytes(),
        "mem_get_info": lambda *args: (machine_bytes() - resident_bytes(), machine_bytes()),
        "memory_stats": _memory_stats,
        "get_device_properties": _properties,
        "get_device_capability": _constant((0, 0)),
        "get_device_name": _constant("cpu"),
    }


class _DeviceGenerators:
    """Stands in for `torch.cuda.default_generators`: every local device index leads to this process's stream."""

    def __getitem__(self, index: int) -> torch.Generator:
        return rng.device_generator

    def __len__(self) -> int:
        return local_world_size()


def _stay() -> Callable[..., Any]:
    """Make a stand-in for `.cuda()` and `.pin_memory()`: tensors and modules are where they should be."""

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    return stay


def present_cpu_as_cuda() -> None:
    """Make `torch.cuda` describe and use the CPU, for this process, from now on."""
    for name, value in _cuda_functions().items():
        setattr(torch.cuda, name, value)
    # torch.cuda.random bound these three by name when it was imported.
    for name in ("current_device", "device_count", "is_initialized"):
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _constant(None))
    # Data loaders pin memory where torch.accelerator reports a device, and its C++ side has none.
    torch.accelerator.is_available = _constant(False)
    for beginning in _GPU_ONLY_WARNINGS:
        warnings.filterwarnings("ignore", beginning)
    for owner, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda")):
        setattr(owner, name, _stay())
    DeviceMode().__enter__()
