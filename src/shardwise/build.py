"""From a resolved configuration to objects: the checks of what is plugged in, and the building of it."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.model_helpers import is_overridden
from torch import nn

from shardwise.config import Config
from shardwise.data.seeded import seeded
from shardwise.data.sharded import ShardedDataModule
from shardwise.errors import ConfigError
from shardwise.models.batch_norm import batch_statistics_layers
from shardwise.optim import build_optimizer, build_scheduler
from shardwise.parallel.dims import ParallelDims
from shardwise.parallel.layout import Layout, check_layout
from shardwise.parallel.sharded_step import check_sharded
from shardwise.resolve import Resolved
from shardwise.seeds import stable_seed
from shardwise.slots import AUTO, accepts, arguments, build, check_arguments, find_target
from shardwise.steps import Steps
from shardwise.telemetry.profile import check_profile

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
    given = arguments(config.optimizer)
    own = {key: value for key, value in given.items() if key != "decay"}  # which is the framework's
    check_arguments(target, own, where="optimizer", supplied=("params",))
    build_optimizer([("probe", nn.Parameter(torch.zeros(1)))], target=target, **{**given, "lr": 1e-3})  # type: ignore[arg-type]
    if dims is not None and (dims.tp > 1 or dims.dp_shard > 1):
        check_sharded(target, own)  # type: ignore[arg-type]
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


def check_callbacks(resolved: Resolved) -> None:
    """Whether every callback, the profile too, can do its work in this training, where its class says so beforehand.

    A callback's class may define ``check_resolved(cls, resolved)``, a classmethod that raises ConfigError; it is called
    before ranks are launched, and not for ``eval`` and ``predict``.

    Raises:
        ConfigError: what a callback objects to.
    """
    config = resolved.config
    check_profile(resolved)
    for name, node in config.callbacks.items():
        target = find_target("callbacks", node, plugins=config.plugins, where=f"callbacks.{name}")
        check = getattr(target, "check_resolved", None)
        if inspect.ismethod(check):  # a classmethod
            check(resolved)


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
    schedule = config.schedule

    def configure_optimizers() -> Any:
        optimizer = build_optimizer(task, target=target, **resolved.optimizer)  # type: ignore[arg-type]
        scheduler = build_scheduler(
            optimizer,
            kind=schedule.kind,
            total_steps=steps.scheduled,
            warmup_steps=steps.warmup,
            min_ratio=schedule.min_ratio,
            decay_fraction=schedule.decay_fraction,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    return configure_optimizers


def notes_on(task: nn.Module, config: Config) -> list[str]:
    """What a person should know before the numbers come."""
    notes = []
    scaling = config.lr_scaling
    if scaling.rule == "none" and scaling.base_batch_size is not None:
        notes.append(
            f"lr_scaling.base_batch_size={scaling.base_batch_size} has no effect with lr_scaling=none "
            f"(rules: linear, sqrt, adam_sde, legw)"
        )
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
