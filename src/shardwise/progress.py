"""What a person sees of a run while it trains."""

import sys
import time
from typing import Any, TextIO

from pytorch_lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardwise.telemetry.step_metrics import StepMetrics

PLAIN_LINE_SECONDS = 5.0
"""Seconds between two lines of progress where the output is no terminal."""


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
