"""Whether a micro-batch fits into memory: two optimizer steps of a run, made for nothing but the memory they take.

Model, data, optimizer, precision, strategy and the user's callbacks are those of the run. The second step has the peak:
the optimizer's state is there from the end of the first one on.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.utilities.model_helpers import is_overridden

from shardwise.build import build_data, build_task
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.config import CheckpointConfig, LRScalingConfig, ProfileConfig, ScheduleConfig, from_plain, to_plain
from shardwise.job import Job, write_json
from shardwise.resolve import Resolved
from shardwise.steps import Steps
from shardwise.strategies.micro_batches import split_batch
from shardwise.summary import StartUp
from shardwise.trainer import build_trainer

STEPS = 2
OUT_OF_MEMORY = "out_of_memory_{rank}.json"
"""Beside the record of a rank's failure: that what it lacked is memory."""

WORDS = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|CUDA error: out of memory"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|std::bad_alloc"
    r"|DataLoader worker .* is killed by signal: Killed",
    re.IGNORECASE,
)
"""What allocators say in an error that has no class of its own; a loader's worker is ended so by the kernel."""


def probe_job(job: Job, micro_size: int, *, folder: Path) -> Job:
    """The job that tries ``micro_size`` for ``job``: the same ranks, started as processes of their own, and the same
    global batch, of whose micro-batches only as many are computed as the memory depends on."""
    config = from_plain(job.config)
    evaluates = int((config.batch.eval_size or 0) > micro_size)  # no larger, it takes less than training
    trainer = replace(
        config.trainer,
        max_steps=STEPS,
        max_epochs=None,
        min_epochs=None,
        min_steps=None,
        max_time=None,
        profiler=None,
        limit_train_batches=None,
        fast_dev_run=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
        num_sanity_val_steps=0,
        limit_val_batches=evaluates,
        limit_test_batches=evaluates,
        check_val_every_n_epoch=None,
        val_check_interval=STEPS,
    )
    plain = to_plain(
        replace(
            config,
            trainer=trainer,
            batch=replace(config.batch, micro_size=micro_size),
            schedule=ScheduleConfig(kind="constant"),
            lr_scaling=LRScalingConfig(),
            checkpoint=CheckpointConfig(),
            profile=ProfileConfig(),
            monitor=replace(config.monitor, nonfinite="ignore"),
            launch=replace(config.launch, max_restarts=0, time_limit=None),
            logger={"_target_": None},
            init_from=None,
        )
    )
    return replace(
        job,
        config=plain,
        world={**job.world, "launch": "local"},
        run_folder=str(folder),
        notes=[],
        action="probe",
        checkpoint=None,
        resumed=False,
        parent=None,
    )


def probe(job: Job, resolved: Resolved, rank: int) -> dict[str, Any]:
    """Make the steps on this rank; returns the ``peak`` of the fullest rank's memory, in bytes.

    Whether an error means a lack of memory is written down where who has started the ranks will look for it.
    """
    if rank == 0:
        _leave_console()
    try:
        trainer = _train(job, resolved, rank)
        peak = torch.tensor(float(_peak()), dtype=torch.float64, device=trainer.strategy.root_device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            dist.destroy_process_group()
    except BaseException as error:
        if lacks_memory(error):
            write_json(Path(job.run_folder) / OUT_OF_MEMORY.format(rank=rank), {"error": str(error)})
        raise
    return {"status": "completed", "peak": int(peak)}


def _train(job: Job, resolved: Resolved, rank: int) -> pl.Trainer:
    accumulate = resolved.batch.accumulate
    # The gradients of an earlier micro-batch are there in the second one; a third one adds nothing.
    few = next((count for count in range(2, accumulate) if accumulate % count == 0), accumulate)
    data = build_data(resolved, rank)
    steps = Steps(data.num_train_samples, None, total=STEPS, scheduled=STEPS, val_check_interval=STEPS)
    task = build_task(resolved, data, steps)
    trainer = build_trainer(job, replace(resolved, batch=replace(resolved.batch, accumulate=few)), steps)
    skip_no_step(trainer.strategy.precision_plugin)
    # What watches a metric would miss it.
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [
        callback
        for callback in callbacks
        if not isinstance(callback, StartUp | SaveCheckpoints) and getattr(callback, "monitor", None) is None
    ]
    train = trainer.strategy.training_step

    def train_on_few(batch: Any, *args: Any) -> Any:
        return train(split_batch(batch, accumulate // few)[0], *args)

    # The whole share of the global batch is on the device all the same, as in the run.
    trainer.strategy.training_step = train_on_few  # type: ignore[method-assign]
    trainer.fit(task, datamodule=data)
    tested = is_overridden("test_step", task) and is_overridden("test_dataloader", data)
    if tested and resolved.config.trainer.limit_test_batches:
        trainer.test(task, datamodule=data, verbose=False)
    return trainer


def skip_no_step(plugin: Any) -> None:
    """Let float16 begin at a scale of the loss at which gradients are finite: it skips steps until one is, and only a
    step that is made gives the optimizer its state."""
    if getattr(plugin, "scaler", None) is not None:
        plugin.scaler = torch.amp.GradScaler(plugin.device, init_scale=1.0)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error, or what has led to it, says that there is not enough memory."""
    return any(
        isinstance(one, torch.OutOfMemoryError | MemoryError)
        or (isinstance(one, OSError) and one.errno == errno.ENOMEM)
        or (isinstance(one, RuntimeError) and WORDS.search(str(one)) is not None)
        for one in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _peak() -> int:
    """Bytes that this rank has held at most: of its GPU, or of the machine where it trains on the CPU."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved()
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _leave_console() -> None:
    """What a probe prints is in its log, and of no use on the console."""
    sys.stdout.flush()
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
