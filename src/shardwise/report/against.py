"""Plots against the batch size and the learning rate, a line a setting."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from shardwise.report.analysis import Analysis, Cell, Spread
from shardwise.report.figure import (
    LABEL,
    LINES,
    MARKERS,
    MAX_ENTRIES,
    MAX_SHADES,
    Theme,
    batch_axis,
    legend,
    log_shares,
    new_figure,
    number_axis,
    plain,
    shade_bar,
    wants_log,
)
from shardwise.report.labels import telling
from shardwise.report.scaling import perfect_steps
from shardwise.report.spacing import metric_axis, spacing

SQUEEZED = 8.0
"""Ratio of the values of a metric above which its axis is logarithmic."""


def draw_metric(analysis: Analysis, theme: Theme) -> Figure:
    figure, axes = new_figure()
    lines = {series: [(cell, cell.final) for cell in cells] for series, cells in analysis.best.items()}
    handles = _draw_lines(axes, lines, theme, band=True)
    batch_axis(axes, _batches(line for line in lines.values()))
    values = drawn_values(cell for cells in analysis.best.values() for cell in cells)
    metric_axis(axes, values, spaced=final_spacing(analysis, values), label=analysis.metric)
    legend(figure, handles)
    return figure


def drawn_values(cells: Iterable[Cell]) -> list[float]:
    """The means and the ends of the bands of a plot of the metric at the end."""
    finals = [cell.final for cell in cells if cell.final]
    return [value for spread in finals for value in (spread.low, spread.middle, spread.high)]


def final_spacing(analysis: Analysis, values: Sequence[float]) -> str:
    return spacing(values, rises=not analysis.below, ratio=SQUEEZED if analysis.below else 30.0)


def draw_reaching(analysis: Analysis, what: str, theme: Theme) -> Figure:
    figure, axes = new_figure()
    lines = {
        series: [(cell, getattr(cell, what)) for cell in reaching.cells]
        for series, reaching in analysis.reaching.items()
    }
    missed = {series: reaching.missed for series, reaching in analysis.reaching.items()}
    shown = list(lines)[:MAX_ENTRIES]
    handles = _draw_lines(axes, lines, theme, band=False)
    open_marks = False
    for at, series in enumerate(shown):
        for cell in missed[series]:
            height = {
                "steps": cell.trained,
                "samples": cell.trained * cell.batch,
                "seconds": cell.runs[0].seconds or 0.0,
            }[what]
            if height > 0:
                open_marks = True
                look: dict[str, Any] = {
                    "marker": MARKERS[at % 8],
                    "color": theme.colours[at % 8],
                    "markerfacecolor": "none",
                }
                axes.plot([cell.batch], [height], linestyle="none", **look)
                axes.annotate(
                    "",
                    (cell.batch, height * 1.25),
                    (cell.batch, height),
                    arrowprops={"arrowstyle": "->", "color": theme.faint},
                )
    if open_marks:
        empty: dict[str, Any] = {"marker": "o", "linestyle": "none", "markerfacecolor": "none", "color": theme.faint}
        handles.append(Line2D([], [], label="not reached", **empty))
    batches = _batches([*lines.values(), *([(cell, None) for cell in cells] for cells in missed.values())])
    batch_axis(axes, batches)
    values = [spread.middle for line in lines.values() for _, spread in line if spread]
    number_axis(axes, "y", log=what == "steps" or wants_log(values, ratio=8), label=f"{_units(what)} to the target")
    if what == "steps":
        number_axis(axes, "y", log=True, label="")
        bottom = axes.get_ylim()[0] / 2  # where perfect scaling would go is clear by then
        handles += _draw_perfect(axes, analysis, shown, theme)
        _draw_regions(axes, analysis, theme)
        handles += _draw_noise(axes, analysis, batches, theme)
        axes.set_ylim(bottom=max(axes.get_ylim()[0], bottom))
        number_axis(axes, "y", log=True, label=f"{_units(what)} to the target")
    legend(figure, handles)
    return figure


def _draw_perfect(axes: Axes, analysis: Analysis, shown: Sequence[str], theme: Theme) -> list[Line2D]:
    """Perfect scaling from the smallest batch of each line, down to its largest."""
    drawn = False
    for at, series in enumerate(shown):
        reaching = analysis.reaching[series]
        steps = [cell.steps.middle for cell in reaching.cells if cell.steps]
        batches = [cell.batch for cell in reaching.cells]
        if len(batches) > 1:
            colour = theme.faint if len(shown) == 1 else theme.colours[at % 8]
            axes.plot(batches, perfect_steps(batches, steps), linestyle=":", linewidth=1.3, color=colour, alpha=0.9)
            drawn = True
    return [Line2D([], [], linestyle=":", color=theme.faint, label="perfect scaling")] if drawn else []


def marked(analysis: Analysis) -> str | None:
    """The line whose regions are marked: the first, by its final metric, that has any."""
    return next((series for series, reaching in analysis.reaching.items() if reaching.regions), None)


def _draw_regions(axes: Axes, analysis: Analysis, theme: Theme) -> None:
    series = marked(analysis)
    if series is None:
        return
    found = analysis.reaching[series].regions
    assert found is not None
    low, high = axes.get_xlim()
    batches = [cell.batch for cell in analysis.reaching[series].cells]
    first = max(found.perfect_to, batches[0])
    second = batches[-1] if found.plateau_from is None else max(found.plateau_from, first)
    spans = [(batches[0], first, "perfect"), (first, second, "diminishing"), (second, batches[-1], "plateau")]
    for at, (start, end, word) in enumerate(spans):
        if end <= start * 1.0001:
            continue
        axes.axvspan(start, end, color=theme.faint, alpha=(0.06, 0.14, 0.24)[at], linewidth=0, zorder=0)
        if math.log(end / start) > 0.14 * math.log(high / low):
            axes.text(
                math.sqrt(start * end), 1.01, word, transform=axes.get_xaxis_transform(), ha="center", fontsize=8.5
            )
    axes.set_xlim(low, high)


def near(noise: float, batches: Sequence[int]) -> bool:
    return batches[0] / 4 <= noise <= batches[-1] * 4


def _draw_noise(axes: Axes, analysis: Analysis, batches: Sequence[int], theme: Theme) -> list[Line2D]:
    noise = analysis.critical_batch
    if noise is None or not near(noise, batches):
        return []
    line = axes.axvline(noise, color=theme.mark, linestyle="-.", linewidth=1.3)
    line.set_label("gradient noise scale")
    return [line]


def draw_lr(analysis: Analysis, cells: Sequence[Cell], joined: bool, theme: Theme) -> Figure:
    figure, axes = new_figure()
    batches = sorted({cell.batch for cell in cells})
    shares = log_shares(batches)
    handles = []
    for at, batch in enumerate(batches):
        points = sorted(
            ((cell.lr or 0.0, cell.final) for cell in cells if cell.batch == batch and cell.final), key=lambda p: p[0]
        )
        colour = theme.shade(shares[batch]) if len(batches) > 1 else theme.colours[0]
        x, y = [lr for lr, _ in points], [spread.middle for _, spread in points]
        bars = [
            [spread.middle - spread.low for _, spread in points],
            [spread.high - spread.middle for _, spread in points],
        ]
        style: Any = "-" if joined else "none"
        axes.errorbar(
            x,
            y,
            yerr=bars,
            color=colour,
            marker=MARKERS[at % 8],
            markersize=5,
            linestyle=style,
            elinewidth=1,
            capsize=2,
        )
        if joined:
            best = (min if analysis.below else max)(range(len(y)), key=y.__getitem__)
            axes.plot(
                [x[best]],
                [y[best]],
                marker="o",
                markersize=12,
                markerfacecolor="none",
                markeredgecolor=theme.mark,
                linestyle="none",
            )
        handles.append(Line2D([], [], color=colour, marker=MARKERS[at % 8], linestyle=style, label=f"batch {batch:,}"))
    number_axis(axes, "x", log=True, label="learning rate at its peak")
    values = drawn_values(cells)
    metric_axis(axes, values, spaced=final_spacing(analysis, values), label=analysis.metric)
    if len(batches) > MAX_SHADES:
        shade_bar(figure, axes, batches, theme, "global batch size (samples)")
        handles = []
    if joined:
        ring: dict[str, Any] = {
            "marker": "o",
            "markersize": 9,
            "markerfacecolor": "none",
            "markeredgecolor": theme.mark,
        }
        handles.append(Line2D([], [], linestyle="none", label="best", **ring))
    legend(figure, handles)
    return figure


def _draw_lines(
    axes: Axes, lines: dict[str, list[tuple[Cell, Spread | None]]], theme: Theme, *, band: bool
) -> list[Line2D]:
    """A line for each series: the first in colours, those that no legend would hold in one faint colour."""
    handles = []
    names = telling(list(lines)[:MAX_ENTRIES], width=LABEL) if lines else []
    for at, points in reversed(list(enumerate(lines.values()))):
        fine = [(cell.batch, spread) for cell, spread in points if spread is not None]
        if not fine:
            continue
        x, y = [batch for batch, _ in fine], [spread.middle for _, spread in fine]
        if at >= MAX_ENTRIES:
            axes.plot(x, y, color=theme.faint, linewidth=0.8, alpha=0.5, marker="." if len(x) == 1 else "", zorder=1)
            continue
        colour = theme.colours[at]
        low, high = [spread.low for _, spread in fine], [spread.high for _, spread in fine]
        if band and any(spread.count > 1 for _, spread in fine):
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        elif not band:
            axes.vlines(x, low, high, color=colour, linewidth=1.2)
        look: dict[str, Any] = {"color": colour, "marker": MARKERS[at], "linestyle": LINES[at]}
        axes.plot(x, y, zorder=3, **look)
        handles.append(Line2D([], [], label=plain(names[at], width=LABEL), **look))
    handles.reverse()
    if len(lines) > MAX_ENTRIES:
        handles.append(Line2D([], [], color=theme.faint, label=f"{len(lines) - MAX_ENTRIES} others"))
    return handles if len(lines) > 1 else []


def _batches(lines) -> list[int]:
    return sorted({cell.batch for line in lines for cell, _ in line})


def _units(what: str) -> str:
    return {"steps": "optimizer steps", "samples": "training samples", "seconds": "seconds"}[what]
