"""Layouts that checkpoints move between, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tests.layouts.cases import EXPERTS
from tests.tiny import Layout, tiny_gpt, tiny_llama

SAVED, LAST = 3, 7
OURS = (
    "--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-refresh-interval", "4", "--shampoo-start-step",
    "2", "--shampoo-tp-alignment", "4", "--dataloader-type", "single", "--global-batch-size", "12",
)  # fmt: skip
"""An alignment that all tensor-parallel sizes of the table divide: blocks are the same on each."""

MODELS = {
    "Llama": tiny_llama(num_layers=4, heads=8, query_groups=4, iters=LAST),
    "GPT": tiny_gpt(num_layers=4, vocab=99, iters=LAST),
    "MoE": [*tiny_llama(num_layers=2, heads=8, query_groups=4, iters=LAST), *EXPERTS],
}
"""Llama: SwiGLU, grouped queries, untied embeddings. GPT: biases, tied embeddings, and a vocabulary that is padded to
112 rows on one rank and to 128 on more. MoE: experts and a shared one in every layer, untied embeddings."""

DENSE = (
    Layout(), Layout(dp=2), Layout(dp=3), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(pp=2, vpp=2),
    Layout(tp=2, pp=2), Layout(tp=2, dp=2, sp=True), Layout(pp=2, dp=2),
)  # fmt: skip
FEWER = (Layout(), Layout(dp=3), Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2, dp=2))
SPARSE = (Layout(), Layout(dp=2), Layout(dp=2, ep=2), Layout(dp=4, ep=2), Layout(tp=2, sp=True), Layout(pp=2))
REPLICATED = (
    Layout(distributed=False), Layout(dp=2, distributed=False), Layout(tp=2, dp=2, distributed=False),
    Layout(pp=2, distributed=False),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A checkpoint is saved on one layout and loaded on another."""

    model: str
    saved: Layout
    loaded: Layout
    flags: tuple[str, ...] = ()
    label: str = ""
    """What the flags are, in words."""
    quick: bool = False
    """Whether `make test` tries it; `make reshard` tries all."""

    @property
    def group(self) -> str:
        """The model, and what else is the same before and after."""
        return ", ".join(part for part in (self.model, self.label) if part)

    def __str__(self) -> str:
        return f"{self.group}: {self.saved} -> {self.loaded}"


def _pairs(model: str, layouts: tuple[Layout, ...], **options: object) -> list[Pair]:
    return [Pair(model=model, saved=a, loaded=b, **options) for a in layouts for b in layouts]  # type: ignore[arg-type]


def _quick(model: str, *pairs: tuple[Layout, Layout], **options: object) -> list[Pair]:
    return [Pair(model=model, saved=a, loaded=b, quick=True, **options) for a, b in pairs]  # type: ignore[arg-type]


HALF = {"flags": ("--bf16",), "label": "bf16"}
SOAP = {"flags": ("--shampoo-method", "kl-soap", "--shampoo-start-step", "1"), "label": "kl-soap"}
OVERLAP = {"flags": ("--overlap-grad-reduce", "--ddp-bucket-size", "20000"), "label": "overlap, small buckets"}
PARALLEL = {"flags": ("--ckpt-fully-parallel-load", "--ckpt-assume-constant-structure"), "label": "fully parallel load"}

_QUICK = [
    *_quick("Llama", (Layout(dp=2), Layout(tp=2, pp=2)), (Layout(tp=2, pp=2), Layout(dp=3)),
            (Layout(tp=4), Layout(pp=2, vpp=2))),
    *_quick("GPT", (Layout(tp=2, dp=2, sp=True), Layout())),
    *_quick("MoE", (Layout(dp=2, ep=2), Layout(tp=2, sp=True))),
    *_quick("Llama", (Layout(dp=2, distributed=False), Layout(tp=2, distributed=False))),
    *_quick("Llama", (Layout(dp=2), Layout(tp=2)), **SOAP),
]  # fmt: skip
_ALL = [
    *_pairs("Llama", DENSE),
    *_pairs("GPT", FEWER),
    *_pairs("MoE", SPARSE),
    *_pairs("Llama", REPLICATED),
    *_pairs("Llama", (Layout(tp=2), Layout(dp=2), Layout(pp=2)), **HALF),
    *_pairs("Llama", (Layout(tp=2), Layout(dp=2), Layout(pp=2)), **SOAP),
    *_pairs("GPT", (Layout(tp=2, dp=2), Layout(dp=3)), **OVERLAP),
    *_pairs("GPT", (Layout(tp=2, dp=2), Layout(dp=3)), **PARALLEL),
]
PAIRS = [*_QUICK, *(pair for pair in _ALL if str(pair) not in {str(quick) for quick in _QUICK})]
"""Each starts from a checkpoint of an unbroken run on its first layout and goes on on its second."""
