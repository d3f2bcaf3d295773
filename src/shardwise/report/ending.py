"""Why a run did not end well: the last line of its reason, and where its log is."""

import contextlib
import json
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import printable

MAX_RECORDS = 64
"""Records of ranks that are looked at, of one run."""
MAX_RECORD_BYTES = 2**20
MAX_REASON = 300
"""Characters of a reason that are shown."""


def reason_of(folder: Path, *, result: dict[str, Any], listed: str = "") -> tuple[str, str]:
    """(the last line of why it failed, the path of its log), each empty where nothing says so.

    Args:
        folder: the run's.
        result: its result.json.
        listed: the message of its row in the list of its sweep.
    """
    record = _first_record(folder / "ranks")
    rank = record.get("rank") if record else 0
    log = folder / "ranks" / f"rank_{rank}.log"
    said = [result.get(name) for name in ("message", "error", "reason")]
    if record:
        message, trace = record.get("message"), record.get("traceback")
        said += [message, trace] if record.get("config_error") is True else [trace, message]
    said.append(listed.partition("; its log: ")[0])
    why = next((line for line in map(_last_line, said) if line), "")
    return why, printable(log) if isinstance(rank, int) and log.is_file() else ""


def _first_record(ranks: Path) -> dict[str, Any] | None:
    """The earliest record of a failure; one that only tells of a lost peer comes last."""
    records = []
    for path in sorted(ranks.glob("failure_*.json"))[:MAX_RECORDS]:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            if path.is_file() and path.stat().st_size <= MAX_RECORD_BYTES:
                plain = json.loads(path.read_text(encoding="utf-8"))
                if isinstance(plain, dict):
                    records.append(plain)
    return min(records, key=_order, default=None)


def _order(record: dict[str, Any]) -> tuple[bool, float]:
    when = record.get("time")
    return record.get("lost_peer") is True, float(when) if isinstance(when, (int, float)) and when < 1e15 else 1e15


def _last_line(text: Any) -> str:
    lines = [line.strip() for line in text[-20_000:].splitlines() if line.strip()] if isinstance(text, str) else []
    return printable(lines[-1])[:MAX_REASON] if lines else ""
