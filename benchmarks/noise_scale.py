"""What measuring the gradient noise scale costs: a part of the time of an optimizer step.

Steps are compared with their neighbours, so that what else runs on the machine hits both. In a training with the
callback every second step is measured, to see many of them: a measured step over the mean of the two around it. Other
steps do nothing more than ask whether they are measured. Fresh processes of one thread each.
"""

import inspect
import itertools
import statistics
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from framework_tax import in_fresh_processes
from torch import nn

from shardwise.data.digits import Digits
from shardwise.data.sharded import ShardedDataModule
from shardwise.data.synthetic import SyntheticTokens
from shardwise.launch import warm_up
from shardwise.models.convnet import ConvNet
from shardwise.models.gpt import GPT
from shardwise.module import Classification, LanguageModel
from shardwise.noise_scale import GradientNoiseScale
from shardwise.strategies import MeshStrategy

EVERY = inspect.signature(GradientNoiseScale).parameters["every_n_steps"].default
"""Steps from one measurement to the next, unless another number is typed."""
STEPS, SKIPPED = 110, 10
"""Optimizer steps of a training, and how many of them at its start are not timed."""
MODELS = ("convnet, batch 64", "gpt, batch 16")


class _Ends(pl.Callback):
    """When each step has ended; the last callback, so that everything of a step is in it."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def _parts(model: str) -> tuple[pl.LightningModule, pl.LightningDataModule, int]:
    """A task, its data, and the samples of a global batch."""
    if model.startswith("convnet"):
        net: nn.Module = ConvNet(10, in_channels=1, image_size=8)
        return Classification(net, num_classes=10), Digits(), 64
    net = GPT(65, context=64, n_layer=2, n_head=4, width=64)
    return LanguageModel(net), SyntheticTokens(num_samples=4096, context=64, vocab_size=65), 16


def _over_neighbours(seconds: list[float], *, first: int) -> float:
    """Every second step from ``first`` on over the mean of the two around it: the median."""
    return statistics.median(
        2 * seconds[i] / (seconds[i - 1] + seconds[i + 1]) for i in range(first, len(seconds) - 1, 2)
    )


def measuring(model: str, processes: int) -> tuple[float, float]:
    """(seconds of a step that is not measured, a measured step over such)"""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task, data, global_size = _parts(model)
    task.configure_optimizers = lambda: torch.optim.AdamW(task.parameters(), lr=1e-3)  # type: ignore[method-assign]
    steps = _Ends()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=MeshStrategy(accumulate=2 if processes == 1 else 1),
        callbacks=[GradientNoiseScale(every_n_steps=2), steps],
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    sharded = ShardedDataModule(
        data, seed=0, global_size=global_size, eval_batch_size=64, dp_rank=rank, dp_size=processes
    )
    trainer.fit(task, datamodule=sharded)
    seconds = [b - a for a, b in itertools.pairwise(steps.ends)][SKIPPED:]  # the first is of step SKIPPED + 2
    return statistics.median(seconds[1::2]), _over_neighbours(seconds, first=2)


def measure(rounds: int) -> list[dict[str, Any]]:
    """A row for each model and number of processes: milliseconds of a step, a measured one, and the mean."""
    warm_up()
    rows = []
    for model, processes in itertools.product(MODELS, (1, 2)):
        found = []
        for number in range(rounds):
            run_id = f"noise-{processes}-{number}"
            seconds, measured = in_fresh_processes(measuring, model, processes, processes=processes, run_id=run_id)
            found.append((1e3 * seconds, measured, 1 + (measured - 1) / EVERY))
        row: dict[str, Any] = {"model": model, "processes": processes}
        for name, values in zip(("ms", "measured", "mean"), zip(*found, strict=True), strict=True):
            row[name] = (min(values), statistics.median(values), max(values))
        rows.append(row)
        print(row, flush=True)
    return rows
