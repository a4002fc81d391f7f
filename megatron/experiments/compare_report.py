"""The tables and files of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.experiments.compare_contenders import CONTENDERS, REFERENCE, Settings
from megatron.experiments.compare_measures import Sample, Summary
from megatron.experiments.compare_records import Record, record_to_json

HEADERS = (
    "optimizer",
    "learning rate",
    "held-out loss",
    "training loss",
    "held-out loss in AdamW's seconds",
    "steps to AdamW's loss",
    "seconds to AdamW's loss",
    "tokens per second",
    "seeds",
    "remarks",
)
RUN_HEADERS = ("optimizer", "learning rate", "seed", "held-out loss", "training loss", "steps", "seconds", "outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A comparison that is done."""

    summaries: Sequence[Summary]
    settings: Settings
    corpus: Mapping[str, Any]
    environment: Mapping[str, Any]
    command: Sequence[str]
    """The comparison's own."""

    @property
    def reference_seconds(self) -> Sample:
        """Of the reference's runs, training steps only."""
        reference = [one for one in self.summaries if one.name == REFERENCE]
        return Sample(tuple(record.measured.seconds for one in reference for record in one.finished))

    @property
    def records(self) -> list[Record]:
        """All runs, by optimizer, learning rate and seed."""
        return [
            record
            for one in self.summaries
            for record in sorted((*one.runs, *one.losers), key=lambda record: (record.run.rate, record.run.seed))
        ]


def rows(summaries: Sequence[Summary], num_seeds: int) -> list[tuple[str, ...]]:
    """Make the rows of the main table.

    Args:
        summaries: in the order of the rows; a contender that never finished has a row too.
        num_seeds: of the comparison.

    Returns:
        Cells as `HEADERS` names them.
    """
    return [
        (
            one.label,
            "none" if one.rate is None else f"{one.rate:g}" + (" (!)" if one.is_at_end else ""),
            _loss(one.held_out) if one.finished else "none",
            _loss(one.train),
            _loss(one.at_reference_seconds) or ("none" if _has_reference(one) else ""),
            _ratio(one.steps_to_reference, missing="not reached" if _has_reference(one) else ""),
            _ratio(one.seconds_to_reference, missing="not reached" if _has_reference(one) else ""),
            _ratio(one.speed),
            f"{len(one.finished)} of {num_seeds}",
            "; ".join(_remarks(one)),
        )
        for one in summaries
    ]


def _has_reference(one: Summary) -> bool:
    return bool(one.speed.known)


def _loss(sample: Sample) -> str:
    if sample.mean is None:
        return ""
    return f"{sample.mean:.3f}" + ("" if sample.half_range is None else f" ± {sample.half_range:.3f}")


def _ratio(sample: Sample, missing: str = "") -> str:
    if sample.mean is None:
        return missing
    spread = "" if sample.half_range is None else f" ± {sample.half_range:.2f}"
    lacking = len(sample.values) - len(sample.known)
    return f"{sample.mean:.2f}{spread}" + (f" (not reached by {lacking})" if lacking and missing else "")


def _remarks(one: Summary) -> list[str]:
    remarks = []
    tried = f"{one.rates[0]:g} to {one.rates[-1]:g}"
    if one.rate is None:
        remarks.append(f"no run of the grid {tried} came to its end")
    elif one.is_at_end:
        remarks.append(f"(!) the best rate is an end of the grid {tried}: a better one may lie outside")
    elif len(one.rates) == 1:
        remarks.append("one rate, not tuned")
    lost = [record for record in (*one.runs, *one.losers) if record.final_loss is None]
    remarks += [
        f"lr {record.run.rate:g} seed {record.run.seed} {record.measured.outcome}: {record.measured.reason}"
        for record in lost
    ]
    return remarks


def run_rows(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Make the rows of the table of all runs.

    Args:
        records: in the order of the rows.

    Returns:
        Cells as `RUN_HEADERS` names them.
    """
    return [
        (
            CONTENDERS[record.run.optimizer].label,
            f"{record.run.rate:g}",
            str(record.run.seed),
            "none" if record.final_loss is None else f"{record.final_loss:.4f}",
            "none" if record.measured.train_loss_at_end is None else f"{record.measured.train_loss_at_end:.4f}",
            str(record.measured.train[-1][0] if record.measured.train else 0),
            f"{record.measured.seconds:.1f}",
            record.measured.outcome + (f": {record.measured.reason}" if record.measured.reason else ""),
        )
        for record in records
    ]


def notes(report: Report) -> list[str]:
    """Say how the figures were made, and what is to be kept in mind.

    Args:
        report: the comparison.

    Returns:
        Sentences, one a line.
    """
    settings, corpus, machine = report.settings, report.corpus, report.environment["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in report.environment["versions"].items() if number)
    lines = [
        f"{settings.steps} steps on {corpus['title']}: {corpus['train_tokens']:,} training tokens, "
        f"{corpus['vocabulary']:,} ids. The held-out loss is over the same {corpus['held_out_tokens']:,} tokens every "
        f"time, at an interval of {settings.eval_interval} steps and at the end.",
        f"Each learning rate of a grid was run with seed {settings.seeds[0]}; the one with the lowest held-out loss at "
        "the end was run with the other seeds. Means over seeds, ± half the range.",
        "Steps, seconds and tokens per second are of AdamW's with the same seed. Seconds are those of training steps, "
        "without start-up and evaluations; between evaluations the held-out curve is taken as straight. A run that is "
        "over before AdamW's counts with its final loss at AdamW's seconds; one not evaluated by then has none.",
    ]
    if report.reference_seconds.mean is not None:
        lines.append(f"AdamW's runs took {report.reference_seconds.mean:.1f} s on average.")
    elif not any(one.name == REFERENCE for one in report.summaries):
        lines.append("AdamW was not among the optimizers, so nothing is measured against it.")
    lines.append(
        f"{machine['processor']}, {machine['cores']} cores; float32 on CPU, {settings.conditions}: the "
        f"same for all optimizers. {versions}."
    )
    present = {one.name for one in report.summaries}
    lines += [f"{c.label}: {c.remark}." for c in CONTENDERS.values() if c.remark and c.name in present]
    if settings.shampoo_flags:
        lines.append(f"Our methods with {' '.join(settings.shampoo_flags)}.")
    if settings.flags:
        lines.append(f"All with {' '.join(settings.flags)}.")
    return [*lines, *_warnings(report)]


def _warnings(report: Report) -> list[str]:
    commit = report.environment["commit"]
    state = " with changes" if report.environment["is_modified"] else ""
    lines = [f"Commit {commit}{state}." if commit else "Not from a git checkout."]
    old = [r for r in report.records if r.environment["sources"] != report.environment["sources"]]
    if old:
        commits = sorted({str(record.environment["commit"])[:12] for record in old})
        lines.append(
            f"Warning: {len(old)} of {len(report.records)} runs were made by other sources than the present ones "
            f"(commit {', '.join(commits)}) and reused; another --out repeats them."
        )
    busy = [r for r in report.records if r.load_average > report.settings.jobs * report.settings.threads + 0.5]
    if busy:
        lines.append(
            f"Warning: when {len(busy)} of {len(report.records)} runs started the machine had more to do than the "
            f"comparison (load up to {max(record.load_average for record in busy):.1f}): their seconds are too many."
        )
    return lines


def markdown(report: Report) -> str:
    """Write the comparison as Markdown.

    Args:
        report: the comparison.

    Returns:
        Both tables and the notes.
    """
    return "\n".join(
        [
            *_markdown_table(HEADERS, rows(report.summaries, len(report.settings.seeds))),
            "",
            *(f"- {line}" for line in notes(report)),
            f"- `{' '.join(report.command)}`",
            "",
            "All runs:",
            "",
            *_markdown_table(RUN_HEADERS, run_rows(report.records)),
            "",
        ]
    )


def _markdown_table(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    lines = [headers, ["---"] * len(headers), *cells]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def show(report: Report, console: Console) -> None:
    """Print the comparison.

    Args:
        report: the comparison.
        console: where.
    """
    summaries = report.summaries
    _print_table("All runs", RUN_HEADERS, run_rows(report.records), console)
    # Remarks may be long: on a terminal they stand below.
    cells = [line[:-1] for line in rows(summaries, len(report.settings.seeds))]
    _print_table("Comparison", HEADERS[:-1], cells, console)
    remarks = [f"{one.label}: {remark}" for one in summaries for remark in _remarks(one)]
    for line in [*remarks, *notes(report)]:
        console.print(line, highlight=False, markup=False)


def _print_table(title: str, headers: Sequence[str], cells: Sequence[Sequence[str]], console: Console) -> None:
    table = Table(*headers, title=title)
    for line in cells:
        table.add_row(*map(escape, line))
    console.print(table)


def to_json(report: Report) -> dict[str, Any]:
    """Turn the comparison into what JSON can hold: every figure of the tables, and every run with its curves."""
    return {
        "command": list(report.command),
        "settings": asdict(report.settings),
        "corpus": dict(report.corpus),
        "environment": dict(report.environment),
        "reference": REFERENCE,
        "reference_seconds": report.reference_seconds.to_json(),
        "optimizers": [_summary_to_json(one) for one in report.summaries],
        "runs": [record_to_json(record) for record in report.records],
        "notes": notes(report),
    }


def _summary_to_json(one: Summary) -> dict[str, Any]:
    names = ("held_out", "train", "at_reference_seconds", "steps_to_reference", "seconds_to_reference", "speed")
    samples = {name: getattr(one, name).to_json() for name in (*names, "tokens_per_second")}
    return {
        "name": one.name,
        "label": one.label,
        "rate": one.rate,
        "rates": list(one.rates),
        "is_at_end_of_grid": one.is_at_end,
        "seeds": [record.run.seed for record in one.finished],
        **samples,
        "remarks": _remarks(one),
    }
