"""When no step ends any more: where every rank is, whom the others wait for, and then the end of all of them.

A collective that one rank does not come to makes the others wait until its limit; what they raise then says nothing of
the rank that is missing. A thread of each rank looks at the time since the last beat (the end of a step, of a batch of
an evaluation, of a checkpoint). Once a rank has had none for 0.8 of the limit, all ranks write down where they are, in
the store at which they have met, which works from a thread while the main thread hangs. One of them tells it all.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.distributed import distributed_c10d

from shardwise.telemetry.stacks import Place, all_stacks, culprits, report, this_place

SHARE = 0.8
"""Of the limit of a collective: the rest is for telling what has happened before the collectives fail."""
ANSWER_SHARE, MOST_ANSWER_SECONDS = 0.06, 5.0
"""How long the ranks have to write down where they are, of the limit, and in seconds."""
END_SHARE, MOST_END_SECONDS = 0.16, 20.0
"""After this time, of the limit and in seconds, a rank that has raised or heard the alarm is gone, whatever it does."""
LEAST_LATE = 2.0
"""Seconds by which the watching thread itself has to be late before the whole process counts as having been stopped."""


class HangError(RuntimeError):
    """No step ends any more. Nobody can raise it in a main thread that hangs; it is recorded as the failure."""


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ending:
    """What becomes of what a rank has to say at its end."""

    log: Callable[[str], None] = _print
    """Takes all stacks of this rank, for its own log."""
    fail: Callable[[int, str], None] = lambda rank, text: _print(text)
    """Takes the rank that is to blame and why the job fails; called on one rank, which may be another one."""
    close: Callable[[], None] = lambda: None
    """Called on rank 0 before it ends: to leave a result, and to let trackers know."""


class Watchdog(Callback):
    """Ends a job of several processes that hangs, and says which rank it is that hangs, and where.

    The limit is 0.8 of ``collective_timeout`` between two beats, and of ``start_timeout`` before the first. It does
    nothing while checkpoints are written, which have a limit of their own. A process that was stopped as a whole
    (SIGSTOP, a debugger) and goes on gets that time back.

    Args:
        start_timeout: seconds.
        collective_timeout: seconds.
        ending: where it is told.
    """

    def __init__(self, *, start_timeout: float, collective_timeout: float, ending: Ending | None = None) -> None:
        self.start_timeout = start_timeout
        self.collective_timeout = collective_timeout
        self.ending = ending or Ending()
        self._beat_at = 0.0
        self._started = False
        self._stage = ""
        self._calls = 0
        self._stop: threading.Event | None = None
        self._store: Any = None
        self._trainer: Any = None

    # ---- the main thread ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        self._end_watch()
        self._trainer, self._stage, self._started = trainer, {"fit": "training"}.get(stage, stage), False
        # A connection of its own: the main thread may hang in one of its.
        store = distributed_c10d._get_default_store().clone()
        store.set_timeout(timedelta(seconds=MOST_ANSWER_SECONDS))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._calls += 1  # what ranks left in the store in an earlier call of the trainer is none of this one's
        self._store = dist.PrefixStore(f"watchdog/{attempt}/{self._calls}/{stage}", store)
        self._stop, self._beat_at = threading.Event(), time.monotonic()
        threading.Thread(target=self._watch, args=(self._stop,), name="watchdog", daemon=True).start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._stop is not None:
            with contextlib.suppress(Exception):  # for the others' information only
                self._store.set(f"left/{dist.get_rank()}", self._stage)
        self._end_watch()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end_watch()  # there is a better reason to fail

    def _end_watch(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _beat(self, *args: Any, **kwargs: Any) -> None:
        self._beat_at = time.monotonic()

    def _beat_of_step(self, *args: Any, **kwargs: Any) -> None:
        self._beat_at, self._started = time.monotonic(), True

    on_train_batch_end = on_test_batch_end = on_predict_batch_end = _beat_of_step
    # A validation before the first step is of the start.
    on_validation_batch_end = on_validation_end = on_train_start = on_train_epoch_end = on_save_checkpoint = _beat

    # ---- the watching thread -----------------------------------------------------------------------------------------

    @property
    def limit(self) -> tuple[str, float]:
        """The name of the limit that holds now, and its seconds."""
        if self._started:
            return "launch.collective_timeout", self.collective_timeout
        return "launch.start_timeout", self.start_timeout

    def _watch(self, stop: threading.Event) -> None:
        try:
            while True:
                poll = min(1.0, self.limit[1] / 50)
                before = time.monotonic()
                if stop.wait(poll):
                    return
                late = time.monotonic() - before - poll
                if late > max(LEAST_LATE, poll):
                    self._beat_at += late
                elif self._saves():
                    self._beat()
                elif time.monotonic() - self._beat_at > SHARE * self.limit[1]:
                    break
                if self._store.check(["alarm"]):
                    break
        except Exception:  # the store is gone, and with it whoever started this job
            return
        # In a thread of its own, so that nothing it meets keeps this rank from ending.
        talk = threading.Thread(target=self._end, args=(stop,), name="watchdog's end", daemon=True)
        talk.start()
        talk.join(min(MOST_END_SECONDS, END_SHARE * self.limit[1]))
        if not stop.is_set():
            os._exit(1)

    def _phase(self) -> str:
        return str(getattr(getattr(self._trainer.strategy, "clock", None), "current", "other"))

    def _saves(self) -> bool:
        """Whether this rank writes a checkpoint, or waits in the midst of it for others that do."""
        clock: Any = getattr(self._trainer.strategy, "clock", None)
        if getattr(clock, "collective", None) is not None:
            return bool(clock.last_collective.phase == "checkpoint")
        return self._phase() == "checkpoint"

    def _place(self) -> Place:
        clock = getattr(self._trainer.strategy, "clock", None)
        hosts = self._hosts()
        return this_place(
            rank=dist.get_rank(),
            host=hosts[dist.get_rank()] if hosts else "",
            step=self._trainer.global_step,
            phase=self._phase(),
            quiet=time.monotonic() - self._beat_at,
            waiting=getattr(clock, "collective", None),
        )

    def _hosts(self) -> list[str]:
        return list(getattr(self._trainer.strategy, "hosts", None) or [])

    def _end(self, stop: threading.Event) -> None:
        """Write down where this rank is, hear of the others, and let one tell."""
        store, rank, size = self._store, dist.get_rank(), dist.get_world_size()
        answering = min(MOST_ANSWER_SECONDS, ANSWER_SHARE * self.limit[1])
        place = self._place()
        # Two may raise the alarm at once, and give the same reason.
        name, seconds = self.limit
        store.compare_set("alarm", "", f"no step has ended for {place.quiet:.3g} s ({SHARE:g} of {name}={seconds:g})")
        store.set(f"rank/{rank}", json.dumps(place.dump()))
        places = self._answers(size, answering)
        first = store.compare_set("teller", "", str(rank)).decode() == str(rank)
        if first and not stop.is_set():
            why = store.get("alarm").decode()
            left = {r: store.get(f"left/{r}").decode() for r in range(size) if store.check([f"left/{r}"])}
            text = report(places, size=size, hosts=self._hosts(), why=why, left=left)
            self.ending.fail(next(iter(culprits(places, size=size)), rank), text)
        if first:
            store.set("told", "")
        with contextlib.suppress(Exception):
            self.ending.log(all_stacks())
        self._until(lambda: store.check(["told"]), answering)
        if rank == 0:
            with contextlib.suppress(Exception):
                self.ending.close()
            store.set("closed", "")
        elif 0 in places:  # whoever ends first ends the others
            self._until(lambda: store.check(["closed"]), MOST_END_SECONDS)

    def _answers(self, size: int, seconds: float) -> dict[int, Place]:
        places: dict[int, Place] = {}

        def complete() -> bool:
            for rank in range(size):
                if rank not in places and self._store.check([f"rank/{rank}"]):
                    places[rank] = Place.load(json.loads(self._store.get(f"rank/{rank}")))
            return len(places) == size

        self._until(complete, seconds)
        return places

    @staticmethod
    def _until(condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end:
            time.sleep(0.02)
