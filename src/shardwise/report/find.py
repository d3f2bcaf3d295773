"""Which folders are runs: below a folder, and in the lists that sweeps keep of their jobs."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError

CONFIG = "config.yaml"
JOBS = "jobs.json"
LEFT_BY_RUNS = ("result.json", "metrics.jsonl", "provenance.json", "overrides.yaml")
"""Files beside config.yaml that make a folder a run's."""
MAX_FOLDERS = 100_000
"""Folders that are looked into."""
MAX_JOBS_BYTES = 64 * 2**20
"""A sweep's list of jobs above this size is not read."""


@dataclass
class Found:
    """Folders of runs, what their sweeps say of them, and what looked like a run and is none."""

    folders: list[Path] = field(default_factory=list)
    statuses: dict[Path, str] = field(default_factory=dict)
    """Folder -> how the job ended, by the list of its sweep."""
    messages: dict[Path, str] = field(default_factory=dict)
    """Folder -> what that list says of a job that failed."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(path, reason) of what is left out."""


def find_runs(folder: Path) -> Found:
    """The run folders at and below ``folder``, and those elsewhere that a ``jobs.json`` below it names.

    Raises:
        ConfigError: there is no such folder, or it cannot be read.
    """
    shown = printable(folder)
    if not folder.exists():
        raise ConfigError(f"{shown}: no such folder; a folder of runs is needed, such as outputs/<experiment>")
    if not folder.is_dir():
        raise ConfigError(f"{shown} is a file; a folder of runs is needed, such as outputs/<experiment>")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{shown} cannot be read: make it readable, or name another folder")
    found, seen = Found(), set[Path]()

    def add(run: Path) -> None:
        if (real := run.resolve()) not in seen:
            seen.add(real)
            found.folders.append(run)

    lists = []
    for path, names in _walk(folder, found):
        if JOBS in names:
            lists.append(path / JOBS)
        if CONFIG in names and any(name in names for name in LEFT_BY_RUNS):
            add(path)
        elif CONFIG not in names and ("result.json" in names or "metrics.jsonl" in names):
            found.skipped.append((str(path), "it has no config.yaml: no run, or one that ended before it began"))
        elif ".hydra" in names:
            found.skipped.append((str(path), "a run of another Hydra program"))
    for path in lists:
        for run, status, message in _jobs(path, found):
            if status == "skipped":
                found.skipped.append((str(run), f"a job that never started, by {path}"))
            elif run.is_dir():
                add(run)
                found.statuses[run.resolve()] = status
                found.messages[run.resolve()] = message
            else:
                found.skipped.append((str(run), f"its folder is not there, though {path} names it"))
    return found


def _walk(folder: Path, found: Found) -> Iterator[tuple[Path, set[str]]]:
    """Every folder with the names of what is in it; not into a run, a hidden folder, or through a link."""
    walk = os.walk(folder, onerror=lambda error: _unreadable(error, found))
    for visited, (path, folders, files) in enumerate(walk):
        if visited >= MAX_FOLDERS:
            reason = f"more than {MAX_FOLDERS:,} folders below {printable(folder)}: name one nearer to the runs"
            raise ConfigError(reason)
        names = {*files, *folders}
        yield Path(path), names
        is_run = CONFIG in names and any(name in names for name in LEFT_BY_RUNS)
        folders[:] = [] if is_run else sorted(name for name in folders if not name.startswith("."))


def _unreadable(error: OSError, found: Found) -> None:
    found.skipped.append((str(error.filename), f"cannot be read ({error.strerror})"))


def _jobs(path: Path, found: Found) -> list[tuple[Path, str, str]]:
    """(run folder, status, message) of every row of a sweep's list.

    A run that has moved along with its sweep is found.
    """
    try:
        if path.stat().st_size > MAX_JOBS_BYTES:
            raise ValueError(f"it has more than {MAX_JOBS_BYTES >> 20} MiB")
        rows = _rows(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        found.skipped.append((str(path), f"it is no list of jobs ({_short(error)})"))
        return []
    jobs = []
    for row in rows:
        if row.get("run_folder") == "":
            found.skipped.append((str(path), f"a job that never started ({_what(row)})"))
            continue
        try:
            run = Path(row["run_folder"])
            moved = path.parent.parent.parent.joinpath(*run.parts[-2:])  # <root>/sweeps/<name>/jobs.json
            message = row.get("message")
            jobs.append(
                (
                    moved if not run.is_dir() and moved.is_dir() else run,
                    str(row.get("status")),
                    message[-20_000:] if isinstance(message, str) else "",
                )
            )
        except (TypeError, KeyError, OSError, ValueError):
            found.skipped.append((str(path), "a job in it has no run folder"))
    return jobs


def _rows(plain: Any) -> list[dict[str, Any]]:
    """The rows of a list of jobs, which may stand inside a mapping."""
    if isinstance(plain, dict):
        inner = [value for value in plain.values() if isinstance(value, (list, dict))]
        plain = next((value for value in inner if _holds_rows(value)), [])
    if isinstance(plain, dict):
        plain = list(plain.values())
    if not isinstance(plain, list):
        raise ValueError("a list is expected")
    return [row for row in plain if isinstance(row, dict)]


def _holds_rows(value: list[Any] | dict[str, Any]) -> bool:
    rows = value if isinstance(value, list) else list(value.values())
    return any(isinstance(row, dict) and "run_folder" in row for row in rows)


def _what(row: dict[str, Any]) -> str:
    """Which job a row is about: its number, or what was typed for it."""
    typed = row.get("overrides")
    return " ".join(map(str, typed))[:200] if isinstance(typed, list) else f"job {str(row.get('number'))[:20]}"


def _short(error: BaseException) -> str:
    return printable(str(error).splitlines()[0] if str(error) else type(error).__name__)[:120]
