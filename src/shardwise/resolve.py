"""From the composed configuration and the world to what a run does: the rules that cross the groups, in one place.

Pure functions of numbers and names; torch is not imported. What comes out is printed, saved and sent to the tracker.
"""

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise import schedules
from shardwise.config import STRATEGIES, Config
from shardwise.errors import ConfigError
from shardwise.lr_scaling import Scaled, scale
from shardwise.parallel.dims import AXES, ParallelDims

NOT_BAREBONES = (
    *("fast_dev_run", "enable_checkpointing", "enable_model_summary"),
    *("num_sanity_val_steps", "detect_anomaly", "profiler"),
)
"""Keys of the trainer that Lightning refuses beside ``barebones``."""


@dataclass(frozen=True)
class World:
    """Where a run happens: ``num_nodes`` x ``devices`` processes, one process a device."""

    num_nodes: int
    devices: int
    accelerator: str
    """``cpu`` or ``gpu``."""
    launch: str
    """``in-process``, ``local`` or ``torchrun``."""
    reason: str
    """Why this launch, for the start-up table."""

    @property
    def size(self) -> int:
        """Processes over all nodes."""
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class Batch:
    """Samples: ``global_size = micro_size * dp_size * accumulate``."""

    global_size: int
    micro_size: int
    accumulate: int
    eval_size: int


@dataclass(frozen=True)
class Resolved:
    """A configuration with everything that can be derived before the data are seen."""

    config: Config
    world: World
    dims: ParallelDims
    batch: Batch
    base_lr: float
    lr: float
    """At the peak of the schedule."""
    optimizer: dict[str, Any]
    """Arguments of the optimizer as the rule has changed them, ``lr`` among them."""
    scaled: Scaled
    """What the rule has changed."""

    def derived(self) -> dict:
        """Plain values for the tracker and ``config.yaml``: what the rules made of the configuration."""
        return {
            "world_size": self.world.size,
            "num_nodes": self.world.num_nodes,
            "devices": self.world.devices,
            "accelerator": self.world.accelerator,
            "launch": self.world.launch,
            **self.dims.shape,
            "dp_size": self.dims.dp_size,
            **{f"batch_{key}": value for key, value in asdict(self.batch).items()},
            "base_lr": self.base_lr,
            "effective_lr": self.lr,
            **{f"effective_{name}": change.after for name, change in self.scaled.changes.items()},
        }


def is_launched_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is one of several that torchrun (or PyTorch's elastic agent) has started."""
    return "TORCHELASTIC_RUN_ID" in environ and "RANK" in environ and "WORLD_SIZE" in environ


def count_gpus() -> int:
    """CUDA devices that this process may use. torch is imported only where a driver is present."""
    if not os.path.exists("/proc/driver/nvidia") and not os.path.exists("/dev/nvidiactl"):
        return 0
    import torch

    return torch.cuda.device_count()


def resolve(config: Config, *, environ: Mapping[str, str] = os.environ, gpus: int | None = None) -> Resolved:
    """Find the world, then apply every rule that crosses groups; see :func:`find_world` and :func:`resolve_in`."""
    check_steps(config)  # before the devices are counted, for which torch may have to be imported
    check_checkpoints(config)
    return resolve_in(config, find_world(config, environ=environ, gpus=gpus))


def resolve_in(config: Config, world: World) -> Resolved:
    """Apply every rule that crosses groups.

    Raises:
        ConfigError: the first contradiction, with the value, the limit and what to type instead.
    """
    if config.precision.kind == "16-mixed" and world.accelerator == "cpu":
        raise ConfigError(
            "precision=16-mixed needs a GPU (float16 on a CPU is neither fast nor safe): type precision=bf16-mixed"
        )
    strategy = config.strategy
    if strategy.async_tensor_parallel and (world.accelerator == "cpu" or not strategy.compile):
        raise ConfigError(
            "strategy.async_tensor_parallel=true works on compiled blocks on GPUs: "
            f"{'type strategy.compile=true, or ' if world.accelerator != 'cpu' else ''}leave it out"
        )
    dims = find_dims(config, world)
    dims.check_precision(config.precision.kind)
    if config.batch.micro_size == "auto" and world.launch == "torchrun":
        raise ConfigError(
            "batch.micro_size=auto under torchrun, whose ranks would have to outlive what does not fit: type a number, "
            "or find it with python train.py"
        )
    batch = find_batch(config, dims.dp_size)
    if config.optimizer and "lr" not in config.optimizer:
        raise ConfigError("optimizer.lr is missing: give it a value, such as optimizer.lr=1e-3")
    base_lr = config.optimizer.get("lr", 0.0)
    if isinstance(base_lr, bool) or not isinstance(base_lr, (int, float)) or base_lr < 0:
        raise ConfigError(f"optimizer.lr={base_lr!r}: a number of at least 0 is needed, such as optimizer.lr=1e-3")
    scaled = _scale(config, float(base_lr), batch.global_size)
    optimizer = {key: value for key, value in config.optimizer.items() if key != "_target_"}
    optimizer |= {"lr": scaled.lr, **{name: change.after for name, change in scaled.changes.items()}}
    return Resolved(
        config, world, dims, batch, base_lr=float(base_lr), lr=scaled.lr, optimizer=optimizer, scaled=scaled
    )


def _scale(config: Config, base_lr: float, global_size: int) -> Scaled:
    scaling = config.lr_scaling
    scaled = scale(
        scaling.rule,
        optimizer={**config.optimizer, "lr": base_lr},
        base_batch_size=scaling.base_batch_size,
        global_size=global_size,
        corrections=scaling.corrections,
    )
    if scaled.warmup_batch_size is not None and typed_warmup(config) is None:
        raise ConfigError(
            f"lr_scaling={scaling.rule} scales the warm-up with the batch, and schedule.warmup_steps=0: type "
            f"schedule.warmup_epochs=<epochs at base batch {scaling.base_batch_size}>, or lr_scaling=sqrt"
        )
    return scaled


def typed_warmup(config: Config) -> str | None:
    """The field of the schedule that says how long the warm-up is; None if there is none."""
    names = ("warmup_steps", "warmup_samples", "warmup_epochs")
    return next((name for name in names if getattr(config.schedule, name)), None)


def find_world(config: Config, *, environ: Mapping[str, str] = os.environ, gpus: int | None = None) -> World:
    """How many processes, on what, and who starts them.

    Args:
        config: the composed configuration.
        environ: environment variables, for ranks that exist already.
        gpus: CUDA devices of this machine; counted if not given.

    Raises:
        ConfigError: the launch, the devices and the machine contradict each other.
    """
    trainer, launch = config.trainer, config.launch
    launched = is_launched_rank(environ)
    if launch.kind == "torchrun" and not launched:
        raise ConfigError(
            "launch=torchrun, but torchrun has not started this process: type torchrun --nproc-per-node=N train.py, "
            "or launch=local"
        )
    if launch.kind == "auto" and not launched and "RANK" in environ and environ.get("WORLD_SIZE", "1") != "1":
        # Somebody means this process to be one of several; alone it would train the same as each of the others.
        raise ConfigError(
            f"RANK={environ['RANK']} and WORLD_SIZE={environ['WORLD_SIZE']} are set, but not by torchrun: start the "
            f"ranks with torchrun, or unset them (launch=local ignores them)"
        )
    if launch.kind == "local" and launched:
        raise ConfigError(
            "launch=local, but torchrun has started this process already: leave launch=auto, or drop torchrun"
        )

    present = 0 if trainer.accelerator == "cpu" else (count_gpus() if gpus is None else gpus)
    if trainer.accelerator in ("gpu", "cuda") and not present:
        raise ConfigError(
            f"trainer.accelerator={trainer.accelerator}: no GPU is visible here: type trainer.accelerator=cpu"
        )
    accelerator = "gpu" if present else "cpu"

    if launched:
        if launch.max_restarts:
            raise ConfigError(
                f"launch.max_restarts={launch.max_restarts} under torchrun, which restarts by itself: leave it out, "
                f"and type resume=<run folder> after a crash"
            )
        size, devices = int(environ["WORLD_SIZE"]), int(environ["LOCAL_WORLD_SIZE"])
        if size % devices:
            raise ConfigError(
                f"torchrun started {size} ranks, {devices} of them on this node: every node needs the same "
                f"--nproc-per-node"
            )
        num_nodes = size // devices
        for name, typed, found, default in (
            ("devices", trainer.devices, devices, "auto"),
            ("num_nodes", trainer.num_nodes, num_nodes, 1),
        ):
            if typed not in (default, found):
                raise ConfigError(
                    f"trainer.{name}={typed}, but torchrun started {name}={found}: leave trainer.{name} out, "
                    f"or start torchrun with {typed}"
                )
        world = World(num_nodes, devices, accelerator, "torchrun", "torchrun has started the ranks")
    else:
        devices = trainer.devices if isinstance(trainer.devices, int) else (present or fewest_processes(config))
        if trainer.num_nodes > 1:
            raise ConfigError(
                f"trainer.num_nodes={trainer.num_nodes} from one machine: type on every machine "
                f"torchrun --nnodes={trainer.num_nodes} --nproc-per-node={devices} --rdzv-backend=c10d "
                f"--rdzv-endpoint=<first host>:29500 train.py ..."
            )
        if devices == 1 and launch.max_restarts:
            reason = f"launch.max_restarts={launch.max_restarts} starts another process after a crash"
            world = World(1, 1, accelerator, "local", reason)
        elif devices == 1:
            world = World(1, 1, accelerator, "in-process", "one process is enough")
        else:
            world = World(1, devices, accelerator, "local", f"{devices} processes on this machine")
    if accelerator == "gpu" and world.devices > present:
        raise ConfigError(
            f"trainer.devices={world.devices}: this machine has {present} GPU{'s' if present > 1 else ''}: "
            f"type trainer.devices={present}, or trainer.accelerator=cpu"
        )
    return world


def fewest_processes(config: Config) -> int:
    """Processes on each node that the strategy needs at least over all nodes, with the degrees that were typed."""
    degrees = _degrees(config, config.trainer.num_nodes, devices=None)
    promised = STRATEGIES[config.strategy.name] if config.strategy.name != "ddp" else ()
    needed = math.prod(max(degree, 2 if axis in promised else 1) for axis, degree in degrees.items())
    return math.ceil(needed / config.trainer.num_nodes)


def _degrees(config: Config, num_nodes: int, *, devices: int | None) -> dict[str, int]:
    """Mesh axis -> degree or -1, with ``devices`` of a node, or None where they follow from the degrees."""
    degrees = {axis: getattr(config.strategy, axis) for axis in AXES}
    if degrees["dp_replicate"] == "nodes":
        degrees["dp_replicate"] = num_nodes
    if degrees["tp"] == "devices" or (degrees["tp"] == "auto" and num_nodes > 1):
        degrees["tp"] = devices or 2
    elif degrees["tp"] == "auto":
        degrees["tp"] = 2
    return degrees


def find_dims(config: Config, world: World) -> ParallelDims:
    """The mesh, and whether it is what the strategy's name promises."""
    name, size = config.strategy.name, world.size
    _check_stays_in_a_node(config, world.num_nodes)
    degrees = _degrees(config, world.num_nodes, devices=world.devices)
    if size == 1 and "tp" in STRATEGIES[name]:
        few = fewest_processes(config)
        raise ConfigError(f"strategy={name} on 1 device splits nothing: type trainer.devices={few}, or strategy=ddp")
    dims = ParallelDims.fill(world_size=size, **degrees) if degrees["tp"] == -1 else None
    tp = degrees["tp"] if dims is None else dims.tp
    if tp > 1 and (tp > world.devices or world.devices % tp):
        least = 2 if world.num_nodes == 1 and len(STRATEGIES[name]) > 1 else 1  # ranks that are left for the other axes
        fits = [d for d in range(2, world.devices + 1) if world.devices % d == 0 and world.devices // d >= least]
        legal = "|".join(map(str, fits))
        raise ConfigError(
            f"strategy.tp={tp} does not divide the {world.devices} devices of a node, which it has to stay "
            f"in: type {f'strategy.tp={legal}, or ' if legal else ''}trainer.devices={least * max(tp, 2)}"
        )
    dims = ParallelDims.fill(world_size=size, **degrees)
    if size == 1 and name in ("ddp", "fsdp"):
        return dims
    above_one = tuple(axis for axis, degree in dims.shape.items() if degree > 1)
    means = next((other for other, axes in STRATEGIES.items() if axes == above_one), "ddp")
    if means == name:
        return dims
    raise ConfigError(
        f"strategy={name} on {size} rank{'s' if size > 1 else ''} comes out as {dims}: type "
        f"{_way_to(name, dims, world)}strategy={means}"
    )


def _check_stays_in_a_node(config: Config, num_nodes: int) -> None:
    if config.strategy.name == "tp" and num_nodes > 1:
        raise ConfigError(
            f"strategy=tp splits layers inside one node, and trainer.num_nodes={num_nodes}: type strategy=fsdp+tp"
        )


def _way_to(name: str, dims: ParallelDims, world: World) -> str:
    """What to type so that all axes of ``name`` come out above 1, with ``, or `` behind it; nothing if unclear."""
    axes = STRATEGIES[name]
    if any(degree > 1 for axis, degree in dims.shape.items() if axis not in axes):
        return ""  # an axis was typed that the name does not promise
    missing = [axis for axis in axes if dims.shape[axis] == 1]
    needed = math.prod(max(2, dims.tp if axis == "tp" else 2) for axis in axes)
    if not missing or world.num_nodes > 1:
        return ""
    typed = [] if world.size % needed == 0 else [f"trainer.devices={needed}"]
    if "dp_replicate" in missing and "dp_shard" in axes:  # a replica a node, unless it is typed
        typed.append("strategy.dp_replicate=2")
    return f"{' '.join(typed)}, or " if typed else ""


def check_steps(config: Config) -> None:
    """Refuse counts that make no sense, or that the endless stream of samples does not have."""
    trainer, schedule = config.trainer, config.schedule
    _check_stays_in_a_node(config, trainer.num_nodes)
    if schedule.warmup_epochs is not None and math.isinf(schedule.warmup_epochs):
        raise ConfigError("schedule.warmup_epochs=inf: a finite number of epochs is needed, such as 1.0")
    names = ("warmup_steps", "warmup_samples", "warmup_epochs")
    typed = [f"schedule.{name}={getattr(schedule, name)}" for name in names if getattr(schedule, name)]
    if len(typed) > 1:
        raise ConfigError(f"{' and '.join(typed)}: a warm-up has one length: set all but one of them to 0")
    if trainer.max_steps < -1 or trainer.max_steps == 0:
        raise ConfigError(
            f"trainer.max_steps={trainer.max_steps}: a positive number of optimizer steps, or -1 for no limit"
        )
    for name, limit in (("trainer.max_time", trainer.max_time), ("launch.time_limit", config.launch.time_limit)):
        if limit is not None and not re.fullmatch(r"\d+:\d\d:\d\d:\d\d", limit):
            raise ConfigError(f"{name}={limit}: DD:HH:MM:SS is needed, such as {name}=00:01:30:00")
    schedules.check(
        schedule.kind,
        total_steps=trainer.max_steps if trainer.max_steps > 0 else sys.maxsize,
        warmup_steps=schedule.warmup_steps,
        min_ratio=schedule.min_ratio,
        decay_fraction=schedule.decay_fraction,
    )
    for name in ("train", "val", "test", "predict"):
        limit = getattr(trainer, f"limit_{name}_batches")
        if isinstance(limit, float) and limit > 1:
            raise ConfigError(f"trainer.limit_{name}_batches={limit}: a whole number, or a fraction of at most 1.0")
    if trainer.limit_train_batches == 0:
        raise ConfigError("trainer.limit_train_batches=0: at least one step is needed")
    interval = trainer.val_check_interval
    if interval is not None and (interval == 0 or (isinstance(interval, float) and interval > 1)):
        raise ConfigError(
            f"trainer.val_check_interval={interval}: a positive number of steps, or a fraction of at most 1.0"
        )
    if trainer.check_val_every_n_epoch is None and not isinstance(interval, int):
        means = "is not given" if interval is None else "is a fraction of an epoch"
        raise ConfigError(
            f"trainer.val_check_interval={'null' if interval is None else interval} {means}, and "
            "trainer.check_val_every_n_epoch=null counts steps across epochs: type a whole number of steps"
        )
    if trainer.inference_mode:
        raise ConfigError(
            "trainer.inference_mode=true: evaluation runs under torch.no_grad, because what is made under "
            "torch.inference_mode (gathered parameters, metrics) is of no use in training afterwards: leave it out"
        )
    if trainer.overfit_batches:
        raise ConfigError(
            f"trainer.overfit_batches={trainer.overfit_batches}: samples come from one endless stream; "
            "use trainer.limit_train_batches, or a small data set"
        )
    if trainer.barebones:
        for name in NOT_BAREBONES:
            if getattr(trainer, name):
                raise ConfigError(
                    f"trainer.barebones=true leaves everything optional out, and so trainer.{name}: drop one of them"
                )
    if trainer.default_root_dir is not None:
        raise ConfigError(
            "trainer.default_root_dir: a run's folder is output_root/<experiment>/<run id>: output_root=..."
        )


def seconds_of(limit: str) -> float:
    """Seconds of a time as DD:HH:MM:SS."""
    days, hours, minutes, seconds = map(int, limit.split(":"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def check_checkpoints(config: Config) -> None:
    """Refuse to keep the best where nothing says which is best, and a metric that decides about nothing."""
    checkpoint = config.checkpoint
    if checkpoint.keep_best and checkpoint.monitor is None:
        raise ConfigError(
            f"checkpoint.keep_best={checkpoint.keep_best}, and no metric says which are best: type "
            f"checkpoint.monitor=val/loss, or another"
        )
    if checkpoint.monitor is not None and not checkpoint.keep_best:
        raise ConfigError(
            f"checkpoint.monitor={checkpoint.monitor}, and checkpoint.keep_best=0 keeps none for it: type "
            f"checkpoint.keep_best=1"
        )


def find_batch(config: Config, dp_size: int) -> Batch:
    """Micro-batch and accumulation for ``dp_size`` data-parallel ranks; those of the smallest micro-batch for ``auto``,
    until it is known which is the largest that fits."""
    sizes = config.batch
    total = sizes.global_size
    if total % dp_size:
        raise ConfigError(
            f"batch.global_size={total} does not divide over {dp_size} data-parallel ranks: "
            f"the nearest that do are {_nearest_multiples(total, dp_size)}"
        )
    share = total // dp_size
    micro, accumulate = sizes.micro_size, sizes.accumulate
    if isinstance(micro, str):
        if accumulate is not None:
            raise ConfigError(
                f"batch.accumulate={accumulate} beside batch.micro_size={micro}, which finds both: leave one of them "
                f"out, or type batch.micro_size={max(1, share // accumulate)}"
            )
        micro = 1
    if micro is not None and accumulate is not None:
        if micro * accumulate * dp_size != total:
            raise ConfigError(
                f"batch.micro_size={micro} x {dp_size} data-parallel ranks x batch.accumulate={accumulate} is "
                f"{micro * accumulate * dp_size}, not batch.global_size={total}: leave one of them out, or type "
                f"batch.global_size={micro * accumulate * dp_size}"
            )
    elif micro is not None:
        if share % micro:
            raise ConfigError(
                f"batch.micro_size={micro} x {dp_size} data-parallel ranks does not divide batch.global_size={total}: "
                f"the nearest global sizes that do are {_nearest_multiples(total, micro * dp_size)}"
            )
        accumulate = share // micro
    else:
        accumulate = 1 if accumulate is None else accumulate
        if share % accumulate:
            raise ConfigError(
                f"batch.accumulate={accumulate} x {dp_size} data-parallel ranks does not divide "
                f"batch.global_size={total}: the nearest global sizes that do are "
                f"{_nearest_multiples(total, accumulate * dp_size)}"
            )
        micro = share // accumulate
    return Batch(global_size=total, micro_size=micro, accumulate=accumulate, eval_size=sizes.eval_size or micro)


def _nearest_multiples(value: int, of: int) -> str:
    below, above = value // of * of, (value // of + 1) * of
    return f"{below} and {above}" if below else str(above)
