"""What every rank wrote of itself, as matrices rank x step: read as a stream, in bounded time and memory."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.checkpoint.manifest import printable
from shardwise.metrics_file import RANK_KINDS
from shardwise.report.runs import number

MAX_COLUMNS = 400
"""Columns of a matrix: of a longer run, each is the mean over neighbouring logging steps."""
MAX_RANKS = 4096
MAX_LINES = 400_000
"""Lines that are looked into, over all ranks: of more, an even choice."""
MAX_BYTES = 2**29
"""A larger file of one rank is not read."""
MAX_NAMES = 100
MAX_LAYOUTS = 1000
"""Different sets of names in the lines of one file."""
WARM = 3
"""Columns above which the first, in which much is done for the first time, does not count in means."""
FILE = re.compile(r"rank_(\d{1,7})\.jsonl")

Columns = dict[str, tuple[np.ndarray, np.ndarray]]
"""Quantity -> (optimizer steps, values), of one rank."""


@dataclass(frozen=True)
class Ranks:
    """Measurements of all ranks over the run; a row of every array is a rank."""

    numbers: list[int]
    """The rank that a row is."""
    edges: np.ndarray
    """(columns + 1,) optimizer steps: column c is measured over the steps above edges[c], up to edges[c + 1]."""
    values: dict[str, np.ndarray]
    """Quantity -> (ranks, columns); NaN where a rank has not measured it."""
    counts: np.ndarray
    """(columns,) logging steps in each column."""
    largest: dict[str, np.ndarray]
    """Quantity -> (ranks,) its largest value, of the first logging step too."""
    notes: list[str] = field(default_factory=list)
    """What is missing or damaged, in sentences."""

    def matrix(self, name: str) -> np.ndarray:
        """One quantity (ranks, columns); NaN throughout where nobody has measured it."""
        found = self.values.get(name)
        return np.full((len(self.numbers), len(self.counts)), np.nan) if found is None else found

    def of(self, rows: Sequence[int]) -> "Ranks":
        """The measurements of some of the ranks only."""
        at = list(rows)
        return replace(
            self,
            numbers=[self.numbers[row] for row in at],
            values={name: matrix[at] for name, matrix in self.values.items()},
            largest={name: values[at] for name, values in self.largest.items()},
        )

    def means(self, matrix: np.ndarray) -> np.ndarray:
        """(ranks,) mean over the logging steps after the first; NaN of a rank without any."""
        first = 1 if len(self.counts) > WARM else 0
        weights = np.where(np.isfinite(matrix), self.counts, 0)[:, first:]
        sums = np.nansum(matrix[:, first:] * weights, axis=1)
        return np.divide(sums, weights.sum(1), out=np.full(len(sums), np.nan), where=weights.sum(1) > 0)


def read_ranks(folder: Path, *, world_size: int | None = None) -> Ranks | None:
    """The measurements in a run folder; None where there are none.

    Args:
        folder: the run's. A run of one process may have them in its metrics.jsonl only.
        world_size: ranks that there should be.
    """
    files, notes = _files(folder)
    if not files and (world_size or 1) == 1 and (folder / "metrics.jsonl").is_file():
        files = {0: folder / "metrics.jsonl"}  # with several ranks it has their means
    budget = MAX_LINES // max(1, len(files))
    stride = max((_lines(path) // budget for path in files.values()), default=0) + 1
    if stride > 1:
        notes.append(f"The files of the ranks are long: every {_ordinal(stride)} line of each has been read.")
    columns: dict[int, Columns] = {}
    for rank, path in files.items():
        try:
            columns[rank], damaged = read_rank(path, stride=stride)
        except (OSError, ValueError, MemoryError) as error:
            columns[rank], damaged = {}, 0
            notes.append(f"{path.name} cannot be read ({printable(getattr(error, 'strerror', None) or error)}).")
        if damaged:
            notes.append(f"{path.name}: {damaged:,} damaged line{'s' if damaged > 1 else ''} left out.")
    if not any(columns.values()):
        return None
    if world_size is not None:
        missing = [rank for rank in range(min(world_size, MAX_RANKS)) if not columns.get(rank)]
        columns |= {rank: {} for rank in missing}
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            notes.append(f"Nothing measured by rank{'s' if len(missing) > 1 else ''} {shown} of {world_size:,}.")
    return join(columns, notes=notes)


def read_rank(path: Path, *, stride: int = 1) -> tuple[Columns, int]:
    """The quantities in one file, and how many of its lines are damaged; a torn last line is none of them.

    Args:
        path: the file, in the format of metrics.jsonl.
        stride: of so many lines, one is looked into.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
    # Lines with the same names in the same order are taken apart in one go, ten times as fast as name by name.
    layouts: dict[tuple[str, ...], tuple[list[str], Callable[[Any], Any], list[Any]]] = {}
    damaged = 0
    with path.open("rb") as file:
        for at, text in enumerate(file):
            if at % stride:
                continue
            if not text.endswith(b"\n"):
                break
            try:
                line = json.loads(text)
                found = layouts.get(key := tuple(line))
                if found is None:
                    names = [name for name in key if name.startswith(RANK_KINDS) and len(name) <= 100][:MAX_NAMES]
                    if not isinstance(line, dict) or len(layouts) >= MAX_LAYOUTS:
                        raise ValueError
                    line["step"]
                    found = layouts[key] = names, itemgetter("step", *names), []
                if found[0]:
                    found[2].append(found[1](line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                damaged += 1
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for names, _, rows in layouts.values():
        if rows:
            table = _table(rows)
            fine = (table[:, 0] >= 0) & (table[:, 0] < 2**53)
            damaged += int((~fine).sum())
            for at, name in enumerate(names):
                if name in parts or len(parts) < MAX_NAMES:
                    parts.setdefault(name, []).append((table[fine, 0], table[fine, at + 1]))
    joined = {
        printable(name): (np.concatenate([steps for steps, _ in some]), np.concatenate([values for _, values in some]))
        for name, some in parts.items()
    }
    return {name: one for name, one in joined.items() if len(one[0])}, damaged


def join(columns: dict[int, Columns], *, notes: Sequence[str] = ()) -> Ranks:
    """The columns of each rank side by side."""
    numbers = sorted(columns)
    found = [steps for one in columns.values() for steps, _ in one.values()]
    all_steps = np.unique(np.concatenate([np.unique(steps) for steps in found]))
    width = min(len(all_steps), MAX_COLUMNS)
    column_of = np.arange(len(all_steps)) * width // len(all_steps)
    counts = np.bincount(column_of, minlength=width)
    last = all_steps[np.cumsum(counts) - 1]
    # A line says what has been since the one before it; what was before the first can only be guessed.
    gap = float(np.median(np.diff(all_steps))) if len(all_steps) > 1 else float(all_steps[0])
    edges = np.concatenate([[max(0.0, float(all_steps[0]) - gap)], last])
    names = list(dict.fromkeys(name for one in columns.values() for name in one))[:MAX_NAMES]
    values, largest = {}, {}
    for name in names:
        matrix, most = np.full((len(numbers), width), np.nan), np.full(len(numbers), np.nan)
        for row, rank in enumerate(numbers):
            if name not in columns[rank]:
                continue
            steps, own = columns[rank][name]
            steps, own = steps[np.isfinite(own)], own[np.isfinite(own)].astype(float)
            if len(own):
                at = column_of[np.searchsorted(all_steps, steps)]
                sums, seen = np.bincount(at, weights=own, minlength=width), np.bincount(at, minlength=width)
                matrix[row] = np.divide(sums, seen, out=np.full(width, np.nan), where=seen > 0)
                most[row] = own.max()
        if np.isfinite(matrix).any():
            values[name], largest[name] = matrix, most
    return Ranks(numbers, edges, values, counts, largest, list(notes))


def _files(folder: Path) -> tuple[dict[int, Path], list[str]]:
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        for path in (folder / "ranks").iterdir():
            if (match := FILE.fullmatch(path.name)) and path.is_file():
                found[int(match[1])] = path
    notes = []
    if len(found) > MAX_RANKS:
        notes.append(f"Of the files of {len(found):,} ranks, those of the first {MAX_RANKS:,} have been read.")
    return {rank: found[rank] for rank in sorted(found)[:MAX_RANKS]}, notes


def _lines(path: Path) -> int:
    """About how many lines a file has, by the length of those it begins with."""
    try:
        with path.open("rb") as file:
            start = file.read(2**16)
        return path.stat().st_size * max(1, start.count(b"\n")) // max(1, len(start))
    except OSError:
        return 0


def _table(rows: list[Any]) -> np.ndarray:
    """Rows of numbers (lines, names) float64; what is no number is NaN."""
    try:
        return np.array(rows, dtype=float)
    except (TypeError, ValueError, OverflowError):
        plain = [[math.nan if (value := number(cell)) is None else value for cell in row] for row in rows]
        return np.array(plain, dtype=float)


def _ordinal(number: int) -> str:
    end = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{end}"
