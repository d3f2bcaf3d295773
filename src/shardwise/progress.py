"""What a person sees of a run while it trains, and the lines that its loggers get."""

import sys
import time
from typing import Any, TextIO

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor

from shardwise.data.sharded import ShardedDataModule
from shardwise.strategies import MeshStrategy

PLAIN_LINE_SECONDS = 5.0
"""Seconds between two lines of progress where the output is no terminal."""


class StepMetrics(Callback):
    """Logs what the framework knows of a training step, under the number of optimizer steps that are done.

    ``train/loss`` (mean over the global batch), ``lr``, ``grad_norm`` (before clipping, where gradients are clipped by
    norm), ``samples`` (seen since the start of the run) and ``samples_per_second`` (without the first step of this
    process, in which much is done for the first time): on the first step, on every ``trainer.log_every_n_steps``-th,
    and on the last. One collective on each of these steps, none on the others.
    """

    def __init__(self, *, total_steps: int, global_size: int) -> None:
        self.total_steps = total_steps
        self.global_size = global_size
        self.latest: dict[str, float] = {}
        self._first = (0, 0)  # steps done and samples seen when this process began to train
        self._logged = 0
        self._since = (0, 0.0)
        self._evaluating = 0.0
        self._lr = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, data = trainer.global_step, getattr(trainer, "datamodule", None)
        # Batches may have been of another size before; the data know the position.
        seen = data.position if isinstance(data, ShardedDataModule) else step * self.global_size
        self._first, self._logged, self._since = (step, seen), step, (step, time.perf_counter())

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, start = self._since
        self._since = (step, start + time.perf_counter() - self._evaluating)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step in (1, self.total_steps) or step % every == 0:
            self._log(trainer, step)
        if self._since[0] == self._first[0]:
            self._since = (step, time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A time limit or early stopping ended the training on another step.
        if trainer.global_step > self._logged:
            self._log(trainer, trainer.global_step)

    def _log(self, trainer: Trainer, step: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        metrics: dict[str, float] = {"train/loss": float(strategy.global_loss())}
        metrics["lr"] = self._lr
        norm = getattr(strategy.precision_plugin, "grad_norm", None)
        if isinstance(norm, Tensor):
            metrics["grad_norm"] = float(norm)
        first, seen = self._first
        metrics["samples"] = seen + (step - first) * self.global_size
        last, start = self._since
        now = time.perf_counter()
        if step > last > first:
            metrics["samples_per_second"] = (step - last) * self.global_size / (now - start)
        self._logged, self._since = step, (step, now)
        self.latest = metrics
        trainer.callback_metrics.update(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        )
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # When the batch has ended the schedule has moved on: what counts is the rate that the step is made with.
        self._lr = float(optimizer.param_groups[0]["lr"])


class ShowProgress(Callback):
    """Progress on rank 0: a bar on a terminal, plain lines elsewhere (at most one in five seconds)."""

    def __init__(self, metrics: StepMetrics, *, total_steps: int, stream: TextIO | None = None) -> None:
        self.metrics = metrics
        self.total_steps = total_steps
        self.stream = stream or sys.stdout
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = 0.0
        self._start = 0.0
        self._first = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = self._last_line = time.monotonic()
        self._first = trainer.global_step  # what an earlier process has done says nothing of this one's speed
        if trainer.is_global_zero and self.stream.isatty():
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=Console(file=self.stream),
                transient=True,
            )
            self._task = self._bar.add_task("train", total=self.total_steps, completed=self._first, numbers="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not trainer.is_global_zero:
            return
        step, now = trainer.global_step, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=self._numbers())
        elif now - self._last_line > PLAIN_LINE_SECONDS or step == self.total_steps:
            self._last_line = now
            left = (now - self._start) / max(step - self._first, 1) * (self.total_steps - step)
            eta = f"  ETA {int(left // 60)}:{int(left % 60):02d}" if step < self.total_steps else ""
            self._line(f"step {step}/{self.total_steps}  {self._numbers()}{eta}")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.sanity_checking:
            return
        values = {k: v for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        shown = "  ".join(f"{name} {float(value):.4g}" for name, value in values.items())
        text = f"step {trainer.global_step}/{self.total_steps}  {shown}"
        if self._bar is not None:
            self._bar.console.print(text)
        elif time.monotonic() - self._last_line > PLAIN_LINE_SECONDS or trainer.global_step >= self.total_steps:
            self._last_line = time.monotonic()
            self._line(text)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _numbers(self) -> str:
        m = self.metrics.latest
        parts = [f"loss {m['train/loss']:.4f}"] if "train/loss" in m else []
        parts += [f"lr {m['lr']:.2e}"] if "lr" in m else []
        parts += [f"{m['samples_per_second']:,.0f} samples/s"] if "samples_per_second" in m else []
        return "  ".join(parts)

    def _line(self, text: str) -> None:
        print(text, flush=True)
