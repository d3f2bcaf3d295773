"""What a sweep shows: a live table on a terminal and plain lines elsewhere, and a table at the end."""

import contextlib
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwise.job import Job
from shardwise.quantities import shown_seconds
from shardwise.sweep.fitting import cut_last, fitted, width_of
from shardwise.sweep.source import Outcome, Planned, counted

TOTAL_STEPS = re.compile(r"^  total_steps: (\d+)$", re.MULTILINE)


class _Shown:
    """A running job in the live table."""

    def __init__(self, planned: Planned, job: Job) -> None:
        self.planned, self.job = planned, job
        self.began = time.monotonic()
        self.step = 0
        self.total: int | None = None
        self.values: dict[str, float] = {}

    def add(self, lines: Sequence[tuple[int, dict[str, float]]]) -> None:
        for self.step, values in lines:
            self.values.update(values)
        if self.total is None and lines:
            with contextlib.suppress(OSError):
                text = (Path(self.job.run_folder) / "config.yaml").read_text(encoding="utf-8")
                found = TOTAL_STEPS.search(text)
                self.total = int(found[1]) if found else None

    @property
    def progress(self) -> str:
        return "" if not self.step else f"{self.step:,}/{self.total:,}" if self.total else f"{self.step:,}"


class Display:
    """Tells how the jobs of a sweep get on; a context in which a terminal shows a table that is kept up to date.

    Args:
        total: jobs in all, None where nobody knows.
        slots: jobs side by side.
        before: how many of all have ended under an earlier start.
    """

    def __init__(self, *, total: int | None, slots: int, before: int = 0) -> None:
        self._total, self._slots, self._before = total, slots, before
        self._began = time.monotonic()
        self._running: dict[str, _Shown] = {}
        self._ended: list[Outcome] = []
        self.ending = False
        """Whether no job is started any more, though some are left."""
        terminal = sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=not terminal, width=None if terminal else 10_000)
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if terminal else None

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def name(self, planned: Planned) -> str:
        """``job 3/16``."""
        return f"job {planned.number}" + ("" if self._total is None else f"/{self._total}")

    def started(self, planned: Planned, job: Job, *, how: str = "started") -> None:
        self._running[planned.key] = _Shown(planned, job)
        self.say(f"{self.name(planned)} {how}{_after_colon(planned.label)}")
        self.refresh()

    def progress(self, planned: Planned, lines: Sequence[tuple[int, dict[str, float]]]) -> None:
        self._running[planned.key].add(lines)

    def failed(self, outcome: Outcome, *, again: str = "") -> None:
        """A job, or an attempt at it, has failed: told at once, on the error stream.

        Args:
            outcome: of the attempt.
            again: which of how many attempts comes now; empty where there is none.
        """
        took, more = shown_seconds(outcome.seconds), f" ({again})" if again else f" ({self.state()})"
        text = f"{self.name(outcome.planned)} failed in {took}{more}: {outcome.message}"
        if self._live is not None:
            self.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def ended(self, outcome: Outcome) -> None:
        self._running.pop(outcome.planned.key, None)
        self._ended.append(outcome)
        name, wrong = self.name(outcome.planned), diverged(outcome)
        values = chosen(outcome.metrics)
        said = _joined(values | ({wrong: outcome.metrics[wrong]} if wrong else {}))
        said += ": diverged" if wrong else ""
        if outcome.before:
            self.say(f"{name} was done before{_after_colon(outcome.planned.label)}{said and f' ({said})'}")
        elif outcome.status == "failed":
            self.failed(outcome)
        elif outcome.status == "diverged":
            self.say(
                f"{name} {standing(outcome)} in {shown_seconds(outcome.seconds)}: {outcome.message} ({self.state()})"
            )
        else:
            self.say(
                f"{name} {outcome.status} in {shown_seconds(outcome.seconds)}{_after_colon(said)} ({self.state()})"
            )
        self.refresh()

    def state(self) -> str:
        """``12 of 16 done, 1 failed, about 40 s left``; what is done is completed, pruned or diverged."""
        counts = {status: sum(one.status == status for one in self._ended) for status in ("failed", "preempted")}
        over = self._before + len(self._ended)
        done = over - sum(counts.values())
        parts = [f"{done} done" if self._total is None else f"{done} of {self._total} done"]
        parts += [f"{number} {status}" for status, number in counts.items() if number]
        ran = [outcome for outcome in self._ended if not outcome.before and outcome.status != "skipped"]
        if ran and self._total is not None and over < self._total and not self.ending:
            left = (time.monotonic() - self._began) / len(ran) * (self._total - over)
            parts.append(f"about {shown_seconds(left)} left")
        return ", ".join(parts)

    def refresh(self) -> None:
        """Bring the live table up to date."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        """Running jobs, and of those that have ended as many as fit on the terminal."""
        room = max(0, shutil.get_terminal_size().lines - len(self._running) - 4)
        shown: list[tuple[int, tuple[str, ...]]] = []
        for outcome in self._ended[-room:] if room else []:
            steps, values = (outcome.result or {}).get("steps"), chosen(outcome.metrics)
            cells = (standing(outcome), f"{steps:,}" if steps else "", shown_seconds(outcome.seconds), _joined(values))
            shown.append((outcome.planned.number, (outcome.planned.label, *cells)))
        for one in self._running.values():
            cells = ("running", one.progress, shown_seconds(time.monotonic() - one.began), _joined(_newest(one.values)))
            shown.append((one.planned.number, (one.planned.label, *cells)))
        headings = ["job", "what varies", "status", "step", "time", "newest metrics"]
        rows = [[str(number), *row] for number, row in sorted(shown)]
        width = self._console.width  # the job that a row is about is worth more than its second metric
        headings, rows = cut_last(*fitted(headings, rows, width, least=min(20, width // 4)), width)
        table = _table_of(headings, rows)
        table.caption, table.caption_justify = self.state(), "left"
        return table


def show_end(outcomes: Sequence[Outcome], *, folder: Path, closing: Sequence[str], width: int | None = None) -> None:
    """A row a job: what it does not share with the others, how it ended, what came out; and what each failure was.

    Args:
        outcomes: of all jobs, in their order.
        folder: the sweep's.
        closing: lines that come after the table.
        width: columns of the terminal; found out if not given, and a file has no edge.
    """
    if width is None and sys.stdout.isatty():
        width = Console().width
    names = _named(outcomes)
    headings = ["job", "overrides", "status", *names, "run folder"]
    rows = [
        [
            str(outcome.planned.number),
            outcome.planned.label,
            standing(outcome),
            *(_shown(outcome.metrics[name]) if name in outcome.metrics else "" for name in names),
            os.path.relpath(outcome.job.run_folder) if outcome.status != "skipped" else "",
        ]
        for outcome in outcomes
    ]
    if width is not None and width_of(headings, rows) > width:
        headings, rows = headings[:-1], [row[:-1] for row in rows]
    left_out = 0
    if width is not None:
        headings, rows = fitted(headings, rows, width)
        while len(headings) > 4 and width_of(headings, rows) > width:
            headings, rows, left_out = headings[:-1], [row[:-1] for row in rows], left_out + 1
    print(f"{counted(len(outcomes), 'job')}, {folder}")
    Console(highlight=False, soft_wrap=True, width=width or 10_000).print(_table_of(headings, rows))
    if left_out:
        print(f"and {counted(left_out, 'metric')} for which the terminal is too narrow")
    for outcome in outcomes:
        if outcome.status in ("failed", "diverged"):
            print(f"job {outcome.planned.number} {outcome.status}: {' '.join(outcome.message.split())}")
    for line in closing:
        print(line)
    sys.stdout.flush()


def chosen(metrics: dict[str, Any]) -> dict[str, Any]:
    """What the test says; where there was none, what the newest validation does, or else the training's loss."""
    for start in ("test/", "val/", "train/loss"):
        if found := {name: value for name, value in sorted(metrics.items()) if name.startswith(start)}:
            return found
    return {}


def diverged(outcome: Outcome) -> str:
    """The first metric of a completed job that is no number, of those that the sweep is after and those of the test;
    empty where all are."""
    if outcome.status != "completed":
        return ""
    names = [*_sought(outcome), *(name for name in sorted(outcome.metrics) if name.startswith("test/"))]
    return next((n for n in names if n in outcome.metrics and _shown(outcome.metrics[n]) == "nan"), "")


def standing(outcome: Outcome) -> str:
    """A job's status, as a table has it."""
    if outcome.status == "diverged":
        steps = (outcome.result or {}).get("steps")  # that were made before
        when = "" if steps is None else f" at step {steps + 1:,}"
        return f"diverged{when}" + (", done before" if outcome.before else "")
    return ("done before" if outcome.before else outcome.status) + (", nan" if diverged(outcome) else "")


def _sought(outcome: Outcome) -> list[str]:
    """The metrics that ``sweep.metric`` names."""
    names = outcome.planned.job.config.get("sweep", {}).get("metric")
    return [names] if isinstance(names, str) else list(names or ())


def _named(outcomes: Sequence[Outcome]) -> list[str]:
    """The metrics that have a column: what the sweep is after, what the test says, and what the rest is known by."""
    there = {name for one in outcomes for name in one.metrics}
    names = [name for name in (_sought(outcomes[0]) if outcomes else []) if name in there]
    names += sorted(name for name in there if name.startswith("test/"))
    for one in outcomes:
        if not any(name in one.metrics for name in names):
            names += chosen(one.metrics)
    return list(dict.fromkeys(names))


def _newest(values: dict[str, float]) -> dict[str, float]:
    """Of a running job's newest metrics those that say how well it does."""
    return {name: value for name, value in values.items() if name == "train/loss"} | chosen(values)


def _joined(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _after_colon(text: str) -> str:
    return f": {text}" if text else ""


def _shown(value: float | None) -> str:
    return "nan" if value is None or not math.isfinite(value) else f"{value:.4g}"


def _table_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
