"""What a search may try: per key a set of choices or an interval of numbers, and the texts that stand behind ``key=``.

Neither Hydra nor Optuna: ``hydra_setup.parse_space`` reads it from what was typed, ``sweep/search.py`` draws from it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Choice:
    """One of several values without an order; a search knows them by their texts, which lose nothing."""

    values: tuple[str, ...]

    def text(self, value: Any) -> str:
        """What stands behind ``key=``."""
        return str(value)

    def ends(self) -> tuple[str, ...]:
        """Values that have to be valid if all are."""
        return self.values


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float
    whole: bool = False
    """Whether they are whole numbers."""
    log: bool = False
    """Whether they are drawn evenly over their logarithm."""
    step: float | None = None
    """Distance between two of them, from ``low`` on; None: every number between."""

    def text(self, value: Any) -> str:
        """What stands behind ``key=``: the very number, without the noise that a multiple of a step has."""
        if self.whole:
            return str(int(value))
        if self.step is None:
            return repr(float(value))
        count = round((value - self.low) / self.step)
        return repr(float(Decimal(repr(self.low)) + count * Decimal(repr(self.step))))

    def ends(self) -> tuple[str, ...]:
        """Values that have to be valid if all are."""
        return tuple(dict.fromkeys((self.text(self.low), self.text(self.high))))


Dimension = Choice | Interval
Space = Mapping[str, Dimension]
"""Key, as it is typed before ``=`` -> what it may be."""


def interval(key: str, low: Any, high: Any, *, log: bool, step: float | None = None) -> Interval:
    """A checked interval; of whole numbers if both ends are whole.

    Raises:
        ConfigError: an end is no finite number, they are the wrong way round, or a logarithm of 0 would be taken.
    """
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, (int, float)) or not math.isfinite(end):
            raise ConfigError(f"{key}: an interval goes from a number to a number, as in {key}=interval(0.1,0.9)")
    if low > high:
        raise ConfigError(f"{key}=interval({low},{high}): the smaller number comes first")
    if log and low <= 0:
        raise ConfigError(f"{key}=tag(log,interval({low},{high})): a logarithmic interval starts above 0")
    whole = isinstance(low, int) and isinstance(high, int) and (step is None or isinstance(step, int))
    return Interval(low=low, high=high, whole=whole, log=log, step=step)


def overrides_of(values: Mapping[str, str]) -> list[str]:
    """Key -> text, as it is typed."""
    return [f"{key}={text}" for key, text in values.items()]


def corners(space: Space) -> list[dict[str, str]]:
    """A first point, and one for each other end of each dimension that differs from it in that alone."""
    first = {key: dimension.ends()[0] for key, dimension in space.items()}
    others = [{**first, key: end} for key, dimension in space.items() for end in dimension.ends()[1:]]
    return [first, *others]


def shown(plain: Any) -> str:
    """A dimension of :func:`plain_space`, for a person."""
    if isinstance(plain, list):
        return ",".join(plain)
    if not isinstance(plain, dict):
        return "not searched"
    kind = "whole numbers " if plain["whole"] else ""
    end = ", logarithmic" if plain["log"] else f" by {plain['step']:g}" if plain["step"] else ""
    return f"{kind}{plain['low']:g} to {plain['high']:g}{end}"


def plain_space(space: Space) -> dict[str, Any]:
    """The space in plain values, to be kept beside the trials and compared."""
    return {
        key: list(dimension.values) if isinstance(dimension, Choice) else asdict(dimension)
        for key, dimension in space.items()
    }
