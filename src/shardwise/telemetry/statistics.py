"""What one line says of all ranks, and what a whole run's time went to."""

import numpy as np

from shardwise.step_clock import PHASES
from shardwise.telemetry.table import RankTable

OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank waits for no other one."""


def flat_statistics(table: RankTable) -> dict[str, float]:
    """Name -> number: of a quantity that one rank has measured its value; of one that several have, ``<q>`` the mean
    over them, ``<q>/min``, ``<q>/max``, and ``<q>/max_rank``, the rank of the largest. What nobody has is left out."""
    holders = (~np.isnan(table.values)).sum(axis=0)
    there = holders > 0
    names = [name for name, is_there in zip(table.names, there, strict=True) if is_there]
    values = table.values[:, there]
    if len(values) == 1:
        return dict(zip(names, values[0].tolist(), strict=True))
    with np.errstate(invalid="ignore"):  # infinities of both signs
        means = np.nanmean(values, axis=0)
    smallest, largest = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
    ranks = np.nanargmax(values, axis=0)
    flat: dict[str, float] = {}
    columns = (means.tolist(), smallest.tolist(), largest.tolist(), ranks.tolist(), holders[there].tolist())
    for name, mean, low, high, rank, count in zip(names, *columns, strict=True):
        flat[name] = mean
        if count > 1:
            flat |= {f"{name}/min": low, f"{name}/max": high, f"{name}/max_rank": rank}
    return flat


def own_values(table: RankTable, rank: int) -> dict[str, float]:
    """What one rank has measured, by the plain names."""
    row = table.values[rank].tolist()
    return {name: value for name, value in zip(table.names, row, strict=True) if value == value}


class TimeSplit:
    """Adds up the times of all ranks over a run."""

    def __init__(self, *, ranks: int) -> None:
        self._seconds = np.zeros((ranks, len(PHASES)))

    def add(self, seconds: np.ndarray) -> None:
        """Add the seconds of each rank and phase (ranks, phases)."""
        self._seconds += seconds

    def mean(self) -> dict[str, float]:
        """Seconds of each phase, mean over ranks."""
        return dict(zip(PHASES, self._seconds.mean(axis=0).tolist(), strict=True))

    def slowest(self, hosts: tuple[str, ...]) -> dict[str, object] | None:
        """The rank that has spent most in its own work: ``ratio`` over the median rank's, and the phase that is most
        above its median. None with one rank, or where nothing is measured."""
        own = self._seconds[:, [PHASES.index(phase) for phase in OWN_PHASES]]
        totals = own.sum(axis=1)
        median = float(np.median(totals))
        if len(totals) < 2 or median <= 0:
            return None
        rank = int(totals.argmax())
        phase = OWN_PHASES[int((own[rank] - np.median(own, axis=0)).argmax())]
        host = hosts[rank] if rank < len(hosts) else ""
        return {"rank": rank, "host": host, "ratio": float(totals[rank]) / median, "phase": phase}
