"""What users of such systems reported broken, tried in real runs with ``--optimizer shampoo``."""

from __future__ import annotations

import functools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import ROOT, Launcher, RunResult
from tests.tiny import Layout, tiny_gpt

SHAMPOO = ["--optimizer", "shampoo", "--shampoo-block-size", "32", "--shampoo-refresh-interval", "2"]
WATCH = "tests.integration.test_cases_runs:watch"


def watch() -> dict[str, Any]:
    """Note after each step of this rank's optimizer what a resume may get wrong.

    Returns:
        Filled during the run, an entry for each step: `counters` [[steps of the moments], [updates of the blocks]],
        each without repetition; `groups` [[learning rate, weight decay]]; `dtypes` {name: of every state}; `bytes` of
        all state.
    """
    from megatron.shampoo.optimizer import Shampoo

    seen: dict[str, Any] = {"steps": []}
    original = Shampoo.step

    @functools.wraps(original)
    def step(self: Shampoo, closure: Any = None) -> Any:
        result = original(self, closure)
        moments = [dict(state) for state in self.state.values()]
        blocks = [state.state_dict() for state in self.states]
        counters = [{int(state["step"]) for state in moments}, {n for b in blocks for n in b["num_updates"].tolist()}]
        tensors = [item for state in moments + blocks for item in state.items()]
        seen["steps"].append(
            {
                "counters": [sorted(values) for values in counters],
                "groups": [[group["lr"], group["weight_decay"]] for group in self.param_groups],
                "dtypes": {name: sorted({str(t.dtype) for n, t in tensors if n == name}) for name, _ in tensors},
                "bytes": sum(tensor.numel() * tensor.element_size() for _, tensor in tensors),
            }
        )
        return result

    Shampoo.step = step  # type: ignore[method-assign]
    return seen


def run(launcher: Launcher, layout: Layout, *flags: str | Path, iters: int = 3, **options: Any) -> RunResult:
    args = [*tiny_gpt(iters=iters), *layout.flags, *SHAMPOO, *flags]
    return launcher.run(args, world_size=layout.world_size, **options).check()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(launcher: Launcher) -> RunResult:
    """Three iterations on one rank."""
    return run(launcher, Layout(), record=["parameters"])


def assert_same(result: RunResult, expected: RunResult) -> None:
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def assert_same_parameters(result: RunResult, expected: RunResult) -> None:
    """Compares the replicas of every rank too, those of a tied embedding among them."""
    parameters = result.parameters()
    for name, tensor in expected.parameters().items():
        if not name.endswith("linear_qkv.bias"):  # the key bias has no gradient but rounding noise
            torch.testing.assert_close(parameters[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (Layout(dp=2), ["--overlap-grad-reduce"]),
        (Layout(dp=2, distributed=False), ["--overlap-grad-reduce"]),
        (Layout(dp=4), ["--num-distributed-optimizer-instances", "2"]),
        (Layout(tp=2), ["--timing-log-level", "2", "--log-params-norm", "--log-num-zeros-in-grad"]),
    ],
    ids=["overlap", "overlap replicated", "two instances", "all logs"],
)
def test_a_flag_beside_the_optimizer_changes_nothing(
    launcher: Launcher, alone: RunResult, layout: Layout, flags: list[str]
) -> None:
    result = run(launcher, layout, *flags, record=["parameters"])
    assert_same(result, alone)
    assert_same_parameters(result, alone)


def test_overlap_keeps_embeddings_of_two_stages_tied(launcher: Launcher) -> None:
    layout, overlap = Layout(dp=2, pp=2), ["--overlap-grad-reduce", "--overlap-param-gather"]
    plain, overlapped = (run(launcher, layout, *flags, record=["parameters"]) for flags in ([], overlap))
    assert_same(overlapped, plain)
    assert_same_parameters(overlapped, plain)


def test_a_stage_of_embeddings_alone_trains(launcher: Launcher) -> None:
    flags = ["--pipeline-model-parallel-layout", "E|ttL"]
    result = run(launcher, Layout(dp=2, pp=2), *flags, record=["parameters"], setup="tests.probes:count")
    assert result.losses[-1] < result.losses[0] - 0.1
    assert result.parameters().keys() >= {f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 1)}
    roots = [sum(inner["roots"] for inner in r["setup"]["optimizers"].values()) for r in result.records]
    assert sorted(count > 0 for count in roots) == [False, False, True, True]


def test_a_vocabulary_that_tensor_parallel_ranks_do_not_divide(launcher: Launcher) -> None:
    flags = ["--vocab-size", "125", "--make-vocab-size-divisible-by", "1", "--shampoo-tp-alignment", "2"]
    assert_same(run(launcher, Layout(tp=2), *flags), run(launcher, Layout(), *flags))


def test_schedules_and_counters_go_on_after_a_resume(launcher: Launcher, tmp_path: Path) -> None:
    schedules = [
        "--bf16", "--lr-decay-style", "cosine", "--lr-warmup-iters", "2", "--min-lr", "1e-5",
        "--start-weight-decay", "0.01", "--end-weight-decay", "0.1", "--weight-decay-incr-style", "linear",
        "--dataloader-type", "single",
    ]  # fmt: skip
    layout = Layout()
    unbroken = run(launcher, layout, *schedules, "--save", tmp_path, "--save-interval", "3", iters=5, setup=WATCH)
    resumed = run(launcher, layout, *schedules, "--load", tmp_path, "--ckpt-step", "3", iters=5, setup=WATCH)
    steps, again = (result.records[0]["setup"]["steps"] for result in (unbroken, resumed))
    assert again == steps[3:] and len(again) == 2
    assert [step["counters"] for step in steps] == [[[count], [count]] for count in range(1, 6)]
    assert len({rate for step in steps for rate, _ in step["groups"]}) == 5, "the rate changes in every step"
    kept = ("exp_avg", "exp_avg_sq", "left.factor", "right.factor", "left.inverse", "right.inverse")
    assert {name: steps[-1]["dtypes"][name] for name in kept} == {name: ["torch.float32"] for name in kept}


def test_every_spoiled_step_is_counted_in_the_log(launcher: Launcher) -> None:
    flags = ["--bf16", "--clip-grad", "0"]
    result = run(launcher, Layout(dp=2), *flags, iters=4, setup="tests.probes:spoil_gradient")
    counted = re.findall(r"iteration +\d+/ .*number of skipped iterations: +(\d+)", result.output)
    assert counted == ["0", "0", "1", "0"]


def test_before_the_start_step_it_is_adamw(launcher: Launcher) -> None:
    ours = run(launcher, Layout(dp=2), "--shampoo-start-step", "1000", iters=5)
    adamw = launcher.run([*tiny_gpt(iters=5), *Layout(dp=2).flags], world_size=2).check()
    assert_same(ours, adamw)


def test_a_model_of_experts_resumes_bit_for_bit(launcher: Launcher, tmp_path: Path) -> None:
    layout = Layout(dp=2)
    flags = ["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--dataloader-type", "single"]
    flags += ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"]
    unbroken = run(launcher, layout, *flags, "--save", tmp_path, "--save-interval", "2", iters=4)
    resumed = run(launcher, layout, *flags, "--load", tmp_path, "--ckpt-step", "2", iters=4)
    assert (resumed.losses, resumed.grad_norms) == (unbroken.losses[2:], unbroken.grad_norms[2:])


def test_a_narrow_model_at_a_high_rate_stays_finite_and_learns(launcher: Launcher) -> None:
    sizes = {"num_layers": 1, "hidden": 16, "heads": 2, "vocab": 30, "seq_length": 16, "global_batch": 2}
    args = [*tiny_gpt(iters=100, lr=1e-2, **sizes), "--optimizer", "shampoo", "--shampoo-block-size", "8"]
    losses = launcher.run(args).check().losses
    assert all(map(math.isfinite, losses)) and len(losses) == 100
    assert max(losses) < 1.2 * losses[0]
    assert sum(losses[-10:]) / 10 < 0.8 * losses[0]


def test_the_readme_s_pretraining_command_trains(launcher: Launcher, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"^    torchrun .*? (pretrain_gpt\.py.*?[^\\])$", readme, re.MULTILINE | re.DOTALL)
    assert found is not None
    flags = shlex.split(found.group(1).replace("\\\n", " "))[1:]
    assert "shampoo" in flags and "--use-distributed-optimizer" in flags
    own = {"--train-data-path", "--valid-data-path", "--save", "--load"}
    kept = [part for i, part in enumerate(flags) if part not in own and (i == 0 or flags[i - 1] not in own)]
    result = launcher.run([*kept, *tiny_gpt(iters=2), "--save", str(tmp_path)], world_size=2).check()
    assert len(result.losses) == 2 and (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_the_readme_s_lines_of_python_work() -> None:
    lines = re.findall(r"^    ((?:from megatron|optimizer = ).*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(lines) == 2
    names: dict[str, Any] = {"model": torch.nn.Linear(4, 3)}
    exec("\n".join(lines), names)  # the README is ours
    before = names["model"].weight.clone()
    names["model"](torch.ones(2, 4)).sum().backward()
    names["optimizer"].step()
    assert not torch.equal(names["model"].weight, before)
