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
from shardwise.sweep.source import Outcome, Planned

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
        self.say(f"{self.name(planned)} {how}: {planned.label}")
        self.refresh()

    def progress(self, planned: Planned, lines: Sequence[tuple[int, dict[str, float]]]) -> None:
        self._running[planned.key].add(lines)

    def failed(self, outcome: Outcome, *, again: str = "") -> None:
        """A job, or an attempt at it, has failed: told at once, on the error stream."""
        text = f"{self.name(outcome.planned)} failed: {outcome.message}{again}"
        if self._live is not None:
            self.say(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def ended(self, outcome: Outcome) -> None:
        self._running.pop(outcome.planned.key, None)
        self._ended.append(outcome)
        values = "  ".join(f"{name} {_shown(value)}" for name, value in chosen(outcome.metrics).items())
        tail = f": {values}" if values else ""
        if outcome.before:
            self.say(f"{self.name(outcome.planned)} was done before: {outcome.planned.label}{tail and f' ({values})'}")
        else:
            said = f"{outcome.status} in {duration(outcome.seconds)}{tail}"
            self.say(f"{self.name(outcome.planned)} {said} ({self.state()})")
        self.refresh()

    def state(self) -> str:
        """``12 of 16 done, 1 failed, about 40 s left``."""
        done, failed = self._before + len(self._ended), sum(outcome.status == "failed" for outcome in self._ended)
        parts = [f"{done} done" if self._total is None else f"{done} of {self._total} done"]
        if failed:
            parts.append(f"{failed} failed")
        ran = [outcome for outcome in self._ended if not outcome.before and outcome.status != "skipped"]
        if ran and self._total is not None and done < self._total:
            left = (time.monotonic() - self._began) / len(ran) * (self._total - done)
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)

    def refresh(self) -> None:
        """Bring the live table up to date."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        """Running jobs, and of those that have ended as many as fit on the terminal."""
        table = Table(box=None, pad_edge=False, caption=self.state(), caption_justify="left")
        for heading in ("job", "what varies", "status", "step", "newest metrics", "time"):
            table.add_column(heading, no_wrap=True, overflow="ellipsis")
        room = max(0, shutil.get_terminal_size().lines - len(self._running) - 4)
        shown: list[tuple[int, tuple[str, ...]]] = []
        for outcome in self._ended[-room:] if room else []:
            steps, values = (outcome.result or {}).get("steps"), chosen(outcome.metrics)
            status = "done before" if outcome.before else outcome.status
            cells = (status, f"{steps:,}" if steps else "", _joined(values), duration(outcome.seconds))
            shown.append((outcome.planned.number, (outcome.planned.label, *cells)))
        for one in self._running.values():
            cells = ("running", one.progress, _joined(_newest(one.values)), duration(time.monotonic() - one.began))
            shown.append((one.planned.number, (one.planned.label, *cells)))
        for number, row in sorted(shown):
            table.add_row(str(number), *map(Text, row))
        return table


def show_end(outcomes: Sequence[Outcome], *, folder: Path, closing: Sequence[str]) -> None:
    """A row a job: what it does not share with the others, how it ended, what came out; and what each failure was."""
    table = Table(title=f"{len(outcomes)} jobs, {folder}", title_justify="left", box=None, pad_edge=False)
    names = sorted({name for one in outcomes for name in one.metrics if name.startswith("test/")})
    for heading in ("job", "overrides", "status", *names, "run folder"):
        table.add_column(heading, no_wrap=True)
    for outcome in outcomes:
        values = outcome.metrics
        table.add_row(
            str(outcome.planned.number),
            Text(outcome.planned.label),
            "done before" if outcome.before else outcome.status,
            *(_shown(values[name]) if name in values else "" for name in names),
            Text(os.path.relpath(outcome.job.run_folder) if outcome.status != "skipped" else ""),
        )
    width = None if sys.stdout.isatty() else 10_000  # a file has no edge
    Console(highlight=False, soft_wrap=True, width=width).print(table)
    for outcome in outcomes:
        if outcome.status == "failed":
            print(f"job {outcome.planned.number} failed: {'; '.join(outcome.message.strip().splitlines()[-2:])}")
    for line in closing:
        print(line)
    sys.stdout.flush()


def chosen(metrics: dict[str, Any]) -> dict[str, Any]:
    """What the test says; where there was none, what the newest validation does."""
    for start in ("test/", "val/"):
        if found := {name: value for name, value in sorted(metrics.items()) if name.startswith(start)}:
            return found
    return {}


def _newest(values: dict[str, float]) -> dict[str, float]:
    """Of a running job's newest metrics those that say how well it does."""
    return {name: value for name, value in values.items() if name == "train/loss"} | chosen(values)


def _joined(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {_shown(value)}" for name, value in values.items())


def _shown(value: float | None) -> str:
    return "nan" if value is None or not math.isfinite(value) else f"{value:.4g}"


def duration(seconds: float) -> str:
    """``4.1 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 99.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"
