"""How a sweep that was asked to end goes on."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from shardwise.job import Job, start_command
from shardwise.provenance import without_secrets
from shardwise.sweep.source import INTERRUPTED, Outcome, Source


def go_on(outcomes: Sequence[Outcome], source: Source, *, folder: Path) -> list[str]:
    """Lines with the command by which a sweep that was asked to end goes on; none where nothing is left.

    Args:
        outcomes: of all jobs that are known.
        source: theirs; a search makes up the others when their turn comes.
        folder: the sweep's.
    """
    preempted = sum(outcome.status == "preempted" for outcome in outcomes)
    waiting = sum(outcome.status == "skipped" and outcome.message == INTERRUPTED for outcome in outcomes)
    if source.total is not None and not source.finished:
        waiting += max(0, source.total - source.ended_before - len(outcomes))
    if not outcomes or not preempted + waiting:
        return []
    command = same_command(outcomes[0].planned.job, folder=folder)
    return [f"{preempted} preempted, {waiting} not started; go on with:", f"  {command}"]


def same_command(job: Job, *, folder: Path) -> str:
    """What was typed, with the name of the sweep's folder; secrets are masked."""
    words = job.command[1:]
    if words[:1] and words[0].endswith(".py"):
        words = words[1:]
    elif words[:2] == ["-m", "shardwise"]:
        words = words[3:]
    kept: list[str] = []
    skip = False
    for word in words:
        own = word in ("--config-dir", "-cd")  # stands in start_command() already
        if not (skip or own or word.startswith(("--config-dir=", "sweep.name="))):
            kept.append(word)
        skip = own
    if folder.parent.name == "sweeps":  # it is where sweep.name leads
        kept.append(f"sweep.name={folder.name}")
    return f"{start_command(job)} {shlex.join(without_secrets(kept))}"
