"""Where the time of a rank goes: at each moment exactly one phase is charged, so that the parts add up to the whole."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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


class Collective(NamedTuple):
    """A collective that a rank has waited for, or waits for now."""

    name: str
    """Such as ``allreduce``."""
    phase: str
    """What the rank was doing when it began to wait."""
    step: int
    """Optimizer steps done at that time."""
    since: float
    """When it began to wait, on the clock of ``time.monotonic``."""


class Event(Protocol):
    """A moment on a device's stream, as ``torch.cuda.Event`` is one."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds until another one."""

    def synchronize(self) -> None:
        """Wait until it has come."""


class StepClock:
    """Charges the time that passes to one phase at a time; a phase inside of another takes its time from that one.

    A fresh clock stands; ``start`` sets it going, ``stop`` ends it. Phases change in the thread that trains (or one
    that it waits for); ``collective`` and ``last_collective`` may be read in any.

    Attributes:
        record: makes and records an event on the stream that the rank computes on. With it, the device's time is
            charged, which a host that only hands out work knows nothing of; without it the host's. No GPU has run this
            so far: what is tested has stand-ins for events.
        step: optimizer steps done, for ``Collective.step``.
        collective: name and beginning (``time.monotonic``) of the collective that the rank waits for now, or None.
        last_collective: the last one that it has begun to wait for.
    """

    def __init__(self) -> None:
        self.record: Callable[[], Event] | None = None
        self.step = 0
        self.collective: tuple[str, float] | None = None
        self.last_collective: Collective | None = None
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._phase = "other"
        self._since: Any = None
        self._stretches: list[tuple[str, Event, Event]] = []

    @property
    def current(self) -> str:
        """The phase that is charged now."""
        return self._phase

    @property
    def running(self) -> bool:
        """Whether time is charged."""
        return self._since is not None

    def start(self) -> None:
        """Begin anew: nothing is spent, and what comes is ``other`` until a phase begins."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._stretches = []
        self._phase, self._since = "other", self._now()

    def stop(self) -> None:
        """Stand still. What has been spent is there to be taken."""
        self._charge(self._phase)
        self._since = self.collective = None

    def phase(self, name: str) -> "_Phase":
        """``with`` it: charge what happens inside to ``name``, one of PHASES."""
        return _Phase(self, name)

    def switch(self, name: str) -> str:
        """From now on charge ``name``; returns what was charged before, for whoever is to switch back."""
        before, self._phase = self._phase, name
        if before != name:
            self._charge(before)
        return before

    def take(self) -> dict[str, float]:
        """Seconds of each phase since ``start`` or the last call; all zero on a clock that stands.

        With events this waits until the device has come to here.
        """
        self._charge(self._phase)
        stretches, self._stretches = self._stretches, []
        if stretches:
            stretches[-1][2].synchronize()
        for phase, begin, end in stretches:
            self._spent[phase] += begin.elapsed_time(end) / 1000
        spent, self._spent = self._spent, dict.fromkeys(PHASES, 0.0)
        return spent

    def begin_waiting(self, name: str) -> str | None:
        """Charge ``communication`` for the collective ``name``; returns what ``end_waiting`` needs.

        One inside of another is a part of it: None then, and on a clock that stands.
        """
        if self.collective is not None or self._since is None:
            return None
        now = time.monotonic()
        self.last_collective = Collective(name, self._phase, self.step, now)
        self.collective = name, now
        return self.switch("communication")

    def end_waiting(self, around: str | None) -> None:
        """Charge what was charged before ``begin_waiting``, which has returned ``around``."""
        if around is not None:
            self.collective = None
            self.switch(around)

    def _now(self) -> Any:
        return time.perf_counter() if self.record is None else self.record()

    def _charge(self, phase: str) -> None:
        before = self._since
        if before is None:
            return
        if self.record is None:
            self._since = time.perf_counter()
            self._spent[phase] += self._since - before
        else:
            self._since = self.record()
            self._stretches.append((phase, before, self._since))


class _Phase:
    """A context manager; one made of a generator takes three times as long."""

    __slots__ = ("_around", "_clock", "_name")

    def __init__(self, clock: StepClock, name: str) -> None:
        self._clock, self._name = clock, name

    def __enter__(self) -> None:
        self._around = self._clock.switch(self._name)

    def __exit__(self, *error: object) -> None:
        self._clock.switch(self._around)
