"""What one line says of all ranks, and what a whole run's time went to."""

import numpy as np

from shardwise.step_clock import PHASES
from shardwise.telemetry.table import RankTable

OWN_PHASES = ("data", "forward", "backward", "optimizer", "other")
"""Phases in which a rank waits for no other one."""
KINDS = {"data": ("data",), "compute": ("forward", "backward", "optimizer"), "other": ("other",)}
"""Kinds of a rank's own work -> the phases that they are made of."""
LEAST_SHARE, LEAST_SECONDS = 0.05, 0.0005
"""An excess over the median rank's own time that is less than this of a step, or in seconds, costs nobody anything."""


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
        """The rank that has spent most in its own work, or None with one rank, or where nothing is measured.

        ``ratio`` is over the median of the other ranks; ``kind`` the kind of work (``KINDS``) and ``phase`` the phase
        of it that is most above what the others take.
        """
        own = {phase: self._seconds[:, PHASES.index(phase)] for phase in OWN_PHASES}
        totals = np.sum(list(own.values()), axis=0)
        if len(totals) < 2:
            return None
        rank = int(totals.argmax())

        def excess(phases: tuple[str, ...]) -> float:
            spent = np.sum([own[phase] for phase in phases], axis=0)
            return float(spent[rank] - np.median(np.delete(spent, rank)))

        usual = float(np.median(np.delete(totals, rank)))
        if usual <= 0:
            return None
        kind = max(KINDS, key=lambda kind: excess(KINDS[kind]))
        phase = max(KINDS[kind], key=lambda phase: excess((phase,)))
        host = hosts[rank] if rank < len(hosts) else ""
        return {"rank": rank, "host": host, "ratio": float(totals[rank]) / usual, "kind": kind, "phase": phase}
