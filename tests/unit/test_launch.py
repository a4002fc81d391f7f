"""The launcher runs the entry script as torchrun would, and reports what happened."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
import torch

from megatron.experiments import ports
from megatron.experiments.ports import free_port
from tests.launch import Launcher
from tests.recorder import gather_parameters, join_slices
from tests.tiny import Layout, tiny_gpt, tiny_llama

SETUPS = "tests.launch_setups"


def is_alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def child_pid(output: str) -> int:
    """The pid that a setup has printed."""
    match = re.search(r"^child (\d+)$", output, re.MULTILINE)
    assert match is not None, output
    return int(match[1])


def test_records_agree_with_megatrons_log(launcher: Launcher) -> None:
    result = launcher.run(tiny_gpt(iters=3) + Layout(dp=2).flags, world_size=2, setup=f"{SETUPS}:count_steps").check()
    assert [record["iterations"] for record in result.records] == [[1, 2, 3]] * 2
    assert [record["setup"] for record in result.records] == [{"steps": 3}] * 2
    assert result.records[0]["losses"] == result.records[1]["losses"] == result.losses
    logged = {int(i): (loss, norm) for i, loss, norm in re.findall(
        r"iteration +(\d+)/.*lm loss: (\S+) .*grad norm: (\S+) ", result.output)}  # fmt: skip
    for iteration in (1, 3):  # Megatron's second logged loss is a mean, see the seam for it
        loss, norm = result.losses[iteration - 1], result.grad_norms[iteration - 1]
        assert logged[iteration] == (f"{loss:.6E}", f"{norm:.3f}")


def test_losses_come_from_the_last_pipeline_stage(launcher: Launcher) -> None:
    result = launcher.run(tiny_gpt(iters=2) + Layout(pp=2).flags, world_size=2, record=["params_norm"]).check()
    assert [len(record["losses"]) for record in result.records] == [0, 2]
    assert len(result.losses) == len(result.grad_norms) == 2
    norms = result.records[0]["params_norms"]
    assert norms == result.records[1]["params_norms"] and norms[0] != norms[1]


def test_parameters_are_gathered_by_global_name(launcher: Launcher) -> None:
    model = tiny_llama(num_layers=4, iters=1)
    layout = Layout(tp=2, pp=2)
    whole = launcher.run(model, record=["parameters"]).check().parameters()
    cut = launcher.run(model + layout.flags, world_size=4, record=["parameters"]).check().parameters()
    assert {name: tensor.shape for name, tensor in cut.items()} == {name: t.shape for name, t in whole.items()}
    assert "decoder.layers.3.mlp.linear_fc1.weight" in cut


def test_checkpoint_is_saved_and_resumed(launcher: Launcher, tmp_path: Path) -> None:
    save = ["--save", tmp_path, "--save-interval", 2]
    launcher.run(tiny_gpt(iters=2) + save, record=["parameters"]).check()
    resumed = launcher.run([*tiny_gpt(iters=3), "--load", tmp_path, "--no-load-optim"]).check()
    assert resumed.records[0]["iterations"] == [3]


def test_failing_rank_is_named_with_its_last_lines_and_stops_the_others(launcher: Launcher) -> None:
    result = launcher.run(tiny_gpt(), world_size=2, setup=f"{SETUPS}:fail_on_rank_one", timeout=100)
    assert result.first_failed == 1 and result.returncodes == [-9, 1] and not result.timed_out
    with pytest.raises(AssertionError, match=r"rank 1 failed(.|\n)*planted failure"):
        result.check()


def test_message_of_a_refusal_is_in_the_log(launcher: Launcher) -> None:
    result = launcher.run(tiny_gpt(), setup=f"{SETUPS}:exit_with_message")
    assert result.returncodes == [1] and result.output == "no such flag\n"


def test_timeout_kills_ranks_and_their_children(launcher: Launcher) -> None:
    result = launcher.run(tiny_gpt(), world_size=2, setup=f"{SETUPS}:start_a_child_and_hang", timeout=4)
    assert result.timed_out and result.returncodes == [-9, -9]
    with pytest.raises(AssertionError, match="timed out"):
        result.check()
    assert not is_alive(child_pid(result.output))


def test_children_left_behind_are_killed(launcher: Launcher) -> None:
    result = launcher.run(tiny_gpt(), setup=f"{SETUPS}:leave_a_child").check()
    assert not is_alive(child_pid(result.output))


def test_environment_is_torchruns_with_the_callers_changes(launcher: Launcher) -> None:
    env = {"ADDED": "yes", "PATH": None}
    result = launcher.run(["--flag", 1], world_size=2, setup=f"{SETUPS}:report_environment", env=env).check()
    expected = [f"environment ['{rank}', '{rank}', '2', '2', 'yes', None] ['--flag', '1']\n" for rank in (0, 1)]
    assert [log.read_text() for log in result.logs] == expected


def test_dead_server_is_reported_with_its_log(tmp_path: Path) -> None:
    entry = tmp_path / "broken.py"
    entry.write_text("raise ImportError('planted')\n")
    with Launcher(entry) as broken, pytest.raises(RuntimeError, match="planted"):
        broken.run([])


def test_free_ports_are_outside_the_kernels_ephemeral_range_and_given_once() -> None:
    given = [free_port() for _ in range(50)]
    assert all(15000 <= port < 30000 for port in given)
    assert len(set(given)) == 50


def test_a_port_that_somebody_listens_on_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free := free_port()))
        monkeypatch.setattr(ports, "PORTS", range(free, free + 1))
        monkeypatch.setattr(ports, "_given", set())
        with pytest.raises(RuntimeError, match=f"no free TCP port in {free} to {free}"):
            free_port()
    assert free_port() == free


def test_gate_and_up_slices_are_joined_half_by_half() -> None:
    gate, up = torch.arange(8.0).view(4, 2), torch.arange(8.0, 16.0).view(4, 2)
    slices = [torch.cat([gate[rows], up[rows]]) for rows in (slice(0, 2), slice(2, 4))]
    assert torch.equal(join_slices(slices, 0, 2), torch.cat([gate, up]))
    assert torch.equal(join_slices(slices, 0, 1), torch.cat(slices))
    assert torch.equal(join_slices(slices, -1, 1), slices[0])


@pytest.mark.parametrize("same", [True, False])
def test_replicas_that_differ_are_named(tmp_path: Path, same: bool) -> None:
    paths = []
    for dp in range(2):
        data = torch.ones(2) + (0.0 if same else dp * 1e-6)
        entry = {"name": "final_layernorm.weight", "data": data, "partition_dim": -1, "stride": 1, "expert": False}
        paths.append(tmp_path / f"rank{dp}.pt")
        torch.save({"position": {"tp": 0, "etp": 0}, "parameters": [entry]}, paths[-1])
    if same:
        assert gather_parameters(paths)["final_layernorm.weight"].shape == (2,)
    else:
        with pytest.raises(AssertionError, match=r"final_layernorm.weight: replicas differ \(rank1"):
            gather_parameters(paths)
