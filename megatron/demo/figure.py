"""Draws loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron.demo.curves import Curve

Axis = Literal["iteration", "seconds"]


def rolling_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it.

    Args:
        values: the curve.
        window: number of values, at least 1.

    Returns:
        As many values.
    """
    windows = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in windows]


def draw(
    curves: Sequence[Curve],
    path: Path,
    *,
    axis: Axis = "iteration",
    smooth: int = 1,
    lines: Mapping[str, float] | None = None,
    title: str | None = None,
) -> None:
    """Draw loss curves over each other into a PNG (or what the path's suffix says).

    Args:
        curves: at least one.
        path: the figure; its folder is made if missing.
        axis: what the abscissa is.
        smooth: log lines to average; above 1 the raw losses are drawn pale behind.
        lines: horizontal lines by name, in nats per token.
        title: above the figure.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, curve in enumerate(curves):
        _draw_curve(axes, curve, f"C{index}", axis, smooth)
    for index, (name, value) in enumerate((lines or {}).items()):
        style = ("--", ":", "-.")[index % 3]
        axes.axhline(value, color="0.4", linewidth=1, linestyle=style, label=f"{name} = {value:.2f}")
    axes.set_xlabel("iteration" if axis == "iteration" else "training time (s)")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title or "")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_curve(axes: Any, curve: Curve, color: str, axis: Axis, smooth: int) -> None:
    places: Sequence[float] = curve.iterations if axis == "iteration" else curve.seconds
    if smooth > 1:
        axes.plot(places, curve.losses, color=color, linewidth=0.8, alpha=0.3)
    axes.plot(places, rolling_mean(curve.losses, smooth), color=color, label=curve.label)
    if curve.validation:
        at = [number if axis == "iteration" else curve.seconds_at(number) for number in curve.validation]
        label = f"{curve.label}, validation"
        axes.plot(at, list(curve.validation.values()), "o", color=color, markersize=5, label=label)
