"""Command lines for ``pretrain_gpt.py`` small enough for a test: tenths of a second for ten iterations on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


def tiny_flags(
    *,
    num_layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    seq_length: int = 32,
    micro_batch: int = 1,
    global_batch: int = 8,
    iters: int = 10,
    vocab: int = 127,
    lr: float = 1e-3,
    seed: int = 1234,
    log_interval: int = 1,
) -> list[str]:
    """Flags that every tiny run shares: mock data, no dropout, constant learning rate, one log line an iteration.

    The vocabulary (one token more than ``vocab``, for end of document) is padded to a multiple of 16 times the
    tensor-parallel size: 128 for the default at tensor-parallel sizes 1, 2, 4 and 8, so that weights of these layouts
    have one shape.

    Args:
        num_layers: transformer layers.
        hidden: hidden size.
        heads: attention heads.
        seq_length: tokens a sample.
        micro_batch: samples a rank takes at once.
        global_batch: samples an iteration.
        iters: training iterations.
        vocab: tokens of the NullTokenizer, without its end of document.
        lr: learning rate.
        seed: of weights, data order and dropout.
        log_interval: iterations per log line.

    Returns:
        The flags.
    """
    options = {
        "num-layers": num_layers,
        "hidden-size": hidden,
        "num-attention-heads": heads,
        "seq-length": seq_length,
        "max-position-embeddings": seq_length,
        "micro-batch-size": micro_batch,
        "global-batch-size": global_batch,
        "train-iters": iters,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": vocab,
        "make-vocab-size-divisible-by": 16,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "lr": lr,
        "lr-decay-style": "constant",
        "log-interval": log_interval,
        "eval-iters": 0,
        "eval-interval": 1000,
        "num-workers": 0,
        "seed": seed,
    }
    return ["--mock-data", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def tiny_gpt(**sizes: int | float) -> list[str]:
    """A GPT-2-like model: learned positions, LayerNorm, GELU, biases, tied embeddings.

    Args:
        **sizes: see `tiny_flags`.

    Returns:
        The flags.
    """
    return tiny_flags(**sizes)  # type: ignore[arg-type]


def tiny_llama(*, query_groups: int = 2, ffn_hidden: int = 96, **sizes: int | float) -> list[str]:
    """A Llama-like model: rope, RMSNorm, SwiGLU, grouped-query attention, no biases, untied embeddings.

    Args:
        query_groups: key/value heads.
        ffn_hidden: width of gate and of up.
        **sizes: see `tiny_flags`.

    Returns:
        The flags.
    """
    return [
        *tiny_flags(**sizes),  # type: ignore[arg-type]
        "--position-embedding-type", "rope",
        "--normalization", "RMSNorm",
        "--swiglu",
        "--disable-bias-linear",
        "--untie-embeddings-and-output-weights",
        "--group-query-attention",
        "--num-query-groups", str(query_groups),
        "--ffn-hidden-size", str(ffn_hidden),
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout of a run."""

    tp: int = 1
    """Tensor-parallel size."""
    cp: int = 1
    """Context-parallel size."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Model chunks per stage; above 1 the number of layers must be divisible by ``pp * vpp``."""
    dp: int = 1
    """Data-parallel size."""
    ep: int = 1
    """Expert-parallel size; divides the ranks of a stage that expert tensor parallelism leaves."""
    etp: int | None = None
    """Expert tensor-parallel size; None for Megatron's default, the tensor-parallel size."""
    sp: bool = False
    """Sequence parallelism."""
    distributed: bool = True
    """Megatron's distributed optimizer."""
    instances: int = 1
    """Distributed optimizer instances: the data-parallel ranks are cut into as many groups, each with all shards."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def flags(self) -> list[str]:
        """The layout's flags; the data-parallel size is what the number of ranks leaves."""
        flags = ["--tensor-model-parallel-size", str(self.tp), "--pipeline-model-parallel-size", str(self.pp)]
        flags += ["--context-parallel-size", str(self.cp)] if self.cp > 1 else []
        flags += ["--num-virtual-stages-per-pipeline-rank", str(self.vpp)] if self.vpp > 1 else []
        flags += ["--expert-model-parallel-size", str(self.ep)] if self.ep > 1 else []
        flags += ["--expert-tensor-parallel-size", str(self.etp)] if self.etp else []
        flags += ["--sequence-parallel"] if self.sp else []
        flags += ["--num-distributed-optimizer-instances", str(self.instances)] if self.instances > 1 else []
        return flags + (["--use-distributed-optimizer"] if self.distributed else [])

    def __str__(self) -> str:
        sizes = {"TP": self.tp, "CP": self.cp, "PP": self.pp, "VPP": self.vpp, "DP": self.dp, "EP": self.ep}
        name = "x".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one rank"
        name += f" ETP{self.etp}" if self.etp else ""
        name += f" {self.instances} instances" if self.instances > 1 else ""
        return name + (" SP" if self.sp else "") + ("" if self.distributed else " replicated optimizer")


def layout_flags(**sizes: int | bool) -> list[str]:
    """Flags of a layout.

    Args:
        **sizes: fields of `Layout`.

    Returns:
        The flags.
    """
    return Layout(**sizes).flags  # type: ignore[arg-type]
