"""Megatron's muon and soap train and resume with ``--use-distributed-optimizer`` in fp32 over gloo.

Also: weights are equal on all data-parallel ranks under virtual pipelining, where Megatron puts buckets of different
buffers into one group. Were such a group managed by two optimizers, the one that steps first would gather parameters
that the other has not updated yet. In runs of ``pretrain_gpt.py`` no parameter carries the mark that makes a group
the layer-wise optimizer's, so that every optimizer gathers every group after its own step; the test watches over it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.shampoo.mcore.seams import layer_wise
from tests import seam_switches
from tests.launch import Launcher, RunResult
from tests.tiny import Layout, tiny_gpt

FP32, GLOO = (seam.name for seam in layer_wise.SEAMS)
LAYOUT = Layout(dp=2)


def train(launcher: Launcher, optimizer: str, *flags: str | Path, off: str = "", layout: Layout = LAYOUT) -> RunResult:
    """Train for four iterations with the mends, but for one."""
    return launcher.run(
        [*tiny_gpt(iters=4), *layout.flags, "--optimizer", optimizer, *flags],
        world_size=layout.world_size,
        setup=seam_switches.SETUP,
        env=seam_switches.off(off),
        record=["parameters"],
    )


def test_muon_dealt_out_to_ranks_equals_muon_on_every_rank(launcher: Launcher) -> None:
    dealt = train(launcher, "muon").check()
    whole = train(launcher, "muon", layout=Layout(dp=2, distributed=False)).check()
    assert dealt.losses[:2] == pytest.approx(whole.losses[:2], rel=1e-6)
    assert dealt.grad_norms[:2] == pytest.approx(whole.grad_norms[:2], rel=1e-6)
    # The norms are summed in another order; orthogonalisation in bf16 enlarges the difference in rounding, on some
    # processors more than on others.
    assert dealt.losses == pytest.approx(whole.losses, rel=2e-5)
    assert dealt.grad_norms == pytest.approx(whole.grad_norms, rel=2e-4)
    torch.testing.assert_close(dealt.parameters(), whole.parameters(), rtol=0, atol=2e-4)


def test_soap_dealt_out_to_ranks_takes_the_same_steps(launcher: Launcher) -> None:
    dealt = train(launcher, "soap").check()
    whole = train(launcher, "soap", layout=Layout(dp=2, distributed=False)).check()
    assert dealt.losses[:2] == pytest.approx(whole.losses[:2], rel=1e-6)
    # Eigenvectors of nearly equal eigenvalues turn with the rounding of the gradients.
    assert dealt.losses == pytest.approx(whole.losses, rel=2e-3)


def test_muon_resumes_bit_for_bit(launcher: Launcher, tmp_path: Path) -> None:
    unbroken = train(launcher, "muon", "--save", tmp_path, "--save-interval", "2").check()
    resumed = train(launcher, "muon", "--load", tmp_path, "--ckpt-step", "2").check()
    assert resumed.losses == unbroken.losses[2:]
    torch.testing.assert_close(resumed.parameters(), unbroken.parameters(), rtol=0, atol=0)


@pytest.mark.parametrize(("seam", "message"), [(FP32, "has no attribute 'get_loss_scale'"), (GLOO, "all_gather")])
def test_without_the_seam_muon_stops(launcher: Launcher, seam: str, message: str) -> None:
    stopped = train(launcher, "muon", off=seam)
    assert 0 not in stopped.returncodes
    assert message in stopped.output


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_virtual_pipeline_keeps_weights_equal_on_data_parallel_ranks(launcher: Launcher, optimizer: str) -> None:
    flags = ["--num-layers", "4", "--check-weight-hash-across-dp-replicas-interval", "1"]
    result = train(launcher, optimizer, *flags, layout=Layout(pp=2, vpp=2, dp=2)).check()
    assert "Parameter hashes not matching" not in result.output
    assert result.parameters()  # which compares the replicas too
