"""Build every object of a job, fit, test, and write what came out: what each rank does with a job."""

import contextlib
import errno
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from pytorch_lightning.utilities.model_helpers import is_overridden

from shardwise.actions import act
from shardwise.build import build_data, build_task, notes_on
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.saving import Preempted
from shardwise.config import to_plain
from shardwise.errors import ConfigError, DivergedError
from shardwise.job import Job, unwritable
from shardwise.probe import probe
from shardwise.provenance import without_secrets
from shardwise.resolve import Resolved
from shardwise.resuming import (
    check_can_go_on,
    cut_metrics,
    done_so_far,
    end_if_asked,
    last_step_is_saved,
    savers,
    wait_for_checkpoints,
)
from shardwise.run_folder import RunFolder
from shardwise.signals import OWNED, PREEMPTED, Stop, undisturbed
from shardwise.steps import resolve_steps
from shardwise.summary import brings_optimizer, show_end
from shardwise.telemetry.step_metrics import StepMetrics
from shardwise.telemetry.watchdog import Ending
from shardwise.tracking import JsonlLogger, WandbTracker
from shardwise.trainer import build_trainer, check_monitors

SAVING_SECONDS = 5.0
"""How long a run that fails waits for the checkpoint that is being written: its peers may be gone."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
"""Why a run folder takes no more, which is not the program's fault."""


def run_job(job: Job, stop: Stop | None = None, ending: Ending | None = None) -> dict[str, Any]:
    """Train and test, or whatever else the job says, on this rank; returns what ``result.json`` holds.

    A signal while training saves and ends the run as ``preempted``, in its last step too: the test is left to
    ``resume=``, which has nothing else to do then. A signal during the test ends the process at once, with the status
    that a shell gives it (128 + n): nothing waits to be saved. What ``result.json`` says is ``preempted`` again where
    the run's last step is in a checkpoint, since nothing has gone wrong and ``resume=`` only runs the test.

    Args:
        job: what to do.
        stop: what signals ask for; while training, they ask for a checkpoint and the end.
        ending: who is told of a job in which no step ends any more.

    Raises:
        ConfigError: something of the configuration shows only now to be wrong, with the data or the model at hand.
    """
    resolved = job.resolved()
    config = resolved.config
    stop = stop or Stop()
    rank = int(os.environ.get("RANK", "0"))
    _quiet_lightning()
    _share_cores(job, resolved)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    if job.action == "probe":
        return probe(job, resolved, rank)
    writer = RunFolder(job, resolved) if rank == 0 else None
    if job.action != "train":
        return _act(job, resolved, writer)
    trainer: pl.Trainer | None = None
    values: dict[str, Any] = {}
    exit_code, status = 1, "failed"
    ended_by: dict[str, Any] = {}  # why, where that is to be read in result.json
    all_saved = False  # whether nothing but the test is left to be done

    def close() -> None:  # by another thread, where this one hangs
        if writer is not None and trainer is not None:
            _leave_failed(job, writer, trainer)

    ending = replace(ending or Ending(), close=close)
    try:
        if writer is not None and not job.resumed:
            writer.start()
        data = build_data(resolved, rank)
        state = None if job.checkpoint is None else read_state(job.checkpoint)
        done = None if state is None else done_so_far(state, data)
        steps = resolve_steps(resolved, data.num_train_samples, done=done)
        task = build_task(resolved, data, steps)
        if job.checkpoint is not None:
            check_can_go_on(job, resolved, steps, task, done=done)
        if writer is not None and job.resumed:
            writer.start()  # only now: a wrong word must not cost what is there
        trainer = build_trainer(job, resolved, steps, notes=notes_on(task, config), stop=stop, ending=ending)
        check_monitors(trainer, data)
        if job.resumed:
            cut_metrics(job, trainer)
        if writer is not None:
            derived = {**resolved.derived(), "total_steps": steps.total, "samples_per_epoch": steps.samples_per_epoch}
            derived["warmup_steps"] = steps.warmup
            if brings_optimizer(task):
                derived.update(base_lr=None, effective_lr=None, warmup_steps=None)
            writer.describe(derived)
            for logger in trainer.loggers:
                logger.log_hyperparams({**without_secrets(to_plain(config)), "derived": derived})
        with stop.deferred() if savers(trainer) else contextlib.nullcontext():
            trainer.fit(task, datamodule=data, ckpt_path=job.checkpoint)
            if state is not None and done is not None and trainer.global_step == done.step:
                values.update(state.get("callback_metrics") or {})  # there was nothing left to be trained
            values.update(trainer.callback_metrics)  # the test starts from none
            wait_for_checkpoints(trainer)
        tested = is_overridden("test_step", task) and is_overridden("test_dataloader", data)
        if tested and not config.trainer.fast_dev_run:
            all_saved = last_step_is_saved(job, trainer, done)
            end_if_asked(trainer, stop, all_saved=all_saved)
            trainer.test(task, datamodule=data, verbose=False)
        exit_code, status = 0, "completed"
    except Preempted as preempted:
        exit_code, status = PREEMPTED, "preempted"
        if rank == 0:
            # A worker's signal is its parent's word; the user's own was acknowledged when it came.
            why = "on request" if preempted.reason in Signals.__members__ else f"by {preempted.reason}"
            print(f"\nended {why}, with a checkpoint of its last step", flush=True)
    except SystemExit as ended:
        # SIGQUIT, and any signal after a rank has failed, is how its peers are ended.
        told = ended.code in [128 + one for one in OWNED if one != Signals.SIGQUIT]
        if told and all_saved and not (Path(job.run_folder) / "ranks" / "failed").exists():
            status = "preempted"
        raise
    except DivergedError as error:
        ended_by = {"reason": str(error).splitlines()[0], "diverged_at": error.step}
        raise
    except MisconfigurationException as error:
        raise ConfigError(f"Lightning refuses: {' '.join(str(error).split())}") from error
    except RuntimeError as error:
        if not str(error).startswith("Early stopping conditioned on metric"):
            raise
        text = str(error).splitlines()[0].partition(" Either add")[0]
        raise ConfigError(f"{text} Type its name as callbacks.<name>.monitor=...") from error
    except OSError as error:
        ours = error.filename is None or str(error.filename).startswith(job.run_folder)
        if ours and error.errno in UNWRITABLE and not isinstance(error, ConfigError):
            raise unwritable(job.run_folder, error) from error
        raise
    finally:
        try:
            if trainer is not None and exit_code == 1:
                with contextlib.suppress(Exception):  # there is an error to tell of already
                    wait_for_checkpoints(trainer, seconds=SAVING_SECONDS)
        finally:
            with undisturbed():  # all of it: a peer that has failed may have this rank ended at any moment
                if trainer is not None and exit_code == 0:
                    values.update(trainer.callback_metrics)
                elif trainer is not None:
                    # Plain numbers that are there: peers may be gone, and the device may be broken.
                    for logger in trainer.loggers:
                        values.update(logger.last if isinstance(logger, JsonlLogger) else {})
                result = {
                    "status": status,
                    "run_id": job.run_id,
                    "steps": 0 if trainer is None else trainer.global_step,
                    "metrics": {name: float(value) for name, value in values.items()},
                    **ended_by,
                    **_telemetry(trainer),
                }
                if writer is not None and writer.record:
                    writer.finish(result, hosts=[] if trainer is None else getattr(trainer.strategy, "hosts", []))
                for logger in [] if trainer is None else trainer.loggers:
                    if isinstance(logger, WandbTracker):
                        logger.finish(exit_code)
        if dist.is_available() and dist.is_initialized() and exit_code in (0, PREEMPTED):
            dist.destroy_process_group()
    if rank == 0:
        show_end(job, result)
    return result


def _telemetry(trainer: pl.Trainer | None) -> dict[str, Any]:
    """What the training's time and memory went to, under its key in ``result.json``; asks no other rank."""
    callbacks: list[Any] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    measured = next((callback.summary() for callback in callbacks if isinstance(callback, StepMetrics)), {})
    return {"telemetry": measured} if measured else {}


def _leave_failed(job: Job, writer: RunFolder, trainer: pl.Trainer) -> None:
    """``result.json`` of a run whose main thread will not write it, and word of its failure to its trackers."""
    last = [logger.last for logger in trainer.loggers if isinstance(logger, JsonlLogger)]
    metrics = {name: float(value) for values in last for name, value in values.items()}
    result = {"status": "failed", "run_id": job.run_id, "steps": trainer.global_step, "metrics": metrics}
    if writer.record:
        writer.finish(result, hosts=getattr(trainer.strategy, "hosts", []))
    for logger in trainer.loggers:
        if isinstance(logger, WandbTracker):
            logger.finish(1)


def _act(job: Job, resolved: Resolved, writer: "RunFolder | None") -> dict[str, Any]:
    """Do what the job says instead of training; returns what ``result.json`` holds."""
    result: dict[str, Any] = {"status": "failed", "run_id": job.run_id, "metrics": {}}
    try:
        if writer is not None:
            writer.start()
        result.update(act(job, resolved, int(os.environ.get("RANK", "0"))), status="completed")
    finally:
        with undisturbed():
            if writer is not None:
                writer.finish(result)
        if dist.is_available() and dist.is_initialized() and result["status"] == "completed":
            dist.destroy_process_group()
    return result


def _share_cores(job: Job, resolved: Resolved) -> None:
    """Each process its share of the cores, or everything crawls; OMP_NUM_THREADS is obeyed."""
    if "OMP_NUM_THREADS" in job.environment:  # which has come too late for the library itself
        torch.set_num_threads(int(job.environment["OMP_NUM_THREADS"]))
    elif resolved.world.devices > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // resolved.world.devices))


def _quiet_lightning() -> None:
    """Drop what Lightning says that is untrue or of no use here, and nothing else."""
    import logging

    for name in ("pytorch_lightning.utilities.rank_zero", "lightning_fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightning_fabric.utilities.distributed").setLevel(logging.WARNING)
    own = logging.getLogger("shardwise")
    own.setLevel(logging.INFO)
    own.handlers = [logging.StreamHandler(sys.stdout)]
    own.propagate = False
    # The number of loader workers is the user's choice; a logger is chosen by logger=.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*`tensorboardX` has been removed.*")
    # Lightning's own use of an old name of torch's.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
