"""What the pool of a sweep and whoever decides on its jobs say to each other.

A source (the jobs of a grid, or a search that asks for a new trial) hands out one job at a time, and hears how each got
on. It never starts anything; the pool never decides what to try.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.job import Job

INTERRUPTED = "interrupted"
"""Message of a job that is not started, or ended at once, as somebody has asked the sweep to end."""
STATUSES = ("running", "completed", "failed", "preempted", "pruned", "diverged", "skipped")
OVER = ("completed", "diverged")
"""Of these, how a job ends that would only end so again."""
"""How a job of a sweep stands, in the ledger and in the table."""


def counted(number: int, what: str) -> str:
    """``1 job``, ``2 jobs``."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclass(frozen=True)
class Planned:
    """One job of a sweep: composed, resolved and checked, and not started yet."""

    job: Job
    key: str
    """Hash of all that decides its numbers: the ledger knows it by that, whatever it is called."""
    number: int
    """From 1 on, in the order in which they are handed out."""
    label: str
    """What tells it from the others, as it is typed: ``optimizer.lr=0.1 seed=2``."""


@dataclass(frozen=True)
class Common:
    """What the jobs of a sweep share, by which a sweep that is run again is known to be the same."""

    values: dict[str, Any]
    """Dotted key -> the value that it has in all of them; without what does not decide their numbers."""
    varied: frozenset[str]
    """Dotted keys whose value differs, or that only some of them have."""


@dataclass
class Outcome:
    """How one job ended."""

    planned: Planned
    job: Job
    """As it ran: its run folder is that of the last attempt."""
    status: str
    """completed, failed, preempted (asked to save and end), pruned, diverged (a loss or a gradient was not finite) or
    skipped."""
    message: str = ""
    """Why it failed, diverged or was skipped."""
    result: dict[str, Any] | None = None
    """What ``result.json`` holds: ``status``, ``steps``, and the last value of each metric under ``metrics``."""
    seconds: float = 0.0
    """Wall-clock time of all attempts."""
    attempts: int = 0
    before: bool = False
    """Whether it was over when the sweep began, and is only repeated from the ledger."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """The last value of each metric; empty where it left none."""
        return (self.result or {}).get("metrics", {})


class Source(Protocol):
    """Where the jobs of a sweep come from. Called from one thread, never from two at once.

    What a method raises ends the sweep: running jobs are asked to save and end, the ledger is written, and the
    exception goes on to the command line (a ConfigError as one line).
    """

    @property
    def total(self) -> int | None:
        """Jobs in all, for what is printed; None where nobody knows."""

    @property
    def ended_before(self) -> int:
        """How many of them have ended under an earlier start, and are not handed out."""

    @property
    def finished(self) -> bool:
        """Whether no job will be handed out any more."""

    def common(self) -> Common:
        """What all jobs share. Called once, before the first job is asked for."""

    def next(self) -> Planned | None:
        """The next job; None where there is none now (a running one has to end first), or none any more.

        Called when a slot is free, and not after :attr:`finished`. A source that hands out nothing while nothing runs
        would wait for ever: that is an error of its own.
        """

    def started(self, planned: Planned, job: Job) -> None:
        """A job has started; ``job.run_folder`` exists. Not called for one that was completed before; called again for
        another attempt."""

    def progress(self, planned: Planned, lines: Sequence[tuple[int, dict[str, float]]]) -> bool:
        """New lines of a running job's metrics file as (step, metrics), in order; about once a second.

        Returns whether the job is to be pruned: it is asked to save and end then, and its outcome says ``pruned``. A
        job that goes on from a checkpoint, or is tried again, reports steps that were reported before.
        """

    def ended(self, planned: Planned, outcome: Outcome) -> None:
        """A job has ended for good: retries are used up. Called too for a job that was completed before."""

    def rest(self) -> Sequence[Planned]:
        """Jobs that are known and have not been handed out, to be listed as skipped where the sweep ends early."""

    def closing(self, outcomes: Sequence[Outcome]) -> Sequence[str]:
        """Lines that are printed after the table at the end, also of a sweep that ended early."""
