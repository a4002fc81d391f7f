"""Every example script: its flags are known and valid at its own size, and it trains when its sizes are shrunk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.data_tools.prepare import PrepareOptions, prepare
from megatron.demo.session import SCRIPT as DEMO_SCRIPT
from tests.launch import Launcher

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAUNCHERS = ("torchrun", "srun")
SHRINK = [
    *("--num-layers", "4", "--hidden-size", "64", "--ffn-hidden-size", "96", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--train-iters", "2", "--eval-iters", "1", "--log-interval", "1", "--num-workers", "0"),
]  # fmt: skip

# Prints what Megatron and we make of the flags; nothing is built. Both validations end the process on an error.
VALIDATE = """
import json, sys
import pretrain_gpt
from megatron import cpu
from megatron.shampoo import mcore
mcore.install()
cpu.adapt_megatron_if_needed()
from megatron.training.arguments import parse_args, validate_args
args = parse_args(pretrain_gpt.add_arguments)
validate_args(args, {})
mcore.validate_args(args)
names = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "num_layers")
print(json.dumps({name: getattr(args, name) for name in names}))
"""


@dataclass(frozen=True)
class Example:
    """A script, the run it describes, and variables that fit it onto two to four processes."""

    script: str
    tokenizer: str
    layout: tuple[int, int, int]
    """TP, PP, DP."""
    num_layers: int
    small: dict[str, str]
    small_world_size: int

    @property
    def world_size(self) -> int:
        tp, pp, dp = self.layout
        return tp * pp * dp

    def __str__(self) -> str:
        return Path(self.script).parent.name


EXAMPLE_RUNS = (
    Example(DEMO_SCRIPT, "sentencepiece", (2, 1, 2), 4, {}, 4),
    Example("examples/gpt_345m_8gpu/train.sh", "bytes", (1, 1, 8), 24, {}, 2),
    Example(
        "examples/llama_7b_3d_slurm/train.sbatch",
        "sentencepiece",
        (4, 2, 4),
        32,
        {"TP": "2", "PP": "2", "LAYERS_PER_VIRTUAL_STAGE": "1"},
        4,
    ),
)
each_example = pytest.mark.parametrize("example", EXAMPLE_RUNS, ids=str)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small corpus for each kind of tokenizer, laid out as prepare_corpus.py does."""
    folder = tmp_path_factory.mktemp("corpora")
    sources = [str(path) for path in sorted((ROOT / "megatron").rglob("*.py")) if path.stat().st_size]
    made = {}
    for tokenizer in ("sentencepiece", "bytes"):
        made[tokenizer] = folder / tokenizer
        prepare(PrepareOptions(corpus="files", inputs=sources, output=str(made[tokenizer]), tokenizer=tokenizer,
                               vocab_size=400, workers=1))  # fmt: skip
    return made


def command_of(example: Example, folder: Path, data: Path, **variables: str) -> list[str]:
    """Run the script with launchers that write down their arguments instead of launching."""
    stubs = folder / "bin"
    stubs.mkdir()
    for name in (*LAUNCHERS, "scontrol"):
        record = f'printf "%s\\0" {name} "$@" > "{folder}/command"'
        (stubs / name).write_text(f"#!/bin/sh\n{record if name in LAUNCHERS else 'echo node1; echo node2'}\n")
        (stubs / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PATH": f"{stubs}:/usr/bin:/bin", "DATA_DIR": str(data), "RUN_DIR": str(folder / "run")}
    if example.script.endswith(".sbatch"):
        environment |= {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", ROOT / example.script],
        env=environment | variables, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return (folder / "command").read_text().rstrip("\0").split("\0")


def flags_of(command: list[str]) -> list[str]:
    """What follows the program's name."""
    return command[command.index("pretrain_gpt.py") + 1 :]


def validate(flags: list[str], world_size: int) -> subprocess.CompletedProcess[str]:
    """Parse and validate flags as rank 0 of a world that is not there."""
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", VALIDATE, *flags],
        env=environment | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip


def test_every_example_is_tested_and_described() -> None:
    scripts = {str(path.relative_to(ROOT)) for path in EXAMPLES.glob("*/train.*")}
    assert scripts == {example.script for example in EXAMPLE_RUNS}
    for folder in (path for path in EXAMPLES.iterdir() if path.is_dir()):
        assert (folder / "README.md").exists(), folder
        assert list(folder.glob("train.*")), folder


@each_example
def test_the_flags_are_valid_at_the_examples_own_size(
    example: Example, tmp_path: Path, corpora: dict[str, Path]
) -> None:
    command = command_of(example, tmp_path, corpora[example.tokenizer])
    done = validate(flags_of(command), example.world_size)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    tp, pp, dp = example.layout
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "world_size": example.world_size,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "data_parallel_size": dp,
        "num_layers": example.num_layers,
    }
    assert "shampoo" in flags_of(command)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [(["--no-such-flag"], "--no-such-flag"), (["--shampoo-block-size", "0"], "--shampoo-block-size")],
)
def test_a_wrong_flag_in_an_example_is_found(
    wrong: list[str], named: str, tmp_path: Path, corpora: dict[str, Path]
) -> None:
    example = EXAMPLE_RUNS[0]
    done = validate([*flags_of(command_of(example, tmp_path, corpora[example.tokenizer])), *wrong], example.world_size)
    assert done.returncode != 0
    assert named in done.stderr


@each_example
def test_the_example_trains_when_shrunk(
    example: Example, tmp_path: Path, corpora: dict[str, Path], launcher: Launcher
) -> None:
    command = command_of(example, tmp_path, corpora[example.tokenizer], **example.small)
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = launcher.run([*flags_of(command), *SHRINK], world_size=example.small_world_size, env=environment).check()
    assert len(result.losses) == 2
    assert all(0 < loss < 8 for loss in result.losses)
    assert (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"
    assert list((tmp_path / "run/tensorboard").iterdir())


@each_example
def test_flags_and_variables_of_the_user_win(example: Example, tmp_path: Path, corpora: dict[str, Path]) -> None:
    data = corpora[example.tokenizer]
    done = command_of(example, tmp_path, data, RUN_DIR="elsewhere")
    assert f"{data}/train_text_document" in done
    assert done[done.index("--save") + 1] == "elsewhere/checkpoints"
    last = (ROOT / example.script).read_text().rstrip().splitlines()[-1].strip()
    assert last == '"$@"'


@each_example
def test_a_missing_corpus_is_said_before_anything_starts(example: Example, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / example.script],
        env={**os.environ, "DATA_DIR": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"error: no corpus in DATA_DIR={tmp_path}" in done.stderr


def test_the_demo_runs_four_processes_on_cpu(tmp_path: Path, corpora: dict[str, Path]) -> None:
    command = command_of(EXAMPLE_RUNS[0], tmp_path, corpora["sentencepiece"])
    assert command[0] == "torchrun"
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert "export CUDA_VISIBLE_DEVICES=\n" in (ROOT / DEMO_SCRIPT).read_text()


def test_the_slurm_job_starts_one_launcher_per_node_that_meet_at_the_first(
    tmp_path: Path, corpora: dict[str, Path]
) -> None:
    command = command_of(EXAMPLE_RUNS[2], tmp_path, corpora["sentencepiece"])
    launcher = command[: command.index("pretrain_gpt.py")]
    assert launcher[:4] == ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "torchrun"]
    options = dict(zip(launcher[4::2], launcher[5::2], strict=True))
    assert options == {
        "--nnodes": "4",
        "--nproc-per-node": "8",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node1:29500",
        "--rdzv-id": "7",
    }
