"""Held-out loss of all contenders, against steps and against seconds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.experiments.compare_measures import Summary
from megatron.experiments.compare_records import write_atomically


def mean_curve(summary: Summary) -> list[tuple[int, float, float, float, float]]:
    """Average the held-out curves of a contender's seeds.

    Args:
        summary: of a contender.

    Returns:
        Step, mean seconds, mean loss, lowest and highest loss, for every step that all its finished runs have.
    """
    curves = [{point.step: point for point in record.measured.held_out} for record in summary.finished]
    if not curves:
        return []
    means = []
    for step in sorted(set.intersection(*(set(curve) for curve in curves))):
        points = [curve[step] for curve in curves]
        losses = [point.loss for point in points]
        seconds = sum(point.seconds for point in points) / len(points)
        means.append((step, seconds, sum(losses) / len(losses), min(losses), max(losses)))
    return means


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Draw the curves, means over seeds with the range behind.

    Args:
        summaries: of the contenders; those without a finished run are named in the legend alone.
        path: the PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, 2, sharey=True)
    for number, summary in enumerate(summaries):
        curve = mean_curve(summary)
        color, marker = f"C{number}", "o" if len(curve) == 1 else None
        rate = "no run finished" if summary.rate is None else f"lr {summary.rate:g}"
        for place, axes in enumerate(panels):
            ordinate = [point[place] for point in curve]
            axes.plot(
                ordinate, [point[2] for point in curve], color=color, marker=marker, label=f"{summary.label}, {rate}"
            )
            axes.fill_between(
                ordinate, [point[3] for point in curve], [point[4] for point in curve], color=color, alpha=0.2, lw=0
            )
    for axes, label in zip(panels, ("steps", "seconds in training steps"), strict=True):
        axes.set_xlabel(label)
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("held-out loss (nats per token)")
    panels[1].legend(frameon=False, fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format="png")
    write_atomically(path, content.getvalue())
