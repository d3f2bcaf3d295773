"""The axis of a metric, spaced so that a few values that went wrong do not squeeze all others into a line."""

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from shardwise.report.figure import number_axis, plain, wants_log

ERROR_RATIO = 10.0
"""Largest over smallest error above which accuracies stand on a logarithmic axis of their errors."""
NO_ERROR = 0.3
"""Height of no error above the smallest one that is drawn, in decades."""


def spacing(values: Sequence[float] | np.ndarray, *, rises: bool, ratio: float = 30.0) -> str:
    """How the axis of these values is to be spaced: ``even``, ``log``, or ``error``.

    ``error`` is a logarithmic axis of 1 - value, for shares of which a large one is good (accuracies): it leaves 0.97
    and 0.99 as far apart beside a collapsed run as without it.

    Args:
        values: what is drawn; those that are no number do not count.
        rises: whether a large value is good.
        ratio: what positive values have to span for ``log``.
    """
    array = _finite(values)
    if rises and len(array) and array.min() >= 0 and array.max() <= 1:
        errors = _errors(array)
        errors = errors[errors > 0]
        return "error" if len(errors) and errors.max() / errors.min() > ERROR_RATIO else "even"
    return "log" if wants_log(array, ratio=ratio) else "even"


def spacing_said(values: Sequence[float] | np.ndarray, spaced: str, metric: str) -> str:
    """The sentence of a caption on an axis that is spaced by errors; nothing for the others."""
    if spaced != "error":
        return ""
    text = (
        f" The axis is logarithmic in the error, 1 - {metric}: from 0.98 to 0.99 is as far as from 0.8 to 0.9, and "
        f"nothing is cut off."
    )
    return text + (" A value of 1, no error, lies at the top." if (_errors(_finite(values)) == 0).any() else "")


def metric_axis(axes: Axes, values: Sequence[float] | np.ndarray, *, spaced: str, label: str) -> None:
    """Scale, ticks and label of a y axis that ``spacing`` has chosen for these values."""
    if spaced != "error":
        number_axis(axes, "y", log=spaced == "log", label=label)
        return
    errors = _errors(_finite(values))
    least, most = float(errors[errors > 0].min()), float(errors.max())
    axes.set_yscale("function", functions=(partial(_height, least=least), partial(_value, least=least)))
    parts = (1,) if most / least > 1000 else (1, 2, 5)
    decades = range(math.floor(math.log10(least)), 1)
    ticks = {round(1 - part * 10.0**decade, 12) for decade in decades for part in parts if part * 10.0**decade <= 1}
    ends = _height(np.array([1 - most, 1 - errors.min()]), least=least)
    margin = 0.05 * (ends[1] - ends[0])
    axes.set_ylim(*_value(ends + np.array([-margin, margin]), least=least))  # the automatic limits leave room empty
    low, high = axes.get_ylim()
    shown = sorted(tick for tick in ticks if low <= tick <= min(high, 1 - least / 1.5))
    axes.yaxis.set_major_locator(FixedLocator([*shown, *([1.0] if errors.min() == 0 else [])]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axes.set_ylabel(plain(f"{label} (log scale of the error)", width=60))


def _height(values: np.ndarray, *, least: float) -> np.ndarray:
    """Logarithmic down to the smallest error, even from there to none at all and beyond, where a margin may lie."""
    errors = 1 - np.asarray(values, dtype=float)
    even = -math.log10(least) + (1 - errors / least) * NO_ERROR
    return np.where(errors >= least, -np.log10(np.maximum(errors, least)), even)


def _value(heights: np.ndarray, *, least: float) -> np.ndarray:
    """The inverse of ``_height``."""
    heights, top = np.asarray(heights, dtype=float), -math.log10(least)
    errors = np.where(heights <= top, 10.0 ** -np.minimum(heights, top), least * (1 - (heights - top) / NO_ERROR))
    return 1 - errors


def _errors(values: np.ndarray) -> np.ndarray:
    return np.round(1 - values, 12)  # 1 - 0.9 is not 0.1


def _finite(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]
