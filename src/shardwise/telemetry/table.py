"""What all ranks have measured of the steps since the last logging step, side by side."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RankTable:
    """A row a rank, a column a quantity."""

    step: int
    """Optimizer steps done."""
    steps: int
    """Optimizer steps that the times are means over; 0 where only the first step of the process has been made."""
    names: tuple[str, ...]
    """Quantities, such as ``time/data``, seconds a step."""
    values: np.ndarray
    """(ranks, quantities) float64; NaN where a rank has not measured a quantity."""
    hosts: tuple[str, ...] = ()
    """Host name of every rank."""

    def column(self, name: str) -> np.ndarray:
        """One quantity of every rank (ranks,); NaN throughout if nobody has measured it."""
        if name not in self.names:
            return np.full(len(self.values), np.nan)
        return self.values[:, self.names.index(name)]
