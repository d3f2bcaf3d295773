"""From a resolved configuration to objects: the checks of what is plugged in, and the building of it."""

import inspect
import json
import sys
from collections.abc import Callable, Sequence, Sized
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.config import Config, to_plain
from shardwise.data.seeded import seeded
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.job import Job
from shardwise.models.batch_norm import batch_statistics_layers
from shardwise.optim import build_optimizer, build_scheduler
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.layout import Layout, check_layout
from shardwise.progress import ShowProgress, StepMetrics
from shardwise.provenance import without_secrets
from shardwise.resolve import Resolved, Steps, seconds_of
from shardwise.seeds import stable_seed
from shardwise.slots import AUTO, accepts, arguments, build, check_arguments, find_target
from shardwise.strategies import MeshStrategy
from shardwise.summary import StartUp
from shardwise.tracking import JsonlLogger

STAND_INS = {"vocab_size": 4096, "num_classes": 16}
"""Sizes that only loaded data tell, and on which the split of layers over tp does not depend."""


def check_slots(config: Config, dims: ParallelDims | None = None) -> None:
    """Whether everything that is plugged in exists, is of its slot's kind and takes its arguments; starts nothing.

    The model is built on the meta device where the data module says enough before it has loaded anything, and its plan
    is checked against the degrees of the mesh.

    Raises:
        ConfigError: the first thing that is wrong.
    """
    plugins = config.plugins
    for slot, supplied in (
        ("data", ()),
        ("model", ()),
        ("task", ("model",)),
        ("logger", ("save_dir", "run_id", "resume")),
    ):
        node = getattr(config, slot)
        if node.get("_target_") or slot in ("data", "task"):
            target = find_target(slot, node, plugins=plugins)
            free = tuple(name for name in supplied if name not in node)
            check_arguments(target, arguments(node), where=slot, supplied=free)
    _check_task(config)
    target = find_target("optimizer", config.optimizer, plugins=plugins)
    check_arguments(target, arguments(config.optimizer), where="optimizer", supplied=("params",))
    given = {key: value for key, value in arguments(config.optimizer).items() if key != "lr"}
    build_optimizer([("probe", nn.Parameter(torch.zeros(1)))], target=target, lr=1e-3, **given)  # type: ignore[arg-type]
    for name, node in config.callbacks.items():
        target = find_target("callbacks", node, plugins=plugins, where=f"callbacks.{name}")
        check_arguments(target, arguments(node), where=f"callbacks.{name}")
    data = build(find_target("data", config.data, plugins=plugins), arguments(config.data), where="data")
    unknown = [key for key, value in config.model.items() if value == AUTO and getattr(data, key, None) is None]
    task = find_target("task", config.task, plugins=plugins)
    if not unknown and accepts(task, "model"):
        model = config.model.get("_target_") and find_target("model", config.model, plugins=plugins)
        if hasattr(model, "init_parameter"):
            build_model(config, data)
    if dims is not None and (dims.tp > 1 or layout_of(config).works_on_blocks):
        _check_layout(config, data, dims)


def _check_layout(config: Config, data: Any, dims: ParallelDims) -> None:
    """Whether the model can be laid out so; where it cannot be built yet, its ranks will find out."""
    wanted = {key for slot in (config.task, config.model) for key, value in slot.items() if value == AUTO}
    told = {key: getattr(data, key, None) for key in wanted}
    known = {key: STAND_INS.get(key) if value is None else value for key, value in told.items()}
    try:
        with torch.device("meta"), seeded(0):
            task = _build_task(config, SimpleNamespace(inner=data, **known))
    except Exception:  # a user's code need not know the meta device, and what is not known is not there
        return
    check_layout(task, layout_of(config), dims)


def layout_of(config: Config) -> Layout:
    """How the configuration wants the model laid out."""
    return Layout(**{name.name: getattr(config.strategy, name.name) for name in fields(Layout)})


def _check_task(config: Config) -> None:
    """Whether task, model and learning-rate rule go together."""
    task = find_target("task", config.task, plugins=config.plugins)
    takes, given = accepts(task, "model") and "model" not in config.task, bool(config.model.get("_target_"))
    name = getattr(task, "__name__", str(task))
    if takes and not given and inspect.signature(task).parameters["model"].default is inspect.Parameter.empty:
        raise ConfigError(f"task {name} needs a model: type model=<choice>, or model=custom model._target_=...")
    if given and not takes:
        raise ConfigError(f"task {name} takes no model, so {config.model['_target_']} would do nothing: model=none")

    own = getattr(task, "configure_optimizers", None) is not pl.LightningModule.configure_optimizers
    if own and config.lr_scaling.rule != "none":
        raise ConfigError(
            f"lr_scaling={config.lr_scaling.rule}, but {name} has a configure_optimizers of its own: remove that, or "
            f"type lr_scaling=none"
        )


def build_data(resolved: Resolved, rank: int) -> ShardedDataModule:
    """The data module, prepared and set up, as this rank's share of the stream of samples."""
    config, dims, batch = resolved.config, resolved.dims, resolved.batch
    target = find_target("data", config.data, plugins=config.plugins)
    with seeded(stable_seed("data")):
        inner = build(target, arguments(config.data), where="data")
    data = ShardedDataModule(
        inner,
        seed=config.seed,
        global_size=batch.global_size,
        eval_batch_size=batch.eval_size,
        dp_rank=dims.dp_rank(rank),
        dp_size=dims.dp_size,
    )
    # Before the ranks need one another: a long download would otherwise run into the limit of a collective.
    data.prepare_data()
    data.setup("fit")
    return data


def fill_auto(given: dict[str, Any], data: Any, *, where: str) -> dict[str, Any]:
    """Arguments with every ``auto`` replaced by the data module's attribute of the same name.

    Raises:
        ConfigError: the data have no such attribute.
    """
    filled = {}
    for key, value in given.items():
        if value == AUTO:
            value = getattr(data, key, None)
            if value is None:
                name = type(getattr(data, "inner", data)).__name__
                raise ConfigError(f"{where}.{key}=auto, but {name} has no {key}: type {where}.{key}=<value>")
        filled[key] = value
    return filled


def build_model(config: Config, data: Any) -> nn.Module | None:
    """The model, on the meta device if it says how each parameter starts, else on the CPU; None if there is none."""
    if not config.model.get("_target_"):
        return None
    target = find_target("model", config.model, plugins=config.plugins)
    given = fill_auto(arguments(config.model), data, where="model")
    if hasattr(target, "init_parameter"):
        with torch.device("meta"):
            return build(target, given, where="model")
    return build(target, given, where="model")


def build_task(resolved: Resolved, data: Any, steps: Steps) -> pl.LightningModule:
    """The LightningModule, with optimizer and schedule from the configuration unless it brings its own."""
    # Whatever is drawn while they are constructed is drawn alike on every rank.
    with seeded(stable_seed(resolved.config.seed, "init")):
        task: Any = _build_task(resolved.config, data)
    if is_overridden("configure_optimizers", task):
        return task
    task.configure_optimizers = _optimizers(task, resolved, steps)
    return task


def _build_task(config: Config, data: Any) -> pl.LightningModule:
    target = find_target("task", config.task, plugins=config.plugins)
    given = fill_auto(arguments(config.task), data, where="task")
    model = build_model(config, data)
    return build(target, given, where="task", **({} if model is None else {"model": model}))


def _optimizers(task: pl.LightningModule, resolved: Resolved, steps: Steps) -> Callable[[], Any]:
    config = resolved.config
    target = find_target("optimizer", config.optimizer, plugins=config.plugins)
    given = {key: value for key, value in arguments(config.optimizer).items() if key != "lr"}
    schedule = config.schedule

    def configure_optimizers() -> Any:
        optimizer = build_optimizer(task.named_parameters(), target=target, lr=resolved.lr, **given)  # type: ignore[arg-type]
        scheduler = build_scheduler(
            optimizer,
            kind=schedule.kind,
            total_steps=steps.scheduled,
            warmup_steps=schedule.warmup_steps,
            min_ratio=schedule.min_ratio,
            decay_fraction=schedule.decay_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return configure_optimizers


def build_trainer(
    job: Job, resolved: Resolved, steps: Steps, *, notes: Sequence[str] = (), stop: Any = None
) -> pl.Trainer:
    """Lightning's Trainer around :class:`MeshStrategy`, with this job's loggers and callbacks.

    Args:
        stop: its ``requested`` says who asks the training to end, or None.
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
        facts={"configuration": _fingerprint(job), "run id": job.run_id, "torch": torch.__version__},
        cluster_environment=TorchElasticEnvironment() if world.size > 1 else LightningEnvironment(),
    )
    metrics = StepMetrics(total_steps=steps.total, global_size=resolved.batch.global_size)
    callbacks: list[pl.Callback] = [metrics, StartUp(job, resolved, steps, notes=notes)]
    if options.pop("enable_progress_bar"):
        callbacks.append(ShowProgress(metrics, total_steps=steps.total, stream=getattr(sys.stdout, "_stream", None)))
    for name, node in config.callbacks.items():
        target = find_target("callbacks", node, plugins=config.plugins, where=f"callbacks.{name}")
        callbacks.append(build(target, arguments(node), where=f"callbacks.{name}"))
    loggers = [] if config.trainer.barebones else build_loggers(job, resolved)
    if not config.trainer.fast_dev_run:  # nothing that is worth to be kept
        callbacks.append(_saving(job, resolved, loggers, stop))
    if config.init_from is not None and job.checkpoint is None:
        from shardwise.checkpoint.weights import InitFrom

        callbacks.append(InitFrom(config.init_from))
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


def _saving(job: Job, resolved: Resolved, loggers: Sequence[Any], stop: Any) -> SaveCheckpoints:
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
    }
    return SaveCheckpoints(
        f"{job.run_folder}/checkpoints" if folder is None else f"{folder.rstrip('/')}/{job.run_id}",
        **settings,
        facts=lambda: {**facts, "metrics_bytes": 0 if lines is None else lines.size()},
        manifest={"run_id": job.run_id, "strategy": config.strategy.name},
        stop=stop,
        time_limit=None if limit is None else job.started + seconds_of(limit),
    )


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
    """``metrics.jsonl``, and the logger of the configuration if there is one; only rank 0 of them writes."""
    config = resolved.config
    folder = Path(job.run_folder)
    loggers: list[Any] = [JsonlLogger(folder / "metrics.jsonl")]
    if config.logger.get("_target_"):
        target = find_target("logger", config.logger, plugins=config.plugins)
        offered = {"save_dir": job.run_folder, "run_id": job.run_id, "resume": job.resumed}
        supplied = {key: value for key, value in offered.items() if accepts(target, key)}
        given = arguments(config.logger)
        loggers.append(build(target, given, where="logger", **{k: v for k, v in supplied.items() if k not in given}))
    return loggers


def _fingerprint(job: Job) -> str:
    """A hash of everything that all ranks have to have been told alike."""
    return hex(stable_seed(json.dumps([job.config, job.world], sort_keys=True)))


def notes_on(task: nn.Module, config: Config) -> list[str]:
    """What a person should know before the numbers come."""
    notes = []
    layers = batch_statistics_layers(task)
    if layers:
        shown = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
        notes.append(
            f"{shown}: statistics over a micro-batch, so the curve depends on batch.micro_size and the number of ranks "
            f"(residual networks: model.norm=group)"
        )
    model = getattr(task, "model", task)
    if not hasattr(model, "init_parameter"):
        size = sum(p.numel() * p.element_size() for p in task.parameters())
        if config.strategy.name != "ddp" and size >= 2**20:
            notes.append(
                f"{type(model).__name__} defines no init_parameter: every rank builds it whole on the CPU "
                f"({size / 2**20:,.0f} MiB) before it is sharded"
            )
    return notes
