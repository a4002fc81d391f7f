"""The course of a comparison: corpus, runs, report."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from rich.console import Console

from megatron.experiments.compare_contenders import Run, Settings
from megatron.experiments.compare_data import Corpus, load_corpus
from megatron.experiments.compare_display import Display
from megatron.experiments.compare_environment import environment
from megatron.experiments.compare_figure import draw
from megatron.experiments.compare_jobs import Job, Jobs
from megatron.experiments.compare_measures import summarise
from megatron.experiments.compare_records import Record, Store, measure, write_atomically
from megatron.experiments.compare_report import Report, markdown, show, to_json
from megatron.experiments.compare_search import MAX_EXTENSIONS, needed

POLL_SECONDS = 0.25
RESULTS, TABLE, FIGURE = "results.json", "table.md", "curves.png"


class BusyFolderError(RuntimeError):
    """Another comparison writes to the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """What to compare and where; paths are relative to the root."""

    root: Path
    """The checkout."""
    optimizers: tuple[str, ...]
    settings: Settings
    data: str
    eval_tokens: int
    archive: str | None
    out: str
    command: tuple[str, ...]
    """The comparison's own, for the report."""


def run_comparison(options: CompareOptions, console: Console) -> bool:
    """Make all runs that are not there yet, then print and write the report.

    Changes the working folder to the root, so that every printed path can be used there.

    Args:
        options: what to compare and where.
        console: where to print.

    Returns:
        Whether any run came to its end.

    Raises:
        DataError: the corpus cannot be used.
        BusyFolderError: another comparison writes to the folder.
    """
    os.chdir(options.root)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        corpus = load_corpus(Path(options.data), options.eval_tokens, options.archive)
        _announce(options, corpus, console)
        present = environment(options.root)
        store = Store(out / "runs", options.settings, corpus)
        records = _run_all(options, store, present, console)
        summaries = summarise(options.optimizers, options.settings, records)
        report = Report(
            summaries=summaries,
            settings=options.settings,
            corpus=corpus.facts,
            environment=present,
            command=options.command,
        )
        write_atomically(out / RESULTS, json.dumps(to_json(report), indent=1, allow_nan=False) + "\n")
        write_atomically(out / TABLE, markdown(report))
        draw(summaries, out / FIGURE)
    show(report, console)
    for name in (RESULTS, TABLE, FIGURE):
        console.print(f"{out / name}", highlight=False, soft_wrap=True)
    return any(one.finished for one in summaries)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyFolderError(
                f"{folder}: another comparison is writing there; wait, or take another --out"
            ) from error
        yield


def _announce(options: CompareOptions, corpus: Corpus, console: Console) -> None:
    settings = options.settings

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(f"Corpus: {corpus.title}, in {options.data}; {corpus.facts['held_out_tokens']:,} held-out tokens")
    say(f"{settings.steps} steps a run, evaluated every {settings.eval_interval}; seeds {_listed(settings.seeds)}")
    say(f"Conditions, the same for every run: {settings.conditions}, float32 on CPU")
    say(f"Learning rates on seed {settings.seeds[0]}, grids growing {MAX_EXTENSIONS} times at most towards a best end:")
    for name in options.optimizers:
        say(f"  {name:20} {_listed(settings.grids[name])}")
    say(
        f"Runs that have ended are kept in {options.out}/runs and reused; an interrupted comparison goes on from there."
    )
    load = os.getloadavg()[0]
    if load > 0.5:
        say(f"Warning: the machine is busy already (load {load:.1f}); seconds will be too many.")


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _run_all(options: CompareOptions, store: Store, present: dict[str, Any], console: Console) -> dict[Run, Record]:
    settings = options.settings
    threads = str(settings.threads)
    # CPU also where there are GPUs; a library that takes its number of threads elsewhere takes the same.
    variables = {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": threads}
    variables |= {"MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    records: dict[Run, Record] = {}
    jobs = Jobs(options.root, Path(options.out).absolute() / "running", variables)
    with Display(console, settings.steps) as display, jobs:
        while True:
            waiting = _waiting(options, store, records, jobs, display)
            if not waiting and not jobs.active:
                return records
            for run in waiting[: settings.jobs - len(jobs.active)]:
                jobs.start(run, store.name(run), store.command(run))
                display.started(run)
            sleep(POLL_SECONDS)
            for job in jobs.ended():
                record = _record(job, store, settings.steps, present)
                store.keep(record, job.log)
                records[job.run] = record
                display.ended(record, reused=False)
            display.update({job.run: job.step() for job in jobs.active}, waiting=len(waiting))


def _waiting(
    options: CompareOptions, store: Store, records: dict[Run, Record], jobs: Jobs, display: Display
) -> list[Run]:
    """Runs that can be started; those that are kept already become records, which may make others needed."""
    active = {job.run for job in jobs.active}
    while True:
        wanted = [
            run
            for name in options.optimizers
            for run in needed(name, options.settings.grids[name], options.settings.seeds, records)
            if run not in active
        ]
        kept = {run: record for run in wanted if (record := store.load(run)) is not None}
        if not kept:
            return wanted
        for record in kept.values():
            display.ended(record, reused=True)
        records.update(kept)


def _record(job: Job, store: Store, steps: int, present: dict[str, Any]) -> Record:
    return Record(
        run=job.run,
        measured=measure(job.log, job.process.returncode, steps),
        command=tuple(store.command(job.run)),
        folder=f"runs/{store.name(job.run)}",
        wall_seconds=round(job.wall_seconds, 2),
        started=job.started,
        load_average=job.load_average,
        environment=present,
    )
