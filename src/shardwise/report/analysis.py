"""What a set of runs shows: for each line and batch the best learning rate, its spread over seeds, and what it took."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shardwise.config import nearest
from shardwise.errors import ConfigError
from shardwise.report.direction import direction
from shardwise.report.diverged import ends_apart
from shardwise.report.runs import Curve, Run, Runs
from shardwise.report.scaling import Regions, Target, derive_target, first_crossing, regions

PREFERRED = ("test/accuracy", "val/accuracy", "test/loss", "val/loss", "train/accuracy", "train/loss")
"""Metrics that are looked at if none is named, the first that most runs have."""
NOISE_SCALE = "noise_scale/critical_batch_size"
MEASURED = 5
"""Logged noise scales that a run needs to be counted."""
POINT = 0.01
"""How far from the best a batch may be to hold: one point of an accuracy, one per cent of anything else."""


@dataclass(frozen=True)
class Spread:
    """One quantity over the seeds of a cell."""

    middle: float
    low: float
    high: float
    count: int


@dataclass
class Cell:
    """The completed runs of one line, batch and learning rate: they differ in their seeds only."""

    series: str
    batch: int
    base_lr: float | None
    runs: list[Run]
    final: Spread | None = None
    """The metric at the end, its mean; None where every run diverged or has none."""
    steps: Spread | None = None
    """Optimizer steps to the target, their median; None where less than half of the runs reach it."""
    samples: Spread | None = None
    seconds: Spread | None = None
    reached: int = 0

    @property
    def lr(self) -> float | None:
        return self.runs[0].lr

    @property
    def trained(self) -> float:
        return statistics.median(run.steps for run in self.runs)


@dataclass
class Reaching:
    """Steps to the target of one line against the batch, each at its best learning rate."""

    cells: list[Cell]
    missed: list[Cell]
    """Batches at which no learning rate reached the target: the cell that trained longest."""
    regions: Regions | None


@dataclass
class Analysis:
    """The numbers behind a report."""

    runs: Runs
    metric: str
    below: bool
    """Whether a small value of the metric is good."""
    target: Target | None
    cells: list[Cell] = field(default_factory=list)
    best: dict[str, list[Cell]] = field(default_factory=dict)
    """Line -> its best cell at every batch by the metric, the smallest batch first; the best line first."""
    reaching: dict[str, Reaching] = field(default_factory=dict)
    noise: dict[str, Spread] = field(default_factory=dict)
    """Line -> the critical batch size that the gradient noise says, median and range of what its runs measured."""
    diverged: list[Run] = field(default_factory=list)
    """Completed runs whose metric ended as no number, or out of reach of the others; they are in no mean."""
    at_first: int = 0
    """Completed runs that had reached the target by the first point they logged: sooner than can be told."""

    @property
    def best_run(self) -> Run | None:
        """The completed run with the best final value."""
        gone = {id(run) for run in self.diverged}
        fine = [run for run in self.runs.completed if id(run) not in gone and is_number(run.final(self.metric))]
        return self._choose(fine, key=lambda run: run.final(self.metric)) if fine else None

    @property
    def critical_batch(self) -> float | None:
        """The median over lines of what the gradient noise says."""
        values = sorted(noise.middle for noise in self.noise.values())
        return values[len(values) // 2] if values else None

    def better(self, one: float, other: float) -> bool:
        return one < other if self.below else one > other

    def holds_to(self, series: str) -> int | None:
        """The largest batch of a line that is within POINT of its best, as is every tried one between; None if bare."""
        means = self.means(series)
        fine = [mean for mean in means.values() if math.isfinite(mean)]
        if len(means) < 2 or not fine:
            return None
        top, batches = (min if self.below else max)(fine), list(means)
        at = list(means.values()).index(top)
        while at + 1 < len(batches) and abs(means[batches[at + 1]] - top) <= self.tolerance(top) + 1e-12:
            at += 1
        return batches[at]

    def means(self, series: str) -> dict[int, float]:
        """Batch -> the metric's mean at its best learning rate, smallest batch first; NaN where all runs diverged."""
        known = {cell.batch: cell.final.middle for cell in self.best.get(series, []) if cell.final}
        tried = sorted({cell.batch for cell in self.cells if cell.series == series and _logged(cell, self.metric)})
        return {batch: known.get(batch, math.nan) for batch in tried}

    def tolerance(self, value: float) -> float:
        return POINT if not self.below and 0 <= value <= 1 else POINT * abs(value)

    def to_target(self, run: Run) -> tuple[float, float, float] | None:
        """Optimizer steps, samples and seconds until a run reached the target; None if it never did."""
        curve = run.metrics.get(self.target.metric) if self.target else None
        return _to_target(curve, self.target) if curve is not None and self.target else None

    def _choose(self, items: Iterable, *, key: Callable):
        return (min if self.below else max)(items, key=key)


def analyse(
    runs: Runs, *, metric: str | None = None, mode: str | None = None, target: str | Target | None = None
) -> Analysis:
    """What the runs show.

    Args:
        runs: from ``load_runs``.
        metric: the one that is compared at the end of the runs; by default the first of PREFERRED that most have.
        mode: whether a ``min`` or a ``max`` of it is good; by default what its name says.
        target: such as ``val/loss<=1.9``; by default derived from the curves of the same metric in validation.

    Raises:
        ConfigError: a metric that no run has, a name that does not say which way is good, or no target.
    """
    metric = _metric(runs, metric)
    below = _below(metric, mode)
    found = Analysis(runs, metric, below, None)
    found.diverged = ends_apart(runs.completed, metric, rises=not below)
    found.cells = _cells(runs.completed, metric, diverged=found.diverged)
    found.target = _target(found, target)
    for cell in found.cells:
        _reach(cell, found)
    found.at_first = sum(_at_first(run, found) for run in runs.completed)
    lines = dict.fromkeys(cell.series for cell in found.cells)
    for series in lines:
        own = [cell for cell in found.cells if cell.series == series]
        batches = sorted({cell.batch for cell in own})
        by_batch = [[cell for cell in own if cell.batch == batch] for batch in batches]
        measured = [[cell for cell in cells if cell.final is not None] for cells in by_batch]
        if any(measured):
            found.best[series] = [
                found._choose(_mostly_numbers(cells), key=lambda cell: cell.final.middle) for cells in measured if cells
            ]
        if found.target is not None:
            found.reaching[series] = _reaching(by_batch)
        measured_scales = [scales for cell in own for run in cell.runs if len(scales := _noise_scales(run)) >= MEASURED]
        if scales := [value for one in measured_scales for value in one]:
            middle = statistics.median(scales)
            found.noise[series] = Spread(middle, min(scales), max(scales), len(measured_scales))
    order = sorted(found.best, key=lambda series: _top(found, series), reverse=not below)
    found.best = {series: found.best[series] for series in order}
    ranked = [*(series for series in order if series in found.reaching), *(s for s in found.reaching if s not in order)]
    found.reaching = {series: found.reaching[series] for series in ranked}
    return found


def is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _metric(runs: Runs, asked: str | None) -> str:
    names = runs.metric_names()
    if asked is not None:
        if asked not in names:
            shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
            raise ConfigError(f"--metric {asked}: no run has it{nearest(asked, names)} (there are {shown or 'none'})")
        return asked
    considered = runs.completed or list(runs)
    counts = {name: sum(run.final(name) is not None for run in considered) for name in PREFERRED}
    most = max(counts.values())
    if most == 0:
        known = [name for name in names if direction(name)]
        if not known:
            raise ConfigError(
                f"no run has {' or '.join(PREFERRED)}: name a metric with --metric ({', '.join(names[:12])})"
            )
        return known[0]
    return next(name for name in PREFERRED if counts[name] > most / 2)


def _below(metric: str, mode: str | None) -> bool:
    mode = mode or direction(metric)
    if mode is None:
        raise ConfigError(
            f"--metric {metric}: its name does not say whether more is better; type --mode max or --mode min"
        )
    return mode == "min"


def _noise_scales(run: Run) -> list[float]:
    curve = run.metrics.get(NOISE_SCALE)
    return [] if curve is None else [value for value in curve.values.tolist() if math.isfinite(value) and value > 0]


def _cells(runs: Sequence[Run], metric: str, *, diverged: Sequence[Run]) -> list[Cell]:
    gone = {id(run) for run in diverged}
    cells: dict[tuple[str, int, float | None], Cell] = {}
    for run in runs:
        key = (run.series, run.batch, run.base_lr)
        cells.setdefault(key, Cell(*key, [])).runs.append(run)
    for cell in cells.values():
        finals = [run.final(metric) for run in cell.runs if id(run) not in gone]
        values = [value for value in finals if value is not None and is_number(value)]
        if values:
            cell.final = Spread(statistics.fmean(values), min(values), max(values), len(values))
    return list(cells.values())


def _logged(cell: Cell, metric: str) -> bool:
    return any(run.final(metric) is not None for run in cell.runs)


def _mostly_numbers(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells of which at least half of the runs ended with a number, unless there are none: one lucky seed of a rate
    that diverges is not the best rate."""
    return [cell for cell in cells if cell.final and 2 * cell.final.count >= len(cell.runs)] or cells


def _target(found: Analysis, asked: str | Target | None) -> Target | None:
    if isinstance(asked, str):
        asked = Target.parse(asked)
    if asked is not None:
        curves = sorted({name for run in found.runs for name in run.metrics})
        if asked.metric not in curves:
            close = nearest(asked.metric, curves)
            raise ConfigError(
                f"--target {asked.metric}: no run has logged it{close} (there are {', '.join(curves[:12])})"
            )
        return asked
    completed = found.runs.completed
    if len({run.batch for run in completed}) < 2:
        return None  # it would be what these very runs reached, and compare nothing
    _, _, last = found.metric.rpartition("/")
    for metric in dict.fromkeys((found.metric, f"val/{last}", "val/loss", "train/loss")):
        way = direction(metric) if metric != found.metric else ("min" if found.below else "max")
        with_curve = [run for run in completed if metric in run.metrics and len(run.metrics[metric].values) > 2]
        if way is None or not with_curve or 2 * len(with_curve) < len(completed):
            continue
        bests: dict[tuple[str, int], float] = {}
        for run in with_curve:
            values = [value for value in run.metrics[metric].values.tolist() if math.isfinite(value)]
            if values:
                top = min(values) if way == "min" else max(values)
                key = (run.series, run.batch)
                bests[key] = (min if way == "min" else max)(top, bests.get(key, top))
        return derive_target(metric, list(bests.values()), below=way == "min")
    return None


def _to_target(curve: Curve, target: Target) -> tuple[float, float, float] | None:
    found = [first_crossing(x, curve.values, target) for x in (curve.steps, curve.samples, curve.seconds)]
    steps, samples, seconds = found
    return None if steps is None or samples is None or seconds is None else (steps, samples, seconds)


def _at_first(run: Run, found: Analysis) -> bool:
    curve = run.metrics.get(found.target.metric) if found.target else None
    way = found.to_target(run)
    return curve is not None and way is not None and way[0] <= float(curve.steps[0])


def _reach(cell: Cell, found: Analysis) -> None:
    took = [way for way in (found.to_target(run) for run in cell.runs) if way is not None]
    cell.reached = len(took)
    if 2 * len(took) < len(cell.runs) or not took:
        return
    # A seed that never gets there counts as infinitely late, as long as the median is not.
    missing = [math.inf] * (len(cell.runs) - len(took))

    def spread(values: list[float]) -> Spread:
        return Spread(statistics.median_low([*values, *missing]), min(values), max(values), len(values))

    cell.steps, cell.samples, cell.seconds = (spread([way[at] for way in took]) for at in range(3))


def _reaching(by_batch: Sequence[Sequence[Cell]]) -> Reaching:
    there, missed = [], []
    for cells in by_batch:
        able = [cell for cell in cells if cell.steps is not None and cell.steps.middle > 0]
        if able:
            there.append(min(able, key=lambda cell: cell.steps.middle if cell.steps else math.inf))
        else:
            missed.append(max(cells, key=lambda cell: cell.trained))
    steps = [cell.steps.middle for cell in there if cell.steps]
    return Reaching(there, missed, regions([cell.batch for cell in there], steps))


def _top(found: Analysis, series: str) -> float:
    means = [cell.final.middle for cell in found.best[series] if cell.final]
    return min(means) if found.below else max(means)
