"""What plots of many ranks have in common: their axes, units, bars and entries of legends."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from shardwise.report.figure import Theme
from shardwise.show.ranks import Ranks

MAX_LINES = 8
"""Ranks with a line of their own; of more, the mean and what lies between the least and the most."""
MAX_BARS = 16
"""Ranks with a bar that has numbers in it."""


def rank_axis(axis: Axis, ranks: Ranks) -> None:
    """Ticks at ranks; a position on the axis is a row of the matrices."""
    rows = len(ranks.numbers)
    several = MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 8, 10])
    axis.set_major_locator(FixedLocator(range(rows)) if rows <= MAX_BARS else several)

    def number(at: float, _: Any = None) -> str:
        return str(ranks.numbers[round(at)]) if 0 <= round(at) < rows else ""

    axis.set_major_formatter(FuncFormatter(number))


def numbers_in_bars(axes: Axes, start: np.ndarray, length: np.ndarray, whole: float, theme: Theme) -> None:
    for at, (left, long) in enumerate(zip(start, length, strict=True)):
        if long > 0.09 * whole:
            axes.text(left + long / 2, at, f"{long:.3g}", ha="center", va="center", fontsize=9, color=theme.background)


def block(colour: Any, label: str) -> Line2D:
    return Line2D([], [], linestyle="none", marker="s", markersize=9, markeredgewidth=0, label=label, color=colour)


def mean_of_ranks(matrix: np.ndarray) -> np.ndarray:
    seen = np.isfinite(matrix).sum(0)
    return np.divide(np.nansum(matrix, axis=0), seen, out=np.full(matrix.shape[1], np.nan), where=seen > 0)


def time_unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if seconds >= 2 else (1e3, "ms")


def any_finite(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())


def largest_of(matrix: np.ndarray) -> np.ndarray:
    """(columns,) the largest of the rows; NaN where there is none."""
    return np.where(np.isfinite(matrix).any(0), np.max(np.where(np.isfinite(matrix), matrix, -np.inf), axis=0), np.nan)
