"""Which plots a set of runs is good for, what each shows, and in plain words how it is read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from shardwise.report.against import (
    draw_lr,
    draw_metric,
    draw_reaching,
    drawn_values,
    final_spacing,
    marked,
    near,
)
from shardwise.report.analysis import Analysis, Cell
from shardwise.report.curves import MAX_CURVES, MAX_POINTS, chosen, colouring, curve_values, draw_curves
from shardwise.report.direction import direction
from shardwise.report.diverged import curves_apart, loss_curve
from shardwise.report.figure import MAX_ENTRIES, Theme
from shardwise.report.labels import telling
from shardwise.report.runs import Run
from shardwise.report.scaling import PERFECT, SAVING
from shardwise.report.spacing import spacing, spacing_said

MAX_LR_PLOTS = 4
TITLE = 62
"""Letters of a title that stay in one line."""


@dataclass(frozen=True)
class Plot:
    """One plot of a report."""

    name: str
    """Of its file, without .png."""
    title: str
    caption: str
    draw: Callable[[Theme], Figure]
    rules: str = ""
    """How exactly the points come about, for those who ask."""


def make_plots(analysis: Analysis) -> tuple[list[Plot], list[str]]:
    """The plots that the runs allow, and for each of the others in one sentence what it needs."""
    plots, lacking = _curve_plots(analysis)
    for make in (_metric_plot, _target_plots, _lr_plots):
        made, why = make(analysis)
        plots += made
        lacking += why
    return plots, lacking


# ---- over the training ---------------------------------------------------------------------------------------------


def _curve_plots(analysis: Analysis) -> tuple[list[Plot], list[str]]:
    everything = list(analysis.runs)
    names = {name for run in everything for name in run.metrics}
    loss = loss_curve(everything, analysis.metric)
    plots = []
    if loss is not None:
        how = _how_drawn(analysis, loss)
        rises = _rises(analysis, loss)
        plots.append(
            Plot(
                "loss_over_steps",
                f"{loss} over optimizer steps",
                f"How {loss} went down, one curve for each run, against the number of updates of the weights. {how}",
                partial(draw_curves, chosen(everything, loss), loss, "steps", rises=rises),
            )
        )
        plots.append(
            Plot(
                "loss_over_samples",
                f"{loss} over samples",
                f"The same curves against the training samples seen: where curves of different batch sizes lie on each "
                f"other, the larger batch learns as much from each sample as the smaller. {how}",
                partial(draw_curves, chosen(everything, loss), loss, "samples", rises=rises),
            )
        )
    target, last = analysis.target, analysis.metric.rpartition("/")[2]
    wanted = (target.metric,) if target is not None else (analysis.metric, f"val/{last}", "val/loss")
    name = next((name for name in wanted if name != loss and name in names and chosen(everything, name)), None)
    if name is not None:
        crossed = "" if target is None else f"The dashed line is the target, {target} ({target.why}). "
        plots.append(
            Plot(
                "metric_over_steps",
                f"{name} over optimizer steps",
                f"How {name} went, one curve for each run. {crossed}{_how_drawn(analysis, name)}",
                partial(
                    draw_curves,
                    chosen(everything, name),
                    name,
                    "steps",
                    target=target,
                    rises=_rises(analysis, name),
                ),
            )
        )
    return plots, [] if plots else ["Curves over the training: no run has logged a metric twice."]


def _how_drawn(analysis: Analysis, metric: str) -> str:
    runs = chosen(list(analysis.runs), metric)
    apart = curves_apart(list(analysis.runs), metric)[1]
    has = sum(metric in run.metrics for run in analysis.runs) - len(apart)
    by = colouring(runs).by
    text = f"Colour says the {by}. " if by else ""
    if has > len(runs) and len(runs) == MAX_CURVES:
        text += f"{MAX_CURVES} of the {has} runs are drawn, chosen evenly over batch sizes and settings. "
    if any(len(run.metrics[metric].values) > MAX_POINTS for run in runs):
        text += f"Each curve has at most {MAX_POINTS} points, each a mean over neighbouring ones. "
    if apart:
        text += f"{_runs_said(len(apart))} diverged, not shown. "
    values = curve_values(runs, metric, analysis.target)
    spaced = spacing(values, rises=_rises(analysis, metric))
    return (text.strip() + spacing_said(values, spaced, metric)).strip()


def _rises(analysis: Analysis, metric: str) -> bool:
    """Whether a large value of a metric is good."""
    if metric == analysis.metric:
        return not analysis.below
    if analysis.target is not None and metric == analysis.target.metric:
        return not analysis.target.below
    return direction(metric) == "max"


# ---- against the batch size ----------------------------------------------------------------------------------------


def _metric_plot(analysis: Analysis) -> tuple[list[Plot], list[str]]:
    batches = {cell.batch for cells in analysis.best.values() for cell in cells}
    name = f"Final {analysis.metric} against the batch size"
    if len(batches) < 2:
        return [], [f"{name}: needs completed runs with at least two batch sizes."]
    caption = (
        f"What completed runs ended with, at each batch size. {_lines_said(list(analysis.best))} Each point is the "
        f"mean over seeds, the band their smallest and largest value. {_best_lr_said(analysis)}"
        f"A line that stays level has kept the result although the batch grew."
    )
    caption += _diverged_said(analysis.diverged)
    caption += _finals_said(analysis, [cell for cells in analysis.best.values() for cell in cells])
    return [Plot("metric_against_batch", name, caption, partial(draw_metric, analysis))], []


def _target_plots(analysis: Analysis) -> tuple[list[Plot], list[str]]:
    target = analysis.target
    if target is None:
        return [], [
            "Steps to a target against the batch size: needs completed runs with at least two batch sizes, and a "
            "metric that is logged at least three times a run."
        ]
    batches = {cell.batch for reaching in analysis.reaching.values() for cell in reaching.cells}
    if len(batches) < 2:
        return [], [
            f"Steps to the target ({target}): needs completed runs that reach it with at least two batch sizes."
        ]
    caption = (
        f"How many updates it took to reach {target}, at each batch size, both axes in ratios. The dotted line is "
        f"perfect scaling: twice the batch, half the steps."
    )
    missed = sum(len(reaching.missed) for reaching in analysis.reaching.values())
    if missed:
        caption += f" Open markers: not reached ({missed} time{'s' * (missed > 1)}) in the steps trained."
    rules = (
        f"The target is {target.value:.4g}, {target.why}. When a run reaches it is read off the straight line between "
        f"the logged points around it. At each batch size the learning rate that got there first is taken, and the "
        f"median of its seeds; bars go from the fastest seed to the slowest that got there. Perfect scaling starts at "
        f"the smallest batch that reached the target. {_lines_said(list(analysis.reaching))}"
    )
    if analysis.at_first:
        rules += (
            f" {_runs_said(analysis.at_first)} had reached it by the first logged point and may have done so sooner: a "
            f"level stretch there can come from how seldom the metric was logged."
        )
    rules = f"{rules.strip()} {_regions_said(analysis)}".strip()
    if noise := _noise_said(analysis):
        caption += f" {noise}"
    samples = (
        "How many training samples it took to reach the target. A level line means that no sample is wasted by a "
        "larger batch; where it rises, a larger batch costs more computing for the same result. Target and points are "
        "those of the plot of steps."
    )
    seconds = (
        "How long it took to reach the target, in wall-clock seconds from the first logged line, validations and "
        "pauses included. It is only comparable among runs on the same, equally busy machine. Target and points are "
        "those of the plot of steps."
    )
    return [
        Plot(
            "steps_to_target",
            "Steps to the target against the batch size",
            caption,
            partial(draw_reaching, analysis, "steps"),
            rules,
        ),
        Plot(
            "samples_to_target",
            "Samples to the target against the batch size",
            samples,
            partial(draw_reaching, analysis, "samples"),
        ),
        Plot(
            "time_to_target",
            "Time to the target against the batch size",
            seconds,
            partial(draw_reaching, analysis, "seconds"),
        ),
    ], []


# ---- against the learning rate -------------------------------------------------------------------------------------


def _lr_plots(analysis: Analysis) -> tuple[list[Plot], list[str]]:
    name = f"Final {analysis.metric} against the learning rate"
    tried: dict[str, list[Cell]] = {}
    for cell in analysis.cells:
        if cell.final is not None and cell.lr is not None and cell.lr > 0:
            tried.setdefault(cell.series, []).append(cell)
    several = [series for series in analysis.best if len({cell.base_lr for cell in tried.get(series, [])}) > 1]
    if not several:
        if len({cell.base_lr for cells in tried.values() for cell in cells}) < 2:
            return [], [f"{name}: needs completed runs with at least two values of optimizer.lr."]
        cells = [cell for series in tried.values() for cell in series]
        caption = (
            "Each point is one setting at its learning rate; they differ in other things too, so no line joins them."
        )
        caption += _diverged_said(analysis.diverged) + _finals_said(analysis, cells)
        return [Plot("metric_against_lr", name, caption, partial(draw_lr, analysis, cells, False))], []
    plots = []
    shown = several[:MAX_LR_PLOTS]
    for at, (series, own) in enumerate(zip(shown, telling(shown, width=TITLE), strict=True)):
        of = "" if series == "all runs" else f" ({series})"
        title = name if not of else f"{name} ({own if len(name) + len(own) < TITLE else f'setting {at + 1}'})"
        caption = (
            f"What completed runs{of} ended with, at each learning rate as it was used (after the rule that scales "
            f"it), one line for each batch size. Points are means over seeds, bars their smallest and largest value; "
            f"a ring marks the best of each line. If the best lies at an end of its line, a better rate may lie beyond."
        )
        caption += _diverged_said([run for run in analysis.diverged if run.series == series])
        if len(several) > MAX_LR_PLOTS:
            caption += f" The {MAX_LR_PLOTS} best of {len(several)} settings have such a plot."
        caption += _finals_said(analysis, tried[series])
        suffix = f"_{at + 1}" if len(several) > 1 else ""
        plots.append(
            Plot(f"metric_against_lr{suffix}", title, caption, partial(draw_lr, analysis, tried[series], True))
        )
    return plots, []


# ---- shared --------------------------------------------------------------------------------------------------------


def _runs_said(number: int) -> str:
    return f"{number} run{'s' * (number != 1)}"


def _diverged_said(runs: Sequence[Run]) -> str:
    return f" {_runs_said(len(runs))} diverged, not shown." if runs else ""


def _lines_said(series: Sequence[str]) -> str:
    if len(series) == 1:
        return ""
    if len(series) <= MAX_ENTRIES:
        return f"One line for each of {len(series)} settings, the best first."
    return f"One line for each of {len(series)} settings: the {MAX_ENTRIES} best have a colour, the others are faint."


def _finals_said(analysis: Analysis, cells: Sequence[Cell]) -> str:
    values = drawn_values(cells)
    return spacing_said(values, final_spacing(analysis, values), analysis.metric)


def _best_lr_said(analysis: Analysis) -> str:
    keys = {(cell.series, cell.batch) for cell in analysis.cells}
    return "At each batch size the best of its learning rates is taken. " if len(keys) < len(analysis.cells) else ""


def _regions_said(analysis: Analysis) -> str:
    series = marked(analysis)
    if series is None:
        return "With fewer than three batch sizes that reach the target no regions are marked. "
    of = "" if series == "all runs" else f" (of {series})"
    return (
        f"The shaded regions{of}: perfect scaling, up to the largest batch before one takes more than {PERFECT:g} "
        f"times the steps of the dotted line; the plateau, from where no doubling of the batch saves {SAVING:.0%} of "
        f"the steps; diminishing returns between them. What lies beyond the batches that reached it is not known. "
    )


def _noise_said(analysis: Analysis) -> str:
    noise = analysis.critical_batch
    if noise is None:
        return ""
    batches = sorted({cell.batch for cell in analysis.cells})
    where = "The upright line is" if near(noise, batches) else "Too far off to be drawn is"
    return f"{where} the critical batch size that the gradient noise says, about {noise:,.0f} samples."
