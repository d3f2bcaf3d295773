"""Plots of a metric over the training, one curve a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from shardwise.report.diverged import curves_apart
from shardwise.report.figure import (
    LABEL,
    MAX_ENTRIES,
    MAX_SHADES,
    Theme,
    count,
    legend,
    log_shares,
    new_figure,
    number_axis,
    plain,
    shade_bar,
)
from shardwise.report.labels import telling
from shardwise.report.runs import Run
from shardwise.report.scaling import Target
from shardwise.report.spacing import metric_axis, spacing

MAX_CURVES = 200
MAX_POINTS = 300
X_LABELS = {"steps": "optimizer steps", "samples": "training samples seen", "seconds": "seconds"}


@dataclass(frozen=True)
class Colouring:
    """What the colour of a curve says."""

    by: str
    """In words, for the caption; empty where it says nothing."""
    value: Callable[[Run], Any]
    values: list[Any]
    ordered: bool
    """Whether the values are sizes, shown on a scale of colours."""

    def colour(self, run: Run, theme: Theme) -> Any:
        if not self.by:
            return theme.colours[0]
        at = self.values.index(self.value(run))
        return theme.shade(log_shares(self.values)[self.values[at]]) if self.ordered else theme.colours[at]


def colouring(runs: Sequence[Run]) -> Colouring:
    """By batch size if it varies, else by what makes a line, by the learning rate, or by run."""
    batches = sorted({run.batch for run in runs})
    series = list(dict.fromkeys(run.series for run in runs))
    rates = sorted({run.lr or 0.0 for run in runs})
    if len(batches) > 1:
        return Colouring("batch size", lambda run: run.batch, batches, ordered=True)
    if 1 < len(series) <= MAX_ENTRIES:
        return Colouring("setting", lambda run: run.series, series, ordered=False)
    if len(rates) > 1 and rates[0] > 0:
        return Colouring("learning rate", lambda run: run.lr, rates, ordered=True)
    if 1 < len(runs) <= MAX_ENTRIES:
        return Colouring("run", lambda run: run.label, list(dict.fromkeys(run.label for run in runs)), ordered=False)
    return Colouring("", lambda run: None, [], ordered=False)


def chosen(runs: Sequence[Run], metric: str) -> list[Run]:
    """The runs with a curve of the metric that did not diverge; of many, an even choice over batches and settings."""
    fine, _ = curves_apart(runs, metric)
    fine.sort(key=lambda run: (run.batch, run.series, run.name))
    if len(fine) <= MAX_CURVES:
        return fine
    return [fine[at] for at in np.linspace(0, len(fine) - 1, MAX_CURVES).round().astype(int)]


def thinned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """At most MAX_POINTS points (rows of x, y), each the mean of neighbouring ones."""
    fine = np.isfinite(y)
    x, y = x[fine], y[fine]
    if len(x) > MAX_POINTS:
        edges = np.linspace(0, len(x), MAX_POINTS + 1).astype(int)[:-1]
        sizes = np.diff(np.append(edges, len(x)))
        x, y = np.add.reduceat(x, edges) / sizes, np.add.reduceat(y, edges) / sizes
    return np.column_stack([x, y])


def curve_values(runs: Sequence[Run], metric: str, target: Target | None = None) -> np.ndarray:
    """All values that a plot of these runs shows, the target's too."""
    lines = [thinned(run.metrics[metric].steps, run.metrics[metric].values)[:, 1] for run in runs]
    return np.concatenate([*lines, [target.value] if target is not None and target.metric == metric else []])


def draw_curves(
    runs: Sequence[Run], metric: str, x: str, theme: Theme, *, target: Target | None = None, rises: bool = False
) -> Figure:
    """A curve a run: ``metric`` over ``x`` (steps, samples or seconds), the target as a line across.

    Args:
        runs: as ``chosen`` gives them.
        rises: whether a large value of the metric is good.
    """
    figure, axes = new_figure()
    colours = colouring(runs)
    lines = [thinned(getattr(run.metrics[metric], x), run.metrics[metric].values) for run in runs]
    alpha, width = next(
        look for most, look in ((12, (0.95, 1.7)), (60, (0.6, 1.1)), (10**9, (0.35, 0.8))) if len(runs) <= most
    )
    axes.add_collection(
        LineCollection(lines, colors=[colours.colour(run, theme) for run in runs], alpha=alpha, linewidths=width)
    )
    axes.autoscale_view()
    ends = [line[-1, 0] for line in lines]
    log_x = max(ends) / max(min(ends), 1e-9) > 8 and min(float(line[0, 0]) for line in lines) > 0
    number_axis(axes, "x", log=log_x, label=X_LABELS[x])
    values = curve_values(runs, metric, target)
    metric_axis(axes, values, spaced=spacing(values, rises=rises), label=metric)
    handles = []
    if target is not None and target.metric == metric:
        handles.append(axes.axhline(target.value, color=theme.mark, linestyle="--", linewidth=1.2))
        handles[0].set_label(plain(f"target {target.value:.4g}"))
    if colours.by and len(colours.values) <= (MAX_SHADES if colours.ordered else MAX_ENTRIES):
        entries: dict[Any, Any] = {}
        for run in runs:
            entries.setdefault(colours.value(run), colours.colour(run, theme))
        shown = [value for value in colours.values if value in entries]
        word = "batch" if colours.by == "batch size" else "lr"
        ordered = [f"{word} {count(value)}" for value in shown] if colours.ordered else []
        for value, text in zip(shown, ordered or telling(list(map(str, shown)), width=LABEL), strict=True):
            handles.append(Line2D([], [], color=entries[value], label=plain(text, width=LABEL)))
    elif colours.by:
        shade_bar(
            figure,
            axes,
            colours.values,
            theme,
            "global batch size (samples)" if colours.by == "batch size" else colours.by,
        )
    legend(figure, handles)
    return figure
