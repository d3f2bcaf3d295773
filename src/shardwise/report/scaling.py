"""How far a training has to go to reach a target, and what a larger batch saves of it. Pure functions of numbers.

The questions and the terms are those of Shallue et al. 2018, "Measuring the effects of data parallelism on neural
network training", arXiv 1811.03600: steps to a target against the batch size, the best learning rate at each batch.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import ConfigError

PERFECT = 1.2
"""Steps over those of perfect scaling up to which a batch counts as scaling perfectly."""
SAVING = 0.10
"""Share of the steps that doubling the batch has to save; below it the plateau begins."""
REACHED_BY = 0.8
"""Share of the best runs that a target reaches that nobody has typed."""


@dataclass(frozen=True)
class Target:
    """A value of a metric that counts as reached."""

    metric: str
    value: float
    below: bool
    """Whether smaller is better: reached at or below the value."""
    why: str = "as typed"

    def __str__(self) -> str:
        return f"{self.metric} {'≤' if self.below else '≥'} {self.value:.4g}"

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Read ``val/loss<=1.9``.

        Raises:
            ConfigError: it is no metric, ``<=`` or ``>=``, and number.
        """
        found = re.fullmatch(r"\s*(.+?)\s*(<=|>=|<|>)\s*(\S+)\s*", text)
        try:
            value = float(found[3]) if found else math.nan
        except ValueError:
            value = math.nan
        if found is None or not math.isfinite(value):
            raise ConfigError(f"--target {text}: a metric and a value are needed, such as --target 'val/loss<=1.9'")
        return cls(found[1], value, below=found[2].startswith("<"))


@dataclass(frozen=True)
class Regions:
    """Where a curve of steps against batch size bends; None where the batches that were tried do not show it."""

    perfect_to: float
    """The largest batch up to which no batch takes more than PERFECT times the steps of perfect scaling."""
    plateau_from: float | None
    """The batch from which on no doubling saves SAVING of the steps."""


def first_crossing(positions: np.ndarray, values: np.ndarray, target: Target) -> float | None:
    """Where a curve first reaches the target, on the straight line between the points around it; None if nowhere.

    A curve that starts beyond the target has reached it at its first point. Values that are no number are passed over.
    """
    fine = np.isfinite(values)
    positions, values = positions[fine], values[fine]
    reached = np.flatnonzero(values <= target.value if target.below else values >= target.value)
    if not len(reached):
        return None
    at = int(reached[0])
    if at == 0:
        return float(positions[0])
    before, after = float(values[at - 1]), float(values[at])
    share = (target.value - before) / (after - before)
    return float(positions[at - 1] + share * (positions[at] - positions[at - 1]))


def derive_target(metric: str, bests: Sequence[float], *, below: bool) -> Target | None:
    """The hardest value that REACHED_BY of ``bests`` reach, in three digits; None without any."""
    fine = sorted((value for value in bests if math.isfinite(value)), reverse=not below)
    if not fine:
        return None
    value = fine[math.ceil(REACHED_BY * len(fine)) - 1]
    if value:
        unit = 10.0 ** (math.floor(math.log10(abs(value))) - 2)
        scaled = round(value / unit, 6)
        value = float(f"{(math.ceil(scaled) if below else math.floor(scaled)) * unit:.6g}")
    return Target(metric, value, below, why=f"the value that {REACHED_BY:.0%} of the best runs at each batch reach")


def perfect_steps(batches: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Steps that each batch would take if the first batch's samples were enough: steps proportional to 1 / batch."""
    return [steps[0] * batches[0] / batch for batch in batches]


def regions(batches: Sequence[float], steps: Sequence[float]) -> Regions | None:
    """The regions of a curve, smallest batch first; None with fewer than three batches."""
    if len(batches) < 3:
        return None
    ideal = perfect_steps(batches, steps)
    perfect = 0
    while perfect + 1 < len(batches) and steps[perfect + 1] <= PERFECT * ideal[perfect + 1]:
        perfect += 1
    plateau = None
    for at in range(len(batches) - 2, -1, -1):
        doublings = math.log2(batches[at + 1] / batches[at])
        if (steps[at + 1] / steps[at]) ** (1 / doublings) <= 1 - SAVING:
            break
        plateau = batches[at]
    return Regions(batches[perfect], plateau)
