"""The jobs of ``-m``: composed one after the other by the parent, which never trains, and run in fresh processes."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.job import Job, in_run_folder, write_json
from shardwise.launch import RanksFailedError, how_it_ended, launch
from shardwise.provenance import without_secrets
from shardwise.signals import GRACE_SECONDS, PREEMPTED, Stop, die_with_parent, owned_signals
from shardwise.worker import first_failure


class SweepFailedError(RuntimeError):
    """At least one job of a sweep failed; the message names each with its log."""


@dataclass
class Outcome:
    """How one job ended."""

    job: Job
    status: str
    """completed, preempted, failed or skipped."""
    message: str = ""
    result: dict[str, Any] | None = None


def run_jobs(jobs: Sequence[Job], *, folder: Path, on_failure: str) -> list[Outcome]:
    """Run the jobs one after the other, each in a process of its own; failures are told at once and again at the end.

    Args:
        jobs: in the order in which they run.
        folder: where ``jobs.json`` goes: what ran, how it ended, and where its folder is.
        on_failure: ``stop`` leaves the jobs after a failing one out, ``continue`` runs them.

    Raises:
        SweepFailedError: a job failed.
        SystemExit: a signal has ended the sweep at once, or (status 75) a job was asked to save and has.
    """
    outcomes: list[Outcome] = []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with owned_signals(console=True, grace=3 * GRACE_SECONDS) as stop, stop.deferred():
            for number, job in enumerate(jobs):
                name = f"job {number + 1}/{len(jobs)}"
                if stop.requested is not None or (outcomes and outcomes[-1].status == "preempted"):
                    break
                if outcomes and outcomes[-1].status != "completed" and on_failure == "stop":
                    outcomes.append(Outcome(job, "skipped", "a job before it failed"))
                    continue
                print(f"\n{name}: {' '.join(_overrides(job))}", flush=True)
                outcomes.append(Outcome(job, "failed", "interrupted"))  # until it has ended otherwise
                outcomes[-1] = _run(job, stop)
                if outcomes[-1].status == "failed":
                    print(f"{name} failed: {outcomes[-1].message}", file=sys.stderr, flush=True)
                write_json(folder / "jobs.json", [_row(outcome) for outcome in outcomes])
    finally:
        outcomes += [Outcome(job, "skipped", "interrupted") for job in jobs[len(outcomes) :]]
        write_json(folder / "jobs.json", [_row(outcome) for outcome in outcomes])
    _show(outcomes, folder)
    if any(outcome.status == "preempted" for outcome in outcomes):
        raise SystemExit(PREEMPTED)
    if stop.requested is not None and len(outcomes) > 0 and outcomes[-1].status == "skipped":
        raise SystemExit(128 + stop.signal)  # between two jobs
    broken = [outcome for outcome in outcomes if outcome.status != "completed"]
    if broken:
        raise SweepFailedError(f"{len(broken)} of {len(jobs)} jobs did not complete; see {folder / 'jobs.json'}")
    return outcomes


def _run(job: Job, stop: Stop) -> Outcome:
    try:
        with in_run_folder(replace(job, started=time.time())) as job:
            return _run_ranks(job, stop) if job.world["launch"] == "local" else _run_apart(job, stop)
    except ConfigError as error:  # of the folder: a job's own are in its outcome
        return Outcome(job, "failed", str(error))


def _run_ranks(job: Job, stop: Stop) -> Outcome:
    """A job of several processes: all of them are fresh, and the parent is no more than their agent."""
    try:
        result = launch(job, stop)
    except (ConfigError, RanksFailedError) as error:
        return Outcome(job, "failed", _with_log(job, str(error)))
    return Outcome(job, result["status"], result=result)


def _with_log(job: Job, message: str) -> str:
    """A message that also names the log of the rank that failed first."""
    record = first_failure(job.run_folder)
    log = f"{job.run_folder}/ranks/rank_{record['rank'] if record else 0}.log"
    return message if log in message else f"{message}; its log: {log}"


def _run_apart(job: Job, stop: Stop) -> Outcome:
    """A job of one process, in a fresh one."""
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_job_process, args=(job.dumps(), writer), name=f"job {job.run_id}")

    def send(one: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid or 0, one)

    try:
        with stop.deferred(lambda one: send(signal.SIGUSR1) if process.pid else None):
            process.start()
            writer.close()
            if stop.requested is not None:  # while it was being started
                send(signal.SIGUSR1)
            answer = reader.recv()
    except EOFError:
        answer = {}
    except BaseException:
        if process.pid:
            send(signal.SIGQUIT)
            process.join(GRACE_SECONDS + 3)
            process.kill()
        raise
    process.join(2 * GRACE_SECONDS)
    process.kill()  # where it hangs in somebody's exit handler: it has said all there is to say
    process.join()
    if "result" in answer:
        return Outcome(job, answer["result"]["status"], result=answer["result"])
    if not answer and stop.requested is not None and (process.exitcode or 0) > 128:
        raise SystemExit(128 + stop.signal)  # the request came before training had begun
    message = answer.get("message") or f"the process of the job {how_it_ended(process.exitcode)}"
    return Outcome(job, "failed", _with_log(job, message))


def _job_process(text: str, writer: Any) -> None:
    """A fresh process for one job."""
    die_with_parent()
    try:
        job = Job.loads(text)
        writer.send({"result": launch(job)})
    except (ConfigError, RanksFailedError) as error:
        writer.send({"message": str(error)})
    except Exception:
        writer.send({"message": traceback.format_exc().rstrip()})


def _row(outcome: Outcome) -> dict[str, Any]:
    return {
        "overrides": _overrides(outcome.job),
        "run_folder": outcome.job.run_folder,
        "status": outcome.status,
        "message": without_secrets(outcome.message),
        "metrics": (outcome.result or {}).get("metrics", {}),
    }


def _overrides(job: Job) -> list[str]:
    return without_secrets(job.overrides)


def _show(outcomes: Sequence[Outcome], folder: Path) -> None:
    """A row a job: what it does not share with the others, how it ended, what came out; and what each failure was."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(outcomes)} jobs, {folder}", title_justify="left", box=None, pad_edge=False)
    metrics = sorted({n for o in outcomes for n in (o.result or {}).get("metrics", {}) if n.startswith("test/")})
    for heading in ("job", "overrides", "status", *metrics, "run folder"):
        table.add_column(heading, no_wrap=True)
    shared = set.intersection(*(set(o.job.overrides) for o in outcomes)) if len(outcomes) > 1 else set()
    for number, outcome in enumerate(outcomes):
        values = (outcome.result or {}).get("metrics", {})
        table.add_row(
            str(number + 1),
            " ".join(without_secrets([o for o in outcome.job.overrides if o not in shared])),
            outcome.status,
            *(f"{values[name]:.4g}" if name in values else "" for name in metrics),
            os.path.relpath(outcome.job.run_folder) if outcome.status != "skipped" else "",
        )
    width = None if sys.stdout.isatty() else 10_000  # a file has no edge
    Console(highlight=False, soft_wrap=True, width=width).print(table)
    for number, outcome in enumerate(outcomes):
        if outcome.status == "failed":
            print(f"job {number + 1} failed: {'; '.join(outcome.message.strip().splitlines()[-2:])}")
