"""Tables and figure of the benchmark, from its results as they stand in `results.json`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.experiments.bench_names import BASELINES, LAYOUTS

Row = Mapping[str, Any]


def label(row: Row) -> str:
    """Name of an optimizer in a table; ours without staggering are marked.

    Args:
        row: of the results.
    """
    return row["optimizer"] if row.get("staggered", True) else f"{row['optimizer']}, not staggered"


def tables(results: Mapping[str, Any]) -> list[Table]:
    """All tables.

    Args:
        results: `steps` and `optimizer`, each may be missing.

    Returns:
        One for each layout, two for each width.
    """
    rows = results.get("steps", [])
    found = [
        steps_table(layout, [row for row in rows if row["layout"] == layout])
        for layout in dict.fromkeys(row["layout"] for row in rows)
    ]
    for width in results.get("optimizer", []):
        found.append(optimizer_table(width))
        if any("shares" in row for row in width["rows"]):
            found.append(shares_table(width))
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """All tables in Markdown.

    Args:
        results: as for `tables`.
    """
    text = io.StringIO()
    console = Console(file=text, width=1000, color_system=None)
    for table in tables(results):
        title, table.title, table.box = table.title, None, box.MARKDOWN
        console.print(f"{title}:\n", highlight=False)
        console.print(table)
    return "\n".join(line.strip() for line in text.getvalue().splitlines()) + "\n"


def steps_table(layout: str, rows: Sequence[Row]) -> Table:
    """Whole training steps on one layout.

    Args:
        layout: key of `LAYOUTS`.
        rows: of it.

    Returns:
        The table; the last columns are the tokens per second as fractions of a baseline's, by steps that were taken one
        after the other.
    """
    columns = ("steps", "median ms", "p99 ms", "p99/p50", "tokens/s", *(f"of {name}'s" for name in BASELINES))
    lines = []
    for row in rows:
        if "reason" in row:
            lines.append(_Line(label(row), [], f"did not run: {row['reason']}"))
            continue
        seconds = row["seconds"]
        ratios = [f"{1 / row[f'over_{name}']:.3f}" if f"over_{name}" in row else "" for name in BASELINES]
        times = [_ms(seconds["median"]), _ms(seconds["p99"]), f"{seconds['spread']:.2f}"]
        cells = [str(seconds["count"]), *times, f"{row['tokens_per_second']:,.0f}", *ratios]
        lines.append(_Line(label(row), cells, row["note"] or ""))
    return _table(f"Whole training steps: {LAYOUTS[layout].title}", columns, lines)


def optimizer_table(width: Mapping[str, Any]) -> Table:
    """The step of the optimizer alone.

    Args:
        width: results of one width.

    Returns:
        The table.
    """
    rates = [f"{shape} at {rate / 1e9:,.1f} GFLOP/s" for shape, rate in width["product_flops_per_second"].items()]
    title = (
        f"The optimizer alone: width {width['width']}, layers {width['layers']}, "
        f"{width['parameters'] / 1e6:,.2f} M parameters, on {width['device']} with {width['threads']} threads; "
        f"float32 products of {', '.join(rates)}"
    )
    columns = (
        "steps", "mean ms", "median ms", "p99 ms", "p99/p50",
        "floor ms", "products + roots", "mean / floor", "state B/param", "peak MiB",
    )  # fmt: skip
    lines = []
    for row in width["rows"]:
        if "reason" in row:
            lines.append(_Line(label(row), [], f"not available: {row['reason']}"))
            continue
        seconds, floor = row["seconds"], row.get("floor")
        times = [*(_ms(seconds[name]) for name in ("mean", "median", "p99")), f"{seconds['spread']:.2f}"]
        least = ["", "", ""]
        if floor:
            parts = f"{_ms(floor['products_seconds'])} + {_ms(floor['roots_seconds'])}"
            least = [_ms(floor["seconds"]), parts, f"{row['over_floor']:.2f}"]
        peak = f"{row['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in row else ""
        memory = [f"{row['state_bytes_per_parameter']:.1f}", peak]
        lines.append(_Line(label(row), [str(seconds["count"]), *times, *least, *memory], row["note"] or ""))
    return _table(title, columns, lines)


def shares_table(width: Mapping[str, Any]) -> Table:
    """Where the time of our steps goes.

    Args:
        width: results of one width.

    Returns:
        The table.
    """
    rows = [row for row in width["rows"] if "shares" in row]
    phases = list(dict.fromkeys(phase for row in rows for phase in row["shares"]))
    lines = []
    for row in rows:
        parts = [f"{row['shares'].get(phase, 0.0):.1%}" for phase in phases]
        lines.append(_Line(label(row), [*parts, f"{row['roots_per_step']:.1f}"], ""))
    return _table(f"Shares of the step: width {width['width']}", [*phases, "roots a step"], lines)


class _Line(NamedTuple):
    label: str
    cells: list[str]
    """Of the columns; none for an optimizer that did not run."""
    note: str


def _table(title: str, columns: Sequence[str], lines: Sequence[_Line]) -> Table:
    """A column for notes only where there are any."""
    table = Table(title=escape(title), title_justify="left")
    table.add_column("optimizer", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    has_notes = any(line.note for line in lines)
    if has_notes:
        table.add_column("note", overflow="fold")
    for line in lines:
        cells = line.cells or [""] * len(columns)
        table.add_row(line.label, *cells, *([escape(line.note)] if has_notes else []))
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f}" if seconds < 10 else f"{1000 * seconds:,.0f}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw all medians as bars, of ours with their phases and floors.

    Args:
        results: as for `tables`.
        path: the figure; its folder is made if missing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layouts = list(dict.fromkeys(row["layout"] for row in results.get("steps", [])))
    widths = results.get("optimizer", [])
    panels = len(layouts) + len(widths)
    figure = Figure(figsize=(9, 3.2 * max(1, panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, layout in enumerate(layouts):
        axes = figure.add_subplot(panels, 1, number + 1)
        rows = [row for row in results["steps"] if row["layout"] == layout and "seconds" in row]
        _bars(axes, rows, "median")
        axes.set_title(f"whole training step: {LAYOUTS[layout].title}")
        axes.set_xlabel("median seconds per step")
    for number, width in enumerate(widths):
        axes = figure.add_subplot(panels, 1, len(layouts) + number + 1)
        rows = [row for row in width["rows"] if "seconds" in row]
        _bars(axes, rows, "mean")
        axes.set_title(f"optimizer alone: width {width['width']}, {width['parameters'] / 1e6:,.1f} M parameters")
        axes.set_xlabel("mean seconds per step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, rows: Sequence[Row], value: str) -> None:
    phases = list(dict.fromkeys(phase for row in rows for phase in row.get("shares", {})))
    places = list(range(len(rows)))
    lengths = [row["seconds"][value] for row in rows]
    plain = [length if "shares" not in row else 0.0 for row, length in zip(rows, lengths, strict=True)]
    axes.barh(places, plain, color="0.6")
    left = [0.0] * len(rows)
    for index, phase in enumerate(phases):
        parts = [length * row.get("shares", {}).get(phase, 0.0) for row, length in zip(rows, lengths, strict=True)]
        axes.barh(places, parts, left=left, color=f"C{index}", label=phase)
        left = [start + part for start, part in zip(left, parts, strict=True)]
    floors = [(place, row["floor"]["seconds"]) for place, row in zip(places, rows, strict=True) if "floor" in row]
    if floors:
        at, seconds = zip(*floors, strict=True)
        axes.plot(seconds, at, "k|", markersize=14, label="floor")
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    axes.set_yticks(places, [label(row) for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25)
