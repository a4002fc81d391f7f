"""The course of a demo: corpus, training, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log as ln
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from megatron.data_tools.encoding import default_num_workers
from megatron.data_tools.prepare import PrepareOptions, prepare
from megatron.demo.curves import curve_of
from megatron.demo.display import follow
from megatron.demo.figure import draw
from megatron.demo.folders import RunFolder, new_run
from megatron.demo.process import error_lines, running
from megatron.demo.training_log import TrainingLog

SCRIPT = "examples/cpu_demo/train.sh"
LAST_LINES = 15


class RunFailedError(RuntimeError):
    """The training run ended early; the message says where and how."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """Where to work; paths are relative to the root."""

    root: Path
    """The checkout."""
    data: str = "data/demo"
    runs: str = "runs/demo"
    script: str = SCRIPT
    flags: Sequence[str] = ()
    """Megatron's and ours, added to the script's."""


def run_demo(options: DemoOptions, console: Console) -> None:
    """Prepare the corpus unless it is there, train in a new folder, print what came out.

    Changes the working folder to the root, so that every printed path and command is short and can be used there.

    Args:
        options: where to work.
        console: where to print.

    Raises:
        DataError: the corpus cannot be prepared.
        RunFailedError: the training failed.
    """
    began = monotonic()
    os.chdir(options.root)
    manifest = _prepare_corpus(options.data, console)
    folder = new_run(Path(options.runs))
    console.print(f"\n[bold]Training[/]: {options.script}, log in {folder.log}")
    if folder.number > 1:
        console.print(f"This is run {folder.number}; earlier ones stay in {options.runs}, delete them as you like.")
    log = _train(options, folder, console)
    known = {f"ln {manifest['vocab_size']}": ln(manifest["vocab_size"]), "unigram entropy": _entropy(manifest)}
    title = " ".join([options.script, *options.flags])
    draw([curve_of(log, f"run {folder.number}")], folder.figure, smooth=10, lines=known, title=title)
    for line in report(log, folder, manifest, monotonic() - began):
        console.print(line, highlight=False, soft_wrap=True)


def _prepare_corpus(folder: str, console: Console) -> dict[str, Any]:
    console.print(f"[bold]Corpus[/]: source code of Python's standard library, in {folder}")
    manifest = prepare(PrepareOptions(corpus="stdlib", output=folder, workers=default_num_workers()))
    found = "reused" if manifest["reused"] else "prepared"
    train, valid = (manifest["splits"][split]["tokens"] for split in ("train", "valid"))
    console.print(
        f"{found}: {train:,} tokens to train on, {valid:,} held out, {manifest['vocab_size']:,} ids", highlight=False
    )
    return manifest


def _entropy(manifest: Mapping[str, Any]) -> float:
    entropy: float = manifest["unigram_entropy_nats"]
    return entropy


def _train(options: DemoOptions, folder: RunFolder, console: Console) -> TrainingLog:
    # The launcher that belongs to this interpreter, whatever PATH says.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    env = {"PATH": path, "DATA_DIR": options.data, "RUN_DIR": str(folder.path), "PYTHONUNBUFFERED": "1"}
    command = ["bash", options.script, *options.flags]
    with running(command, log=folder.log, cwd=options.root, env=env) as (process, lines):
        log = follow(lines, console)
    if process.returncode or not log.iterations:
        raise RunFailedError(_failure(folder.log, process.returncode))
    return log


def _failure(log: Path, status: int) -> str:
    ended = f"the training run ended with status {status}" if status else "the training run made no iteration"
    return "\n".join(
        [f"{ended}. From {log}, which has it all:", *(f"  {line}" for line in error_lines(log, LAST_LINES))]
    )


def report(log: TrainingLog, folder: RunFolder, manifest: Mapping[str, Any], wall_seconds: float) -> list[str]:
    """Say what came out.

    Args:
        log: a finished run's.
        folder: the run's.
        manifest: the corpus'.
        wall_seconds: of the whole demo.

    Returns:
        Lines of text.
    """
    guess = f"guessing blindly costs ln {manifest['vocab_size']} = {ln(manifest['vocab_size']):.3f}"
    held_out = f", {list(log.validation.values())[-1]:.3f} on held-out text" if log.validation else ""
    saved = folder.saved_iteration()
    speed = log.tokens_per_second()
    training = f"{_minutes(log.seconds[-1])} for {log.iterations[-1].number} iterations"
    return [
        "",
        f"loss at start  {log.loss_at_start():.3f} nats per token ({guess})",
        f"loss at end    {log.loss_at_end():.3f}{held_out} (the corpus' unigram entropy is {_entropy(manifest):.3f})",
        f"speed          {speed:,.0f} tokens per second" if speed else "speed          unknown",
        f"time           {training}, {_minutes(wall_seconds)} in all",
        f"log            {folder.log}",
        f"checkpoint     {folder.checkpoints} (iteration {saved})" if saved else "checkpoint     none was saved",
        f"loss curve     {folder.figure}",
    ]


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60} min {int(seconds) % 60:02d} s"
