"""Where the time of a step goes: its phases stacked, by rank and over the run."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from shardwise.report.figure import SIZE, Theme, legend, new_figure, number_axis
from shardwise.show.axes import MAX_BARS, MAX_LINES, block, mean_of_ranks, numbers_in_bars, rank_axis, time_unit
from shardwise.show.findings import PHASES, Slow, mean_times
from shardwise.show.ranks import Ranks


def draw_split(ranks: Ranks, slow: Sequence[Slow], theme: Theme, *, percent: bool) -> Figure:
    """The phases of each rank's step, stacked."""
    times = mean_times(ranks)
    whole = np.nansum(list(times.values()), axis=0)
    factor, unit = time_unit(float(whole.max()))
    figure, axes = new_figure()
    rows = len(ranks.numbers)
    colours, at = phase_colours(theme), np.arange(rows)
    start = np.zeros(rows)
    drawn = []
    for phase, seconds in times.items():
        length = np.nan_to_num(seconds)
        length = np.divide(length, whole, out=np.zeros(rows), where=whole > 0) * 100 if percent else length * factor
        if not (length > 0).any():
            continue
        drawn.append(phase)
        if rows <= MAX_BARS:
            axes.barh(at, length, left=start, height=0.8, color=colours[phase], linewidth=0)
            numbers_in_bars(axes, start, length, 100.0 if percent else float(whole.max() * factor), theme)
        else:
            steps = np.append(at, rows) - 0.5
            low, high = np.append(start, start[-1]), np.append(start + length, (start + length)[-1])
            axes.fill_between(steps, low, high, step="post", color=colours[phase], linewidth=0)
        start = start + length
    label = "% of a step" if percent else f"{unit} a step"
    if rows <= MAX_BARS:
        figure.set_size_inches(SIZE[0], 1.7 + 0.3 * rows)
        axes.set_ylim(rows - 0.4, -0.6)
        axes.set_yticks(at, [f"rank {rank}" for rank in ranks.numbers])
        number_axis(axes, "x", log=False, label=label)
        axes.set_xlim(0, 100 if percent else None)
        axes.grid(False, axis="y")
        for one in slow:
            axes.get_yticklabels()[one.row].set(color=theme.mark, fontweight="bold")
    else:
        axes.set_xlim(-0.5, rows - 0.5)
        axes.set_ylim(0, 100 if percent else None)
        number_axis(axes, "y", log=False, label=label)
        axes.set_xlabel("rank")
        rank_axis(axes.xaxis, ranks)
        for one in slow[:MAX_LINES]:
            axes.plot([one.row], [1.0], "v", color=theme.mark, transform=axes.get_xaxis_transform(), clip_on=False)
    legend(figure, [block(colours[phase], phase) for phase in drawn])
    return figure


def draw_phases(ranks: Ranks, theme: Theme) -> Figure:
    """Where the time of a step went over the run: the phases stacked, as means over all ranks."""
    figure, axes = new_figure()
    colours, handles = phase_colours(theme), []
    means = {phase: mean_of_ranks(ranks.matrix(f"time/{phase}")) for phase in PHASES}
    total = np.nansum(list(means.values()), axis=0)
    top = float(np.percentile(total, 99)) * 1.15
    factor, unit = time_unit(top)
    start = np.zeros(len(total))
    for phase, mean in means.items():
        height = np.nan_to_num(mean) * factor
        if (height > 0).any():
            low, high = (np.append(values, values[-1]) for values in (start, start + height))
            axes.fill_between(ranks.edges, low, high, step="post", color=colours[phase], linewidth=0)
            handles.append(block(colours[phase], phase))
            start = start + height
    axes.set_xlim(ranks.edges[0], ranks.edges[-1])
    axes.set_ylim(0, top * factor)
    number_axis(axes, "x", log=False, label="optimizer steps")
    number_axis(axes, "y", log=False, label=f"{unit} a step")
    legend(figure, handles)
    return figure


def phase_colours(theme: Theme) -> dict[str, str]:
    """Phase -> its colour; waiting for others is pale."""
    blue, orange, green, purple, pink, _, brown, teal = theme.colours
    colours = (orange, blue, purple, theme.faint, green, brown, teal, theme.text, pink)
    return dict(zip(PHASES, colours, strict=True))
