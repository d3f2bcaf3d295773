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

STRATEGIES: dict[str, tuple[str, ...]] = {
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "tp": ("tp",),
    "ddp+tp": ("dp_replicate", "tp"),
    "fsdp+tp": ("dp_shard", "tp"),
    "hybrid": ("dp_replicate", "dp_shard", "tp"),
}
"""Strategy -> the mesh axes that have to come out above 1, and no others. Its degrees stand in its YAML file."""

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "64-true")

OWNED_ELSEWHERE = {
    "strategy": f"strategy={'|'.join(STRATEGIES)}",
    "precision": f"precision={'|'.join(PRECISIONS)}",
    "plugins": "plugins=[mypackage] (packages that a configuration may name) and launch= (the cluster environment)",
    "logger": "logger=wandb|tensorboard|csv|none",
    "callbacks": "callbacks.<name>._target_=...",
    "accumulate_grad_batches": "batch.accumulate or batch.micro_size",
    "use_distributed_sampler": "the stream of samples (always sharded over the data-parallel ranks)",
    "sync_batchnorm": "model.norm=group (statistics over a micro-batch are outside what can be kept equal)",
}
"""Arguments of Lightning's Trainer that have an owner here: name -> what to type instead."""


def choices(*allowed: str) -> dict[str, Any]:
    """Field metadata that limits a string to ``allowed``."""
    return {"choices": allowed}


def limits(*words: str, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """Field metadata that limits a number to ``least`` ... ``most``, and a string in its place to ``words``."""
    return {"words": words, "least": least, "most": most}


def texts(*allowed: str) -> dict[str, Any]:
    """Field metadata for a text or a list of texts, each one of ``allowed`` if there are any.

    The field's type is Any, as a schema of Hydra's has no such union.
    """
    return {"texts": allowed}


@dataclass
class TrainerConfig:
    """Lightning's Trainer, by its own names. Every count of steps or batches means optimizer steps."""

    accelerator: str = field(default="auto", metadata=choices("auto", "cpu", "gpu", "cuda"))
    """Where to train; ``auto`` takes the GPUs where there are any, else the CPU."""
    devices: int | str = field(default="auto", metadata=limits("auto", least=1))
    """Processes (one a device) on each node; ``auto``: all GPUs, or on a CPU the fewest that the strategy needs."""
    num_nodes: int = field(default=1, metadata=limits(least=1))
    """Machines."""
    max_epochs: int | None = field(default=None, metadata=limits(least=1))
    """Passes over the samples, which become ceil(max_epochs * samples / batch.global_size) optimizer steps; 20 passes
    where neither this nor max_steps is given."""
    min_epochs: int | None = field(default=None, metadata=limits(least=1))
    """Passes that early stopping has to wait for."""
    max_steps: int = -1
    """Optimizer steps; -1 leaves it to max_epochs. Where both are given, the first to be reached ends the training."""
    min_steps: int | None = field(default=None, metadata=limits(least=1))
    """Optimizer steps that early stopping has to wait for."""
    max_time: str | None = None
    """Wall-clock limit as DD:HH:MM:SS."""
    fast_dev_run: bool | int = field(default=False, metadata=limits(least=0))
    """Run only this many batches of each kind (true: one), without loggers and tests, to see whether all goes."""
    limit_train_batches: int | float | None = field(default=None, metadata=limits(least=0))
    """Optimizer steps in an epoch at most: a number, or a fraction (at most 1.0) of it."""
    limit_val_batches: int | float | None = field(default=None, metadata=limits(least=0))
    """Validation batches at most: a number, or a fraction (at most 1.0) of them."""
    limit_test_batches: int | float | None = field(default=None, metadata=limits(least=0))
    """Test batches at most: a number, or a fraction (at most 1.0) of them."""
    limit_predict_batches: int | float | None = field(default=None, metadata=limits(least=0))
    """Prediction batches at most: a number, or a fraction (at most 1.0) of them."""
    overfit_batches: int = 0
    """Not with the endless stream of samples; use limit_train_batches and a small data set instead."""
    val_check_interval: int | float | None = field(default=None, metadata=limits(least=0))
    """Optimizer steps between validations, or a fraction (at most 1.0) of an epoch."""
    check_val_every_n_epoch: int | None = field(default=1, metadata=limits(least=1))
    """Epochs between validations; null counts val_check_interval across epochs."""
    num_sanity_val_steps: int = field(default=0, metadata=limits(least=-1))
    """Validation batches to try before training; -1 for all of them."""
    log_every_n_steps: int = field(default=10, metadata=limits(least=1))
    """Optimizer steps between two lines of metrics."""
    enable_checkpointing: bool = False
    """Lightning's own ModelCheckpoint."""
    enable_progress_bar: bool = True
    """Progress on rank 0: a bar on a terminal, plain lines elsewhere."""
    enable_model_summary: bool = False
    """Lightning's table of layers."""
    gradient_clip_val: float | None = field(default=None, metadata=limits(least=0))
    """Limit of the gradients' norm (or of each value), over all ranks."""
    gradient_clip_algorithm: str = field(default="norm", metadata=choices("norm", "value"))
    """What gradient_clip_val limits."""
    deterministic: bool | str | None = field(default=None, metadata=limits("warn"))
    """true, false or warn: PyTorch's deterministic algorithms."""
    benchmark: bool | None = None
    """cuDNN's autotuner."""
    inference_mode: bool = False
    """Not used: evaluation runs under torch.no_grad."""
    profiler: str | None = field(default=None, metadata=choices("simple", "advanced", "pytorch"))
    """One of Lightning's profilers."""
    detect_anomaly: bool = False
    """Autograd's anomaly detection (slow)."""
    barebones: bool = False
    """Everything optional off, to measure the loop."""
    reload_dataloaders_every_n_epochs: int = field(default=0, metadata=limits(least=0))
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
    start_timeout: int = field(default=600, metadata=limits(least=1))
    """Seconds until every rank has met the others and made the first step."""
    collective_timeout: int = field(default=120, metadata=limits(least=1))
    """Seconds a collective may take in training."""
    max_restarts: int = field(default=0, metadata=limits(least=0))
    """Times that all processes are started again after a crash, from the newest whole checkpoint."""
    time_limit: str | None = None
    """Wall-clock time as DD:HH:MM:SS after which the run saves a checkpoint and ends as preempted (exit status 75)."""


@dataclass
class CheckpointConfig:
    """When the state of a run is saved, where, and what is kept. A request to end (a signal) saves in any case."""

    every_n_steps: int | None = field(default=None, metadata=limits(least=1))
    """Optimizer steps between two checkpoints."""
    every_minutes: float | None = field(default=15.0, metadata=limits(least=0))
    """Minutes between two checkpoints, after the step in which they are over; null for none."""
    at_end: bool = True
    """Save after the last step."""
    background: bool = True
    """Let training go on while a copy of the state is written; false waits for it."""
    keep_last: int | None = field(default=2, metadata=limits(least=1))
    """Newest checkpoints that are kept; null keeps all."""
    keep_every_n_steps: int | None = field(default=None, metadata=limits(least=1))
    """Checkpoints of every n-th step are kept besides."""
    keep_best: int = field(default=0, metadata=limits(least=0))
    """Checkpoints with the best values of checkpoint.monitor that are kept besides."""
    monitor: str | None = None
    """Metric that says which is best, such as val/loss."""
    mode: str = field(default="min", metadata=choices("min", "max"))
    """Whether a small or a large value of checkpoint.monitor is good."""
    folder: str | None = None
    """Where checkpoints go, in a folder of the run's id: a path, s3://, gs://, memory://; null: into the run folder."""


@dataclass
class StrategyConfig:
    """Degrees of parallelism; at most one is -1 (the remaining ranks), their product is the number of ranks."""

    name: str = field(default="ddp", metadata=choices(*STRATEGIES))
    """The choice of the group: what the degrees have to come out as."""
    dp_replicate: int | str = field(default=1, metadata=limits("nodes"))
    """Replicas whose gradients are all-reduced; -1 takes the remaining ranks, ``nodes`` makes one replica a node."""
    dp_shard: int = 1
    """Ranks over which parameters, gradients and optimizer state are sharded; -1 takes the remaining ranks."""
    tp: int | str = field(default=1, metadata=limits("auto", "devices"))
    """Ranks that split each layer between them (tensor parallelism), all in one node; -1 takes the remaining ranks,
    ``devices`` all of a node, ``auto`` all of a node where there are several nodes, else 2."""
    sequence_parallel: bool | None = None
    """Split activations along the sequence between the split layers; null: where the model's plan allows."""
    plan: dict[str, Any] = field(default_factory=dict)
    """Module-name pattern -> style, such as ``"blocks.*.attn.q": colwise``; empty: the model's own plan."""
    activation_checkpointing: str = field(default="none", metadata=choices("none", "selective", "full"))
    """Compute a block's activations again in the backward pass instead of keeping them: all of them (full), or all but
    the results of matrix products and attention (selective)."""
    compile: bool = False
    """Compile each block with torch.compile."""
    async_tensor_parallel: bool = False
    """Hide the communication of split layers behind their products (GPUs, with compile and sequence parallelism)."""
    check_replicas_every_n_steps: int | None = field(default=None, metadata=limits(least=1))
    """Compare what should be equal on several ranks this often, and stop with the name of the first tensor that is
    not."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass, and gather them again later (dp_shard)."""
    defer_gradient_sync: bool = True
    """Reduce gradients once a step, after the last micro-batch; false trades traffic for memory."""
    find_unused_parameters: bool = False
    """DistributedDataParallel's search for parameters without a gradient (ddp; the others need none)."""


@dataclass
class PrecisionConfig:
    """Number formats."""

    kind: str = field(default="32-true", metadata=choices(*PRECISIONS))
    """Lightning's names: ``true`` holds and computes in the format, ``mixed`` holds float32 and computes in it."""


@dataclass
class BatchConfig:
    """Sizes in samples: global_size = micro_size x data-parallel size x accumulate."""

    global_size: int = field(default=64, metadata=limits(least=1))
    """Samples of one optimizer step, over all ranks. The knob."""
    micro_size: int | str | None = field(default=None, metadata=limits("auto", least=1))
    """Samples of one forward pass on one rank; derived if not given; auto: the largest that fits into memory, found by
    trying in processes of its own."""
    accumulate: int | None = field(default=None, metadata=limits(least=1))
    """Micro-batches of one optimizer step on one rank; derived if not given."""
    eval_size: int | None = field(default=None, metadata=limits(least=1))
    """Samples of one evaluation batch on one rank; a micro-batch if not given."""


@dataclass
class ScheduleConfig:
    """The learning rate over optimizer steps, as a factor of the effective rate."""

    kind: str = field(default="cosine", metadata=choices("cosine", "linear", "constant", "wsd"))
    """Shape after the warm-up."""
    warmup_steps: int = field(default=0, metadata=limits(least=0))
    """Optimizer steps of linear warm-up; under lr_scaling=legw steps are those of the base batch and stay."""
    warmup_samples: int | None = field(default=None, metadata=limits(least=0))
    """The same in samples, instead of warmup_steps."""
    warmup_epochs: float | None = field(default=None, metadata=limits(least=0))
    """The same in passes over the samples (0.5 is half of one), instead of warmup_steps."""
    min_ratio: float = field(default=0.0, metadata=limits(least=0, most=1))
    """Factor at the end."""
    decay_fraction: float = field(default=0.2, metadata=limits(least=0, most=1))
    """Share of all steps in which wsd (warmup-stable-decay) goes down."""


@dataclass
class LRScalingConfig:
    """How the base rate of the optimizer follows the global batch."""

    rule: str = field(default="none", metadata=choices("none", "linear", "sqrt", "adam_sde", "legw"))
    """none, linear (Goyal et al. 2017), sqrt (Krizhevsky 2014), adam_sde (Malladi et al. 2022: Adam's betas and eps
    too) or legw (You et al. 2019: sqrt, and a warm-up of as many steps as at the base batch: one in samples or
    epochs grows, schedule.warmup_steps are those of the base batch and stay)."""
    base_batch_size: int | None = field(default=None, metadata=limits(least=1))
    """Global batch, in samples, for which optimizer.lr was found."""
    corrections: bool = True
    """Change the weight decay too where the rule's source says how: sqrt multiplies it as it does the rate, for
    optimizers of which a step takes lr * weight_decay of a weight away (SGD, AdamW, Adafactor, Muon)."""


@dataclass
class MonitorConfig:
    """What is watched while a run trains, and what is done about it."""

    nonfinite: str = field(default="stop", metadata=choices("stop", "skip", "ignore"))
    """A loss or gradient that is not finite: stop ends the run with step, rank and first module; skip leaves that
    optimizer step out, says the same, and goes on; ignore goes on without a look."""
    straggler_factor: float | None = field(default=1.5, metadata=limits(least=1))
    """A rank that takes this many times the median rank's time over its own work is named; null names none."""
    straggler_steps: int = field(default=10, metadata=limits(least=1))
    """Optimizer steps that a rank has to be that slow before it is named."""


@dataclass
class ProfileConfig:
    """A window of steps that PyTorch's profiler looks at."""

    kind: str = field(default="none", metadata=choices("none", "step"))
    """step: write traces, a picture of a step, and on a GPU a snapshot of its memory to <run folder>/profile."""
    start: int = field(default=10, metadata=limits(least=1))
    """Optimizer steps of this process before the window, so that nothing in it is done for the first time."""
    steps: int = field(default=3, metadata=limits(least=1))
    """Optimizer steps in the window."""
    ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that are looked at."""


@dataclass
class SweepConfig:
    """How the jobs of ``-m`` are run."""

    name: str | None = None
    """Folder of the sweep, below output_root/sweeps: run again under the same name, it skips what is completed and goes
    on with what is not. A new folder each time if not given."""
    slots: int | str = field(default=1, metadata=limits("auto", least=1))
    """Jobs side by side, each with its share of the cores or GPUs; auto: as many as there are GPUs (or cores) for."""
    on_failure: str = field(default="stop", metadata=choices("stop", "continue", "retry"))
    """What a failing job does to those after it: stop leaves them out, continue runs them, retry tries the failed one
    again first, from its newest checkpoint where it has left one."""
    retries: int = field(default=1, metadata=limits(least=0))
    """Times that a failed job is tried again (on_failure=retry)."""
    allow_code_change: bool = False
    """Take results under the same sweep.name that another commit, or other uncommitted changes, have made."""
    search: str = field(default="grid", metadata=choices("grid", "tpe", "gp", "random", "nsga2"))
    """grid runs every combination; the others are Optuna's samplers, which try sweep.trials points of the space (key=
    choice(...), range(...), interval(...), tag(log, interval(...))): TPE, Gaussian processes, random, NSGA-II."""
    trials: int | None = field(default=None, metadata=limits(least=1))
    """Jobs of a search in all, those of an earlier start under the same sweep.name included."""
    metric: Any = field(default=None, metadata=texts())
    """What a search is after, and by what the best job is named at the end: a metric's last value, such as
    val/accuracy; a list of them for several objectives."""
    mode: Any = field(default=None, metadata=texts("min", "max"))
    """Whether a small or a large value is good (a list for a list); null: what the metric's name says, as of a loss or
    an accuracy."""
    prune: str = field(default="none", metadata=choices("none", "median", "halving"))
    """End jobs early by sweep.metric at the same step: median, once 4 jobs have ended, those that are worse than the
    median of the others; halving, at steps that are 4 times further apart each time, all but the best quarter."""
    storage: str | None = None
    """Where a search keeps its trials: a URL as Optuna takes it, such as sqlite:///search.db; null: a journal in the
    sweep's folder."""


@dataclass
class Config:
    """The whole configuration. ``extra`` is the one place for keys that nobody checks."""

    experiment_name: str | None = None
    """Folder that holds the runs of one experiment; the choice of the experiment group, of sweep or
    of data if not given."""
    seed: int = 0
    """Initial weights, order of samples, augmentation and noise."""
    output_root: str = "outputs"
    """Where run folders go; relative to where the command is typed."""
    plugins: list[str] = field(default_factory=list)
    """Packages of yours that the configuration may name as a _target_."""
    init_from: str | None = None
    """Weights to start from: a safetensors file, a folder of them, or a checkpoint."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    lr_scaling: LRScalingConfig = field(default_factory=LRScalingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
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
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def unknown_key(path: str, names: Iterable[str]) -> ConfigError:
    """The error for the key at ``path`` (dotted) that is none of ``names``."""
    parent, _, key = path.rpartition(".")
    names = list(names)
    if parent == "trainer" and key in OWNED_ELSEWHERE:
        return ConfigError(f"{path} is not set here: use {OWNED_ELSEWHERE[key]}")
    where = f"{parent} has {', '.join(names)}" if parent else f"there are {', '.join(names)}; any key fits under extra"
    return ConfigError(f"{path}: no such key{nearest(key, names) or f' ({where})'}")


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
        if isinstance(hint, type) and is_dataclass(hint):
            values[key] = _build(hint, value, where)
        else:
            values[key] = _check(known[key], hint, value, where)
    return kind(**values)


def _check(known: Field, hint: Any, value: Any, path: str) -> Any:
    kinds = _kinds(hint)
    if value is None and (type(None) in kinds or hint is Any):
        return None
    if missing := _missing(value, path):
        raise ConfigError(f"{missing} is missing: give it a value, such as {missing}=...")
    if "texts" in known.metadata:
        return _check_texts(known, value, path)
    if isinstance(value, str) and known.metadata.get("choices"):
        if value not in known.metadata["choices"]:
            raise wrong_choice(path, value, known.metadata["choices"])
        return value
    if isinstance(value, str) and known.metadata.get("words"):
        if value not in known.metadata["words"]:
            raise wrong_value(path, value, known)
        return value
    if list in kinds and isinstance(value, (list, tuple)):
        return list(value)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        value = value if int in kinds else float(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise wrong_value(path, value, known)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _check_range(known, value, path)
    return dict(value) if isinstance(value, Mapping) else value


def _check_texts(known: Field, value: Any, path: str) -> str | list[str]:
    several = isinstance(value, (list, tuple))
    for one in value if several else [value]:
        if not isinstance(one, str):
            raise wrong_value(path, value, known)
        if known.metadata["texts"] and one not in known.metadata["texts"]:
            raise wrong_choice(path, one, known.metadata["texts"])
    return list(value) if several else value


def _kinds(hint: Any) -> tuple[type, ...]:
    """The classes that a type hint allows."""
    union = get_origin(hint) in (Union, types.UnionType)
    return tuple(get_origin(part) or part for part in (get_args(hint) if union else (hint,)))


def _check_range(known: Field, value: float, path: str) -> None:
    least, most = known.metadata.get("least"), known.metadata.get("most")
    if value != value or (least is not None and value < least) or (most is not None and value > most):
        if most is not None:
            raise ConfigError(f"{path}={value}: a number from {least} to {most} is needed")
        words = "".join(f", or {word}" for word in known.metadata["words"])
        raise ConfigError(f"{path}={value}: at least {least} is needed{words}")


def _missing(value: Any, path: str) -> str:
    """The dotted name of the first value below ``path`` that YAML declares mandatory, or an empty string."""
    if isinstance(value, Mapping):
        return next(filter(None, (_missing(inner, f"{path}.{key}") for key, inner in value.items())), "")
    if isinstance(value, (list, tuple)):
        return next(filter(None, (_missing(inner, f"{path}[{at}]") for at, inner in enumerate(value))), "")
    return path if value == "???" else ""


def wrong_choice(path: str, value: Any, allowed: Iterable[str]) -> ConfigError:
    """The error for a value that is none of those that the key (or group) takes."""
    allowed = list(allowed)
    return ConfigError(f"{path}={value}: no such choice{nearest(str(value), allowed)} ({path}={'|'.join(allowed)})")


def wrong_value(path: str, value: Any, known: Field) -> ConfigError:
    """The error for a value of a type that the field does not take."""
    shown = value if isinstance(value, str) else repr(value)
    return ConfigError(f"{path}={shown}: {needed(known)} is needed")


def needed(known: Field) -> str:
    """What a field takes, as a person would say it: ``a whole number or auto``."""
    if known.metadata.get("choices"):
        return "|".join(known.metadata["choices"])
    if "texts" in known.metadata:
        return f"{'|'.join(known.metadata['texts']) or 'a text'}, or a list such as {known.name}=[a,b],"
    kinds = _kinds(known.type)
    said: dict[type, list[str]] = {float: ["a number"], int: ["a whole number"], bool: ["true", "false"]}
    said |= {str: list(known.metadata.get("words") or ["a text"]), dict: ["a mapping"]}
    said |= {list: [f"a list, such as {known.name}=[{'0,1' if int in get_args(known.type) else 'mypackage'}],"]}
    shown = [text for kind, texts in said.items() if kind in kinds for text in texts]
    if int in kinds and float in kinds:
        shown.remove("a whole number")
    return " or ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
