"""The plots of one run: its curves, heat maps rank x step, the time split, and what each rank had."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from shardwise.checkpoint.manifest import printable
from shardwise.metrics_file import RANK_KINDS
from shardwise.report.curves import thinned
from shardwise.report.figure import (
    LINES,
    SIZE,
    Theme,
    legend,
    new_figure,
    number_axis,
    plain,
    wants_log,
)
from shardwise.report.runs import Curve
from shardwise.report.spacing import metric_axis, spacing
from shardwise.show.axes import (
    MAX_BARS,
    MAX_LINES,
    any_finite,
    block,
    largest_of,
    mean_of_ranks,
    numbers_in_bars,
    rank_axis,
)
from shardwise.show.findings import PHASES, Slow, mean_times, own_time, shares
from shardwise.show.heat import draw_heat
from shardwise.show.ranks import Ranks
from shardwise.show.record import Record
from shardwise.show.split import draw_phases, draw_split

MANY = 32
"""Ranks above which the slowest have a heat map of their own."""
MAX_CURVES = 24
CURVE_HEIGHT = 3.2
"""Inches."""
USUAL = ("data", "forward", "backward", "communication", "optimizer")
RARE = 0.005
"""Share of a step below which another phase has no heat map."""


@dataclass(frozen=True)
class Plot:
    """A figure of the page, drawn once for each theme."""

    title: str
    caption: str
    draw: Callable[[Theme], Figure]


def heat_maps(ranks: Ranks, slow: Sequence[Slow]) -> list[Plot]:
    """Own time first, then each phase that takes a share of a step worth showing."""
    own = own_time(ranks)
    if not np.isfinite(own).any():
        return []
    one = len(ranks.numbers) == 1
    plots = [
        Plot(
            "Own time of each rank",
            "What a rank spends itself in a step: data, forward, backward, optimizer and other, without waiting for "
            f"other ranks. {'A bright column is a slow step.' if one else 'A bright row is a slow rank.'}",
            partial(draw_heat, ranks, own, slow),
        )
    ]
    if len(ranks.numbers) > MANY:
        order = np.argsort(-np.nan_to_num(ranks.means(own)), kind="stable")
        named = [rank.row for rank in slow][:MAX_BARS]
        rows = list(dict.fromkeys([*named, *map(int, order)]))[:MAX_BARS]
        near = [replace(rank, row=rows.index(rank.row)) for rank in slow if rank.row in rows]
        few = ranks.of(rows)
        plots.append(
            Plot(
                f"Own time of the slowest {len(rows)} ranks",
                "The slow ones from near, and those that come next.",
                partial(draw_heat, few, own_time(few), near),
            )
        )
    parts = shares(ranks)
    for phase in PHASES:
        pointed = [rank for rank in slow if phase in (rank.phase, "communication")]
        if parts.get(phase, 0) >= (0 if phase in USUAL else RARE) and f"time/{phase}" in ranks.values:
            plots.append(
                Plot(phase, _caption(phase), partial(draw_heat, ranks, ranks.matrix(f"time/{phase}"), pointed))
            )
    return plots


def time_plots(ranks: Ranks, slow: Sequence[Slow]) -> list[Plot]:
    """The time split of each rank, in milliseconds and in percent, and how it went over the run."""
    if not mean_times(ranks):
        return []
    after = "means over the logging steps after the first"
    plots = [
        Plot("Time of a step, by rank", f"In milliseconds, {after}.", partial(draw_split, ranks, slow, percent=False)),
        Plot(
            "Time split, by rank",
            f"In percent of each rank's step, {after}.",
            partial(draw_split, ranks, slow, percent=True),
        ),
    ]
    if len(ranks.counts) > 1:
        plots.append(
            Plot(
                "Time of a step over the run", "The mean over all ranks, in milliseconds.", partial(draw_phases, ranks)
            )
        )
    return plots


def memory_plots(ranks: Ranks, slow: Sequence[Slow]) -> list[Plot]:
    """Memory over the run, and the peak of each rank."""
    plots = [
        Plot(_title(name), _memory_caption(name), partial(draw_quantity, ranks, name, slow))
        for name in sorted(ranks.values)
        if name.startswith("memory/") and name != "memory/peak" and any_finite(ranks.values[name])
    ]
    if "memory/peak" in ranks.largest:
        text = "The most that each rank held at a time: on a GPU memory of tensors, else resident memory."
        plots.append(Plot("Peak memory, by rank", text, partial(draw_peaks, ranks, slow)))
    return plots


def other_plots(ranks: Ranks, slow: Sequence[Slow]) -> list[Plot]:
    """Everything else that ranks measured: losses and gradients of their own, devices, nodes."""
    names = [name for name in sorted(ranks.values) if name.startswith(("rank/", "gpu/", "node/")) and len(name) < 60]
    captions = {
        "rank/loss": "The mean loss of each rank's own samples.",
        "rank/grad_norm": "The norm of the gradients that each rank holds.",
    }
    return [
        Plot(_title(name), captions.get(name, ""), partial(draw_quantity, ranks, name, slow))
        for name in names[:MAX_CURVES]
    ]


def curve_plots(record: Record) -> tuple[list[Plot], int]:
    """A plot for each metric, train, val and test of one name together; and how many metrics had no room."""
    groups: dict[str, list[str]] = {}
    for name, curve in record.metrics.items():
        if name in ("samples", "tokens", "epoch") or name.startswith(RANK_KINDS) or not np.isfinite(curve.values).any():
            continue
        kind, _, rest = name.partition("/")
        groups.setdefault(rest if kind in ("train", "val", "test") and rest else name, []).append(name)
    order = [
        "loss",
        "accuracy",
        "lr",
        "grad_norm",
        "samples_per_second",
        "tokens_per_second",
        "flops_per_second",
        "mfu",
    ]
    place = {name: at for at, name in enumerate(order)}
    chosen = sorted(groups, key=lambda name: (place.get(name, 99), name))
    plots = []
    for name in chosen[:MAX_CURVES]:
        curves = {one: record.metrics[one] for one in sorted(groups[name], reverse=True)[:MAX_LINES]}
        plots.append(Plot(printable(name).replace("_", " ")[:60], "", partial(draw_curves, curves, name)))
    return plots, len(chosen) - len(plots)


def draw_quantity(ranks: Ranks, name: str, slow: Sequence[Slow], theme: Theme) -> Figure:
    """One quantity over the run: a line a rank, or of many ranks the mean and the range."""
    figure, axes = new_figure()
    matrix, (factor, unit) = ranks.matrix(name), _quantity_unit(name, ranks.largest[name])
    rows = [row for row in range(len(matrix)) if any_finite(matrix[row])]
    x, handles = ranks.edges[1:], []
    if len(rows) <= MAX_LINES:
        for at, row in enumerate(rows):
            look: dict[str, Any] = {"color": theme.colours[at % 8], "linestyle": LINES[at % 8]}
            axes.plot(x, matrix[row] * factor, marker="." if len(x) == 1 else "", linewidth=1.5, **look)
            handles.append(Line2D([], [], label=f"rank {ranks.numbers[row]}", **look))
        handles = handles if len(rows) > 1 else []
    else:
        own = matrix[rows] * factor
        low, high = -largest_of(-own), largest_of(own)
        axes.fill_between(x, low, high, color=theme.colours[0], alpha=0.25, linewidth=0)
        axes.plot(x, mean_of_ranks(own), color=theme.colours[0], linewidth=1.5)
        handles = [Line2D([], [], color=theme.colours[0], label="mean of the ranks")]
        handles.append(block((theme.colours[0], 0.25), "least to most"))
        apart = int(np.nanargmax(np.nanmax(own, axis=1)))
        axes.plot(x, own[apart], color=theme.colours[1], linewidth=1.1)
        handles.append(Line2D([], [], color=theme.colours[1], label=f"rank {ranks.numbers[rows[apart]]} (the most)"))
    number_axis(axes, "x", log=False, label="optimizer steps")
    axes.set_xlim(ranks.edges[0], float(ranks.edges[-1]) * 1.02)
    if name.startswith("memory/") or unit == "%":
        axes.set_ylim(0, 1.08 * float(np.nanmax(matrix)) * factor or 1)
    number_axis(axes, "y", log=False, label=plain(_title(name) + (f" ({unit})" if unit else "")))
    legend(figure, handles)
    return figure


def draw_peaks(ranks: Ranks, slow: Sequence[Slow], theme: Theme) -> Figure:
    """The peak memory of each rank."""
    figure, axes = new_figure()
    peaks, rows = ranks.largest["memory/peak"], len(ranks.numbers)
    factor, unit = _quantity_unit("memory/peak", peaks)
    heights = np.nan_to_num(peaks) * factor
    if rows <= MAX_BARS:
        figure.set_size_inches(SIZE[0], 1.3 + 0.3 * rows)
        axes.barh(np.arange(rows), heights, height=0.8, color=theme.colours[0])
        numbers_in_bars(axes, np.zeros(rows), heights, float(heights.max()), theme)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.set_yticks(np.arange(rows), [f"rank {rank}" for rank in ranks.numbers])
        axes.grid(False, axis="y")
        number_axis(axes, "x", log=False, label=f"peak memory ({unit})")
    else:
        axes.fill_between(
            np.arange(rows + 1) - 0.5, np.append(heights, heights[-1]), step="post", color=theme.colours[0]
        )
        axes.set_xlim(-0.5, rows - 0.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("rank")
        rank_axis(axes.xaxis, ranks)
        number_axis(axes, "y", log=False, label=f"peak memory ({unit})")
    return figure


def draw_curves(curves: dict[str, Curve], name: str, theme: Theme) -> Figure:
    """Metrics of one name over the steps."""
    figure, axes = new_figure()
    figure.set_size_inches(SIZE[0], CURVE_HEIGHT)
    lines, handles = {}, []
    for at, (one, curve) in enumerate(curves.items()):
        line = lines[one] = thinned(curve.steps, curve.values)
        marker = "o" if len(line) < 30 else ""
        look: dict[str, Any] = {
            "color": theme.colours[at % 8],
            "linestyle": LINES[at % 8],
            "marker": marker,
            "markersize": 3.5,
        }
        axes.add_collection(
            LineCollection([line], colors=[look["color"]], linestyles=[look["linestyle"]], linewidths=1.6)
        )
        if marker:
            axes.plot(line[:, 0], line[:, 1], linestyle="none", color=look["color"], marker=marker, markersize=3.5)
        handles.append(Line2D([], [], label=plain(one), **look))
    axes.autoscale_view()
    if len(last := [float(line[-1, 0]) for line in lines.values() if len(line)]) and max(last) > 0:
        axes.set_xlim(0, max(last) * 1.02)
    number_axis(axes, "x", log=False, label="optimizer steps")
    values = np.concatenate([line[:, 1] for line in lines.values()])
    label = name.replace("_", " ")
    if name.endswith("loss"):
        metric_axis(axes, values, spaced=spacing(values, rises=False), label=label)
    else:
        log = name == "grad_norm" and wants_log(values)
        if not log and values.min() >= 0 and name.endswith("_per_second"):
            axes.set_ylim(0, float(values.max()) * 1.1 or 1)
        number_axis(axes, "y", log=log, label=label)
    legend(figure, handles if len(handles) > 1 else [])
    return figure


def _quantity_unit(name: str, values: np.ndarray) -> tuple[float, str]:
    """What to multiply by, and the unit then."""
    most = float(np.nanmax(np.abs(values))) if any_finite(values) else 0.0
    if name.startswith("memory/") or name in _TRAFFIC:
        power = 3 if most >= 2**30 else 2 if most >= 2**20 else 1
        return 1024.0**-power, ("KiB", "MiB", "GiB")[power - 1] + ("/s" if name in _TRAFFIC else "")
    return 1.0, {"gpu/temperature": "°C", "gpu/power": "W"}.get(name, "%" if name in _PERCENT else "")


_TRAFFIC = ("node/disk_read", "node/disk_write", "node/network_in", "node/network_out")
_PERCENT = ("gpu/utilisation", "node/cpu", "node/memory")


def _title(name: str) -> str:
    kind, _, rest = name.partition("/")
    words = rest.replace("_", " ")[:50]
    return {
        "memory": f"{words} memory",
        "gpu": f"GPU {words}",
        "node": f"node: {words}",
        "rank": f"{words} of each rank",
    }.get(kind, words)


def _caption(phase: str) -> str:
    return {
        "data": "Waiting for the next batch.",
        "forward": "The forward pass, without communication.",
        "backward": "The backward pass, without communication.",
        "communication": "Waiting for other ranks, as far as no computation hides it: a slow rank waits least.",
        "optimizer": "The optimizer's step.",
        "logging": "Writing and sending metrics.",
        "evaluation": "Validation, as a share of the steps around it.",
        "checkpoint": "Saving, as a share of the steps around it.",
        "other": "Everything else between two steps, such as callbacks.",
    }[phase]


def _memory_caption(name: str) -> str:
    return {
        "memory/resident": "Memory that the process of a rank holds on its host.",
        "memory/allocated": "Memory of the device that tensors take.",
        "memory/reserved": "Memory of the device that the allocator holds, for tensors or empty.",
    }.get(name, "")
