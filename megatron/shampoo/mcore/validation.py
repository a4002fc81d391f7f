"""Checks of our arguments against Megatron's, before the model is built: every refusal names flag, value and remedy."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.shampoo.config import Qkv, ShampooConfig
from megatron.shampoo.mcore.arguments import OPTIMIZERS, config_of, given_flags, is_ours


class _Refusal(NamedTuple):
    """A Megatron argument that our optimizer does not work with."""

    dest: str
    works: tuple[Any, ...]
    flag: str
    remedy: str


_OFF = (False, None)

_REFUSALS = (
    _Refusal("use_megatron_fsdp", _OFF, "--use-megatron-fsdp", "use --use-distributed-optimizer"),
    _Refusal("use_torch_fsdp2", _OFF, "--use-torch-fsdp2", "use --use-distributed-optimizer"),
    _Refusal(
        "use_precision_aware_optimizer",
        _OFF,
        "--use-precision-aware-optimizer",
        "leave it out: moments and main parameters are float32",
    ),
    _Refusal("optimizer_cpu_offload", _OFF, "--optimizer-cpu-offload", "leave it out"),
    _Refusal("optimizer_cuda_graph", _OFF, "--optimizer-cuda-graph", "leave it out: refresh turns change every step"),
    _Refusal("fp8_param_gather", _OFF, "--fp8-param-gather", "leave it out (--fp8-format alone works)"),
    _Refusal("fp4_param_gather", _OFF, "--fp4-param-gather", "leave it out"),
    _Refusal(
        "overlap_param_gather_with_optimizer_step",
        _OFF,
        "--overlap-param-gather-with-optimizer-step",
        "use --overlap-param-gather",
    ),
    _Refusal("use_mup", _OFF, "--use-mup", "leave it out: its learning-rate rules are Adam's"),
    _Refusal("qk_clip", _OFF, "--qk-clip", "leave it out: it reads whole main parameters, ours are sharded"),
    _Refusal("moe_mlp_glu_interleave_size", _OFF, "--moe-mlp-glu-interleave-size", "leave it out"),
    _Refusal("moe_shared_expert_glu_interleave_size", _OFF, "--moe-shared-expert-glu-interleave-size", "leave it out"),
    _Refusal("moe_use_upcycling", _OFF, "--moe-use-upcycling", "upcycle with --optimizer adam first"),
)


def validate_args(args: Any) -> ShampooConfig | None:
    """Check the optimizer's arguments.

    Args:
        args: Megatron's, after its own validation.

    Returns:
        The configuration, or None where another optimizer was chosen.

    Raises:
        ValueError: a `--shampoo-*` flag with another optimizer, or a value out of range.
        NotImplementedError: a combination with a Megatron feature that does not work.
    """
    if not is_ours(args):
        given = given_flags(args)
        if given:
            raise ValueError(
                f"{', '.join(given)}: only used with --optimizer {' or '.join(OPTIMIZERS)}, but it is "
                f"--optimizer {args.optimizer}; change the optimizer or leave the flags out"
            )
        return None
    config = config_of(args)
    _check_alignment(config, args)
    for refusal in _REFUSALS:
        value = getattr(args, refusal.dest, None)
        if value not in refusal.works:
            raise NotImplementedError(
                f"{refusal.flag} does not work with --optimizer {args.second_order_optimizer}; {refusal.remedy}"
            )
    _check_checkpoint_format(args)
    return config


def _check_alignment(config: ShampooConfig, args: Any) -> None:
    size = args.tensor_model_parallel_size
    alignment = config.tp_alignment
    if alignment is not None and alignment % size:
        raise ValueError(
            f"--shampoo-tp-alignment {alignment}: allowed are multiples of --tensor-model-parallel-size {size}, "
            f"for instance {size * -(-alignment // size)}"
        )
    lengths = _attention_lengths(config, args) | {"--ffn-hidden-size": args.ffn_hidden_size}
    if args.num_experts:
        lengths["--moe-ffn-hidden-size"] = args.moe_ffn_hidden_size or args.ffn_hidden_size
        lengths["--moe-shared-expert-intermediate-size"] = args.moe_shared_expert_intermediate_size or 0
        expert_size = args.expert_tensor_parallel_size or size
        if alignment is not None and alignment % expert_size:
            raise ValueError(
                f"--shampoo-tp-alignment {alignment}: allowed are multiples of "
                f"--expert-tensor-parallel-size {expert_size}"
            )
    for name, length in lengths.items():
        if alignment is not None and length % alignment:
            raise ValueError(
                f"--shampoo-tp-alignment {alignment} does not divide the {length} {name}; allowed are divisors of "
                f"{length} that are multiples of --tensor-model-parallel-size {size}, for instance {size}"
            )


def _attention_lengths(config: ShampooConfig, args: Any) -> dict[str, int]:
    """Rows of the attention's projection that tensor parallelism cuts.

    Raises:
        NotImplementedError: a cut goes through the rows of one query group, and these are to be taken apart.
    """
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    if config.qkv is Qkv.FUSED:
        # An output gate has as many rows as the queries.
        heads = args.num_attention_heads * (2 if getattr(args, "attention_output_gate", False) else 1) + 2 * groups
        return {"rows of the fused projection (heads and two query groups x head width)": heads * args.kv_channels}
    if groups % args.tensor_model_parallel_size:
        raise NotImplementedError(
            f"--num-query-groups {groups} on --tensor-model-parallel-size {args.tensor_model_parallel_size}: the cut "
            f"goes through queries, keys and values that --shampoo-qkv {config.qkv} takes apart; use --shampoo-qkv "
            f"fused, or a tensor-parallel size that divides {groups}"
        )
    return {
        "query rows (heads x head width)": args.num_attention_heads * args.kv_channels,
        "key rows (query groups x head width)": groups * args.kv_channels,
    }


def _check_checkpoint_format(args: Any) -> None:
    if args.non_persistent_ckpt_type == "local":
        raise NotImplementedError(
            "--non-persistent-ckpt-type local cannot hold the reshardable state of --optimizer "
            f"{args.second_order_optimizer}; use --non-persistent-ckpt-type global"
        )
    uses_checkpoints = args.save is not None or args.load is not None
    if uses_checkpoints and args.ckpt_format != "torch_dist" and not args.no_save_optim:
        raise NotImplementedError(
            f"--ckpt-format {args.ckpt_format} cannot hold the factors of --optimizer {args.second_order_optimizer}; "
            "allowed is torch_dist"
        )
