"""What `make compare` compares: the optimizers, their learning rates, the model they all train."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REFERENCE = "adam"
"""The optimizer that the others are measured against."""

MODEL = shlex.split(
    """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0"""
)
"""1.05 M parameters with a vocabulary of 1,024."""

# Evaluation is over the whole of the held-out set, so that every figure is of the same text. In megatron-core 0.19.2
# --full-validation works with --multiple-validation-sets alone, and reads one sample per micro batch: with one micro
# batch a step, which the last two flags see to, the set is read once.
TRAINING = shlex.split(
    """--micro-batch-size 16 --global-batch-size 16 --lr-decay-style cosine --lr-warmup-fraction 0.05 --clip-grad 1.0
--weight-decay 0.1 --adam-beta2 0.95 --num-workers 0 --log-interval 1
--full-validation --multiple-validation-sets --eval-micro-batch-size 32 --eval-global-batch-size 32"""
)

FINAL_RATE = 0.1
"""Learning rate at the end, of the highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """An optimizer and how it is called."""

    name: str
    """For `--optimizers`."""
    label: str
    """In tables and figures."""
    flags: tuple[str, ...]
    """Of `pretrain_gpt.py`."""
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    """Learning rates to try, ascending."""
    is_ours: bool = False
    remark: str = ""
    """Why its flags are not Megatron's defaults, or what the defaults are."""


def _ours(method: str, label: str) -> Contender:
    name = "shampoo" if method == "shampoo" else f"shampoo-{method}"
    return Contender(
        name=name, label=label, flags=("--optimizer", "shampoo", "--shampoo-method", method), is_ours=True
    )  # fmt: skip


def _by_name(contenders: Sequence[Contender]) -> dict[str, Contender]:
    return {contender.name: contender for contender in contenders}


CONTENDERS = _by_name(
    (
        Contender(
            name="sgd",
            label="SGD",
            flags=("--optimizer", "sgd", "--sgd-momentum", "0.9", "--weight-decay", "1e-3"),
            rates=(0.1, 0.3, 1.0),
            remark="momentum 0.9; weight decay 1e-3, since it is multiplied by a learning rate a hundred times AdamW's",
        ),
        Contender(name="adam", label="AdamW", flags=("--optimizer", "adam")),
        Contender(
            name="muon",
            label="Muon (Megatron)",
            flags=(
                *("--optimizer", "muon", "--muon-momentum", "0.95", "--muon-nesterov"),
                *("--muon-fp32-matmul-prec", "high"),
            ),
            rates=(3e-3, 1e-2, 3e-2),
            remark="momentum 0.95 with Nesterov, as published; products in fp32, since bf16 is slower on a CPU; "
            "Megatron's spectral scale",
        ),
        Contender(
            name="soap",
            label="SOAP (Megatron)",
            flags=("--optimizer", "soap"),
            remark="Megatron's defaults, for which it has no flags: factors of KL-Shampoo, a refresh at every step",
        ),
        _ours("shampoo", "Shampoo"),
        _ours("soap", "SOAP (ours)"),
        _ours("kl-soap", "KL-SOAP"),
        _ours("kl-shampoo", "KL-Shampoo"),
        _ours("one-sided", "one-sided Shampoo"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    optimizer: str
    """Name of the contender."""
    rate: float
    """Highest learning rate."""
    seed: int
    """Of weights and data order."""

    def __str__(self) -> str:
        return f"{self.optimizer} lr {self.rate:g} seed {self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is the same for all runs of a comparison."""

    steps: int = 200
    eval_interval: int = 20
    """Steps between two evaluations; one more follows the last step."""
    seeds: tuple[int, ...] = (1234, 4321)
    """The first one chooses the learning rate."""
    grids: Mapping[str, tuple[float, ...]]
    """Learning rates by contender's name, ascending."""
    jobs: int = 1
    """Runs at a time."""
    threads: int = 1
    """Of a run."""
    shampoo_flags: tuple[str, ...] = ()
    """Added to the flags of our methods."""
    flags: tuple[str, ...] = ()
    """Added to the flags of all; they come last and win."""

    @property
    def conditions(self) -> str:
        """What the seconds of a run depend on, in words."""
        at_a_time = "1 run" if self.jobs == 1 else f"{self.jobs} runs"
        return f"{at_a_time} at a time, {'1 thread' if self.threads == 1 else f'{self.threads} threads'} each"

    def command(self, run: Run, data_flags: Sequence[str]) -> list[str]:
        """Spell out a run.

        Args:
            run: which one.
            data_flags: the corpus'.

        Returns:
            `pretrain_gpt.py` and all its flags.
        """
        contender = CONTENDERS[run.optimizer]
        rate = ["--lr", f"{run.rate:.6g}", "--min-lr", f"{FINAL_RATE * run.rate:.6g}"]
        course = ["--train-iters", str(self.steps), "--eval-interval", str(self.eval_interval)]
        own = [*contender.flags, *(self.shampoo_flags if contender.is_ours else ())]
        return [
            *("pretrain_gpt.py", *MODEL, *TRAINING, *data_flags, *course),
            *(*rate, "--seed", str(run.seed), *own, *self.flags),
        ]


def parse_optimizers(text: str) -> tuple[str, ...]:
    """Read the value of `--optimizers`.

    Args:
        text: names, separated by commas.

    Returns:
        The names.

    Raises:
        ArgumentTypeError: a name is unknown or comes twice.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in CONTENDERS:
            raise argparse.ArgumentTypeError(f"unknown optimizer '{name}': choose from {', '.join(CONTENDERS)}")
    return _distinct(names, text)


def parse_grid(text: str) -> tuple[str, tuple[float, ...]]:
    """Read a value of `--grid`.

    Args:
        text: such as `adam=1e-3,3e-3,1e-2`.

    Returns:
        Name and learning rates, ascending.

    Raises:
        ArgumentTypeError: it does not read so.
    """
    name, equals, values = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"'{text}': write NAME=RATE,RATE,..., for example adam=1e-3,3e-3,1e-2")
    names = parse_optimizers(name)
    if len(names) > 1:
        raise argparse.ArgumentTypeError(f"'{text}': one optimizer to a grid; repeat --grid for the next")
    rates = []
    for value in values.split(","):
        try:
            rate = float(value)
        except ValueError:
            rate = math.nan
        if not (0 < rate < math.inf):
            raise argparse.ArgumentTypeError(f"'{text}': '{value}' is not a learning rate above 0")
        rates.append(rate)
    return names[0], tuple(sorted(_distinct(rates, text)))


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read the value of `--seeds`.

    Args:
        text: integers from 1, separated by commas.

    Returns:
        The seeds.

    Raises:
        ArgumentTypeError: one is not such a number, or comes twice.
    """
    values = text.split(",")
    for value in values:
        if not value.strip().isdecimal() or int(value) < 1:  # Megatron refuses 0
            raise argparse.ArgumentTypeError(f"'{text}': '{value}' is not a seed; give integers from 1")
    return _distinct([int(value) for value in values], text)


def _distinct[T: (str, int, float)](values: Sequence[T], text: str) -> tuple[T, ...]:
    for number, value in enumerate(values):
        if value in values[:number]:
            raise argparse.ArgumentTypeError(f"'{text}': {value} is there twice")
    return tuple(values)
