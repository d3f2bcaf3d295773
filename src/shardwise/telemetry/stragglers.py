"""Which rank slows the others down, and by what: said in one line while the run goes on.

A rank that is late makes all others wait for it, so the wall time of a step tells nothing of ranks. What does is each
rank's own time: data, forward, backward, optimizer and the rest of the loop, without what it waits for others.
"""

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pytorch_lightning import Callback, Trainer

from shardwise.metrics_file import FINDINGS
from shardwise.parallel.links import measure_links
from shardwise.quantities import shown_ms
from shardwise.telemetry.links import links_line
from shardwise.telemetry.memory_growth import MemoryGrowth
from shardwise.telemetry.statistics import KINDS, LEAST_SECONDS, LEAST_SHARE
from shardwise.telemetry.table import RankTable

log = logging.getLogger(__name__)

WORK = {kind: tuple(f"time/{phase}" for phase in phases) for kind, phases in KINDS.items()}
"""What a rank can be slow in -> the columns that are its time."""
LEAST_TABLES = 2
"""Logging steps in a row: one alone may have had the one long step that the system was busy with something else."""
CLEARLY = 1.5
"""By so many times the excess of what has been said another part has to be the larger one to be said instead."""
MOST_LINES = 4
"""Ranks that are named at once; of the others there is the number."""
PATIENCE = 10
"""Between two measurements of the links, times the steps that it takes to name a rank."""
COMMUNICATION_SHARE, COMMUNICATION_SECONDS = 0.25, 0.005
"""Of a step, and seconds a step: from which exposed communication on is worth a look at the links."""


def middle(values: np.ndarray) -> float:
    """The median rank's value; of an even number the lower of both, as a rank that is one of two must not hide in it.

    NaN if no rank has measured any.
    """
    known = np.sort(values[~np.isnan(values)])
    return float(known[(len(known) - 1) // 2]) if len(known) else float("nan")


@dataclass(frozen=True)
class _Part:
    """What the logging steps of one rank in a row come to."""

    excess: dict[str, float]
    """Seconds a step above the median rank, by kind of work."""
    own: float
    typical: float
    steps: int


class SlowRanks:
    """Decides, from tables alone, which ranks are named: equal tables give equal lines.

    A rank is named whose own time is ``factor`` times the median rank's for at least ``steps`` optimizer steps, on two
    logging steps or more, and again when something else slows it, or when it has recovered.

    Args:
        factor: at least 1.
        steps: optimizer steps.
    """

    def __init__(self, *, factor: float, steps: int) -> None:
        self.factor = factor
        self.steps = steps
        self.named: dict[int, str] = {}
        """Rank -> what slows it, for those that have been named and have not recovered."""
        self.suspected = False
        """Whether a rank was slow in the last table, named or not yet."""
        self._slow: dict[int, deque[_Part]] = {}
        self._well: dict[int, list[int]] = {}

    def update(self, table: RankTable) -> list[str]:
        """Lines to be said after another logging step."""
        if table.steps == 0 or len(table.values) < 2:
            return []
        columns = {name: np.nan_to_num(table.column(name)) for names in WORK.values() for name in names}
        own = sum(columns.values(), np.zeros(len(table.values)))
        typical, step = middle(own), middle(table.column("time/step"))
        least = max(LEAST_SECONDS, LEAST_SHARE * np.nan_to_num(step))
        lines, recovered = [], []
        self.suspected = False
        for rank, mine in enumerate(own):
            if mine < self.factor * typical or mine - typical < least:
                self._slow.pop(rank, None)
                if rank in self.named and self._goes_on(self._well.setdefault(rank, []), table.steps):
                    recovered.append(rank)
                continue
            self.suspected = True
            self._well.pop(rank, None)
            excess = {
                kind: sum(float(columns[name][rank]) - middle(columns[name]) for name in names)
                for kind, names in WORK.items()
            }
            parts = self._slow.setdefault(rank, deque())
            parts.append(_Part(excess, float(mine), typical, table.steps))
            while sum(part.steps for part in list(parts)[1:]) >= self.steps and len(parts) > LEAST_TABLES:
                parts.popleft()
            if len(parts) < LEAST_TABLES or sum(part.steps for part in parts) < self.steps:
                continue
            kind = self._kind(parts, said=self.named.get(rank))
            if self.named.get(rank) != kind:
                self.named[rank] = kind
                lines.append(self._line(rank, kind, parts, columns, table))
        for rank in recovered:
            del self.named[rank], self._well[rank]
            lines.append(f"{_who(rank, table.hosts)} is as fast as the others again")
        if len(lines) > MOST_LINES:
            lines = [*lines[:MOST_LINES], f"and the same kind of line for {len(lines) - MOST_LINES} more ranks"]
        return lines

    def _goes_on(self, covered: list[int], steps: int) -> bool:
        covered.append(steps)
        return len(covered) >= LEAST_TABLES and sum(covered) >= self.steps

    @staticmethod
    def _kind(parts: Sequence[_Part], *, said: str | None) -> str:
        excess = {kind: sum(part.excess[kind] * part.steps for part in parts) for kind in WORK}
        largest = max(excess, key=lambda kind: excess[kind])
        return said if said is not None and excess[largest] < CLEARLY * excess[said] else largest

    def _line(
        self, rank: int, kind: str, parts: Sequence[_Part], columns: dict[str, np.ndarray], table: RankTable
    ) -> str:
        steps = sum(part.steps for part in parts)
        own = sum(part.own * part.steps for part in parts)
        typical = sum(part.typical * part.steps for part in parts)
        ratio = f"{own / typical:.1f}" if own < 100 * typical else "more than 100"
        name = max(WORK[kind], key=lambda name: columns[name][rank] - middle(columns[name]))
        mine, others = shown_ms(float(columns[name][rank])), shown_ms(middle(columns[name]))
        why = {
            "data": f"it waits {mine} a step for its batch, the median rank {others} (data.num_workers?)",
            "compute": f"its {name.removeprefix('time/')} takes {mine} a step, the median rank's {others} "
            f"(is its device shared, hot, or another one?)",
            "other": f"what is neither data nor the model takes {mine} a step, the median rank's {others} "
            f"(does a callback work on this rank only?)",
        }[kind]
        slow = f"{ratio} x the median rank's own time for {steps} steps"
        return f"{_who(rank, table.hosts)} is slow: {slow}, by {kind}: {why}"


class WaitingForAll:
    """Decides, from tables alone, when the links are worth a measurement: waiting is equal on all ranks.

    That is when exposed communication takes a quarter of the step on the median rank, as long as it takes to name a
    rank, and no rank's own time stands out. After one measurement there is another one only if it takes half as much
    again, or has been less in between, and not before ten times as many steps as it takes to name a rank.
    """

    def __init__(self, *, steps: int) -> None:
        self.steps = steps
        self.share = 0.0
        """Of the step, on the median rank, in the last table."""
        self._covered: list[int] = []
        self._measured = 0.0
        self._not_before = 0

    def update(self, table: RankTable, *, suspected: bool) -> bool:
        """Whether to measure now."""
        step, waiting = middle(table.column("time/step")), middle(table.column("time/communication"))
        if table.steps == 0 or len(table.values) < 2 or not step > 0 or np.isnan(waiting):
            return False
        self.share = waiting / step
        if self.share < COMMUNICATION_SHARE / 2:
            self._measured = 0.0
        if suspected or self.share < COMMUNICATION_SHARE or waiting < COMMUNICATION_SECONDS:
            self._covered = []
            return False
        self._covered.append(table.steps)
        enough = len(self._covered) >= LEAST_TABLES and sum(self._covered) >= self.steps
        if not enough or waiting < CLEARLY * self._measured or table.step < self._not_before:
            return False
        self._measured, self._not_before = waiting, table.step + PATIENCE * self.steps
        return True


class Stragglers(Callback):
    """Names, on rank 0, the rank that slows the others down, and the rank whose memory grows.

    Args:
        factor: times the median rank's own time (or growth) from which on a rank is named.
        steps: optimizer steps that it has to be that slow.
        folder: where rank 0 adds what it says to ``findings.jsonl``, a line each: {"step", "time" (Unix seconds),
            "kind" (``rank``, ``memory`` or ``communication``), "text"}; None for nowhere.
    """

    def __init__(self, *, factor: float, steps: int, folder: str | os.PathLike[str] | None = None) -> None:
        self.factor = factor
        self.folder = None if folder is None else Path(folder)
        self.slow = SlowRanks(factor=factor, steps=steps)
        self.waiting = WaitingForAll(steps=steps)
        self.memory = MemoryGrowth(factor=factor)
        self.lines: list[str] = []
        """All that has been said."""

    def on_rank_table(self, trainer: Trainer, table: RankTable) -> None:
        found = [("rank", line) for line in self.slow.update(table)]
        found += [("memory", line) for line in self.memory.update(table)]
        if self.waiting.update(table, suspected=self.slow.suspected):
            # All ranks have decided on this from equal tables; it is a collective.
            strategy: Any = trainer.strategy
            seconds = measure_links(strategy.root_device, hosts=table.hosts)
            line = links_line(seconds, hosts=table.hosts, share=self.waiting.share, factor=self.factor)
            found.append(("communication", line))
        self.lines += [line for _, line in found]
        if trainer.is_global_zero:
            for kind, line in found:
                log.warning("%s", line)
                self._keep({"step": table.step, "time": round(time.time(), 3), "kind": kind, "text": line})

    def _keep(self, finding: dict[str, Any]) -> None:
        if self.folder is not None:
            with contextlib.suppress(OSError), (self.folder / FINDINGS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(finding) + "\n")


def _who(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank}" + (f" ({hosts[rank]})" if rank < len(hosts) else "")
