"""When a run is saved, and that all ranks stop together: a Lightning callback."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, cast

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor

from shardwise.checkpoint.capture import capture
from shardwise.checkpoint.manifest import FORMAT_VERSION, step_name, step_of
from shardwise.checkpoint.retention import best_first, retained
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.writer import Writer
from shardwise.errors import ConfigError

log = logging.getLogger(__name__)

GO_ON, SAVE, STOP = 0, 1, 2
"""What a rank wishes for at the end of a step; the largest wish of all ranks is what happens."""

WRITING_HOURS = 2.0
"""Limit of a collective while a checkpoint is written, in which the slowest rank is waited for."""


class Preempted(Exception):
    """Training has been asked to end, and has saved what it is."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"ended by {reason} after a checkpoint")
        self.reason = reason


class NoStop:
    """Nobody asks this training to end."""

    requested: str | None = None


class SaveCheckpoints(Callback):
    """Saves the whole state of a run, and ends it when asked to, on all ranks at the same step.

    A checkpoint is of a finished step with all that belongs to it, validation and the end of an epoch included. Each
    step the ranks tell one another what they wish for; the answer is read a step later, so nobody waits for it.

    Args:
        folder: path or URL for the checkpoints of this run.
        every_n_steps: optimizer steps between two checkpoints; None for none.
        every_minutes: minutes between two checkpoints; None for none.
        at_end: save when training ends.
        background: let training go on while a copy is written.
        keep_last: newest ones that are kept; None keeps all.
        keep_every_n_steps: those of every n-th step are kept besides.
        keep_best: so many with the best values of ``monitor`` are kept besides.
        monitor: name of a metric.
        mode: ``min`` or ``max``.
        facts: plain values for ``state.json`` (what the run is), called when a checkpoint is made.
        manifest: plain values for the manifest.
        stop: its ``requested`` says who asks for the end, or None.
        time_limit: Unix time at which to save and end; None for none.
    """

    def __init__(
        self,
        folder: str,
        *,
        every_n_steps: int | None = None,
        every_minutes: float | None = None,
        at_end: bool = True,
        background: bool = True,
        keep_last: int | None = 2,
        keep_every_n_steps: int | None = None,
        keep_best: int = 0,
        monitor: str | None = None,
        mode: str = "min",
        facts: Callable[[], Mapping[str, Any]] = dict,
        manifest: Mapping[str, Any] | None = None,
        stop: Any = None,
        time_limit: float | None = None,
    ) -> None:
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.every_minutes = every_minutes
        self.at_end = at_end
        self.background = background
        self.keep_last = keep_last
        self.keep_every_n_steps = keep_every_n_steps
        self.keep_best = keep_best
        self.monitor = monitor
        self.mode = mode
        self.facts = facts
        self.manifest = dict(manifest or {})
        self.stop = stop or NoStop()
        self.time_limit = time_limit
        self.saved_step = 0
        """Of the last checkpoint that was begun, or from which this run goes on."""
        self._writer: Writer | None = None
        self._wish: Wish | None = None
        self._taken_up = False
        self._last_time = 0.0
        self._trainer: Trainer | None = None
        self._started = False
        self._told = False
        self._judged: Any = None
        self._passed_over: set[str] = set()

    # ---- the moments ----------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        several = trainer.world_size > 1
        # Groups of their own: a thread uses the one while training uses the other.
        writing, wishing = (_new_group() if several else None for _ in range(2))
        self._writer = Writer(Store(self.folder), group=writing, background=self.background, published=self._tidy_up)
        self._wish = Wish(wishing)
        if trainer.is_global_zero:
            self._remove_leftovers()
        self.saved_step, self._taken_up = trainer.global_step, False
        self._last_time = time.monotonic()
        if self._trainer is not trainer:
            _after(trainer.fit_loop.epoch_loop, "on_advance_end", lambda: self._step_done(trainer))
            _after(trainer.fit_loop, "on_advance_end", lambda: self._between_steps(trainer))
            self._trainer = trainer

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.saved_step = trainer.global_step  # after a checkpoint was loaded
        self._check_folder(trainer)
        if trainer.is_global_zero and self._writer is not None:
            self._passed_over = {n for n in self._writer.store.names() if step_of(n) > trainer.global_step}
        self._take_up(trainer)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if trainer.is_global_zero and any(isinstance(callback, BaseFinetuning) for callback in callbacks):
            log.warning("BaseFinetuning: once it has unfrozen layers, this run cannot be resumed")
        # What cannot be saved is to show now, and not when hours would be lost.
        strategy: Any = trainer.strategy
        capture(trainer, constructed=strategy.constructed)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if not self._started:  # what was measured before the checkpoint is judged already
            self._started, self._judged = True, trainer.callback_metrics.get(self.monitor or "")

    def _check_folder(self, trainer: Trainer) -> None:
        """Refuse to begin a training among the checkpoints of another one: theirs would be removed in time.

        Raises:
            ConfigError: on every rank.
        """
        fault = None
        if trainer.is_global_zero and trainer.global_step == 0 and self._writer is not None:
            store, ours = self._writer.store, self.manifest.get("run_id")
            newest = store.names()[-1:]
            whole = bool(newest) and not store.problems(newest[0], contents=False)
            if whole and (ours is None or store.manifest(newest[0]).get("run_id") != ours):
                fault = (
                    f"{store.url} holds {newest[0]} of another training: go on from it with ckpt_path, or save into "
                    f"another folder"
                )
        if (fault := trainer.strategy.broadcast(fault)) is not None:
            raise ConfigError(fault)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._taken_up:  # the checkpoint is of the last step, and there was nothing to train
            self._take_up(trainer)

    def _take_up(self, trainer: Trainer) -> None:
        """Do what a crash has left to do after the newest checkpoint was published, if this run goes on from it."""
        self._taken_up = True
        if trainer.is_global_zero:
            self._finish(step_name(trainer.global_step))

    def _finish(self, name: str) -> None:
        """Let ``last`` point to the newest checkpoint if that is ``name``, and remove what need not be kept."""
        assert self._writer is not None
        store = self._writer.store
        if store.names()[-1:] == [name]:
            if store.last() != name:
                store.set_last(name)
            self._tidy_up(name)

    def _step_done(self, trainer: Trainer) -> None:
        if not trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            self._between_steps(trainer)

    def _between_steps(self, trainer: Trainer) -> None:
        """Save, end, or go on."""
        assert self._writer is not None
        assert self._wish is not None
        self._writer.check()
        step, strategy = trainer.global_step, cast(Any, trainer.strategy)
        if trainer.fit_loop.done or (trainer.should_stop and trainer.fit_loop._can_stop_early):
            return  # on_train_end
        reason = self._reason_to_stop(trainer)
        # Waiting for others here is no saving, which the watchdog leaves alone.
        answer = self._wish.exchange(STOP if reason else SAVE if self._is_time(trainer) else GO_ON)
        if answer == STOP:
            with strategy.clock.phase("checkpoint"):
                if self.saved_step != step:
                    self.save(trainer)
                self._writer.wait()
            raise Preempted(reason or self._reason_to_stop(trainer) or "another rank's request")
        due = self.every_n_steps is not None and step % self.every_n_steps == 0
        if (due or answer == SAVE) and self.saved_step != step:
            with strategy.clock.phase("checkpoint"):
                self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._writer is not None
        assert self._wish is not None
        self._wish.end()
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        if (self.at_end or due) and self.saved_step != trainer.global_step:
            strategy: Any = trainer.strategy
            with strategy.clock.phase("checkpoint"):
                self.save(trainer)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for what is being written; raises what went wrong with it."""
        if self._writer is not None:
            self._writer.wait(seconds)

    # ---- what happens ---------------------------------------------------------------------------------------------

    def save(self, trainer: Trainer) -> None:
        """Begin a checkpoint of the last step; a collective."""
        assert self._writer is not None
        strategy: Any = trainer.strategy
        step = trainer.global_step
        pieces, plain = capture(trainer, constructed=strategy.constructed)
        metrics = _numbers(trainer.callback_metrics)
        if self.monitor is not None:
            value = trainer.callback_metrics.get(self.monitor)
            if value is self._judged:  # the value of an earlier step, which has its checkpoint
                metrics.pop(self.monitor, None)
            if value is None and not self._told and trainer.is_global_zero and trainer.callback_metrics:
                self._told = True
                known = ", ".join(sorted(trainer.callback_metrics))
                log.warning("checkpoint.monitor=%s has not been logged so far; there are %s", self.monitor, known)
            self._judged = value
        versions = {"torch": torch.__version__, "pytorch-lightning": pl.__version__}
        mesh, data = strategy.dims.shape, getattr(trainer, "datamodule", None)
        state = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "mesh": mesh,
            "samples_seen": plain["lightning"].get(type(data).__qualname__, {}).get("samples_seen"),
            "callback_metrics": metrics,
            **self.facts(),
            "trainer": plain,
        }
        manifest = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "time": time.time(),
            "mesh": mesh,
            "world_size": trainer.world_size,
            "metrics": metrics,
            "versions": versions,
            **self.manifest,
        }
        self._writer.save(step_name(step), pieces, state, manifest)
        self.saved_step, self._last_time = step, time.monotonic()

    def _is_time(self, trainer: Trainer) -> bool:
        if self.every_minutes is None or not trainer.is_global_zero:
            return False
        return time.monotonic() - self._last_time >= 60 * self.every_minutes

    def _reason_to_stop(self, trainer: Trainer) -> str | None:
        if self.stop.requested:
            return self.stop.requested
        if self.time_limit is not None and trainer.is_global_zero and time.time() >= self.time_limit:
            return "launch.time_limit"
        return None

    def _remove_leftovers(self) -> None:
        """What a killed run was in the midst of writing or removing is of no use to anybody."""
        assert self._writer is not None
        store = self._writer.store
        for name in store.leftovers():
            if name.endswith((".partial", ".removed")):
                store.remove(name)

    def _tidy_up(self, name: str) -> None:
        """Remove what need not be kept; on the first rank, whose metrics decide which is best."""
        assert self._writer is not None
        store = self._writer.store
        # Those of later steps than this run's first are not whole, or it would have gone on from them: they count for
        # nothing, and nobody removes them until this run has come to their steps.
        self._passed_over.discard(name)
        names = [other for other in store.names() if step_of(other) <= step_of(name)]
        names = [
            other for other in names if other not in self._passed_over and not store.problems(other, contents=False)
        ]
        metrics = {other: store.manifest(other).get("metrics", {}).get(self.monitor) for other in names}
        keep = retained(
            metrics,
            keep_last=self.keep_last,
            keep_every_n_steps=self.keep_every_n_steps,
            keep_best=self.keep_best,
            mode=self.mode,
        )
        best = best_first(metrics, mode=self.mode)
        if best:
            store.set_best(best[0])
        for other in names:
            if other not in keep:
                store.remove(other)
        self._remove_leftovers()


class Wish:
    """One number a rank and step; the largest of all ranks is known a step later, to all at the same step.

    Args:
        group: gloo, for this alone; None with one process, where nobody has to be asked.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._pending: tuple[Any, Tensor] | None = None

    def exchange(self, mine: int) -> int:
        """Send this step's wish, and return the largest of the step before. All ranks call it equally often."""
        if self._group is None:
            return mine
        before, self._pending = self._pending, None
        answer = GO_ON
        if before is not None:
            work, value = before
            work.wait()
            answer = int(value)
        value = torch.tensor(mine)
        self._pending = dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self._group, async_op=True), value
        return answer

    def end(self) -> None:
        """Wait for what is on its way."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None


def _new_group() -> Any:
    return dist.new_group(backend="gloo", timeout=timedelta(hours=WRITING_HOURS))


def _after(owner: Any, method: str, then: Callable[[], None]) -> None:
    """Let ``then`` run whenever ``owner.method`` has returned."""
    inner = getattr(owner, method)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        then()
        return result

    setattr(owner, method, both)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    values = {name: float(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}
