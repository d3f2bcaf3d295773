"""Lightning's Trainer for a job: its strategy, its callbacks, its loggers, and what Lightning has to be told apart."""

import json
import os
import sys
from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.model_helpers import is_overridden

from shardwise.build import layout_of
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.config import to_plain
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.progress import ShowProgress
from shardwise.provenance import without_secrets
from shardwise.resolve import Resolved, seconds_of
from shardwise.seeds import stable_seed
from shardwise.slots import accepts, arguments, build, find_target
from shardwise.steps import Steps
from shardwise.strategies import MeshStrategy
from shardwise.summary import StartUp
from shardwise.telemetry.profile import FOLDER, ProfileSteps, check_window
from shardwise.telemetry.step_metrics import StepMetrics
from shardwise.telemetry.stragglers import Stragglers
from shardwise.telemetry.watchdog import Ending, Watchdog
from shardwise.tracking import JsonlLogger, RankJsonlLogger
from shardwise.weights.loading import InitFrom

ON_RESUME: dict[str, Callable[[int], dict[str, Any]]] = {
    "CSVLogger": lambda step: {"version": f"from_step_{step}"},
    "TensorBoardLogger": lambda step: {"purge_step": step + 1},
}
"""Lightning's loggers by name -> what one needs in a run that goes on from a step: the first would delete the file that
is there, the second show what comes after that step twice."""


def build_trainer(
    job: Job,
    resolved: Resolved,
    steps: Steps,
    *,
    notes: Sequence[str] = (),
    stop: Any = None,
    ending: Ending | None = None,
) -> pl.Trainer:
    """Lightning's Trainer around :class:`MeshStrategy`, with this job's loggers and callbacks.

    Args:
        stop: its ``requested`` says who asks the training to end, or None.
        ending: who is told of a job in which no step ends any more.
    """
    config, world, options = resolved.config, resolved.world, to_plain(resolved.config)["trainer"]
    strategy = MeshStrategy(
        dp_replicate=resolved.dims.dp_replicate,
        dp_shard=resolved.dims.dp_shard,
        tp=resolved.dims.tp,
        **vars(layout_of(config)),
        check_replicas_every_n_steps=config.strategy.check_replicas_every_n_steps,
        accumulate=resolved.batch.accumulate,
        seed=config.seed,
        defer_gradient_sync=config.strategy.defer_gradient_sync,
        find_unused_parameters=config.strategy.find_unused_parameters,
        start_timeout=config.launch.start_timeout,
        collective_timeout=config.launch.collective_timeout,
        nonfinite=config.monitor.nonfinite,
        facts={"configuration": _fingerprint(job), "run id": job.run_id, "torch": torch.__version__},
        cluster_environment=TorchElasticEnvironment() if world.size > 1 else LightningEnvironment(),
    )
    strategy.verify_checkpoints = False  # whoever has composed the job has
    metrics = StepMetrics(total_steps=steps.total, global_size=resolved.batch.global_size)
    callbacks: list[pl.Callback] = [metrics, StartUp(job, resolved, steps, notes=notes)]
    if options.pop("enable_progress_bar"):
        callbacks.append(ShowProgress(metrics, total_steps=steps.total, stream=getattr(sys.stdout, "_stream", None)))
    for name, node in config.callbacks.items():
        target = find_target("callbacks", node, plugins=config.plugins, where=f"callbacks.{name}")
        callbacks.append(build(target, arguments(node), where=f"callbacks.{name}"))
    loggers = [] if config.trainer.barebones else build_loggers(job, resolved)
    if not config.trainer.fast_dev_run:  # nothing that is worth to be kept
        callbacks.append(_saving(job, resolved, steps, loggers, stop))
    if config.init_from is not None and job.checkpoint is None:
        callbacks.append(InitFrom(config.init_from))
    limits = {name: getattr(config.launch, name) for name in ("start_timeout", "collective_timeout")}
    callbacks.append(Watchdog(**limits, ending=ending))
    if config.monitor.straggler_factor is not None:
        factor, slow_steps = config.monitor.straggler_factor, config.monitor.straggler_steps
        callbacks.append(Stragglers(factor=factor, steps=slow_steps, folder=Path(job.run_folder) / "ranks"))
    if config.profile.kind == "step":
        callbacks.append(_profiling(job, resolved, steps))
    if options["enable_checkpointing"]:
        # Lightning's own names hold '=', which no override can.
        folder = Path(job.run_folder) / "checkpoints"
        name = "epoch_{epoch}-step_{step}"
        callbacks.append(ModelCheckpoint(dirpath=folder, filename=name, auto_insert_metric_name=False))
    options.update(
        accelerator=world.accelerator,
        devices=world.devices,
        num_nodes=world.num_nodes,
        precision=config.precision.kind,
        max_steps=steps.total,
        val_check_interval=steps.val_check_interval,
        default_root_dir=job.run_folder,
    )
    if options["max_epochs"] is None:
        options["max_epochs"] = -1
    if config.trainer.barebones:
        options["log_every_n_steps"] = 0
    try:
        trainer = pl.Trainer(
            strategy=strategy,
            logger=loggers or False,
            callbacks=None if config.trainer.barebones else callbacks,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            **options,
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"trainer: Lightning refuses: {' '.join(str(error).split())}") from error
    # Signals have one owner (signals.py). Lightning's own broadcast before each batch, which would tell the ranks of a
    # SIGTERM, costs a device synchronisation a step and hides the error of a dead peer.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    # What a module logs belongs to the number of optimizer steps that are done. Lightning counts training steps from 0,
    # and gives a validation the number of the step before it.
    log_metrics = trainer._logger_connector.log_metrics

    def log_at_step(values: dict[str, Any], step: int | None = None) -> None:
        values.pop("step", None)  # the way to tell Lightning of another step
        log_metrics(values, step=trainer.global_step)

    trainer._logger_connector.log_metrics = log_at_step  # type: ignore[method-assign,assignment]
    return trainer


def _saving(job: Job, resolved: Resolved, steps: Steps, loggers: Sequence[Any], stop: Any) -> SaveCheckpoints:
    """The callback that saves this job."""
    config, settings = resolved.config, dict(vars(resolved.config.checkpoint))
    folder, limit = settings.pop("folder"), config.launch.time_limit
    lines = next((logger for logger in loggers if isinstance(logger, JsonlLogger)), None)
    facts = {
        "run_id": job.run_id,
        "run_folder": job.run_folder,
        "experiment": Path(job.run_folder).parent.name,
        "config": without_secrets(to_plain(config)),
        "overrides": without_secrets(list(job.overrides)),
        "strategy": config.strategy.name,
        "warmup": None if steps.warmup_samples is None else [str(steps.warmup_samples), steps.unscaled_warmup],
    }
    return SaveCheckpoints(
        f"{job.run_folder}/checkpoints" if folder is None else f"{folder.rstrip('/')}/{job.run_id}",
        **settings,
        facts=lambda: {**facts, "metrics_bytes": 0 if lines is None else lines.size()},
        manifest={"run_id": job.run_id, "strategy": config.strategy.name},
        stop=stop,
        time_limit=None if limit is None else job.started + seconds_of(limit),
    )


def _profiling(job: Job, resolved: Resolved, steps: Steps) -> ProfileSteps:
    """The callback that profiles this job."""
    from shardwise.report.timeline import write_timeline  # matplotlib, which a job without a profile does not need

    settings = dict(vars(resolved.config.profile))
    del settings["kind"]
    if job.checkpoint is None:  # what goes on from one may have few steps left, and says so at its end
        check_window(resolved.config, steps.total)
    return ProfileSteps(Path(job.run_folder) / FOLDER, **settings, draw=write_timeline)


def check_monitors(trainer: pl.Trainer, data: ShardedDataModule) -> None:
    """Whether what a callback watches will exist; Lightning would say so only after the first epoch."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    watched = {type(c).__name__: str(getattr(c, "monitor", None)) for c in callbacks}
    watched = {name: metric for name, metric in watched.items() if metric.startswith("val/")}
    if not watched or (trainer.limit_val_batches and _has_validation(data)):
        return
    name, metric = next(iter(watched.items()))
    raise ConfigError(
        f"{name} watches {metric}, and there is no validation: type data.val_fraction=0.1, or monitor=train/loss for it"
    )


def _has_validation(data: ShardedDataModule) -> bool:
    if not is_overridden("val_dataloader", data):
        return False
    loaders = data.inner.val_dataloader()
    loaders = list(loaders.values()) if isinstance(loaders, dict) else loaders
    loaders = loaders if isinstance(loaders, list | tuple) else [loaders]
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    return any(len(dataset) > 0 if isinstance(dataset, Sized) else True for dataset in datasets)


def build_loggers(job: Job, resolved: Resolved) -> list[Any]:
    """``metrics.jsonl``, ``ranks/rank_<k>.jsonl`` of this rank, and the logger of the configuration if there is one."""
    config = resolved.config
    folder = Path(job.run_folder)
    loggers: list[Any] = [JsonlLogger(folder / "metrics.jsonl"), RankJsonlLogger(folder / "ranks", rank=_rank())]
    if config.logger.get("_target_"):
        target = find_target("logger", config.logger, plugins=config.plugins)
        offered = {"save_dir": job.run_folder, "run_id": job.run_id, "resume": job.resumed}
        supplied = {key: value for key, value in offered.items() if accepts(target, key)}
        given = arguments(config.logger)
        if job.resumed and (special := ON_RESUME.get(getattr(target, "__name__", ""))):
            step = read_state(job.checkpoint)["step"] if job.checkpoint and job.checkpoint != job.parent else 0
            given |= special(step)
        loggers.append(build(target, given, where="logger", **{k: v for k, v in supplied.items() if k not in given}))
    return loggers


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _fingerprint(job: Job) -> str:
    """A hash of everything that all ranks have to have been told alike."""
    return hex(stable_seed(json.dumps([job.config, job.world], sort_keys=True)))
