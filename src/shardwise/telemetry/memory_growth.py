"""A rank whose memory grows from step to step, until there is none left."""

from collections import deque

import numpy as np

from shardwise.quantities import shown_bytes
from shardwise.telemetry.table import RankTable

SETTLING = 3
"""Logging steps until what a process allocates once has been allocated."""
RISING = 5
"""Logging steps in a row that memory has to rise, without falling, before a rank is named."""
LEAST_SHARE, LEAST_BYTES = 0.2, 256 * 2**20
"""Growth since the baseline, of it and in bytes."""


class MemoryGrowth:
    """Decides, from tables alone, whose memory grows: GPUs' allocated memory, or else the resident set.

    A rank is named when it has grown steadily by 20 % and 256 MiB since the first logging steps, ``factor`` times as
    much as the median rank; where the median rank has grown that much, all of them together are. Said again when the
    growth has doubled.
    """

    def __init__(self, *, factor: float) -> None:
        self.factor = factor
        self._tables = 0
        self._base: np.ndarray | None = None
        self._base_step = 0
        self._last: deque[np.ndarray] = deque(maxlen=RISING + 1)
        self._said: dict[int, float] = {}  # rank, or -1 for all -> growth

    def update(self, table: RankTable) -> list[str]:
        """Lines to be said after another logging step."""
        allocated = table.column("memory/allocated")
        on_gpu = not np.isnan(allocated).all()
        memory = allocated if on_gpu else table.column("memory/resident")
        self._tables += 1
        if np.isnan(memory).all() or self._tables < SETTLING:
            return []
        self._last.append(memory)
        if self._base is None:
            self._base, self._base_step = memory, table.step
            return []
        if len(self._last) <= RISING:
            return []
        growth = memory - self._base
        rises = np.diff(np.stack(list(self._last)), axis=0)
        # Pages come many at a time, so that some logging steps may see none.
        steadily = (rises >= 0).all(axis=0) & ((rises > 0).sum(axis=0) > RISING / 2)
        grows = steadily & (growth > LEAST_BYTES) & (growth > LEAST_SHARE * self._base)
        ordered = np.sort(growth)
        typical = max(0.0, float(ordered[(len(ordered) - 1) // 2]))
        what, lines = "allocated" if on_gpu else "resident", []
        steps = table.step - self._base_step
        if len(growth) > 1 and grows.mean() > 0.5:
            if self._is_news(-1, typical):
                lines.append(f"memory grows on all ranks: {_grown(what, typical, steps)} (is a graph or a loss kept?)")
            return lines
        for rank in map(int, np.flatnonzero(grows)):
            if (len(growth) == 1 or growth[rank] >= self.factor * typical) and self._is_news(rank, float(growth[rank])):
                who = f"rank {rank}" + (f" ({table.hosts[rank]})" if rank < len(table.hosts) else "")
                median = "" if len(growth) == 1 else f"; the median rank's by {shown_bytes(typical)}"
                whose = "memory grows" if len(growth) == 1 else f"memory of {who} grows"
                lines.append(f"{whose}: {_grown(what, float(growth[rank]), steps)}{median}")
        return lines

    def _is_news(self, whose: int, growth: float) -> bool:
        if growth < 2 * self._said.get(whose, 0.0):
            return False
        self._said[whose] = growth
        return True


def _grown(what: str, growth: float, steps: int) -> str:
    return f"{what} bytes by {shown_bytes(growth)} in {steps} steps, {shown_bytes(growth / max(steps, 1))} a step"
