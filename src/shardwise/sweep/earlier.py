"""What an earlier attempt at a job has left: its result, or a checkpoint to go on from."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.sweep.source import Outcome, Planned


def before(planned: Planned, row: dict[str, Any]) -> Outcome:
    """The outcome of a job that was over when the sweep began."""
    job = replace(planned.job, run_folder=row["run_folder"], run_id=Path(row["run_folder"]).name)
    status, message = row["status"], row["message"]
    result = {"status": status, "run_id": job.run_id, "steps": row.get("steps"), "metrics": row["metrics"]}
    seconds, attempts = row.get("seconds", 0.0), row.get("attempts", 1)
    return Outcome(planned, job, status, message, result, seconds, attempts, before=True)


def over(row: dict[str, Any]) -> dict[str, Any] | None:
    """What a job's own folder says of it, if it says that it is completed, or has diverged."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        result = json.loads((Path(row["run_folder"]) / "result.json").read_text(encoding="utf-8"))
        diverged = isinstance(result.get("diverged_at"), int)
        if (result["status"] == "completed" or diverged) and isinstance(result["metrics"], dict):
            status, message = ("diverged", str(result.get("reason", ""))) if diverged else ("completed", "")
            found = {"status": status, "message": message, "metrics": result["metrics"], "steps": result.get("steps")}
            return {**found, "seconds": result.get("seconds", 0.0)}
    return None


def continued(job: Job, run_folder: str) -> Job:
    """The job on from the newest whole checkpoint of an earlier attempt's folder; a new one where there is none."""
    from shardwise.checkpoint.find import newest_whole, stores_of
    from shardwise.checkpoint.manifest import step_of

    folder = Path(run_folder)
    try:
        found, _ = newest_whole(stores_of(folder), shown=str(folder))
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (ConfigError, OSError, ValueError):
        found, record = None, None
    if found is None:
        return job
    parent = record.get("parent") if isinstance(record, dict) else None
    return replace(
        job,
        run_id=folder.name,
        run_folder=str(folder),
        resumed=True,
        checkpoint=found.url,
        parent=parent if isinstance(parent, str) else job.parent,
        notes=[*job.notes, f"resumed from step {step_of(found.name)} of {folder}"],
    )
