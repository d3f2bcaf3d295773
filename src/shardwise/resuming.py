"""Where a run goes on: what lies behind it, whether it can, and whether it is to end."""

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist

from shardwise.checkpoint.capture import check_resumable
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.saving import Preempted, SaveCheckpoints
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.resolve import Resolved
from shardwise.signals import Stop
from shardwise.slots import find_target
from shardwise.steps import Done, Steps
from shardwise.summary import brings_optimizer
from shardwise.tracking import JsonlLogger, RankJsonlLogger


def check_can_go_on(job: Job, resolved: Resolved, steps: Steps, task: pl.LightningModule, *, done: Done | None) -> None:
    """Whether what this job trains can go on from its checkpoint; reads only.

    Raises:
        ConfigError: it cannot, or there is nothing left to train.
    """
    assert job.checkpoint is not None
    if done is not None and (steps.total < done.step or (steps.total == done.step and not job.resumed)):
        raise ConfigError(
            f"the run would end after step {steps.total}, and {job.checkpoint} is of step {done.step}: type "
            f"trainer.max_steps=<more than {done.step}>, or more trainer.max_epochs"
        )
    optimizer = None
    if not brings_optimizer(task):
        target = find_target("optimizer", resolved.config.optimizer, plugins=resolved.config.plugins)
        optimizer = getattr(target, "__name__", None)
    check_resumable(task, job.checkpoint, optimizer=optimizer, global_size=resolved.batch.global_size)


def done_so_far(state: Mapping[str, Any], data: ShardedDataModule) -> Done | None:
    """What lies behind a checkpoint, None where it does not say; raises ConfigError where the data are other ones."""
    held = state["trainer"].get("lightning", {}).get(type(data).__qualname__) or {}
    data.check_same_data(held)
    seen = state.get("samples_seen")
    warmup = state.get("warmup")
    known = None if warmup is None else (Fraction(warmup[0]), int(warmup[1]))
    return Done(state["step"], seen, known) if isinstance(seen, int) else None


def last_step_is_saved(job: Job, trainer: pl.Trainer, done: Done | None) -> bool:
    """Whether a checkpoint of this run holds all that it has trained, so that ``resume=`` would only test."""
    own = job.resumed and job.checkpoint != job.parent and done is not None and done.step == trainer.global_step
    return own or any(saver.saved_step == trainer.global_step > 0 for saver in savers(trainer))


def end_if_asked(trainer: pl.Trainer, stop: Stop, *, all_saved: bool) -> None:
    """End what a signal in the last step, or while that was saved, has asked to end; all ranks, or none.

    Raises:
        Preempted: the checkpoint of the last step is there.
        SystemExit: the run keeps none of its last step, so that nothing is to be gained by trying again.
    """
    asked = stop.requested is not None
    if dist.is_available() and dist.is_initialized():
        flag = torch.tensor(int(asked), device=trainer.strategy.root_device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        asked = bool(flag)
    if asked and all_saved:
        raise Preempted(stop.requested or "another rank's request")
    if asked:
        raise SystemExit(128 + stop.signal)


def cut_metrics(job: Job, trainer: pl.Trainer) -> None:
    """Leave in the metrics files what was there when the checkpoint was made: the rest comes again."""
    own = job.checkpoint is not None and job.checkpoint != job.parent
    size = read_state(job.checkpoint).get("metrics_bytes", 0) if own and job.checkpoint else 0
    for logger in trainer.loggers:
        if isinstance(logger, JsonlLogger):
            logger.cut(int(size))
        elif isinstance(logger, RankJsonlLogger):
            logger.go_on_after(Path(job.run_folder) / "metrics.jsonl", int(size), ranks=trainer.world_size)


def savers(trainer: pl.Trainer) -> list[SaveCheckpoints]:
    """The callbacks that save this run."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, SaveCheckpoints)]


def wait_for_checkpoints(trainer: pl.Trainer, *, seconds: float | None = None) -> None:
    """Wait for what is being written, at most so long; raises what went wrong with it."""
    for saver in savers(trainer):
        saver.wait(seconds)
