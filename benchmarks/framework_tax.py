"""What the framework costs: time per optimizer step over a hand-written PyTorch loop, stock Lightning beside it.

Same model (the convnet, drawn from the same seed), same data (the digits), AdamW, a schedule stepped every step, the
loss read every ten steps. Every arm runs in fresh processes with one thread each, the arms of a round one after the
other; a ratio compares two arms of one round.
"""

import contextlib
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shardwise.config import from_plain
from shardwise.data.digits import Digits
from shardwise.job import make_job, with_folder
from shardwise.launch import warm_up
from shardwise.models.convnet import ConvNet
from shardwise.parallel.initialise import materialise
from shardwise.resolve import World
from shardwise.run import run_job
from shardwise.signals import die_with_parent

STEPS, SKIPPED = 60, 20
"""Optimizer steps of a run, and how many of them at its start are not measured."""

SIZES = {"40 ms": {"batch": 128, "width": 64}, "7 ms": {"batch": 64, "width": 32}}
"""Aimed step time -> samples of a rank's batch and width of the convnet."""


class StepTimer(pl.Callback):
    """Writes down when each training batch has ended."""

    ends: list[float] = []  # noqa: RUF012  read by this module after the run, in the same process

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def median_step(ends: list[float], *, skipped: int = SKIPPED) -> float:
    """Median seconds of the measured steps."""
    return statistics.median(b - a for a, b in zip(ends[skipped:-1], ends[skipped + 1 :], strict=True))


def _model(width: int) -> nn.Module:
    model = ConvNet(10, in_channels=1, image_size=8, width=width)
    materialise(model, seed=0, device=torch.device("cpu"))
    return model


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = Digits()
    data.setup("fit")
    images, labels = zip(*(data.train_dataloader().dataset[i] for i in range(1408)), strict=True)
    return torch.stack(images), torch.as_tensor(labels)


def _start(processes: int) -> None:
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo")


def by_hand(processes: int, batch: int, width: int) -> float:
    """A loop as one writes it without any framework."""
    _start(processes)
    images, labels = _digits()
    model = _model(width)
    if processes > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    generator = torch.Generator().manual_seed(0)
    rank, ends, order = (dist.get_rank() if processes > 1 else 0), [], []
    for step in range(STEPS):
        if len(order) < batch * processes:
            order = torch.randperm(len(labels), generator=generator)
        mine, order = order[rank * batch : (rank + 1) * batch], order[batch * processes :]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            loss.item()
        ends.append(time.perf_counter())
    return median_step(ends)


class _Module(pl.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = _model(width)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def stock_lightning(processes: int, batch: int, width: int) -> float:
    """Lightning's own loop and DDPStrategy, everything optional off."""
    torch.set_num_threads(1)
    images, labels = _digits()
    dataset = torch.utils.data.TensorDataset(images, labels)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_steps=STEPS,
        logger=False,
        callbacks=[StepTimer()],
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Module(width), torch.utils.data.DataLoader(dataset, batch_size=batch, shuffle=True, drop_last=True))
    return median_step(StepTimer.ends)


def shardwise_loop(processes: int, batch: int, width: int, output_root: str = "/tmp") -> float:
    """The loop of ``train.py``: progress lines, metrics.jsonl and the run folder included."""
    run_quietly(
        {
            "output_root": output_root,
            "plugins": ["framework_tax"],
            "trainer": {"max_steps": STEPS, "devices": processes, "accelerator": "cpu", "limit_val_batches": 0},
            "strategy": {"dp_replicate": -1},
            "batch": {"global_size": batch * processes},
            "schedule": {"kind": "linear"},
            "task": {"_target_": "shardwise.module.Classification", "num_classes": 10},
            "model": {
                "_target_": "shardwise.models.convnet.ConvNet",
                "num_classes": 10,
                "in_channels": 1,
                "image_size": 8,
                "width": width,
            },
            "data": {"_target_": "shardwise.data.digits.Digits"},
            "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
            "callbacks": {"timer": {"_target_": "framework_tax.StepTimer"}},
        },
        processes=processes,
    )
    return median_step(StepTimer.ends)


def run_quietly(plain: dict[str, Any], *, processes: int) -> None:
    """Run a job in a process that is one of ``processes`` ranks already, and print nothing."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    world = World(1, processes, "cpu", "local" if processes > 1 else "in-process", "benchmark")
    rank = int(os.environ.get("RANK", "0"))
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "bench")
    job = make_job(from_plain(plain), world, experiment="bench", overrides=[], command=[], run_id=run_id)
    if rank == 0:
        job = with_folder(job)
    else:  # as a launcher does before it starts the ranks
        while not os.path.isdir(f"{job.run_folder}/ranks"):
            time.sleep(0.01)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run_job(job)


ARMS: dict[str, Callable[..., float]] = {
    "hand-written": by_hand,
    "shardwise": shardwise_loop,
    "stock Lightning": stock_lightning,
}


def _arm(name: str, processes: int, batch: int, width: int, output_root: str) -> float:
    extra = {"output_root": output_root} if name == "shardwise" else {}
    return ARMS[name](processes, batch, width, **extra)


def _obey(function: Callable[..., Any], arguments: tuple) -> Any:
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.disable(logging.WARNING)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  for the life of this process
    return function(*arguments)


def in_fresh_processes(function: Callable[..., Any], *arguments: Any, processes: int, run_id: str) -> Any:
    """What the first of ``processes`` new ranks returns from ``function``, which is a module's own."""
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
    )
    return elastic_launch(settings, _obey)(function, arguments)[0]


def spread(times: list[float], base: list[float]) -> tuple[float, float, float]:
    """Smallest, median and largest ratio of two arms within a round."""
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    return ratios[0], statistics.median(ratios), ratios[-1]


def measure(rounds: int, output_root: str) -> list[dict[str, Any]]:
    """A row for each size and number of processes: milliseconds of the hand-written step, and ratios to it."""
    warm_up()
    rows = []
    for processes in (1, 2):
        for size, sizes in SIZES.items():
            times: dict[str, list[float]] = {name: [] for name in ARMS}
            for number in range(rounds):
                for name in ARMS:
                    arguments = (name, processes, sizes["batch"], sizes["width"], output_root)
                    run_id = f"{processes}-{sizes['width']}-{number}"
                    seconds = in_fresh_processes(_arm, *arguments, processes=processes, run_id=run_id)
                    times[name].append(seconds)
            row: dict[str, Any] = {"processes": processes, "size": size}
            row["hand ms"] = 1e3 * statistics.median(times["hand-written"])
            for name in ("shardwise", "stock Lightning"):
                row[name] = spread(times[name], times["hand-written"])
            rows.append(row)
            print(row, flush=True)
    return rows
