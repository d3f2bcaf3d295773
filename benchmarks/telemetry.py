"""What seeing every rank costs: time inside the framework's own telemetry over the time of a training step.

The difference of two whole runs would be noise. So each call that the training makes into it is timed: the callbacks
that measure, log and watch, with the metrics files, a W&B run (offline) and what a language model's own ``log`` calls
bring along; and the step clock, by how often it is switched and what a switch costs. ``share`` is the time that the
thread which trains computes in it, over 40 ms; ``share with waiting`` is all of its time, of which a rank spends most
in waiting for the others in the one collective where ranks share cores, as four here are likely to. Ranks meet before a
logging step is timed. Fresh processes of one thread each; a step sleeps for what it is short of 40 ms.

The second part makes up what 1,024 ranks would have sent, and times what rank 0 does with it.
"""

import contextlib
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from framework_tax import in_fresh_processes

from shardwise.data.sharded import ShardedDataModule
from shardwise.data.synthetic import SyntheticTokens
from shardwise.launch import warm_up
from shardwise.models.gpt import GPT
from shardwise.module import LanguageModel
from shardwise.parallel.named_values import CAPACITY, HEADER, Gathered
from shardwise.step_clock import StepClock
from shardwise.strategies import MeshStrategy
from shardwise.telemetry.readings import NODE
from shardwise.telemetry.statistics import flat_statistics, own_values
from shardwise.telemetry.step_metrics import SPENT, StepMetrics
from shardwise.telemetry.stragglers import Stragglers
from shardwise.telemetry.watchdog import Watchdog
from shardwise.tracking import JsonlLogger, RankJsonlLogger, WandbTracker

STEPS, SKIPPED = 60, 10
"""Optimizer steps of a training, and how many of them at its start are not counted."""
STEP_SECONDS = 0.040
RANKS = 1024
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end")


class _Talking(LanguageModel):
    """Takes 40 ms at least, and logs some metrics of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        end = time.perf_counter() + STEP_SECONDS
        loss, count = super().training_step(batch, batch_idx)
        for number in range(8):
            self.log(f"train/own_{number}", loss.detach() / count)
        time.sleep(max(0.0, end - time.perf_counter()))
        return loss, count


class _Timed:
    """Adds up what calls take, by step."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.computing: dict[int, float] = {}
        self.ends: list[float] = []

    def wrap(self, callback: pl.Callback, *, meet: bool) -> None:
        for hook in HOOKS:
            if getattr(type(callback), hook) is not getattr(pl.Callback, hook):
                setattr(callback, hook, self._timed(getattr(callback, hook), hook, meet=meet and hook == HOOKS[-1]))

    def _timed(self, call: Any, hook: str, *, meet: bool) -> Any:
        def timed(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
            if meet:
                dist.barrier()
            start, of_thread = time.perf_counter(), time.thread_time()
            call(trainer, *args, **kwargs)
            step = trainer.global_step + (hook != HOOKS[-1])  # the step that is being made
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
            self.computing[step] = self.computing.get(step, 0.0) + time.thread_time() - of_thread

        return timed


class _Ends(pl.Callback):
    def __init__(self, timed: _Timed) -> None:
        self.timed = timed

    def on_train_batch_end(self, *args: Any) -> None:
        self.timed.ends.append(time.perf_counter())


def _switch_seconds() -> float:
    """What it takes to go from one phase to another."""
    clock, found = StepClock(), []
    clock.start()
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            with clock.phase("forward"):
                pass
        found.append((time.perf_counter() - start) / 200)
    return statistics.median(found)


def _wandb(folder: str) -> Any:
    os.environ["WANDB_SILENT"] = "true"
    return WandbTracker(mode="offline", save_dir=folder, run_id="telemetry", settings={"x_disable_stats": True})


def training(every: int, folder: str) -> dict[str, float]:
    """Of rank 0: what its telemetry takes and how often it is called upon."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rank, processes = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]), 4
    task = _Talking(GPT(65, context=32, n_layer=2, n_head=4, width=32))
    task.configure_optimizers = lambda: torch.optim.AdamW(task.parameters(), lr=1e-3)  # type: ignore[method-assign]
    metrics = StepMetrics(total_steps=STEPS, global_size=16)
    own: list[pl.Callback] = [metrics, Watchdog(start_timeout=600.0, collective_timeout=120.0)]
    own.append(Stragglers(factor=1.5, steps=20))
    timed = _Timed()
    for callback in own:
        timed.wrap(callback, meet=callback is metrics)
    loggers = [JsonlLogger(f"{folder}/metrics.jsonl"), RankJsonlLogger(f"{folder}/ranks", rank=rank), _wandb(folder)]
    strategy = MeshStrategy()
    switches = [0]
    charge = strategy.clock._charge

    def counted(phase: str) -> None:
        switches[0] += 1
        charge(phase)

    strategy.clock._charge = counted  # type: ignore[method-assign]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=strategy,
        callbacks=[*own, _Ends(timed)],
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        log_every_n_steps=every,
        logger=loggers,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = SyntheticTokens(num_samples=4096, context=32, vocab_size=65)
    sharded = ShardedDataModule(data, seed=0, global_size=16, eval_batch_size=64, dp_rank=rank, dp_size=processes)
    trainer.fit(task, datamodule=sharded)
    with contextlib.suppress(Exception):
        loggers[-1].finish(0)  # type: ignore[union-attr]
    counted_steps = range(SKIPPED + 1, STEPS + 1)
    logging = [timed.seconds[step] for step in counted_steps if step % every == 0 and step != STEPS]
    others = [timed.seconds.get(step, 0.0) for step in counted_steps if step % every]
    steps = [b - a for a, b in zip(timed.ends[SKIPPED:-1], timed.ends[SKIPPED + 1 :], strict=True)]
    return {
        "logging step": statistics.median(logging),
        "of it computing": statistics.median(timed.computing[step] for step in counted_steps if step % every == 0),
        "other step": statistics.median(others) if others else 0.0,
        "clock": switches[0] / STEPS * _switch_seconds(),
        "switches": switches[0] / STEPS,
        "collectives": metrics._gather.collectives / (STEPS // every + (every > 1)),
        "step": statistics.median(steps),
    }


def inside(rounds: int) -> list[dict[str, Any]]:
    """A row for logging every tenth step, and every one."""
    rows = []
    for every in (10, 1):
        found = []
        for number in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(in_fresh_processes(training, every, folder, processes=4, run_id=f"tele-{every}-{number}"))
        row: dict[str, Any] = {"every": every}
        for name in ("logging step", "of it computing", "other step", "clock"):
            row[f"{name} ms"] = 1e3 * statistics.median(one[name] for one in found)
        row["switches a step"] = statistics.median(one["switches"] for one in found)
        row["collectives a logging step"] = max(one["collectives"] for one in found)
        row["step ms"] = 1e3 * statistics.median(one["step"] for one in found)
        for name, kind in (("share", "of it computing"), ("share with waiting", "logging step")):
            shares = [
                (one[kind] / every + one["other step"] * (1 - 1 / every) + one["clock"]) / STEP_SECONDS for one in found
            ]
            row[name] = (min(shares), statistics.median(shares), max(shares))
        rows.append(row)
        print(row, flush=True)
    return rows


def simulated(rounds: int) -> dict[str, Any]:
    """What 1,024 ranks send in a logging step, and milliseconds that rank 0 takes to make statistics of it and log."""
    generator = np.random.default_rng(0)
    memory = ("memory/resident", "memory/peak", "memory/allocated", "memory/reserved")
    sensors = ("gpu/temperature", "gpu/power", "gpu/utilisation")
    told = ("step/tokens", "step/peak_flops", "step/flops", "step/loss_sum", "step/count")
    names = (*SPENT, *memory, *sensors, *NODE, *told, "step/square", "step/square_share")
    values = generator.random((RANKS, len(names)))
    values[np.arange(RANKS) % 8 > 0, names.index(NODE[0]) : names.index(NODE[-1]) + 1] = np.nan
    gathered = Gathered(names, values, np.ones_like(values, dtype=bool))
    metrics = StepMetrics(total_steps=100, global_size=RANKS)
    metrics._hosts = tuple(f"node-{rank // 8}" for rank in range(RANKS))
    found: dict[str, list[float]] = {"statistics": [], "files": [], "wandb": [], "all": []}
    quantities = 0
    with tempfile.TemporaryDirectory() as folder:
        lines, own, wandb = JsonlLogger(f"{folder}/m.jsonl"), RankJsonlLogger(folder, rank=0), _wandb(folder)
        for step in range(1, 5 * rounds + 3):
            times = [time.perf_counter()]
            table = metrics._table(gathered, step=step, steps=10)
            line = {"train/loss": 1.0, **flat_statistics(table)}
            mine = own_values(table, 0)
            times.append(time.perf_counter())
            lines.log_metrics(line, step)
            own.log_rank(mine, step)
            times.append(time.perf_counter())
            wandb.log_metrics(line, step)
            wandb.log_ranks(table)
            times.append(time.perf_counter())
            quantities = len(table.names)
            if step > 2:  # the first starts the run
                for name, a, b in zip(found, times, times[1:], strict=False):
                    found[name].append(b - a)
                found["all"].append(times[-1] - times[0])
        wandb.finish(0)
    row: dict[str, Any] = {
        "ranks": RANKS,
        "quantities": quantities,
        "payload KiB": RANKS * (HEADER + CAPACITY) * 8 / 1024,
    }
    row |= {f"{name} ms": 1e3 * statistics.median(seconds) for name, seconds in found.items()}
    row["largest ms"] = 1e3 * max(found["all"])
    print(row, flush=True)
    return row


def measure(rounds: int) -> dict[str, Any]:
    """``inside``: rows of a training of four ranks; ``simulated``: a row of 1,024 made up."""
    warm_up()
    return {"inside": inside(rounds), "simulated": simulated(rounds)}


if __name__ == "__main__":
    measure(3)
