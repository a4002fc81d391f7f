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
        words = value if isinstance(value, list) else [value]
        given = " ".join([self.flag, *(str(getattr(word, "name", word)) for word in words if word is not True)])
        return f"{given}: cannot run on CPU (torch finds no CUDA device); allowed: {self.allowed}; {self.remedy}."


def _is_set(value: Any) -> bool:
    return bool(value)


def _more_than(limit: int) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def _other_than(*allowed: Any) -> Callable[[Any], bool]:
    """Refuse all but the values listed; an enumeration's members are compared by name."""
    return lambda value: getattr(value, "name", value) not in (None, *allowed)


_A2A = _other_than("p2p", "all_gather")
_CUDA_GRAPHS = "CUDA graphs need a GPU"
_TRANSFORMER_ENGINE = "it is Transformer Engine's"
_NCCL = "NCCL moves GPU memory only"
_USE_BF16 = "use --bf16 or fp32"
_ZERO_1 = "use --use-distributed-optimizer"

VALUE_REFUSALS = (
    Refusal("transformer_impl", "--transformer-impl", _other_than("local"), "local", "leave the flag out"),
    Refusal("distributed_backend", "--distributed-backend", _other_than("gloo"), "gloo", "leave the flag out"),
    Refusal("attention_backend", "--attention-backend", _other_than("auto", "local", "unfused"), "auto, local, unfused",
            "fused attention is a CUDA kernel"),
    Refusal("cuda_graph_impl", "--cuda-graph-impl", _other_than("none"), "none", _CUDA_GRAPHS),
    Refusal("cross_entropy_fusion_impl", "--cross-entropy-fusion-impl", _other_than("native"), "native",
            _TRANSFORMER_ENGINE),
    Refusal("moe_token_dispatcher_type", "--moe-token-dispatcher-type", _other_than("allgather", "alltoall"),
            "allgather, alltoall", "the flex dispatcher is a CUDA library"),
    Refusal("cpu_offloading_num_layers", "--cpu-offloading-num-layers", _more_than(0), "0",
            "activations are on the CPU already"),
    Refusal("cp_comm_type", "--cp-comm-type", lambda value: any(_A2A(kind) for kind in value or ()), "p2p, all_gather",
            "keys and values are gathered"),
    Refusal("fp8", "--fp8-format", _is_set, "leave it out", _USE_BF16),
    Refusal("fp4", "--fp4-format", _is_set, "leave it out", _USE_BF16),
    Refusal("nccl_ub", "--use-nccl-ub", _is_set, "leave it out", _NCCL),
)  # fmt: skip
"""Options refused for some of their values."""

SWITCH_REFUSALS = {
    "async_save": "its writer process stages GPU memory; without it checkpoints are saved synchronously",
    "cross_entropy_loss_fusion": "leave the loss unfused",
    "enable_cuda_graph": _CUDA_GRAPHS,
    "external_cuda_graph": _CUDA_GRAPHS,
    "fine_grained_activation_offloading": "activations are on the CPU already",
    "fp4_param_gather": _USE_BF16,
    "fp8_param_gather": _USE_BF16,
    "fused_residual_rmsnorm": _TRANSFORMER_ENGINE,
    "gpu_sniff_test_interval": "there is no GPU to test",
    "hierarchical_context_parallel_sizes": "keys and values are gathered over the whole context-parallel group",
    "inprocess_restart": "it watches CUDA devices; let the launcher restart the run",
    "moe_enable_deepep": "DeepEP is a CUDA library; use --moe-token-dispatcher-type alltoall",
    "moe_grouped_gemm": "grouped GEMM is a CUDA kernel; without it experts run one after another",
    "moe_permute_fusion": _TRANSFORMER_ENGINE,
    "moe_router_fusion": _TRANSFORMER_ENGINE,
    "nccl_communicator_config_path": _NCCL,
    "optimizer_cpu_offload": "the optimizer is on the CPU already",
    "optimizer_cuda_graph": _CUDA_GRAPHS,
    "pipeline_model_parallel_comm_backend": "stages exchange over gloo",
    "record_memory_history": "it records CUDA's allocator",
    "te_rng_tracker": _TRANSFORMER_ENGINE,
    "tp_comm_overlap": f"{_TRANSFORMER_ENGINE}; use --sequence-parallel alone",
    "use_flash_attn": "flash attention is a CUDA kernel",
    "use_kitchen_attention": "it is a CUDA library",
    "use_megatron_fsdp": _ZERO_1,
    "use_precision_aware_optimizer": f"it is Transformer Engine's fused Adam; {_ZERO_1}",
    "use_sharp": _NCCL,
    "use_te_activation_func": _TRANSFORMER_ENGINE,
    "use_torch_fsdp2": _ZERO_1,
    "use_transformer_engine_op_fuser": _TRANSFORMER_ENGINE,
    "yaml_cfg": "its values would replace the defaults that a CPU needs; type the flags",
}
"""Options refused whenever they are given (destination, reason or remedy)."""

REFUSALS = VALUE_REFUSALS + tuple(
    Refusal(dest, "--" + dest.replace("_", "-"), _is_set, "leave it out", remedy)
    for dest, remedy in SWITCH_REFUSALS.items()
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
            if refusal.is_refused(value):
                self._refuse(refusal.message(value))
        if args.context_parallel_size > 1 and args.window_size is not None:
            self._refuse(
                f"--window-size {args.window_size}: on CPU (torch finds no CUDA device) it is allowed with "
                "--context-parallel-size 1 alone; leave one of the two out."
            )
        if int(os.environ.get("RANK", "0")) == 0:
            print(self._report(args), flush=True)
        return args

    def _refuse(self, message: str) -> None:
        # Not parser.error: Megatron's usage is six hundred lines long.
        self._parser.exit(2, f"{self._parser.prog}: error: {message}\n")

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
