"""Runs the jobs of a sweep side by side in slots, each in fresh processes; the parent trains nothing itself."""

import contextlib
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.job import Job, in_run_folder
from shardwise.signals import GRACE_SECONDS, PREEMPTED, Stop, owned_signals
from shardwise.sweep.earlier import before, continued, over
from shardwise.sweep.going_on import go_on
from shardwise.sweep.ledger import ROWS, Ledger, in_sweep_folder, is_partial
from shardwise.sweep.process import JobProcess
from shardwise.sweep.slots import Shares, count_slots
from shardwise.sweep.source import INTERRUPTED, OVER, Outcome, Planned, Source, counted
from shardwise.sweep.table import Display, show_end
from shardwise.worker import set_failures_aside

POLL_SECONDS = 1.0
"""Between two looks at the metrics of the jobs that run."""


class SweepFailedError(RuntimeError):
    """At least one job of a sweep failed; the message names each with its log."""


def run_jobs(source: Source, *, folder: Path, sample: Planned) -> list[Outcome]:
    """Run what a source hands out, ``sweep.slots`` jobs side by side; failures are told at once and again at the end.

    What ``folder`` knows of an earlier run of this sweep is kept: jobs that are over (completed, or diverged) are not
    run again, partial ones go on.

    Args:
        source: where the jobs come from.
        folder: where the ledger is, and comes to be.
        sample: any job of it, the one with the most devices; its ``sweep`` is read.

    Raises:
        ConfigError: the folder is another sweep's, damaged, or in use; or the source says so.
        SweepFailedError: a job failed.
        SystemExit: a signal has ended the sweep at once, or (status 75) a job was asked to save and has.
    """
    resolved = sample.job.resolved()
    config, world = resolved.config, resolved.world
    slots = count_slots(config, world, total=source.total)
    with in_sweep_folder(folder):
        ledger = Ledger(folder, plugins=config.plugins)
        keys = {planned.key for planned in source.rest()}
        notes = ledger.check(source.common(), keys=keys, allow_code_change=config.sweep.allow_code_change)
        with owned_signals(console=True, grace=3 * GRACE_SECONDS) as stop:
            pool = _Pool(source, ledger, config=config, slots=slots, stop=stop)
            for note in notes:
                pool.display.say(note)
            try:
                with pool.display:
                    pool.run()
            except Exception:  # what is done is to be seen all the same
                outcomes = pool.all_outcomes()
                with contextlib.suppress(Exception):
                    show_end(outcomes, folder=folder, closing=source.closing(outcomes))
                raise
            except BaseException:  # a signal has ended it: there is no time for a table
                on = go_on(pool.all_outcomes(), source, folder=folder)
                print(f"ended at once; the jobs are listed in {folder / ROWS}", *on, sep="\n", flush=True)
                raise
            outcomes = pool.all_outcomes()
            asked = stop.requested is not None or any(outcome.status == "preempted" for outcome in outcomes)
            on = go_on(outcomes, source, folder=folder) if asked else []
            show_end(outcomes, folder=folder, closing=[*source.closing(outcomes), *on])
    return _judged(outcomes, stop, folder)


def _judged(outcomes: list[Outcome], stop: Stop, folder: Path) -> list[Outcome]:
    """The outcomes, where all is well; the exit status otherwise."""
    ended = [outcome for outcome in outcomes if outcome.status == "preempted"]
    if any(outcome.result for outcome in ended):
        raise SystemExit(PREEMPTED)
    if stop.requested is not None and any(outcome.status in ("skipped", "preempted") for outcome in outcomes):
        raise SystemExit(128 + stop.signal)  # between two jobs, or before they had anything to save
    broken = [outcome for outcome in outcomes if outcome.status not in (*OVER, "pruned")]
    if broken:
        kinds = {outcome.status: sum(one.status == outcome.status for one in broken) for outcome in broken}
        named = ", ".join(f"{n} {'not started' if status == 'skipped' else status}" for status, n in kinds.items())
        kept = f"{len(broken)} of {counted(len(outcomes), 'job')} did not complete"
        raise SweepFailedError(f"{kept}{f' ({named})' if len(kinds) > 1 else ''}; see {folder / ROWS}")
    return outcomes


class _Running:
    """A job that runs, and what has to be undone after it."""

    def __init__(self, planned: Planned, *, attempts: int, seconds: float, retries: int = 0) -> None:
        self.planned = planned
        self.attempts = attempts
        """Of all times that this sweep was run, with this one."""
        self.retries = retries
        """Of this time."""
        self.seconds = seconds
        """Of earlier attempts."""
        self.began = time.monotonic()
        self.pruned = False
        self.undo = contextlib.ExitStack()
        self.job: Job
        self.process: JobProcess

    def outcome(self, status: str, message: str = "", *, result: dict[str, Any] | None = None) -> Outcome:
        seconds = self.seconds + time.monotonic() - self.began
        return Outcome(self.planned, self.job, status, message, result, seconds, self.attempts)


class _Pool:
    def __init__(self, source: Source, ledger: Ledger, *, config: Config, slots: int, stop: Stop) -> None:
        self.source, self.ledger, self.stop = source, ledger, stop
        self.sweep = config.sweep
        self.slots = slots
        self.shares = Shares(slots)
        self.display = Display(total=source.total, slots=slots, before=source.ended_before)
        self.outcomes: list[Outcome] = []
        self.running: list[_Running] = []
        self._ending: str | None = None
        """Why no more jobs are started; None while they are."""

    def run(self) -> None:
        with self.stop.deferred(lambda one: self._ask(self.running)):
            try:
                self._loop()
            except Exception:  # the source's word, or a mistake of ours: what runs is not to be lost
                self._ending = INTERRUPTED
                self._ask(self.running)
                self._drain()
                self._end_at_once()
                raise
            except BaseException:
                self._end_at_once()
                raise

    def _loop(self) -> None:
        while True:
            while not self._stopping() and len(self.running) < self.slots and not self.source.finished:
                planned = self.source.next()
                if planned is None:
                    break
                self._begin(planned)
            if self.running:
                self._wait()
            elif self._stopping() or self.source.finished:
                return
            else:
                raise AssertionError("the source of the sweep's jobs waits for a job, and none runs")

    def _drain(self) -> None:
        """Wait until every job has saved; what goes wrong with one is not to cost the others theirs."""
        left = len(self.running) + 1
        while 0 < len(self.running) < left:
            with contextlib.suppress(Exception):
                while self.running:
                    left = len(self.running)
                    self._wait()

    def _stopping(self) -> bool:
        if self.stop.requested is not None and self._ending is None:
            self._ending = INTERRUPTED
        self.display.ending = self._ending is not None
        return self._ending is not None

    def all_outcomes(self) -> list[Outcome]:
        """How each job has ended, in their order; what has not been started is noted down."""
        self._list_rest()
        return sorted(self.outcomes, key=lambda outcome: outcome.planned.number)

    def _list_rest(self) -> None:
        for planned in self.source.rest():
            why = self._ending or INTERRUPTED
            self.ledger.skip(planned, why)
            row = self.ledger.row(planned) or {}
            if row.get("status") in OVER:
                self.outcomes.append(before(planned, row))
            else:
                self.outcomes.append(Outcome(planned, planned.job, "skipped", why))

    # ---- a job begins ------------------------------------------------------------------------------------------

    def _begin(self, planned: Planned) -> None:
        """Start a job, or let it go on; one that is completed is only told of."""
        if any(one.planned.key == planned.key for one in self.running):  # a search tries a point again
            planned = replace(planned, key=f"{planned.key}#{planned.number}")
        row = self.ledger.row(planned)
        if row is not None and row["status"] not in OVER and is_partial(row) and (found := over(row)):
            row.update(found)  # the parent was killed before it heard of it
        if row is not None and row["status"] in OVER:
            self.ledger.renumber(planned)
            outcome = before(planned, row)
            self.outcomes.append(outcome)
            self.display.ended(outcome)
            self.source.ended(planned, outcome)
            return
        attempts, seconds = (row.get("attempts", 0), row.get("seconds", 0.0)) if row is not None else (0, 0.0)
        job = planned.job
        if row is not None and is_partial(row):
            job = continued(job, row["run_folder"])
        self._start(_Running(planned, attempts=attempts + 1, seconds=seconds), job)

    def _start(self, one: _Running, job: Job, *, how: str = "") -> None:
        one.job = job
        try:
            one.job = one.undo.enter_context(in_run_folder(one.job))
            share = self.shares.take(one.job.resolved().world)
            one.undo.callback(self.shares.give_back, share)
            self.ledger.start(one.planned, run_folder=one.job.run_folder, attempts=one.attempts)
            set_failures_aside(one.job.run_folder)
            one.process = JobProcess(one.job, share)
        except ConfigError as error:  # of the folder: a job's own are in its outcome
            one.undo.close()
            self._finish(one.outcome("failed", str(error)))
            return
        except BaseException:
            one.undo.close()
            raise
        self.running.append(one)
        if self.stop.requested is not None:  # while it was being started
            self._ask([one])
        how = how or ("goes on" if one.job.resumed else "started")
        self.display.started(one.planned, one.job, how=how)
        self.source.started(one.planned, one.job)

    # ---- a job runs ---------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait until something happens, at most until the next look at the metrics."""
        wait([what for one in self.running for what in one.process.waits_for], POLL_SECONDS)
        for one in list(self.running):
            ended = one.process.ended()
            lines = one.process.new_lines()
            if lines:
                self.display.progress(one.planned, lines)
                if self.source.progress(one.planned, lines) and not ended and not one.pruned:
                    one.pruned = True
                    self._ask([one])
            if ended:
                self._take_in(one)
        self.display.refresh()

    @staticmethod
    def _ask(running: Sequence[_Running]) -> None:
        """Ask jobs to save and end."""
        for one in list(running):  # a signal may come while a job is taken in
            one.process.send(signal.SIGUSR1)

    # ---- a job ends ---------------------------------------------------------------------------------------------

    def _take_in(self, one: _Running) -> None:
        process, asked = one.process, one.pruned or self.stop.requested is not None or self._ending == INTERRUPTED
        blamed = False
        if process.answer and "result" in process.answer:
            result = process.answer["result"]
            status = "pruned" if one.pruned and result["status"] == "preempted" else result["status"]
            outcome = one.outcome(status, result=result)
        elif asked and process.told_to_end():
            outcome = one.outcome("pruned" if one.pruned else "preempted", "ended before it had anything to save")
        elif diverged := process.diverged():
            left = over({"run_folder": one.job.run_folder}) or {}
            outcome = one.outcome("diverged", diverged, result={"metrics": {}, **left})
        else:
            message, blamed = process.failure()
            outcome = one.outcome("failed", message)
        self.running.remove(one)
        process.close()
        one.undo.close()
        if outcome.status == "failed" and not blamed and self._again(one, outcome):
            return
        self._finish(outcome)

    def _again(self, one: _Running, outcome: Outcome) -> bool:
        """Another attempt at a job that has failed, where there is to be one."""
        if self.sweep.on_failure != "retry" or one.retries >= self.sweep.retries or self._stopping():
            return False
        retries, attempts = one.retries + 1, one.attempts + 1
        self.display.failed(outcome, again=f"retry {retries} of {self.sweep.retries}")
        self.ledger.end(outcome)
        again = _Running(one.planned, attempts=attempts, seconds=outcome.seconds, retries=retries)
        job = continued(one.planned.job, one.job.run_folder)
        how = "is tried again" + (" from its newest checkpoint" if job.resumed else " from the start")
        self._start(again, job, how=how)
        return True

    def _finish(self, outcome: Outcome) -> None:
        """A job has ended for good."""
        self.outcomes.append(outcome)
        self.ledger.end(outcome)
        if outcome.status == "failed" and self.sweep.on_failure == "stop" and self._ending is None:
            self._ending = "a job before it failed"
        if outcome.status == "preempted" and self._ending is None:  # its time is over, and so is everybody's
            self._ending = INTERRUPTED
        self._stopping()  # for the display
        self.display.ended(outcome)
        self.source.ended(outcome.planned, outcome)

    def _end_at_once(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS + 3
        for one in self.running:
            one.process.send(signal.SIGQUIT)
        for one in self.running:
            one.process.end_at_once(deadline=deadline)
            one.undo.close()
            outcome = one.outcome("preempted", INTERRUPTED)
            self.outcomes.append(outcome)
            self.ledger.end(outcome)
        self.running.clear()
