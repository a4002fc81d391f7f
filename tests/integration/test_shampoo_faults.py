"""Faults in a real run: gradients that are not finite, loss scales that overflow, a solver that fails."""

from __future__ import annotations

import math
import re
import signal

import pytest
import torch

from tests.launch import Launcher, RunResult
from tests.layouts.cases import EXPERTS
from tests.tiny import Layout, tiny_gpt, tiny_llama

SHAMPOO = ["--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-refresh-interval", "2"]


PRECISIONS = {"fp32": [], "bf16": ["--bf16"], "fp16": ["--fp16", "--initial-loss-scale", "1024"]}
WHERE = {"spoil_gradient": r"decoder\.layers\.\S+", "spoil_adamw_gradient": r"(embedding|decoder)\.\S+"}


@pytest.mark.parametrize("spoil", WHERE)
@pytest.mark.parametrize("clip", ["0", "1"], ids=["no clipping", "clipping"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    launcher: Launcher, precision: str, clip: str, spoil: str
) -> None:
    layout = Layout(tp=2, dp=2)
    flags = [*tiny_gpt(iters=5), *layout.flags, *SHAMPOO, *PRECISIONS[precision], "--clip-grad", clip]
    result = launcher.run(flags, world_size=4, setup=f"tests.probes:{spoil}").check()
    for record in result.records:
        assert record["skipped"] == [False, False, True, False, False]
        assert record["setup"]["unchanged"] == [True]
    assert all(map(math.isfinite, result.losses))
    assert result.output.count("this step is skipped") == 1
    named = re.findall(r"rank (\d): gradient of (\S+) is not finite", result.output)
    assert [rank for rank, _ in named] == ["3"]
    assert re.fullmatch(WHERE[spoil], named[0][1])


@pytest.mark.parametrize("method", ["shampoo", "kl-soap"])
@pytest.mark.parametrize("scale", ["1e4", "1e8", "1e-20"])
def test_one_gradient_of_another_scale_does_not_stall_the_run(launcher: Launcher, scale: str, method: str) -> None:
    """With Megatron's clipping, which is on by default."""
    flags = [*tiny_gpt(iters=20), *Layout(dp=2).flags, *SHAMPOO, "--shampoo-method", method]
    plain = launcher.run(flags, world_size=2).check()
    scaled = launcher.run(flags, world_size=2, setup="tests.probes:scale_one_gradient", env={"TEST_SCALE": scale})
    assert scaled.check().grad_norms[3] == pytest.approx(float(scale) * plain.grad_norms[3], rel=1e-5)
    assert scaled.losses[-1] < plain.losses[0] - 0.8 * (plain.losses[0] - plain.losses[-1])
    assert max(scaled.losses[4:]) < plain.losses[3] + 0.1


@pytest.mark.parametrize("method", ["shampoo", "kl-soap", "soap"])
def test_an_unclipped_spike_does_no_more_harm_than_with_adamw(launcher: Launcher, method: str) -> None:
    """Adam's second moment remembers a spike, so that all of them go on by small steps for a while."""
    base = [*tiny_gpt(iters=20), *Layout(dp=2).flags, "--clip-grad", "0"]
    spike = {"setup": "tests.probes:scale_one_gradient", "env": {"TEST_SCALE": "1e4"}}
    adamw = launcher.run([*base, "--optimizer", "adam"], world_size=2, **spike).check()  # type: ignore[arg-type]
    ours = launcher.run([*base, *SHAMPOO, "--shampoo-method", method], world_size=2, **spike).check()  # type: ignore[arg-type]
    assert ours.losses[-1] < adamw.losses[-1] + 0.02
    assert max(ours.losses[4:]) < ours.losses[3] + 0.1


@pytest.mark.parametrize("method", ["shampoo", "kl-soap"])
def test_larger_gradients_give_the_same_run_and_tiny_ones_a_finite_one(launcher: Launcher, method: str) -> None:
    """Of a power of two bit for bit. Squares of 1e-20 underflow in float32, for AdamW too: steps come to nothing."""
    base = [*tiny_gpt(iters=10), *Layout(dp=2).flags, *SHAMPOO, "--shampoo-method", method, "--clip-grad", "0"]
    flags = [*base, "--adam-eps", "1e-30"]
    plain = launcher.run(flags, world_size=2).check()
    setup = "tests.probes:scale_all_gradients"
    larger = launcher.run(flags, world_size=2, setup=setup, env={"TEST_SCALE": str(2.0**27)}).check()
    assert larger.losses == plain.losses
    tiny = launcher.run(base, world_size=2, setup=setup, env={"TEST_SCALE": "1e-20"}).check()
    assert all(map(math.isfinite, tiny.losses)) and tiny.losses[-1] < tiny.losses[0] + 0.1


# -- ranks that drift, die, hang or were started differently


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_replicas_that_differ_in_one_bit_end_the_run(launcher: Launcher, distributed: bool) -> None:
    """The bit flips after step 3. The distributed optimizer gathers parameters anew in step 4: only a check before it
    sees the bit, and afterwards there is none."""
    layout, interval = Layout(dp=3, distributed=distributed), "1" if distributed else "4"
    flags = [*tiny_gpt(iters=8, global_batch=12), *layout.flags, *SHAMPOO, "--shampoo-check-replicas", interval]
    launcher.run(flags, world_size=3).check()
    result = launcher.run(flags, world_size=3, setup="tests.probes:flip_one_bit")
    assert result.returncodes == [1, 1, 1]
    seen = 4 if distributed else 5
    assert [record["iterations"][-1] for record in result.records] == [seen - 1] * 3
    for log in result.logs:
        assert f"before iteration {seen} data-parallel copies of parameters differ" in log.read_text()
        assert "decoder.final_layernorm.weight: rank 1 of ranks 0, 1, 2" in log.read_text()


def test_replicas_are_compared_when_gathered_with_overlap_too(launcher: Launcher) -> None:
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
    flags = [*tiny_gpt(), *Layout(dp=2).flags, *SHAMPOO, *overlap, "--shampoo-check-replicas", "3"]
    result = launcher.run(flags, world_size=2, setup="tests.probes:count_replica_checks").check()
    assert [len(record["setup"]["compared"]) for record in result.records] == [3, 3], "before iterations 4, 7, 10"


@pytest.mark.parametrize(
    ("layout", "experts"),
    [(Layout(tp=2, dp=2, distributed=False), False), (Layout(dp=4, instances=2), False), (Layout(cp=2, dp=2), False),
     (Layout(tp=2, dp=2, sp=True, etp=1), True), (Layout(dp=4, ep=2), True)],
    ids=str,
)  # fmt: skip
def test_replicas_do_not_drift(launcher: Launcher, layout: Layout, experts: bool) -> None:
    model = [*tiny_llama(heads=8, query_groups=4), *EXPERTS] if experts else tiny_gpt()
    flags = [*model, *layout.flags, *SHAMPOO, "--train-iters", "5", "--shampoo-check-replicas", "1"]
    result = launcher.run(flags, world_size=layout.world_size, setup="tests.probes:count_replica_checks").check()
    compared = [record["setup"]["compared"] for record in result.records]
    assert all(len(it) == 4 * (1 + experts) for it in compared), "four checks, of experts by themselves"
    assert all(group > 1 and tensors > 0 for it in compared for group, tensors in it)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--shampoo-block-size 16", "--shampoo-block-size is 32 on ranks 0, 2, 3, 16 on rank 1"),
        ("--optimizer adam", "--optimizer is shampoo on ranks 0, 2, 3, adam on rank 1"),
        ("--lr 0.5 --seed 7", "--seed is 1234 on ranks 0, 2, 3, 7 on rank 1; --lr is 0.001 on ranks 0, 2, 3, 0.5 on"),
    ],
)
def test_ranks_with_different_flags_are_refused(launcher: Launcher, given: str, message: str) -> None:
    layout = Layout(tp=2, pp=2)
    env = {"TEST_ARGUMENTS": given}
    flags = [*tiny_gpt(), *layout.flags, *SHAMPOO]
    if given.startswith("--optimizer"):
        flags = [*flags[: -len(SHAMPOO)], "--optimizer", "shampoo"]
    result = launcher.run(flags, world_size=4, setup="tests.probes:disagree", env=env, timeout=60)
    assert not result.timed_out
    assert result.returncodes == [1, 1, 1, 1]
    for log in result.logs:
        assert message in log.read_text()


def test_a_rank_that_dies_in_the_exchange_ends_the_others(launcher: Launcher) -> None:
    layout = Layout(dp=3)
    flags = [*tiny_gpt(iters=8, global_batch=12), *layout.flags, *SHAMPOO]
    result = launcher.run(flags, world_size=3, setup="tests.probes:die_in_exchange", timeout=60)
    assert result.returncodes == [1, -signal.SIGKILL, 1], "the others end by themselves, with an error"
    for rank in (0, 2):
        assert "all_to_all_single" in result.logs[rank].read_text()


def test_a_solver_that_hangs_ends_the_run(launcher: Launcher) -> None:
    layout = Layout(dp=3)
    flags = [*tiny_gpt(iters=8, global_batch=12), *layout.flags, *SHAMPOO, "--shampoo-solver-timeout", "1"]
    result = launcher.run(flags, world_size=3, setup="tests.probes:hang_in_solver", timeout=60)
    assert result.returncodes == [1, 1, 1]
    assert result.first_failed == 1
    log = result.logs[1].read_text()
    assert "data-parallel rank 1: the refreshes of one step took more than --shampoo-solver-timeout 1 seconds" in log
    assert "basis.py" in log, "where it hangs"


@pytest.mark.parametrize("mode", [[], ["--deterministic-mode"]], ids=["", "deterministic mode"])
def test_the_same_command_twice_is_the_same_run_bit_for_bit(launcher: Launcher, mode: list[str]) -> None:
    layout = Layout(tp=2, dp=2)
    flags = [*tiny_gpt(), *layout.flags, *SHAMPOO, *mode]
    env = {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    one, two = (launcher.run(flags, world_size=4, record=["parameters"], env=env).check() for _ in range(2))
    assert one.losses == two.losses and one.grad_norms == two.grad_norms
    other = two.parameters()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.parameters().items())


# -- half precision and solvers


def test_an_overflowing_loss_scale_leaves_the_state_alone(launcher: Launcher) -> None:
    layout = Layout(dp=2)
    scale = str(2.0**40)  # overflows float16 until it has been halved often enough
    flags = [*tiny_gpt(iters=6), *layout.flags, *SHAMPOO, "--fp16", "--initial-loss-scale", scale, "--hysteresis", "1"]
    result = launcher.run(flags, world_size=2, setup="tests.probes:count").check()
    skipped = result.records[0]["skipped"]
    assert skipped[0] and result.records[1]["skipped"] == skipped
    assert result.records[0]["setup"]["steps"] == skipped.count(False)


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--shampoo-solver", "eigh"], "root"),
        (["--shampoo-solver", "newton"], "root"),
        (["--shampoo-method", "soap", "--shampoo-solver", "qr"], "eigenbasis"),
    ],
    ids=["eigh", "newton", "soap by qr"],
)
def test_a_solver_that_always_fails_is_named_and_the_run_goes_on(
    launcher: Launcher, flags: list[str], what: str
) -> None:
    layout = Layout(dp=2)
    args = [*tiny_gpt(iters=8), *layout.flags, *SHAMPOO, "--shampoo-log-interval", "4", *flags]
    result = launcher.run(args, world_size=2, setup="tests.probes:fail_solver").check()
    name = "decoder.layers.0.self_attention.linear_proj.weight[weight 0,0]"
    assert f"left {what} of {name}: every solver failed, the previous one stays (1 in a row)" in result.output
    assert f"left {what} of {name}: every solver failed 3 times in a row" in result.output
    assert "--shampoo-epsilon" in result.output
    assert all(map(math.isfinite, result.losses)) and len(result.losses) == 8
    assert result.losses[-1] < result.losses[0] - 0.1, "the grafting steps train"
    figures = [line for line in result.output.splitlines() if "shampoo at iteration" in line]
    assert len(figures) == 2
    for line in figures:
        values = dict(entry.split(": ") for entry in line.split(" | ")[1:])
        assert float(values["refreshes-failed"]) > 0
    # Two factors for each of the blocks, all of them given up after the third refresh.
    assert float(values["factors-given-up"]) == 2 * sum(blocks_of(result))


def test_a_solver_that_recovers_is_used_again(launcher: Launcher) -> None:
    layout = Layout(dp=2)
    flags = [*tiny_gpt(iters=12), *layout.flags, *SHAMPOO, "--shampoo-log-interval", "2"]
    result = launcher.run(flags, world_size=2, setup="tests.probes:fail_solver_for_a_while").check()
    given_up = re.findall(r"factors-given-up: (\S+)", result.output)
    failed = re.findall(r"refreshes-failed: (\S+)", result.output)
    # Steps 2 to 12 by twos: a third failure comes in step 3 or 4, and the last one in step 8.
    assert [float(value) > 0 for value in given_up] == [False, True, True, True, False, False]
    assert [float(value) > 0 for value in failed] == [True, True, True, True, False, False]
    assert all(map(math.isfinite, result.losses))


def blocks_of(result: RunResult) -> list[int]:
    """Blocks in the model, as the report at the start has them."""
    return [int(found) for found in re.findall(r"elements \(one tensor-parallel rank\), (\d+) blocks", result.output)]
