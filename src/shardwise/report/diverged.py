"""Which runs diverged, so that they do not flatten all others into one line."""

from collections.abc import Iterable, Sequence

import numpy as np

from shardwise.report.direction import direction
from shardwise.report.runs import Run

CLIFF = 100.0
"""Times the usual height of a metric (the lower quartile of the runs' largest values) beyond which a run diverged."""
DIVERGED = f"ended as no number (NaN), or rose to over {CLIFF:.0f} times the usual height"


def curves_apart(runs: Sequence[Run], metric: str) -> tuple[list[Run], list[Run]]:
    """(the runs whose curves of a metric stay within reach, those that diverged); all within reach if none is."""
    runs = [run for run in runs if metric in run.metrics and len(run.metrics[metric].values) > 1]
    falls = direction(metric) == "min"  # where more is better, the best are far above the usual
    usual, apart = _usual(runs, metric) if falls else 0.0, []
    for run in runs:
        values = run.metrics[metric].values
        if not np.isfinite(values[-1]) or 0 < usual * CLIFF < _height(values):
            apart.append(run)
    gone = {id(run) for run in apart}
    within = [run for run in runs if id(run) not in gone and _numbers(run, metric) > 1]
    return (within, apart) if within else ([run for run in runs if _numbers(run, metric) > 1], [])


def loss_curve(runs: Sequence[Run], metric: str) -> str | None:
    """The metric whose curves are shown first: the loss in training, if runs logged it more than once."""
    names = dict.fromkeys(("train/loss", "val/loss", metric))
    return next((name for name in names if any(_numbers(run, name) > 1 for run in runs)), None)


def ends_apart(runs: Sequence[Run], metric: str, *, rises: bool) -> list[Run]:
    """The runs whose last value of a metric is no number, or far beyond those of the others and where they began.

    Args:
        rises: whether a large value is good, of which none is too large.
    """
    finals = {id(run): value for run in runs if (value := run.final(metric)) is not None}
    fine = [abs(value) for value in finals.values() if np.isfinite(value)]
    usual = float(np.percentile(fine, 25)) if fine and not rises else 0.0
    if not rises and metric.endswith("loss"):  # a good end lies far below the beginning, which is no divergence either
        began = (_usual([run for run in runs if name in run.metrics], name) for name in ("train/loss", "val/loss"))
        usual = max(usual, *began)
    return [
        run
        for run in runs
        if id(run) in finals and (not np.isfinite(finals[id(run)]) or 0 < usual * CLIFF < abs(finals[id(run)]))
    ]


def said_of(runs: Iterable[Run], *, shown: int = 5) -> str:
    """The names of some runs."""
    names = [run.name for run in runs]
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _usual(runs: Sequence[Run], metric: str) -> float:
    heights = [height for run in runs if (height := _height(run.metrics[metric].values)) > 0]
    return float(np.percentile(heights, 25)) if heights else 0.0


def _numbers(run: Run, metric: str) -> int:
    return int(np.isfinite(run.metrics[metric].values).sum()) if metric in run.metrics else 0


def _height(values: np.ndarray) -> float:
    fine = np.abs(values[np.isfinite(values)])
    return float(fine.max()) if len(fine) else 0.0
