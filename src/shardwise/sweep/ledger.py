"""What a sweep has done so far, in its folder, so that it can be run again after whatever has ended it.

``jobs.json`` has a row a job, known by a hash of what decides its numbers; ``sweep.json`` what all of them share. Both
are written whole, under a temporary name first, at every change.
"""

import contextlib
import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardwise.config import Config, to_plain
from shardwise.errors import ConfigError
from shardwise.job import held, holder_of, unwritable, write_json
from shardwise.provenance import without_secrets
from shardwise.sweep.code import code_state, shown_code
from shardwise.sweep.planning import deciding
from shardwise.sweep.source import INTERRUPTED, OVER, STATUSES, Common, Outcome, Planned

ROWS, SHARED = "jobs.json", "sweep.json"
SHOWN = 3
"""Keys, or versions of the code, that one line names."""


@contextlib.contextmanager
def in_sweep_folder(folder: Path) -> Iterator[None]:
    """The folder of a sweep, made if need be, and held against others while the block lasts.

    Raises:
        ConfigError: another process runs this sweep, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    with held(folder, taken=_running):
        yield


def _running(folder: Path) -> ConfigError:
    who = holder_of(folder)
    return ConfigError(
        f"sweep.name={folder.name}: {who} runs it in {folder}: wait until it has ended, or type another sweep.name"
    )


class Ledger:
    """The rows of a sweep, in the memory of the one process that runs it, and in its folder.

    Args:
        folder: the sweep's.
        plugins: packages of the user's, whose code counts too.

    Raises:
        ConfigError: what is there is damaged; it is left as it is.
    """

    def __init__(self, folder: Path, *, plugins: Sequence[str] = ()) -> None:
        self.folder, self._plugins = folder, list(plugins)
        self.code = code_state(self._plugins)
        self.rows: dict[str, dict[str, Any]] = {row["key"]: row for row in _read_rows(folder / ROWS)}
        self._shared = _read_shared(folder / SHARED)

    def check(self, common: Common, *, keys: Collection[str], allow_code_change: bool) -> list[str]:
        """Whether what was done fits what is asked for now; notes it down.

        Args:
            common: what the jobs of now share.
            keys: of the jobs of now; empty where nobody knows, which means all that are there.
            allow_code_change: whether what other code has done counts.

        Returns:
            Lines for the user.

        Raises:
            ConfigError: the configuration differs otherwise than by what is swept, or other code has done it.
        """
        self._check_same(common)
        counted = [row for key, row in self.rows.items() if row["status"] != "skipped" and (not keys or key in keys)]
        done = [row for row in counted if row["status"] in OVER or is_partial(row)]
        others = [row for row in done if row.get("code") != self.code]
        notes = []
        if others:
            codes = list(dict.fromkeys(shown_code(row.get("code")) for row in others))
            more = f" and {len(codes) - SHOWN} more" if len(codes) > SHOWN else ""
            which = f"{'; '.join(codes[:SHOWN])}{more}; now {shown_code(self.code)}"
            said = f"{len(others)} of {len(done)} jobs were run by other code ({which})"
            if not allow_code_change:
                raise ConfigError(
                    f"sweep.name={self.folder.name}: {said}: type sweep.allow_code_change=true to take their results, "
                    f"or another sweep.name"
                )
            notes.append(f"note: {said}, which sweep.allow_code_change=true accepts")
            self._shared["accepted"] = [
                *self._shared.get("accepted", []),
                {
                    "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                    "now": self.code,
                    "jobs": [row["key"] for row in others],
                },
            ]
        varied = set(self._shared["varied"]) | common.varied
        values = {**self._shared["common"], **common.values}
        self._shared["varied"] = sorted(varied)
        self._shared["common"] = {key: value for key, value in values.items() if key not in varied}
        write_json(self.folder / SHARED, self._shared)
        return notes

    def _check_same(self, common: Common) -> None:
        if not self.rows or not self._shared["common"]:
            return
        then, varied = self._shared["common"], set(self._shared["varied"])
        defaults, missing = deciding(to_plain(Config())), object()
        now = json.loads(json.dumps(common.values, default=str))  # as it comes back from a file
        differing = []
        for key in sorted({*then, *now} - varied - common.varied):
            before, after = then.get(key, missing), now.get(key, missing)
            # A key that one of the two does not know has its default there: a newer version has more of them.
            before = defaults.get(key, missing) if before is missing else before
            after = defaults.get(key, missing) if after is missing else after
            if before != after:
                shown = ["nothing" if value is missing else repr(value) for value in (before, after)]
                differing.append(f"{key} was {shown[0]} and is {shown[1]}")
        if differing:
            more = f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
            changed = f"{', '.join(differing[:SHOWN])}{more}"
            raise ConfigError(
                f"sweep.name={self.folder.name} was run with another configuration: {changed}: "
                f"type a new sweep.name (only what is swept may change), or the values of then, or remove {self.folder}"
            )

    def row(self, planned: Planned) -> dict[str, Any] | None:
        """What is known of a job from before."""
        return self.rows.get(planned.key)

    def start(self, planned: Planned, *, run_folder: str, attempts: int) -> None:
        """A job, or another attempt at it, has begun."""
        seconds, code = self.rows.get(planned.key, {}).get("seconds", 0.0), code_state(self._plugins)
        # Taken anew for each job: a user goes on writing while a long sweep runs.
        self._put(planned, run_folder=run_folder, status="running", attempts=attempts, seconds=seconds, code=code)

    def end(self, outcome: Outcome) -> None:
        """A job, or an attempt at it, has ended."""
        result = outcome.result or {}
        self._put(
            outcome.planned,
            run_folder=outcome.job.run_folder,
            status=outcome.status,
            message=without_secrets(outcome.message),
            metrics={name: _finite(value) for name, value in outcome.metrics.items()},
            steps=result.get("steps"),
            seconds=round(outcome.seconds, 3),
            attempts=outcome.attempts,
            code=self.rows.get(outcome.planned.key, {}).get("code", self.code),
        )

    def skip(self, planned: Planned, why: str) -> None:
        """A job is not run now; what was known of it stays."""
        if self.rows.get(planned.key, {}).get("status", "skipped") == "skipped":
            self._put(planned, run_folder=planned.job.run_folder, status="skipped", message=why, code=None)

    def renumber(self, planned: Planned) -> None:
        """A job that is known has another number in the sweep of now."""
        self.rows[planned.key]["number"] = planned.number
        self.write()

    def _put(self, planned: Planned, **values: Any) -> None:
        row = {
            "number": planned.number,
            "key": planned.key,
            "overrides": without_secrets(planned.job.overrides),
            "run_folder": "",
            "status": "",
            "message": "",
            "metrics": {},
            "steps": None,
            "seconds": 0.0,
            "attempts": 0,
            "code": self.code,
            **values,
        }
        assert row["status"] in STATUSES
        self.rows[planned.key] = row
        self.write()

    def write(self) -> None:
        """``jobs.json``, in the order of the jobs' numbers."""
        path = self.folder / ROWS
        try:
            write_json(path, sorted(self.rows.values(), key=lambda row: row["number"]))
        except OSError as error:
            raise unwritable(path, error) from error


def is_partial(row: dict[str, Any]) -> bool:
    """Whether a job has begun and nobody knows of its end, so that it may go on."""
    # "failed" and "interrupted" stand in ledgers of earlier versions.
    return row["status"] in ("running", "preempted") or (row["status"], row["message"]) == ("failed", INTERRUPTED)


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = _read(path)
    if rows is None:
        return []
    kinds = {"number": int, "key": str, "run_folder": str, "status": str, "message": str, "metrics": dict}
    if not isinstance(rows, list):
        raise _damaged(path, "a list is expected")
    for place, row in enumerate(rows):
        wrong = [
            name for name, kind in kinds.items() if not isinstance(row, dict) or not isinstance(row.get(name), kind)
        ]
        if wrong or row["status"] not in STATUSES:
            raise _damaged(path, f"row {place + 1} has no right {wrong[0] if wrong else 'status'}")
    return rows


def _read_shared(path: Path) -> dict[str, Any]:
    shared = _read(path)
    if shared is None:
        return {"common": {}, "varied": []}
    if not isinstance(shared, dict) or not isinstance(shared.get("common"), dict):
        raise _damaged(path, "a mapping with common is expected")
    if not isinstance(shared.get("varied"), list):
        raise _damaged(path, "a list under varied is expected")
    return shared


def _damaged(path: Path, why: str) -> ConfigError:
    why = " ".join(why.split())[:200]
    return ConfigError(f"{path} is damaged ({why}): mend it, or type another sweep.name; it is left as it is")
