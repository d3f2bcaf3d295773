"""What the measurements of all ranks show: which rank is slow, by what, and when. Numbers only, no plots."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.show.ranks import WARM, Ranks
from shardwise.step_clock import PHASES
from shardwise.telemetry.statistics import KINDS, LEAST_SECONDS, LEAST_SHARE, OWN_PHASES

FEW = 8
"""Ranks above which the median of all stands for that of the others."""


@dataclass(frozen=True)
class Slow:
    """One rank that takes longer than the others over its own work. Times in seconds a step."""

    row: int
    """Of the matrices."""
    rank: int
    ratio: float
    """Its own time over the median of the others'."""
    own: float
    median: float
    phase: str
    """The phase with the largest excess, of the kind of work with the largest: data, compute or other."""
    time: float
    """What it takes for that kind of work."""
    usual: float
    """What the median of the others takes for it."""
    steps: tuple[int, int] | None = None
    """Between which steps it was that slow; None over the whole run."""

    @property
    def what(self) -> str:
        """``data``, ``compute`` or ``other``."""
        return "compute" if self.phase in KINDS["compute"] else self.phase


def own_time(ranks: Ranks) -> np.ndarray:
    """(ranks, columns) seconds that each rank spends itself in a step; NaN where it measured none of it."""
    parts = np.stack([ranks.matrix(f"time/{phase}") for phase in OWN_PHASES])
    return np.where(np.isfinite(parts).any(0), np.nansum(parts, axis=0), np.nan)


def mean_times(ranks: Ranks) -> dict[str, np.ndarray]:
    """Phase -> (ranks,) mean seconds a step, of the phases that anybody has measured; in the order of PHASES."""
    return {phase: ranks.means(ranks.values[f"time/{phase}"]) for phase in PHASES if f"time/{phase}" in ranks.values}


def slow_ranks(ranks: Ranks, *, factor: float, steps: int = 10) -> list[Slow]:
    """The ranks that stand out, the slowest first: over the whole run, or else for a while.

    Args:
        ranks: what they measured.
        factor: a rank that takes so many times the median of the others is slow.
        steps: for so many optimizer steps it has to be, where it is for a while only.
    """
    own = own_time(ranks)
    whole = ranks.means(own)
    least = max(LEAST_SHARE * _middle(ranks.means(_step_time(ranks))), LEAST_SECONDS)
    expected = usual(whole)
    ratio = np.divide(whole, expected, out=np.where(whole > 0, np.inf, np.nan), where=expected > 0)
    excess = whole - expected
    rows = [row for row in np.argsort(-np.nan_to_num(whole)) if ratio[row] >= factor and excess[row] >= least]
    slow = [slow_of(ranks, int(row)) for row in rows]
    expected = usual(own)
    now_slow = (own >= factor * expected) & (own - expected >= least)
    now_slow[:, :1] &= len(ranks.counts) <= WARM  # much is done there for the first time
    spells = {row: _longest(now_slow[row]) for row in range(len(own)) if row not in rows}
    for_a_while = [
        slow_of(ranks, row, columns=spell)
        for row, spell in spells.items()
        if spell.stop - spell.start > 1 and ranks.edges[spell.stop] - ranks.edges[spell.start] >= steps
    ]
    return slow + sorted(for_a_while, key=lambda one: -one.own)


def slow_of(ranks: Ranks, row: int, *, columns: slice | None = None) -> Slow:
    """How slow the rank of one row is, over the whole run or some columns."""
    if columns is None:
        means, own = mean_times(ranks), ranks.means(own_time(ranks))
        when = None
    else:
        means = {phase: _mean(ranks.matrix(f"time/{phase}")[:, columns]) for phase in PHASES}
        own = _mean(own_time(ranks)[:, columns])
        when = int(ranks.edges[columns.start]) + 1, int(ranks.edges[columns.stop])
    nothing = np.full(len(own), np.nan)
    excess = {
        phase: float(np.nan_to_num((means.get(phase, nothing) - usual(means.get(phase, nothing)))[row]))
        for phase in OWN_PHASES
    }
    kind = max(KINDS, key=lambda one: sum(excess[phase] for phase in KINDS[one]))
    phase = max(KINDS[kind], key=excess.__getitem__)
    parts = np.stack([means.get(one, nothing) for one in KINDS[kind]])
    time = np.where(np.isfinite(parts).any(0), np.nansum(parts, axis=0), np.nan)
    median = float(usual(own)[row])
    ratio = float(own[row]) / median if median > 0 else math.inf if own[row] > 0 else math.nan
    return Slow(
        row, ranks.numbers[row], ratio, float(own[row]), median, phase, float(time[row]), float(usual(time)[row]), when
    )


def slowest(ranks: Ranks) -> Slow | None:
    """The rank with the largest own time, whether it stands out or not; None where less than two have any."""
    own = ranks.means(own_time(ranks))
    if np.isfinite(own).sum() < 2:
        return None
    return slow_of(ranks, int(np.nanargmax(own)))


def shares(ranks: Ranks) -> dict[str, float]:
    """Phase -> its share (0 to 1) of a step, over all ranks."""
    times = {phase: float(np.nanmean(values)) for phase, values in mean_times(ranks).items() if _any(values)}
    total = sum(times.values())
    return {phase: time / total for phase, time in times.items()} if total > 0 else {}


def _longest(true: np.ndarray) -> slice:
    """The longest stretch of columns in which something is true; an empty one if it never is."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], true, [False]]).astype(int)))
    starts, stops = ends[::2], ends[1::2]
    if not len(starts):
        return slice(0, 0)
    at = int(np.argmax(stops - starts))
    return slice(int(starts[at]), int(stops[at]))


def usual(values: np.ndarray) -> np.ndarray:
    """For each rank the median of the others, of the same shape as ``values`` (ranks, ...): of two, the other one."""
    if len(values) > FEW:  # one of many hardly moves the median
        return np.broadcast_to(_median(values), values.shape)
    return np.stack([_median(np.delete(values, row, 0)) for row in range(len(values))])


def _median(values: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="All-NaN slice|Mean of empty slice")
        return np.nanmedian(values, axis=0) if len(values) else np.full(values.shape[1:], np.nan)


def _step_time(ranks: Ranks) -> np.ndarray:
    """(ranks, columns) seconds a step."""
    if "time/step" in ranks.values:
        return ranks.values["time/step"]
    return np.nansum([ranks.matrix(f"time/{phase}") for phase in PHASES], axis=0)


def _middle(values: np.ndarray | Sequence[float]) -> float:
    fine = np.asarray(values)[np.isfinite(values)]
    return float(np.median(fine)) if len(fine) else math.nan


def _mean(matrix: np.ndarray) -> np.ndarray:
    seen = np.isfinite(matrix).sum(1)
    return np.divide(np.nansum(matrix, axis=1), seen, out=np.full(len(matrix), np.nan), where=seen > 0)


def _any(values: np.ndarray) -> bool:
    return bool(np.isfinite(values).any())
