"""What the framework owns in the configuration: one typed dataclass a group, each field with its unit and its default.

YAML files hold differences from these defaults. What a user plugs in (``model``, ``data``, ``task``, ``optimizer``,
``callbacks``, ``logger``) is a free mapping with a ``_target_``; its arguments are checked against the signature of the
target instead. Nothing here imports torch, so that a mistake is answered at once.
"""

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from shardwise.errors import ConfigError

PLUGGED_IN = ("model", "data", "task", "optimizer", "callbacks", "logger")
"""Slots whose content is the user's; everything else is checked against the dataclasses below."""

STRATEGIES = ("ddp", "fsdp", "hsdp")

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")

OWNED_ELSEWHERE = {
    "strategy": "strategy=ddp|fsdp|hsdp",
    "precision": "precision=bf16-mixed",
    "plugins": "plugins=[mypackage] (packages that a configuration may name) and launch= (the cluster environment)",
    "logger": "logger=wandb|tensorboard|csv|none",
    "callbacks": "callbacks.<name>._target_=...",
    "accumulate_grad_batches": "batch.accumulate or batch.micro_size",
    "use_distributed_sampler": "the stream of samples (always sharded over the data-parallel ranks)",
    "sync_batchnorm": "model.norm=group (statistics over a micro-batch are outside what can be kept equal)",
    "devices_per_node": "trainer.devices",
}
"""Arguments of Lightning's Trainer that have an owner here: name -> what to type instead."""


def choices(*allowed: str) -> dict[str, tuple[str, ...]]:
    """Field metadata that limits a string to ``allowed``."""
    return {"choices": allowed}


@dataclass
class TrainerConfig:
    """Lightning's Trainer, by its own names. Every count of steps or batches means optimizer steps."""

    accelerator: str = field(default="auto", metadata=choices("auto", "cpu", "gpu", "cuda"))
    """Where to train; ``auto`` takes the GPUs where there are any, else the CPU."""
    devices: int | str = "auto"
    """Processes (one a device) on each node; ``auto``: all GPUs, or on a CPU the fewest that the strategy needs."""
    num_nodes: int = 1
    """Machines."""
    max_epochs: int | None = None
    """Passes over the training samples; turned into ceil(max_epochs * samples / batch.global_size) optimizer steps."""
    min_epochs: int | None = None
    """Passes that early stopping has to wait for."""
    max_steps: int = -1
    """Optimizer steps; -1 leaves it to max_epochs."""
    min_steps: int | None = None
    """Optimizer steps that early stopping has to wait for."""
    max_time: str | None = None
    """Wall-clock limit as DD:HH:MM:SS."""
    fast_dev_run: bool | int = False
    """Run only this many batches of each kind, with loggers off."""
    limit_train_batches: int | None = None
    """Optimizer steps in an epoch at most."""
    limit_val_batches: int | float | None = None
    """Validation batches at most: a number, or a fraction below 1.0."""
    limit_test_batches: int | float | None = None
    """Test batches at most: a number, or a fraction below 1.0."""
    limit_predict_batches: int | float | None = None
    """Prediction batches at most: a number, or a fraction below 1.0."""
    overfit_batches: int = 0
    """Not with the endless stream of samples; use limit_train_batches and a small data set instead."""
    val_check_interval: int | float | None = None
    """Optimizer steps between validations, or a fraction (at most 1.0) of an epoch."""
    check_val_every_n_epoch: int | None = 1
    """Epochs between validations; null counts val_check_interval across epochs."""
    num_sanity_val_steps: int = 0
    """Validation batches to try before training."""
    log_every_n_steps: int = 10
    """Optimizer steps between two lines of metrics."""
    enable_checkpointing: bool = False
    """Lightning's own ModelCheckpoint."""
    enable_progress_bar: bool = True
    """Progress on rank 0: a bar on a terminal, plain lines elsewhere."""
    enable_model_summary: bool = False
    """Lightning's table of layers."""
    gradient_clip_val: float | None = None
    """Limit of the gradients' norm (or of each value), over all ranks."""
    gradient_clip_algorithm: str = field(default="norm", metadata=choices("norm", "value"))
    """What gradient_clip_val limits."""
    deterministic: bool | str | None = None
    """true, false or warn: PyTorch's deterministic algorithms."""
    benchmark: bool | None = None
    """cuDNN's autotuner."""
    inference_mode: bool = True
    """Evaluate under torch.inference_mode; sharded parameters use no_grad instead."""
    profiler: str | None = field(default=None, metadata=choices("simple", "advanced", "pytorch"))
    """One of Lightning's profilers."""
    detect_anomaly: bool = False
    """Autograd's anomaly detection (slow)."""
    barebones: bool = False
    """Everything optional off, to measure the loop."""
    reload_dataloaders_every_n_epochs: int = 0
    """Ask the data module for new loaders this often."""
    default_root_dir: str | None = None
    """Not used: a run's folder is output_root/<experiment>/<run id>."""
    enable_autolog_hparams: bool = True
    """Lightning's own logging of hyperparameters; the resolved configuration is logged either way."""
    model_registry: str | None = None
    """Name of a model in Lightning's registry."""


@dataclass
class LaunchConfig:
    """How processes come to be."""

    kind: str = field(default="auto", metadata=choices("auto", "local", "torchrun"))
    """auto decides and says why; local starts the processes of this machine; torchrun expects ranks that exist."""
    start_timeout: int = 600
    """Seconds until every rank has met the others and made the first step."""
    collective_timeout: int = 120
    """Seconds a collective may take in training."""


@dataclass
class StrategyConfig:
    """Degrees of parallelism; at most one is -1 (the remaining ranks), their product is the number of ranks."""

    name: str = field(default="ddp", metadata=choices(*STRATEGIES))
    """The choice of the group: what the degrees have to come out as."""
    dp_replicate: int | str = 1
    """Replicas whose gradients are all-reduced; ``nodes`` means one replica a node."""
    dp_shard: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass, and gather them again in the backward pass."""
    defer_gradient_sync: bool = True
    """Reduce gradients once a step, after the last micro-batch; false trades traffic for memory (fsdp, hsdp)."""
    find_unused_parameters: bool = False
    """DistributedDataParallel's search for parameters without a gradient."""


@dataclass
class PrecisionConfig:
    """Number formats."""

    kind: str = field(default="32-true", metadata=choices(*PRECISIONS))
    """Lightning's names: ``true`` holds and computes in the format, ``mixed`` holds float32 and computes in it."""


@dataclass
class BatchConfig:
    """Sizes in samples: global_size = micro_size x data-parallel size x accumulate."""

    global_size: int = 64
    """Samples of one optimizer step, over all ranks. The knob."""
    micro_size: int | None = None
    """Samples of one forward pass on one rank; derived if not given."""
    accumulate: int | None = None
    """Micro-batches of one optimizer step on one rank; derived if not given."""
    eval_size: int | None = None
    """Samples of one evaluation batch on one rank; the training share of a rank if not given."""


@dataclass
class ScheduleConfig:
    """The learning rate over optimizer steps, as a factor of the effective rate."""

    kind: str = field(default="cosine", metadata=choices("cosine", "linear", "constant", "wsd"))
    """Shape after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    min_ratio: float = 0.0
    """Factor at the end."""
    decay_fraction: float = 0.2
    """Share of all steps in which wsd (warmup-stable-decay) goes down."""


@dataclass
class LRScalingConfig:
    """How the base rate of the optimizer follows the global batch."""

    rule: str = field(default="none", metadata=choices("none", "linear", "sqrt"))
    """none, linear (Goyal et al. 2017) or sqrt (Krizhevsky 2014)."""
    base_batch_size: int | None = None
    """Global batch, in samples, for which optimizer.lr was found."""


@dataclass
class SweepConfig:
    """How the jobs of ``-m`` are run."""

    on_failure: str = field(default="stop", metadata=choices("stop", "continue"))
    """What a failing job does to those after it."""


@dataclass
class Config:
    """The whole configuration. ``extra`` is the one place for keys that nobody checks."""

    experiment_name: str | None = None
    """Folder that holds the runs of one experiment; the choice of the experiment group, or of data, if not given."""
    seed: int = 0
    """Initial weights, order of samples, augmentation and noise."""
    output_root: str = "outputs"
    """Where run folders go; relative to where the command is typed."""
    plugins: list[str] = field(default_factory=list)
    """Packages of yours that the configuration may name as a _target_."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_scaling: LRScalingConfig = field(default_factory=LRScalingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    logger: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)


def nearest(name: str, names: Iterable[str]) -> str:
    """``, did you mean 'x'?`` for the name most like ``name``, or an empty string."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown_key(path: str, names: Iterable[str]) -> ConfigError:
    """The error for the key at ``path`` (dotted) that is none of ``names``."""
    parent, _, key = path.rpartition(".")
    names = list(names)
    if parent == "trainer" and key in OWNED_ELSEWHERE:
        return ConfigError(f"{path} is not set here: use {OWNED_ELSEWHERE[key]}")
    where = f"{parent} has" if parent else "the configuration has"
    return ConfigError(f"{path}: no such key" + (nearest(key, names) or f" ({where}: {', '.join(names)})"))


def from_plain(plain: Mapping[str, Any]) -> Config:
    """A :class:`Config` from plain containers, every key, type and choice checked.

    Raises:
        ConfigError: names the first wrong key or value, what is allowed, and the nearest valid name.
    """
    return _build(Config, plain, "")


def to_plain(config: Config) -> dict[str, Any]:
    """Plain containers, as they are written to ``config.yaml``."""
    return asdict(config)


def _build(kind: type, plain: Any, path: str) -> Any:
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{path}={plain!r}: a mapping is needed here, such as {path}.{fields(kind)[0].name}=...")
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}
    values = {}
    for key, value in plain.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise unknown_key(where, known)
        hint = hints[key]
        values[key] = _build(hint, value, where) if is_dataclass(hint) else _check(known[key], hint, value, where)
    return kind(**values)


def _check(known: Field, hint: Any, value: Any, path: str) -> Any:
    allowed = known.metadata.get("choices")
    union = get_origin(hint) in (Union, types.UnionType)
    optional = union and type(None) in get_args(hint)
    if value is None and optional:
        return None
    if value == "???":
        raise ConfigError(f"{path} is missing: give it a value, such as {path}=...")
    if allowed and value not in allowed:
        shown = "|".join(allowed)
        raise ConfigError(f"{path}={value!r}: no such choice{nearest(str(value), allowed)} ({path}={shown})")
    if get_origin(hint) is list and isinstance(value, (list, tuple)):
        return list(value)
    kinds = tuple(get_origin(arg) or arg for arg in (get_args(hint) if union else (hint,)))
    if bool not in kinds and isinstance(value, bool):
        raise ConfigError(f"{path}={value}: {_names(kinds)} is needed")
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return value if int in kinds else float(value)
    if not isinstance(value, kinds):
        raise ConfigError(f"{path}={value!r}: {_names(kinds)} is needed")
    return dict(value) if isinstance(value, Mapping) else value


def kinds_in_words(kinds: Iterable[str]) -> str:
    """Names of types as a person would say them: ``a whole number or a text``."""
    words = {"int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false"}
    words |= {"dict": "a mapping", "list": "a list"}
    return " or ".join(words[kind] for kind in kinds if kind in words)


def _names(kinds: tuple[type, ...]) -> str:
    return kinds_in_words(kind.__name__ for kind in kinds)
