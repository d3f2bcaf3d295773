"""The lines that a run's loggers get of its training steps, and the table of what each rank has measured."""

import math
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor

from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.parallel.grad_norm import local_gradients, own_squares
from shardwise.parallel.named_values import Gathered, NamedGather
from shardwise.step_clock import PHASES
from shardwise.strategies import MeshStrategy
from shardwise.strategies.micro_batches import batch_samples, split_batch
from shardwise.telemetry.flops import flops_per_sample, meta_copy, peak_flops
from shardwise.telemetry.loop import watch
from shardwise.telemetry.readings import Readings
from shardwise.telemetry.statistics import OWN_PHASES, TimeSplit, flat_statistics, own_values
from shardwise.telemetry.table import RankTable

TIMES = ("time/step", *(f"time/{phase}" for phase in PHASES))
SPENT = tuple(f"spent/{phase}" for phase in PHASES)
"""Seconds of each phase since the last logging step, as ranks tell them to each other."""


class StepMetrics(Callback):
    """Measures training steps, and logs them under the number of optimizer steps that are done.

    Of all ranks together: ``train/loss`` (mean over the global batch), ``lr``, ``grad_norm`` (before clipping),
    ``samples`` (seen since the start of the run), ``samples_per_second``, and where the module has
    ``count_tokens(batch)``, ``tokens`` and ``tokens_per_second``; where its operations can be counted,
    ``flops_per_second`` and ``mfu`` (``telemetry.flops``); where steps may be skipped, ``skipped_steps``. Of each rank:
    where its time went (``time/own``: without waiting for others), memory, sensors, load, its loss and gradients
    (RankTable). Rates and times are without the first step of this process, in which much is done for the first time.

    On the first step, on every ``trainer.log_every_n_steps``-th, and on the last, in one collective, in which what the
    module logs itself goes along; there is none on other steps. Loggers get a line (``log_metrics``), and those that
    have these methods: ``log_rank(values, step)`` on every rank with its own values, ``log_ranks(table)`` on rank 0,
    or on every rank if the logger's ``wants_every_table`` is true.
    Every callback's ``on_rank_table(trainer, table)`` is called on every rank, with equal tables.
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
        self._squares: Tensor | None = None
        self._tokens: int | None = None  # of all ranks up to the last logging step, None if there are none to count
        self._tokens_since = 0  # of this rank, since then
        self._held_tokens: int | None = None
        self._skipped = 0  # steps that earlier processes of the run have left out
        self._twin: LightningModule | None = None
        self._flops: float | None = None
        self._peak = 0.0
        self._ranks = 1
        self._dp_size = 1
        self._own_time = dict.fromkeys(PHASES, 0.0)  # of this rank, in no table
        self._split = TimeSplit(ranks=1)
        self._peak_memory: tuple[float, int] | None = None
        self._hosts: tuple[str, ...] = ()
        self._clock: Any = None
        self._strategy: MeshStrategy | None = None

    # ---- beginning ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            _mesh_strategy(trainer)
        if stage == "fit" and self._flops is None:
            self._twin = meta_copy(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = _mesh_strategy(trainer)
        step, data = trainer.global_step, getattr(trainer, "datamodule", None)
        # Batches may have been of another size before; the data know the position.
        seen = data.position if isinstance(data, ShardedDataModule) else step * self.global_size
        self._strategy, strategy.gathers_logged = strategy, False
        self._ranks, self._dp_size = strategy.dims.world_size, strategy.dp_size
        self._hosts = tuple(strategy.hosts)
        self._gather = NamedGather(dist.group.WORLD if self._ranks > 1 else None, strategy.root_device)
        self._readings = Readings(strategy.root_device, reads_node=strategy.local_rank == 0)
        self._split, self._own_time = TimeSplit(ranks=self._ranks), dict.fromkeys(PHASES, 0.0)
        if self._twin is not None:
            self._peak = peak_flops(strategy.root_device, strategy.precision_plugin.precision)
        self._clock = watch(trainer)
        self._first, self._logged, self._since = (step, seen), step, (step, time.perf_counter())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._twin is not None:
            # As large as the model is ever called with: another size may be too much for it.
            micro_batch = split_batch(batch, _mesh_strategy(trainer).accumulate)[0]
            self._flops, self._twin = flops_per_sample(self._twin, micro_batch), None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        # When the batch has ended the schedule has moved on: what counts is the rate that the step is made with.
        self._lr = float(optimizer.param_groups[0]["lr"])
        if self._logs(trainer, trainer.global_step + 1):
            gradients = local_gradients(_mesh_strategy(trainer).precision_plugin.main_params(optimizer))
            self._squares = own_squares(gradients, ranks=self._ranks)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, start = self._since
        self._since = (step, start + time.perf_counter() - self._evaluating)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, first = trainer.global_step, self._since[0] == self._first[0]
        self._count_tokens(pl_module, batch)
        if self._logs(trainer, step):
            self._log(trainer, step)
        if first:  # with what loggers do for the first time
            self._keep_own_time()
            self._since = (step, time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A time limit or early stopping ended the training on another step.
        if trainer.global_step > self._logged:
            self._log(trainer, trainer.global_step)
        self._keep_own_time()
        _mesh_strategy(trainer).gathers_logged = True

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        trainer.strategy.gathers_logged = True  # type: ignore[attr-defined]

    # ---- tokens over a resume -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        # What other ranks have seen since the last logging step is not known here: as much as this one.
        seen = self._held_tokens if self._tokens is None else self._tokens + self._tokens_since * self._dp_size
        tokens = {} if seen is None else {"tokens": seen}
        skipped = self._skipped + (0 if self._strategy is None else self._strategy.skipped_steps)
        return tokens | ({"skipped_steps": skipped} if skipped else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._held_tokens = state_dict.get("tokens")
        self._skipped = state_dict.get("skipped_steps", 0)

    def _count_tokens(self, module: LightningModule, batch: Any) -> None:
        count = getattr(module, "count_tokens", None)
        if count is None:
            return
        tokens = int(count(batch))
        if self._tokens is None:
            seen = self._first[1]
            # A checkpoint that does not say: all samples as long as these.
            guessed = seen * tokens // max(batch_samples(batch), 1) if seen else 0
            self._tokens = guessed if self._held_tokens is None else self._held_tokens
        self._tokens_since += tokens

    # ---- a logging step -------------------------------------------------------------------------------------------

    def _logs(self, trainer: Trainer, step: int) -> bool:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return step in (1, self.total_steps) or (every > 0 and step % every == 0)

    def _log(self, trainer: Trainer, step: int) -> None:
        spent = self._clock.take()
        with self._clock.phase("logging"):
            strategy = _mesh_strategy(trainer)
            gathered = self._gather_values(strategy, spent)
            foreign = strategy.put_step_values(gathered)
            last = self._since[0]
            steps = step - last if last > self._first[0] else 0
            if steps:
                self._split.add(np.stack([gathered.column(name) for name in SPENT], axis=1))
            else:
                self._own_time = {phase: self._own_time[phase] + spent[phase] for phase in PHASES}
            table = self._table(gathered, step=step, steps=steps)
            metrics = self._global_metrics(strategy, gathered, step=step, steps=steps)
            self._logged, self._since = step, (step, time.perf_counter())
            self.latest = metrics
            trainer.callback_metrics.update(
                {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
            )
            line = {**metrics, **foreign, **flat_statistics(table)}
            own = own_values(table, strategy.global_rank)
            for logger in trainer.loggers:
                logger.log_metrics(line, step=step)
                if hasattr(logger, "log_rank"):
                    logger.log_rank(own, step)
                every = trainer.is_global_zero or getattr(logger, "wants_every_table", False) is True
                if every and hasattr(logger, "log_ranks"):
                    logger.log_ranks(table)
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            for callback in callbacks:
                if hasattr(callback, "on_rank_table"):
                    callback.on_rank_table(trainer, table)

    def _gather_values(self, strategy: MeshStrategy, spent: dict[str, float]) -> Gathered:
        """This step's numbers of every rank: the one collective of a logging step."""
        on_host = dict(zip(SPENT, (spent[phase] for phase in PHASES), strict=True))
        on_host |= self._readings.read()
        on_host |= {"step/tokens": self._tokens_since, "step/peak_flops": self._peak, "step/flops": self._flops or 0.0}
        self._tokens_since = 0
        values = strategy.step_values()
        if self._squares is not None:
            values["step/square"], values["step/square_share"] = self._squares
            self._squares = None
        told = torch.tensor(list(on_host.values()), dtype=torch.float64).to(strategy.root_device, non_blocking=True)
        return self._gather([*on_host, *values], torch.cat([told, torch.stack(list(values.values()))]))

    def _table(self, gathered: Gathered, *, step: int, steps: int) -> RankTable:
        columns: dict[str, np.ndarray] = {}
        seconds = np.stack([gathered.column(name) for name in SPENT], axis=1) / (steps or math.nan)
        columns |= dict(zip(TIMES, (seconds.sum(axis=1), *seconds.T), strict=True))
        # Without waiting for others: by its largest, the rank that they wait for.
        columns["time/own"] = np.sum([columns[f"time/{phase}"] for phase in OWN_PHASES], axis=0)
        kinds = ("memory/", "gpu/", "node/")
        columns |= {name: gathered.column(name) for name in gathered.names if name.startswith(kinds)}
        counts = gathered.column("step/count")
        columns["rank/loss"] = gathered.column("step/loss_sum") / np.where(counts == 0, math.nan, counts)
        columns["rank/grad_norm"] = np.sqrt(gathered.column("step/square"))
        peaks = columns["memory/peak"]
        if self._peak_memory is None or peaks.max() > self._peak_memory[0]:
            self._peak_memory = float(peaks.max()), int(peaks.argmax())
        values = np.stack(list(columns.values()), axis=1)
        return RankTable(step=step, steps=steps, names=tuple(columns), values=values, hosts=self._hosts)

    def _global_metrics(self, strategy: MeshStrategy, gathered: Gathered, *, step: int, steps: int) -> dict[str, float]:
        # Ranks that split a layer between them have the same samples: one of each counts.
        each = slice(None, None, strategy.dims.tp)
        count = gathered.column("step/count")[each].sum()
        metrics: dict[str, float] = {"train/loss": float(gathered.column("step/loss_sum")[each].sum() / (count or 1.0))}
        metrics["lr"] = self._lr
        norm = getattr(strategy.precision_plugin, "grad_norm", None)
        if isinstance(norm, Tensor):
            metrics["grad_norm"] = float(norm)
        elif "step/square_share" in gathered.names:
            metrics["grad_norm"] = math.sqrt(gathered.column("step/square_share").sum())
        if strategy.nonfinite.policy == "skip":
            metrics["skipped_steps"] = self._skipped + strategy.skipped_steps
        first, seen = self._first
        metrics["samples"] = seen + (step - first) * self.global_size
        rate = steps / (time.perf_counter() - self._since[1])
        if steps:
            metrics["samples_per_second"] = rate * self.global_size
        if self._tokens is not None:
            tokens = int(gathered.column("step/tokens")[each].sum())
            self._tokens += tokens
            metrics["tokens"] = self._tokens
            if steps:
                metrics["tokens_per_second"] = rate * tokens / (step - self._logged)
        flops, peak = gathered.column("step/flops")[0], gathered.column("step/peak_flops").sum()
        if steps and flops:
            metrics["flops_per_second"] = float(flops) * metrics["samples_per_second"]
            metrics["mfu"] = metrics["flops_per_second"] / float(peak)
        return metrics

    # ---- the whole run --------------------------------------------------------------------------------------------

    def _keep_own_time(self) -> None:
        spent = self._clock.take()
        self._own_time = {phase: self._own_time[phase] + spent[phase] for phase in PHASES}

    def summary(self) -> dict[str, Any]:
        """What this process's training went to, for ``result.json``; {} if it has not begun.

        ``time``: seconds of each phase, mean over ranks (of the first step, and of what came after the last logging
        step, this rank's); ``wall``: their sum; ``slowest_rank`` and ``peak_memory`` over all ranks, or None.
        """
        if self._clock is None:
            return {}
        if self._clock.record is None:  # it would wait for the device, which may be what has failed
            self._keep_own_time()
        mean = self._split.mean()
        spent = {phase: mean[phase] + self._own_time[phase] for phase in PHASES}
        memory = self._peak_memory
        return {
            "time": spent,
            "wall": sum(spent.values()),
            "slowest_rank": self._split.slowest(self._hosts),
            "peak_memory": None if memory is None else {"bytes": int(memory[0]), "rank": memory[1]},
        }


def _mesh_strategy(trainer: Trainer) -> MeshStrategy:
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy):
        raise ConfigError(
            f"Trainer(strategy={type(strategy).__name__}): StepMetrics measures the steps of MeshStrategy only: "
            f"Trainer(strategy=MeshStrategy())"
        )
    return strategy
