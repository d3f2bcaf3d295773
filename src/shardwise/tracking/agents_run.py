"""The run that an agent of a W&B sweep has made for a training, and the run folder's memory of it."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

AGENTS_RUN = "agents_run.json"
"""In <save_dir>/wandb: the run of an agent that the metrics went to."""
VARIABLES = ("WANDB_SWEEP_ID", "WANDB_RUN_ID")


def agents_run(service_settings: Any, folder: Path, *, resume: bool, writes: bool) -> dict[str, Any]:
    """run_id, project and entity of the run that an agent of a sweep has made, which counts instead of a new one; empty
    without an agent. What is resumed outside of it goes on in the same run.

    Args:
        folder: <save_dir>/wandb.
        writes: whether this process notes it there.
    """
    path = folder / AGENTS_RUN
    if service_settings.sweep_id and service_settings.run_id:
        found = {name: getattr(service_settings, name) for name in ("run_id", "project", "entity")}
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found), encoding="utf-8")
        return found
    if resume:
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict) and isinstance(found.get("run_id"), str):
                return {name: found.get(name) for name in ("run_id", "project", "entity")}
    return {}


def leave_agent() -> None:
    """Let this process have a run of its own: the agent has made one, which is another rank's."""
    for variable in VARIABLES:
        os.environ.pop(variable, None)
