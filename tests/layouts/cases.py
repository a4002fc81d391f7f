"""The layouts and variants that must give one training run, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tests.tiny import Layout, tiny_gpt, tiny_llama

ITERATIONS = 10
OURS = ("--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-tp-alignment", "4",
        "--shampoo-log-interval", "0", "--global-batch-size", "12")  # fmt: skip
LATE = ("--shampoo-start-step", "3", "--shampoo-refresh-interval", "3")
"""Roots from step 3 on: that of the very first gradient, of a nearly singular factor, amplifies rounding."""
EXPERTS = ("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32",
           "--moe-shared-expert-intermediate-size", "64", "--moe-token-dispatcher-type", "alltoall",
           "--moe-router-load-balancing-type", "none")  # fmt: skip
"""Without the balancing loss, which Megatron computes per micro-batch: it is another loss on another layout."""
LATENT = ("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear",
          "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "96",
          "--multi-latent-attention", "--qk-head-dim", "16", "--qk-pos-emb-head-dim", "8", "--v-head-dim", "24",
          "--kv-lora-rank", "32", "--q-lora-rank", "48")  # fmt: skip

MODELS = {
    "GPT": tiny_gpt(num_layers=4),
    "GPT, untied": [*tiny_gpt(num_layers=4), "--untie-embeddings-and-output-weights"],
    "GPT, 6 layers": tiny_gpt(num_layers=6),
    "Llama": tiny_llama(num_layers=2, heads=8, query_groups=4),
    "Llama, 8 groups": tiny_llama(num_layers=2, heads=8, query_groups=8),
    "multi-query": tiny_llama(num_layers=2, heads=8, query_groups=1),
    "MLA": [*tiny_gpt(num_layers=2), *LATENT],
    "MLA, no query rank": [*tiny_gpt(num_layers=2), *LATENT[:-2]],
    "MTP": [*tiny_llama(num_layers=2, heads=8, query_groups=4), "--mtp-num-layers", "1"],
    "MoE": [*tiny_llama(num_layers=2, heads=8, query_groups=4), *EXPERTS],
}
"""GPT: learned positions, LayerNorm, biases, tied embeddings. Llama: rope, RMSNorm, SwiGLU, 8 heads in 4 query groups,
no biases, untied embeddings. Multi-query: one query group. MLA: the Llama with multi-latent attention. MTP: the Llama
with one more layer that predicts the token after the next; not under context parallelism, where Megatron averages
that loss per rank. MoE: the Llama with 4 experts in a layer, two for a token, and a shared one."""

FP32 = {"loss": 1e-5, "gradient norm": 1e-5, "parameter": 1e-4}
"""Relative tolerances. Rounding alone: gradients of two layouts differ by about 1e-7, and ten steps of an optimizer
that forgets the gradient's scale amplify that; plain Adam differs as much."""
HALF = {"loss": 1e-3, "gradient norm": 3e-2, "parameter": 4e-2}
"""With activations in bfloat16 or float16, whose rounding depends on the layout. Parameters: matrices alone. Biases and
norms begin at 0 or 1 and are small beside the differences that Adam makes of rounding."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run and what it is compared with."""

    model: str
    layout: Layout
    flags: tuple[str, ...] = ()
    """Beside the layout's; they must not change the run."""
    label: str = ""
    """What the flags are, in words."""
    settings: tuple[str, ...] = LATE
    """Flags that the run on one rank has too."""
    setting: str = ""
    """What the settings are, in words; they make a model of their own in the table."""
    probe: str = "count"
    """Function of `tests.probes`, on one rank too."""
    is_half: bool = False
    """Whether activations are in half precision."""
    quick: bool = False
    """Whether `make test` runs it; `make layouts` runs all."""

    @property
    def tolerances(self) -> dict[str, float]:
        """Relative, by what is compared."""
        return HALF if self.is_half else FP32

    @property
    def name(self) -> str:
        """What is different from one rank."""
        return ", ".join(part for part in (str(self.layout), self.label) if part)

    @property
    def group(self) -> str:
        """What is compared: the model and what else one rank has too."""
        return ", ".join(part for part in (self.model, self.setting) if part)

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def _cases(model: str, *layouts: Layout, **options: object) -> list[Case]:
    return [Case(model=model, layout=layout, **options) for layout in layouts]  # type: ignore[arg-type]


BF16 = {"settings": (*LATE, "--bf16"), "setting": "bf16", "is_half": True}
FP16 = {"settings": (*LATE, "--fp16", "--initial-loss-scale", "1024"), "setting": "fp16", "is_half": True}
FUSED = {"settings": (*LATE, "--shampoo-qkv", "fused", "--shampoo-tp-alignment", "8"), "setting": "fused QKV"}
"""Where tensor-parallel ranks are more than query groups."""
ALIGNED = {"settings": (*LATE, "--shampoo-tp-alignment", "8"), "setting": "planned for TP8"}
CROWD = "more ranks than blocks"
LARGE = {"settings": (*LATE, "--shampoo-block-size", "1024", "--shampoo-tp-alignment", "1"),
         "setting": "large blocks"}  # fmt: skip
"""As many as matrices."""
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")

CASES = [
    *_cases("GPT", Layout(dp=2), Layout(dp=3), Layout(dp=4), Layout(tp=2), Layout(tp=4), Layout(pp=2),
            Layout(pp=2, vpp=2), Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(tp=2, sp=True),
            Layout(dp=2, distributed=False), Layout(tp=2, dp=2, distributed=False), Layout(pp=2, dp=2), quick=True),
    *_cases("GPT", Layout(pp=4), Layout(tp=4, sp=True), Layout(pp=2, dp=3), Layout(dp=3, distributed=False),
            Layout(pp=2, vpp=2, dp=2), Layout(tp=2, pp=2, sp=True, dp=2), Layout(dp=4, instances=2)),
    *_cases("GPT", Layout(dp=2), flags=("--overlap-grad-reduce",), label="overlapped reduction"),
    *_cases("GPT", Layout(dp=2, distributed=False), flags=("--overlap-grad-reduce",), label="overlapped reduction"),
    *_cases("GPT", Layout(dp=2), flags=OVERLAP, label="overlapped reduction and gather", quick=True),
    *_cases("GPT", Layout(pp=2, vpp=2, dp=2), flags=OVERLAP, label="overlapped reduction and gather"),
    *_cases("GPT", Layout(dp=4, instances=2), flags=OVERLAP, label="overlapped reduction and gather"),
    *_cases("GPT", Layout(dp=2), flags=("--micro-batch-size", "1"), label="6 micro-batches"),
    *_cases("GPT", Layout(dp=2), flags=("--ddp-bucket-size", "20000"), label="small buckets"),
    *_cases("GPT", Layout(dp=3), flags=("--shampoo-ownership", "balanced"), label="balanced owners", quick=True),
    *_cases("GPT", Layout(pp=2, dp=2), flags=("--shampoo-ownership", "balanced"), label="balanced owners"),
    *_cases("GPT", Layout(tp=2, dp=2), flags=("--recompute-activations",), label="recomputed activations"),
    *_cases("GPT, 6 layers", Layout(pp=2), flags=("--decoder-first-pipeline-num-layers", "4"), label="4 and 2 layers"),
    *_cases("GPT, 6 layers", Layout(pp=4), flags=("--pipeline-model-parallel-layout", "E|ttt|ttt|L"),
            label="stages E, ttt, ttt, L"),
    *_cases("GPT, 6 layers", Layout(pp=2), flags=("--pipeline-model-parallel-layout", "Et|tt|ttt|L"),
            label="interleaved stages Et, tt, ttt, L"),
    *_cases("GPT, untied", Layout(dp=2), Layout(tp=2), Layout(pp=2)),
    *_cases("GPT", Layout(dp=2), Layout(tp=2), Layout(pp=2), probe="count_frozen", setting="partly frozen"),
    *_cases("Llama", Layout(tp=2), Layout(tp=4), Layout(dp=3), Layout(tp=2, dp=2), Layout(tp=2, sp=True),
            Layout(pp=2), quick=True),
    *_cases("Llama", Layout(tp=2, pp=2, dp=2, sp=True), Layout(dp=4)),
    *_cases("multi-query", Layout(dp=2), Layout(pp=2)),
    *_cases("multi-query", Layout(tp=2, sp=True), Layout(tp=4), **FUSED),
    *_cases("Llama", Layout(tp=8), **FUSED),
    *_cases("Llama, 8 groups", Layout(dp=12), flags=("--micro-batch-size", "1"), label=CROWD, **LARGE),
    *_cases("Llama, 8 groups", Layout(tp=2, dp=2), Layout(tp=8), Layout(tp=8, sp=True), **ALIGNED),
    *_cases("GPT", Layout(cp=2), quick=True),
    *_cases("GPT", Layout(cp=4), Layout(cp=2, dp=2), Layout(tp=2, sp=True, cp=2), Layout(pp=2, cp=2),
            Layout(cp=2, distributed=False)),
    *_cases("Llama", Layout(cp=2), Layout(tp=2, sp=True, cp=2, dp=2)),
    *_cases("MLA", Layout(tp=2), quick=True),
    *_cases("MLA", Layout(dp=2), Layout(tp=2, sp=True, dp=2), Layout(cp=2), Layout(pp=2)),
    *_cases("MLA, no query rank", Layout(tp=2), Layout(dp=2)),
    *_cases("MTP", Layout(dp=2), Layout(tp=2, sp=True), Layout(pp=2)),
    *_cases("MoE", Layout(dp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(dp=4, ep=2), Layout(dp=4, ep=4),
            Layout(cp=2, ep=2), Layout(tp=2, dp=2, sp=True, etp=1), Layout(tp=2, dp=2, sp=True, ep=2),
            Layout(pp=2, dp=2, ep=2), Layout(dp=2, distributed=False, ep=2)),
    *_cases("MoE", Layout(dp=2, ep=2), quick=True),
    *_cases("GPT", Layout(tp=2), Layout(pp=2, dp=2), **BF16),
    *_cases("GPT", Layout(dp=2), quick=True, **BF16),
    *_cases("GPT", Layout(dp=2), flags=("--grad-reduce-in-bf16",), label="gradients reduced in bf16", **BF16),
    *_cases("GPT", Layout(dp=2), flags=("--accumulate-allreduce-grads-in-fp32",), label="gradients in fp32", **BF16),
    *_cases("Llama", Layout(dp=2), Layout(tp=2, sp=True), **BF16),
    *_cases("GPT", Layout(dp=2), Layout(tp=2), Layout(pp=2), **FP16),
]  # fmt: skip
"""Every case is compared with one rank that has the same model, settings and probe."""
