"""Megatron's command line on CPU: defaults that a CPU can run, and a named refusal of what it cannot.

Megatron's own defaults assume a GPU with Transformer Engine and Apex. What the user left at its default is changed and
reported in one line; what the user asked for is never changed: it runs, or it is refused before anything is built.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CpuDefault:
    """One default of Megatron's that differs on CPU."""

    dest: str
    value: Any
    typed: str
    """How the user would have typed it."""


CPU_DEFAULTS = (
    CpuDefault("transformer_impl", "local", "--transformer-impl local"),
    CpuDefault("distributed_backend", "gloo", "--distributed-backend gloo"),
    CpuDefault("use_cpu_initialization", True, "--use-cpu-initialization"),
    CpuDefault("no_persist_layer_norm", True, "--no-persist-layer-norm"),
    CpuDefault("gradient_accumulation_fusion", False, "--no-gradient-accumulation-fusion"),
    CpuDefault("masked_softmax_fusion", False, "--no-masked-softmax-fusion"),
    CpuDefault("bias_dropout_fusion", False, "--no-bias-dropout-fusion"),
    CpuDefault("bias_gelu_fusion", False, "--no-bias-gelu-fusion"),
    CpuDefault("bias_swiglu_fusion", False, "--no-bias-swiglu-fusion"),
    CpuDefault("apply_rope_fusion", False, "--no-rope-fusion"),
)


@dataclass(frozen=True)
class Refusal:
    """A flag whose value cannot work on CPU."""

    dest: str
    flag: str
    is_refused: Callable[[Any], bool]
    allowed: str
    remedy: str

    def message(self, value: Any) -> str:
        """Say what was asked for, what is allowed and what to do.

        Args:
            value: the refused value.

        Returns:
            One sentence per point.
        """
        given = self.flag if value is True else f"{self.flag} {value}"
        return f"{given}: cannot run on CPU (torch finds no CUDA device); allowed: {self.allowed}; {self.remedy}."


def _is_set(value: Any) -> bool:
    return bool(value)


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in allowed


def _switch(dest: str, reason: str) -> Refusal:
    """Refuse a switch or an option that must stay unset."""
    return Refusal(dest, "--" + dest.replace("_", "-"), _is_set, "leave it out", reason)


REFUSALS = (
    Refusal(
        "transformer_impl",
        "--transformer-impl",
        _other_than("local"),
        "local",
        "Transformer Engine's layers are CUDA kernels; leave the flag out",
    ),
    Refusal(
        "distributed_backend",
        "--distributed-backend",
        _other_than("gloo"),
        "gloo",
        "NCCL moves GPU memory only; leave the flag out",
    ),
    Refusal("context_parallel_size", "--context-parallel-size", _more_than_one, "1",
            "split the sequence with --sequence-parallel and --tensor-model-parallel-size instead"),
    Refusal("hierarchical_context_parallel_sizes", "--hierarchical-context-parallel-sizes", _is_set, "leave it out",
            "context parallelism needs Transformer Engine's attention"),
    Refusal("cuda_graph_impl", "--cuda-graph-impl", _other_than(None, "none"), "none", "leave the flag out"),
    Refusal("fp8", "--fp8-format", _is_set, "leave it out", "use --bf16 or fp32"),
    Refusal("fp4", "--fp4-format", _is_set, "leave it out", "use --bf16 or fp32"),
    Refusal("pipeline_model_parallel_comm_backend", "--pipeline-model-parallel-comm-backend",
            _other_than(None, "gloo"), "gloo", "leave the flag out"),
    Refusal("attention_backend", "--attention-backend", lambda value: getattr(value, "name", "auto")
            not in ("auto", "local", "unfused"), "auto, local, unfused", "fused attention kernels need a GPU"),
    _switch("async_save", "its writer process stages GPU memory; checkpoints are saved synchronously"),
    _switch("optimizer_cpu_offload", "the optimizer is on the CPU already"),
    _switch("optimizer_cuda_graph", "CUDA graphs need a GPU"),
    _switch("external_cuda_graph", "CUDA graphs need a GPU"),
    _switch("enable_cuda_graph", "CUDA graphs need a GPU"),
    _switch("use_precision_aware_optimizer", "it is Transformer Engine's fused Adam; use --use-distributed-optimizer"),
    _switch("fp8_param_gather", "fp8 needs a GPU; use --bf16"),
    _switch("fp4_param_gather", "fp4 needs a GPU; use --bf16"),
    _switch("use_flash_attn", "flash attention is a CUDA kernel"),
    _switch("tp_comm_overlap", "it overlaps with Transformer Engine's user buffers; use --sequence-parallel alone"),
    _switch("use_megatron_fsdp", "use --use-distributed-optimizer"),
    _switch("use_torch_fsdp2", "use --use-distributed-optimizer"),
    _switch("use_nccl_ub", "NCCL moves GPU memory only"),
    _switch("nccl_ub", "NCCL moves GPU memory only"),
    _switch("moe_grouped_gemm", "grouped GEMM is a CUDA kernel; experts then run one after another"),
    _switch("moe_permute_fusion", "the fusion is a Transformer Engine kernel"),
    _switch("cross_entropy_loss_fusion", "leave the loss unfused"),
    _switch("inprocess_restart", "it watches CUDA devices; let the launcher restart the run"),
    _switch("cpu_offloading", "activations are on the CPU already"),
    _switch("fine_grained_activation_offloading", "activations are on the CPU already"),
    _switch("te_rng_tracker", "it is Transformer Engine's; leave the flag out"),
    _switch("multi_latent_attention", "Megatron's local layers do not support it"),
)


class CpuArgumentParser:
    """Megatron's parser with the defaults of a CPU; what it parses is checked before Megatron sees it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        """Change the parser's defaults.

        Args:
            parser: the parser holding all of Megatron's arguments and ours.
        """
        self._parser = parser
        known = {action.dest for action in parser._actions}
        self._defaults = [default for default in CPU_DEFAULTS if default.dest in known]
        self._replaced = {default.dest: parser.get_default(default.dest) for default in self._defaults}
        parser.set_defaults(**{default.dest: default.value for default in self._defaults})

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse, refuse what cannot run, and report the changed defaults.

        Args:
            argv: the arguments, the process's own if None.

        Returns:
            Megatron's arguments.
        """
        return self._checked(self._parser.parse_args(argv))

    def parse_known_args(self, argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse like `parse_args`, letting unknown arguments pass.

        Args:
            argv: the arguments, the process's own if None.

        Returns:
            Megatron's arguments and the unknown ones.
        """
        args, unknown = self._parser.parse_known_args(argv)
        return self._checked(args), unknown

    def _checked(self, args: argparse.Namespace) -> argparse.Namespace:
        for refusal in REFUSALS:
            value = getattr(args, refusal.dest, None)
            if refusal.is_refused(value) and hasattr(args, refusal.dest):
                # Not parser.error: Megatron's usage is six hundred lines long.
                self._parser.exit(2, f"{self._parser.prog}: error: {refusal.message(value)}\n")
        if int(os.environ.get("RANK", "0")) == 0:
            print(self._report(args), flush=True)
        return args

    def _report(self, args: argparse.Namespace) -> str:
        changed = [
            default.typed
            for default in self._defaults
            if getattr(args, default.dest) == default.value != self._replaced[default.dest]
        ]
        return "> running on CPU, no CUDA device found; set: " + " ".join(changed)


def adapt(parser: argparse.ArgumentParser) -> argparse.ArgumentParser | CpuArgumentParser:
    """Fit Megatron's parser to the device; the last thing an `extra_args_provider` does.

    Args:
        parser: the parser holding all arguments.

    Returns:
        On CPU a parser with a CPU's defaults and checks, otherwise the same parser.
    """
    from megatron import cpu

    return CpuArgumentParser(parser) if cpu.is_needed() else parser
