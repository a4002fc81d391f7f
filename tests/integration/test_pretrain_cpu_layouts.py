"""The same run on every layout: initial weights, losses and gradient norms, through the real ``pretrain_gpt.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.launch import Launcher, RunResult
from tests.tiny import Layout, tiny_gpt, tiny_llama

DROPOUT = ["--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
MOE = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"]
EXPERTS_SPLIT = [*MOE, "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type"]


def run(launcher: Launcher, model: list[str], layout: Layout, flags: list[str] = [], **options: object) -> RunResult:  # noqa: B006
    flags = [*model, *layout.flags, *flags]
    return launcher.run(flags, world_size=layout.world_size, timeout=300, **options).check()  # type: ignore[arg-type]


def assert_same(run: RunResult, reference: RunResult, tolerance: float) -> None:
    assert run.losses == pytest.approx(reference.losses, rel=tolerance)
    assert run.grad_norms == pytest.approx(reference.grad_norms, rel=tolerance)


@pytest.mark.parametrize("model", [tiny_gpt, tiny_llama])
def test_initial_weights_do_not_depend_on_the_tensor_parallel_size(launcher: Launcher, model) -> None:  # type: ignore[no-untyped-def]
    # The divisor is Megatron's default: 128 rows of vocabulary at TP1, 512 at TP4. Nothing is learned at rate 0.
    flags = [*model(iters=1, lr=0.0), "--make-vocab-size-divisible-by", "128"]
    weights = {
        tp: run(launcher, flags, Layout(tp=tp, distributed=False), record=["parameters"]).parameters()
        for tp in ([1, 2, 4] if model is tiny_gpt else [1, 2])
    }
    for tp, of_layout in weights.items():
        assert of_layout.keys() == weights[1].keys()
        for name, weight in of_layout.items():
            rows = len(weights[1][name]) - 1 if "word_embeddings" in name or "output_layer" in name else len(weight)
            assert torch.equal(weight[:rows], weights[1][name][:rows]), f"{name} at TP{tp}"
    # Weights of equal shape are not copies of each other.
    first, second = (weights[1][f"decoder.layers.{layer}.mlp.linear_fc2.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("model", [tiny_gpt(iters=5), tiny_llama(iters=5)], ids=["GPT", "Llama"])
def test_sequence_parallelism_and_padding_change_nothing(launcher: Launcher, model: list[str]) -> None:
    reference = run(launcher, model, Layout())
    assert reference.losses[-1] < reference.losses[0] < 4.95, "the loss falls from about ln 127"
    for divisor in ("1", "128"):
        padded = run(launcher, model, Layout(tp=2), ["--make-vocab-size-divisible-by", divisor])
        assert_same(padded, reference, 2e-6)
    assert_same(run(launcher, model, Layout(tp=2, sp=True)), reference, 2e-6)


def test_experts_and_dispatchers_change_nothing(launcher: Launcher) -> None:
    reference = run(launcher, tiny_gpt(iters=3), Layout(), MOE)
    for dispatcher in ("allgather", "alltoall"):
        split = run(launcher, tiny_gpt(iters=3), Layout(dp=2), [*EXPERTS_SPLIT, dispatcher])
        assert_same(split, reference, 2e-6)
    assert_same(run(launcher, tiny_gpt(iters=3), Layout(tp=2, sp=True), MOE), reference, 2e-6)


@pytest.mark.parametrize(
    "recompute",
    [
        ["--recompute-granularity", "selective"],
        ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    ],
    ids=["selective", "full"],
)
def test_recomputed_activations_with_dropout_train_the_same(launcher: Launcher, recompute: list[str]) -> None:
    model = [*tiny_gpt(iters=3), *DROPOUT]
    stored, recomputed = run(launcher, model, Layout(tp=2)), run(launcher, model, Layout(tp=2), recompute)
    assert recomputed.losses == stored.losses
    assert recomputed.grad_norms == stored.grad_norms
    assert stored.losses != run(launcher, tiny_gpt(iters=3), Layout(tp=2)).losses, "dropout does something"


def test_dropout_goes_on_bit_for_bit_after_a_resume(launcher: Launcher, tmp_path: Path) -> None:
    model, layout = [*tiny_gpt(iters=4), *DROPOUT], Layout(tp=2, distributed=False)
    unbroken = run(launcher, model, layout, ["--save", str(tmp_path), "--save-interval", "2"])
    resume = ["--load", str(tmp_path), "--ckpt-step", "2"]
    assert run(launcher, model, layout, resume).losses == unbroken.losses[2:]
    assert run(launcher, model, layout, [*resume, "--no-load-rng"]).losses != unbroken.losses[2:]


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        (["--bf16"], Layout(dp=2)),
        (["--fp16", "--initial-loss-scale", "1024"], Layout()),
        (["--num-workers", "2", "--timing-log-level", "2"], Layout(pp=2)),
        (["--num-layers", "4"], Layout(pp=2, vpp=2)),
    ],
    ids=["bf16", "fp16", "workers, PP", "VPP"],
)
def test_precisions_pipelines_and_loader_workers_train(launcher: Launcher, flags: list[str], layout: Layout) -> None:
    losses = run(launcher, tiny_gpt(iters=5), layout, flags).losses
    assert len(losses) == 5
    assert losses[-1] < losses[0] < 4.95
