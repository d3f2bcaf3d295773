"""One run folder, read for its page: what is missing or damaged becomes a note, never an error."""

import contextlib
import fcntl
import json
import os
import shlex
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from shardwise.checkpoint.manifest import printable
from shardwise.errors import ConfigError
from shardwise.job import LOCK
from shardwise.metrics_file import FINDINGS, RANK_KINDS
from shardwise.report.ending import reason_of
from shardwise.report.find import JOBS, find_runs
from shardwise.report.reading import first_line, plain_json, plain_yaml, read_curves
from shardwise.report.runs import STATUSES, Curve, number, rerun_command
from shardwise.show.ranks import Ranks, read_ranks

FILES = ("config.yaml", "result.json", "provenance.json", "metrics.jsonl", "overrides.yaml")
MAX_FILES = 200
MAX_SAID = 20
"""Findings of the run itself that the page shows."""
MAX_TEXT = 2**18
"""Characters of config.yaml that the page shows."""

T = TypeVar("T")


@dataclass
class Record:
    """What a run folder holds. Nothing of it is to be believed to have a sensible form, only plain types."""

    folder: Path
    config: dict[str, Any]
    config_text: str
    overrides: list[str]
    result: dict[str, Any]
    provenance: dict[str, Any]
    metrics: dict[str, Curve]
    """Metric of the whole run -> its values; what each rank measures is in ``ranks``."""
    ranks: Ranks | None
    status: str
    """completed, failed, preempted, pruned, running, or unfinished: killed before it could say."""
    reason: str = ""
    log: str = ""
    notes: list[str] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)
    """(path below the folder, bytes)."""
    more_files: int = 0
    last_time: float | None = None
    """Unix time of the last line of metrics."""
    said: list[tuple[int, str, str]] = field(default_factory=list)
    """(step, kind, text): what was said of ranks while it trained, oldest first."""

    @property
    def derived(self) -> dict[str, Any]:
        found = self.config.get("derived")
        return found if isinstance(found, dict) else {}

    @cached_property
    def places(self) -> dict[int, dict[str, Any]]:
        """Rank -> its node, host, dp and tp, by provenance.json."""
        found = self.provenance.get("ranks")
        places = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
        return {one["rank"]: one for one in places if type(one.get("rank")) is int}

    @property
    def world_size(self) -> int | None:
        size = number(self.derived.get("world_size"))
        return int(size) if size is not None and 1 <= size < 2**31 else len(self.places) or None

    @property
    def steps(self) -> int:
        """Optimizer steps that were made, as far as is known."""
        done = number(self.result.get("steps"))
        if done is not None and 0 <= done < 2**53:
            return int(done)
        ends = [float(curve.steps.max()) for curve in self.metrics.values() if len(curve.steps)]
        return int(max([*ends, *([float(self.ranks.edges[-1])] if self.ranks is not None else [])], default=0))

    def host(self, rank: int) -> str:
        """The host of a rank, empty where nothing says it."""
        place = self.places.get(rank, {})
        # At the start, rank 0 knows that of its own node only.
        found = place.get("host") or self._hosts.get(str(place.get("node")), "")
        return printable(found)[:64]

    @cached_property
    def _hosts(self) -> dict[str, Any]:
        """Node -> its host."""
        return {str(one.get("node")): one["host"] for one in self.places.values() if one.get("host")}

    @property
    def repeat(self) -> str:
        """What to type to run it again."""
        return rerun_command(self.folder, self.config)


def read_record(folder: Path) -> Record:
    """Everything that a page of one run shows.

    Raises:
        ConfigError: there is no such folder, or it is that of several runs, or of none.
    """
    check_one_run(folder)
    notes: list[str] = []

    def reading(name: str, read: Callable[[], T], default: T, lacking: str) -> T:
        if not (folder / name).exists():
            notes.append(f"There is no {name}: {lacking}.")
            return default
        try:
            return read()
        except (OSError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            notes.append(printable(f"{name} cannot be read ({why}): {lacking}."))
            return default

    config: Any = reading("config.yaml", lambda: plain_yaml(folder / "config.yaml"), {}, "no configuration is shown")
    text = reading("config.yaml", lambda: _text(folder / "config.yaml"), "", "no configuration is shown")
    notes = list(dict.fromkeys(notes))
    overrides: Any = reading(
        "overrides.yaml", lambda: plain_yaml(folder / "overrides.yaml"), [], "what was typed is not known"
    )
    provenance: dict[str, Any] = reading(
        "provenance.json", lambda: plain_json(folder / "provenance.json"), {}, "code, versions and hosts are not known"
    )
    result: dict[str, Any] = reading(
        "result.json", lambda: plain_json(folder / "result.json"), {}, "the run has not come to its end"
    )
    config = config if isinstance(config, dict) else {}
    nothing: tuple[dict[str, Curve], float | None] = ({}, None)
    curves, last_time = reading(
        "metrics.jsonl", lambda: _curves(folder / "metrics.jsonl", config, notes), nothing, "no curves are drawn"
    )
    record = Record(
        folder=folder,
        config=config,
        config_text=text,
        overrides=[line[:1000] for line in overrides[:1000] if isinstance(line, str)]
        if isinstance(overrides, list)
        else [],
        result=result,
        provenance=provenance,
        metrics=curves,
        ranks=None,
        status="unfinished",
        notes=notes,
        last_time=last_time,
    )
    said = result.get("status")
    record.status = said if said in STATUSES else "running" if is_running(folder) else "unfinished"
    if record.status == "running":
        notes[:] = [note for note in notes if not note.startswith("There is no result.json")]
    if record.status in ("failed", "unfinished"):
        record.reason, record.log = reason_of(folder, result=result)
    if record.status == "failed" and not record.reason:
        notes.append("Why it failed is not recorded: its logs, in ranks, may say.")
    record.ranks = read_ranks(folder, world_size=record.world_size)
    if record.ranks is not None:
        notes += record.ranks.notes
    elif (folder / "metrics.jsonl").exists():
        notes.append(
            "No rank has measured its times (there is no ranks/rank_<k>.jsonl): the run is of an older version, or "
            "ended before its first logging step."
        )
    record.said = _said(folder / "ranks" / FINDINGS)
    record.files, record.more_files = _listed(folder)
    return record


def _said(path: Path) -> list[tuple[int, str, str]]:
    """What is in the file of findings that has their form; the newest MAX_SAID of them."""
    found: deque[tuple[int, str, str]] = deque(maxlen=MAX_SAID)
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                one = json.loads(line)
                found.append((int(one["step"]), printable(one["kind"])[:20], printable(one["text"])[:500]))
    return list(found)


def check_one_run(folder: Path) -> None:
    """Whether a folder is that of one run.

    Raises:
        ConfigError: it is not there, no folder, cannot be read, holds several runs, or none.
    """
    shown = printable(folder)
    if not folder.exists():
        raise ConfigError(f"{shown}: no such folder; name a run folder, such as outputs/<experiment>/<run id>")
    if not folder.is_dir():
        raise ConfigError(f"{shown} is a file; name the run folder that it is in")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise ConfigError(f"{shown} cannot be read: make it readable, or name another folder")
    if not (folder / JOBS).exists() and any((folder / name).exists() for name in FILES):
        return
    runs = find_runs(folder).folders
    if runs:
        several = "a run" if len(runs) == 1 else f"{len(runs):,} runs"
        raise ConfigError(
            f"{shown} holds {several}: show one of them, such as {printable(runs[-1])}, or all of them with "
            f"python -m shardwise report {shlex.quote(shown)}"
        )
    raise ConfigError(f"{shown}: no run in it; name a run folder, such as outputs/<experiment>/<run id>")


def is_running(folder: Path) -> bool:
    """Whether a process on this machine trains in a folder, by its lock; nothing is written."""
    path = folder / LOCK
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
    return False


def _curves(path: Path, config: dict[str, Any], notes: list[str]) -> tuple[dict[str, Curve], float | None]:
    derived = config.get("derived")
    batch = number(derived.get("batch_global_size")) if isinstance(derived, dict) else None
    curves, held, broken = read_curves(path, batch=int(batch) if batch is not None and 1 <= batch < 2**53 else 1)
    if broken > 0:
        notes.append(f"metrics.jsonl: {broken:,} of {held + broken:,} lines cannot be read.")
    if not held:
        notes.append("metrics.jsonl holds no line that can be read: no curves are drawn.")
    last = path.stat().st_mtime if held else None
    return {name: curve for name, curve in curves.items() if not name.startswith(RANK_KINDS)}, last


def _text(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(MAX_TEXT + 1)
    lines = text[:MAX_TEXT].split("\n")
    return "\n".join(printable(line) for line in lines) + ("\n…" if len(text) > MAX_TEXT else "")


def _listed(folder: Path) -> tuple[list[tuple[str, int]], int]:
    """The files of a run, without what is inside of its checkpoints."""
    found: list[tuple[str, int]] = []
    deadline = time.monotonic() + 2
    for path, folders, names in os.walk(folder):
        below = Path(path).relative_to(folder)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if below.parts[:1] == ("checkpoints",):
            found += [(str(below / name) + "/", 0) for name in folders]
            folders[:] = []
        for name in sorted(names):
            if not name.startswith("."):
                with contextlib.suppress(OSError):
                    found.append((str(below / name), os.stat(os.path.join(path, name)).st_size))
        if time.monotonic() > deadline or len(found) > 100 * MAX_FILES:
            break
    return found[:MAX_FILES], max(0, len(found) - MAX_FILES)
