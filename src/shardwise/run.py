"""Build every object of a job, fit, test, and write what came out: what each rank does with a job."""

import contextlib
import errno
import json
import math
import os
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
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
from shardwise.checkpoint.capture import check_resumable
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.saving import Preempted, SaveCheckpoints
from shardwise.config import to_plain
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.hydra_setup import write_yaml
from shardwise.job import Job, unwritable, write_json
from shardwise.provenance import collect, with_attempts, without_secrets
from shardwise.resolve import Done, Resolved, resolve_steps
from shardwise.signals import OWNED, PREEMPTED, Stop, undisturbed
from shardwise.slots import find_target
from shardwise.summary import brings_optimizer, show_end
from shardwise.tracking import JsonlLogger, WandbTracker
from shardwise.trainer import build_trainer, check_monitors

SAVING_SECONDS = 5.0
"""How long a run that fails waits for the checkpoint that is being written: its peers may be gone."""

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
"""Why a run folder takes no more, which is not the program's fault."""


def run_job(job: Job, stop: Stop | None = None) -> dict[str, Any]:
    """Train and test, or whatever else the job says, on this rank; returns what ``result.json`` holds.

    A signal while training saves and ends the run as ``preempted``, in its last step too: the test is left to
    ``resume=``, which has nothing else to do then. A signal during the test ends the process at once, with the status
    that a shell gives it (128 + n): nothing waits to be saved. What ``result.json`` says is ``preempted`` again where
    the run's last step is in a checkpoint, since nothing has gone wrong and ``resume=`` only runs the test.

    Args:
        job: what to do.
        stop: what signals ask for; while training, they ask for a checkpoint and the end.

    Raises:
        ConfigError: something of the configuration shows only now to be wrong, with the data or the model at hand.
    """
    resolved = job.resolved()
    config = resolved.config
    stop = stop or Stop()
    rank = int(os.environ.get("RANK", "0"))
    _quiet_lightning()
    _share_cores(resolved)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    writer = _RunFolder(job, resolved) if rank == 0 else None
    if job.action != "train":
        return _act(job, resolved, writer)
    trainer: pl.Trainer | None = None
    values: dict[str, Any] = {}
    exit_code, status = 1, "failed"
    all_saved = False  # whether nothing but the test is left to be done
    try:
        if writer is not None and not job.resumed:
            writer.start()
        data = build_data(resolved, rank)
        state = None if job.checkpoint is None else read_state(job.checkpoint)
        done = None if state is None else _done(state, data)
        steps = resolve_steps(resolved, data.num_train_samples, done=done)
        task = build_task(resolved, data, steps)
        if job.checkpoint is not None:
            _check_resumable(job, resolved, task)
        if writer is not None and job.resumed:
            writer.start()  # only now: a wrong word must not cost what is there
        trainer = build_trainer(job, resolved, steps, notes=notes_on(task, config), stop=stop)
        check_monitors(trainer, data)
        if job.resumed:
            _cut_metrics(job, trainer)
        if writer is not None:
            derived = {**resolved.derived(), "total_steps": steps.total, "samples_per_epoch": steps.samples_per_epoch}
            if brings_optimizer(task):
                derived.update(base_lr=None, effective_lr=None)
            writer.describe(derived)
            for logger in trainer.loggers:
                logger.log_hyperparams({**without_secrets(to_plain(config)), "derived": derived})
        with stop.deferred() if _savers(trainer) else contextlib.nullcontext():
            trainer.fit(task, datamodule=data, ckpt_path=job.checkpoint)
            if state is not None and done is not None and trainer.global_step == done.step:
                values.update(state.get("callback_metrics") or {})  # there was nothing left to be trained
            values.update(trainer.callback_metrics)  # the test starts from none
            _wait_for_checkpoints(trainer)
        tested = is_overridden("test_step", task) and is_overridden("test_dataloader", data)
        if tested and not config.trainer.fast_dev_run:
            all_saved = _last_step_is_saved(job, trainer, done)
            _end_if_asked(trainer, stop, all_saved=all_saved)
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
        if trainer is not None and exit_code == 0:
            values.update(trainer.callback_metrics)
        elif trainer is not None:
            if exit_code == 1:
                with contextlib.suppress(Exception):  # there is an error to tell of already
                    _wait_for_checkpoints(trainer, seconds=SAVING_SECONDS)
            # Plain numbers that are there: peers may be gone, and the device may be broken.
            for logger in trainer.loggers:
                values.update(logger.last if isinstance(logger, JsonlLogger) else {})
        result = {
            "status": status,
            "run_id": job.run_id,
            "steps": 0 if trainer is None else trainer.global_step,
            "metrics": {name: float(value) for name, value in values.items()},
        }
        with undisturbed():
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


def _act(job: Job, resolved: Resolved, writer: "_RunFolder | None") -> dict[str, Any]:
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


def _check_resumable(job: Job, resolved: Resolved, task: pl.LightningModule) -> None:
    """Whether what this job trains can go on from its checkpoint; reads only."""
    assert job.checkpoint is not None
    optimizer = None
    if not brings_optimizer(task):
        target = find_target("optimizer", resolved.config.optimizer, plugins=resolved.config.plugins)
        optimizer = getattr(target, "__name__", None)
    check_resumable(task, job.checkpoint, optimizer=optimizer, global_size=resolved.batch.global_size)


def _done(state: Mapping[str, Any], data: ShardedDataModule) -> Done | None:
    """What lies behind a checkpoint, None where it does not say; raises ConfigError where the data are other ones."""
    held = state["trainer"].get("lightning", {}).get("ShardedDataModule") or {}
    data.check_same_data(held)
    seen = state.get("samples_seen")
    return Done(state["step"], seen) if isinstance(seen, int) else None


def _last_step_is_saved(job: Job, trainer: pl.Trainer, done: Done | None) -> bool:
    """Whether a checkpoint of this run holds all that it has trained, so that ``resume=`` would only test."""
    own = job.resumed and job.checkpoint != job.parent and done is not None and done.step == trainer.global_step
    return own or any(saver.saved_step == trainer.global_step > 0 for saver in _savers(trainer))


def _end_if_asked(trainer: pl.Trainer, stop: Stop, *, all_saved: bool) -> None:
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


def _cut_metrics(job: Job, trainer: pl.Trainer) -> None:
    """Leave in the metrics file what was there when the checkpoint was made: the rest comes again."""
    if not trainer.is_global_zero:
        return
    own = job.checkpoint is not None and job.checkpoint != job.parent
    size = read_state(job.checkpoint).get("metrics_bytes", 0) if own and job.checkpoint else 0
    for logger in trainer.loggers:
        if isinstance(logger, JsonlLogger):
            logger.cut(int(size))


def _savers(trainer: pl.Trainer) -> list[SaveCheckpoints]:
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, SaveCheckpoints)]


def _wait_for_checkpoints(trainer: pl.Trainer, *, seconds: float | None = None) -> None:
    for saver in _savers(trainer):
        saver.wait(seconds)


def _share_cores(resolved: Resolved) -> None:
    """Each process its share of the cores, or everything crawls; OMP_NUM_THREADS is obeyed."""
    if resolved.world.devices > 1 and "OMP_NUM_THREADS" not in os.environ:
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


# ---- what a run leaves ---------------------------------------------------------------------------------------------


class _RunFolder:
    """The files that explain a run; rank 0 writes them."""

    def __init__(self, job: Job, resolved: Resolved) -> None:
        self.job = job
        self.resolved = resolved
        self.folder = Path(job.run_folder)
        self.started = time.time()
        self.record: dict[str, Any] = {}

    def describe(self, derived: dict[str, Any]) -> None:
        """``config.yaml`` with what the rules made of it."""
        write_yaml(self.folder / "config.yaml", without_secrets({**self.job.config, "derived": derived}))

    def start(self) -> None:
        """``config.yaml``, ``overrides.yaml`` and ``provenance.json``, before anything can go wrong."""
        self.describe(self.resolved.derived())
        write_yaml(self.folder / "overrides.yaml", without_secrets(list(self.job.overrides)))
        world, dims = self.resolved.world, self.resolved.dims
        ranks = [
            {
                "rank": rank,
                "node": rank // world.devices,
                "local_rank": rank % world.devices,
                "dp": dims.dp_rank(rank),
                "tp": dims.tp_rank(rank),
                **({"host": socket.gethostname()} if rank // world.devices == 0 else {}),
            }
            for rank in range(world.size)
        ]
        self.record = collect(command=self.job.command, seed=self.resolved.config.seed, ranks=ranks)
        if self.job.action != "train":
            self.record["action"] = self.job.action
        if self.job.parent is not None:
            self.record["parent"] = without_secrets(self.job.parent)
        if self.job.resumed:
            self.record = with_attempts(self.record, self._earlier())
            (self.folder / "result.json").unlink(missing_ok=True)  # or a killed run would pass for what it was before
        write_json(self.folder / "provenance.json", self.record)

    def _earlier(self) -> Any:
        """The record of this run before it was resumed; None if it cannot be read."""
        try:
            return json.loads((self.folder / "provenance.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def finish(self, result: dict[str, Any], *, hosts: Sequence[str] = ()) -> None:
        """``result.json``; a value that is no number of JSON's is null. ``hosts`` are those of the ranks, in order."""
        metrics = {name: value if math.isfinite(value) else None for name, value in result["metrics"].items()}
        seconds = round(time.time() - self.started, 3)
        try:
            if len(set(hosts)) > 1:  # at the start, a rank knows its own only
                ranks = [{**rank, "host": host} for rank, host in zip(self.record["ranks"], hosts, strict=True)]
                write_json(
                    self.folder / "provenance.json", {**self.record, "ranks": ranks, "hosts": sorted(set(hosts))}
                )
            write_json(self.folder / "result.json", {**result, "metrics": metrics, "seconds": seconds})
        except OSError as error:
            if result["status"] == "completed":  # else something has gone wrong already, and is told
                raise unwritable(self.folder / "result.json", error) from error
