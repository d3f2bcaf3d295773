"""Heat maps rank x step."""

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shardwise.report.figure import SIZE, Theme, count, new_figure, number_axis
from shardwise.show.axes import MAX_LINES, any_finite, largest_of, rank_axis, time_unit
from shardwise.show.findings import Slow
from shardwise.show.ranks import Ranks

MAX_ROWS = 256
"""Rows of a heat map: of more ranks, each row is the slowest of several."""
SCALE = "viridis"


def draw_heat(ranks: Ranks, matrix: np.ndarray, slow: Sequence[Slow], theme: Theme) -> Figure:
    """Rank x step, bright where it takes long; the scale begins at nothing, so that equal ranks look equal."""
    figure, axes = new_figure()
    rows, width = len(matrix), SIZE[0]
    figure.set_size_inches(width, min(SIZE[1], 1.6 + 0.22 * rows))
    each = math.ceil(rows / MAX_ROWS)
    shown = matrix if each == 1 else np.stack([largest_of(matrix[at : at + each]) for at in range(0, rows, each)])
    factor, unit = time_unit(float(np.nanmax(shown)) if any_finite(shown) else 0.0)
    top = scale_top(shown) * factor
    colours = matplotlib.colormaps[SCALE].with_extremes(bad=theme.grid)
    bottom = np.minimum(np.arange(len(shown) + 1) * each, rows) - 0.5
    mesh = axes.pcolormesh(
        ranks.edges, bottom, np.ma.masked_invalid(shown * factor), cmap=colours, vmin=0, vmax=top, linewidth=0
    )
    axes.grid(False)
    axes.set_ylim(rows - 0.5, -0.5)
    number_axis(axes, "x", log=False, label="optimizer steps")
    axes.set_ylabel("rank" if each == 1 else f"rank (the slowest of {each})")
    rank_axis(axes.yaxis, ranks)
    _mark_slow(axes, slow, theme, rows=rows)
    clipped = any_finite(shown) and float(np.nanmax(shown)) * factor > top * 1.001
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, extend="max" if clipped else "neither")
    bar.set_label(f"{unit} a step")
    bar.locator = MaxNLocator(4)
    bar.formatter = FuncFormatter(count)
    bar.update_ticks()
    bar.outline.set_visible(False)
    return figure


def scale_top(matrix: np.ndarray) -> float:
    """The value at the bright end of the scale: the largest, unless a few are far beyond all others.

    It is twice the median at least: where all ranks take the same, none is bright.
    """
    fine = matrix[np.isfinite(matrix)]
    if not len(fine) or fine.max() <= 0:
        return 1e-3
    rows = np.array([np.nanmedian(row) for row in matrix if any_finite(row)])  # a slow rank stays within the scale
    usual = max(float(np.percentile(fine, 98)), float(rows.max()) * 1.05)
    return max(2 * float(np.median(fine)), float(fine.max()) if fine.max() < 1.5 * usual else usual)


def _mark_slow(axes: Axes, slow: Sequence[Slow], theme: Theme, *, rows: int) -> None:
    """The slow ranks pointed at, on the left of their rows."""
    for one in slow[: MAX_LINES if rows > MAX_LINES else rows]:
        axes.plot(
            [0.0],
            [one.row],
            ">",
            color=theme.mark,
            markersize=9,
            transform=axes.get_yaxis_transform(),
            clip_on=False,
            zorder=9,
        )
