"""Where the time of a rank goes: at each moment exactly one phase is charged, so that the parts add up to the whole."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "logging",
    "evaluation",
    "checkpoint",
    "other",
)
"""What a rank does: waits for its next batch, computes, waits for other ranks (communication that is not hidden behind
computation), steps the optimizer, logs, evaluates, saves; and everything else of the loop."""


class StepClock:
    """Charges the time that passes to one phase at a time; a phase inside of another takes its time from that one.

    A fresh clock stands; ``start`` sets it going.
    """

    def __init__(self) -> None:
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._phase = "other"
        self._since: float | None = None

    @property
    def current(self) -> str:
        """The phase that is charged now."""
        return self._phase

    def start(self) -> None:
        """Begin anew: nothing is spent, and what comes is ``other`` until a phase begins."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = "other", time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge what happens inside to ``name``, one of PHASES."""
        around = self._switch(name)
        try:
            yield
        finally:
            self._switch(around)

    def take(self) -> dict[str, float]:
        """Seconds of each phase since ``start`` or the last call; all zero on a clock that stands."""
        self._switch(self._phase)
        spent, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        return spent

    def _switch(self, name: str) -> str:
        before, self._phase = self._phase, name
        if self._since is not None:
            now = time.perf_counter()
            self._spent[before] += now - self._since
            self._since = now
        return before
