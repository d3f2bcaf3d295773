"""What each rank brings to W&B: which run it writes to, and under which names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.metrics_file import RANK_KINDS, read_lines
from shardwise.telemetry.table import RankTable
from shardwise.tracking.place import Place

WAYS = ("gathered", "grouped", "shared")
UNITS = ("rank", "node")
MOST_LINES = 64
"""Ranks up to which each has a line of its own beside the histogram: a chart of more cannot be read."""
MOST_BINS = 32
FIGURES = ("/min", "/max", "/max_rank")

Line = tuple[int, dict[str, Any], float]
"""Step, values, Unix time."""


@dataclass(frozen=True)
class Part:
    """The run that one process writes to."""

    run_id: str
    name: str
    group: str | None = None
    job_type: str | None = None
    label: str = ""
    """Of this process, such as rank-3, where each has a run or a label of its own."""
    shared: bool = False


def part_of(way: str, place: Place, run_id: str, *, unit: str, name: str | None, group: str | None) -> Part:
    """A process's part in the training ``run_id``; the ids are the same whenever that goes on."""
    name = name or run_id
    if way == "gathered":
        return Part(run_id, name, group)
    if way == "shared":
        return Part(run_id, name, group, label=f"rank-{place.rank}", shared=True)
    label = f"rank-{place.rank}" if unit == "rank" else f"node-{place.node}"
    return Part(f"{run_id}-{label}", f"{name}-{label}", group or run_id, unit, label)


def table_row(table: RankTable) -> dict[str, Any]:
    """A table as values of one run: ``<quantity>/histogram`` (counts, edges) and ``<quantity>/rank_<k>``.

    Of a quantity that fewer than two ranks have measured, its plain value says all.
    """
    values = np.asarray(table.values, dtype=np.float64)
    held = np.isfinite(values)
    several = np.flatnonzero(held.sum(axis=0) > 1)
    names, values, held = [table.names[number] for number in several], values[:, several], held[:, several]
    row: dict[str, Any] = dict(zip([f"{name}/histogram" for name in names], _histograms(values, held), strict=True))
    if len(values) <= MOST_LINES:
        for name, column, its in zip(names, values.T.tolist(), held.T.tolist(), strict=True):
            row.update({f"{name}/rank_{rank}": column[rank] for rank in range(len(column)) if its[rank]})
    return row


def _histograms(values: np.ndarray, held: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(counts, edges) of each column (ranks, columns), of what is held; all at once, because numpy.histogram takes
    longer over a few numbers than the client does over the whole row."""
    bins = min(MOST_BINS, max(8, len(values)))
    low, high = np.where(held, values, np.inf).min(axis=0), np.where(held, values, -np.inf).max(axis=0)
    # As numpy does where all are equal; of large ones the next number is further away than that.
    low, width = np.where(high > low, (low, high - low), (low - 0.5, np.maximum(1.0, np.abs(low) * 1e-12)))
    numbers = np.where(held, (values - low) / width * bins, 0.0).astype(np.int64).clip(0, bins - 1)
    columns = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    counts = np.bincount((numbers + columns * bins)[held], minlength=bins * values.shape[1]).reshape(-1, bins)
    edges = low[:, None] + width[:, None] * (np.arange(bins + 1) / bins)
    return list(zip(counts, edges, strict=True))


def node_row(table: RankTable, place: Place) -> dict[str, float]:
    """The mean over a node's ranks of each quantity that one of them has measured, and of several the largest."""
    first = place.node * place.local_size
    row: dict[str, float] = {}
    for name, column in zip(table.names, table.values[first : first + place.local_size].T, strict=True):
        measured = np.flatnonzero(np.isfinite(column))
        if len(measured):
            row[name] = float(column[measured].mean())
        if len(measured) > 1:
            largest = int(measured[column[measured].argmax()])
            row |= {f"{name}/max": float(column[largest]), f"{name}/max_rank": first + largest}
    return row


def without_own(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A line of all ranks for a run that has values of its own rank by the plain names: the mean over ranks becomes
    ``<quantity>/mean``."""
    line: dict[str, Any] = {}
    for name, value in metrics.items():
        if not name.startswith(RANK_KINDS) or name.endswith(FIGURES):
            line[name] = value
        elif f"{name}/max_rank" in metrics:
            line[f"{name}/mean"] = value
    return line


def own_row(part: Part, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a rank has measured, by the names that it has in the run; rows of a shared run carry no label."""
    prefix = f"{part.label.replace('-', '_')}/" if part.shared else ""
    return {f"{prefix}{name}": value for name, value in values.items()}


def lines_of(part: Part, place: Place, folder: Path, *, before: int | None) -> list[Line]:
    """The rows that a part has been given according to the run folder, the oldest first.

    Args:
        before: only what is of earlier steps; needed where the rank's own file may not have been cut back yet.
    """
    lines: list[Line] = []
    if place.rank == 0:
        shared_names: Callable[[Mapping[str, Any]], dict[str, Any]] = dict if _has_all(part) else without_own
        lines = [(step, shared_names(line), when) for step, line, when in read_lines(folder / "metrics.jsonl")]
        before = max((step for step, _, _ in lines), default=0) + 1
    own: Iterator[Line] = iter(())
    if part.label.startswith("rank-"):
        own = (
            (step, own_row(part, line), when)
            for step, line, when in read_lines(folder / "ranks" / f"rank_{place.rank}.jsonl")
        )
    elif not part.label:
        own = _table_rows(folder / "ranks")
    lines += [line for line in own if line[1] and (before is None or line[0] < before)]
    return sorted(lines, key=lambda line: line[0])


def _has_all(part: Part) -> bool:
    return part.shared or not part.label


def _table_rows(folder: Path) -> Iterator[Line]:
    """Tables as they were, put together from what each rank has written of itself."""
    files = {int(path.stem[5:]): path for path in folder.glob("rank_*.jsonl") if path.stem[5:].isdecimal()}
    if not 1 < len(files) <= MOST_LINES:  # more are much to read for a few rows that a killed run may have lost
        return
    steps: dict[int, dict[int, dict[str, float]]] = {}
    times: dict[int, float] = {}
    for rank, path in files.items():
        for step, line, when in read_lines(path):
            steps.setdefault(step, {})[rank] = line
            times[step] = when
    for step, ranks in sorted(steps.items()):
        names = tuple(dict.fromkeys(name for line in ranks.values() for name in line))
        values = np.full((max(ranks) + 1, len(names)), np.nan)
        for rank, line in ranks.items():
            values[rank] = [line.get(name, np.nan) for name in names]
        yield step, table_row(RankTable(step=step, steps=0, names=names, values=values)), times[step]
