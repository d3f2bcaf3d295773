"""What a run is at the end of a step: its tensors, and everything else in plain values; and putting it back.

Tensors are kept under the names of the plain model, as pieces of wholes, so that any layout can read them. What belongs
to a rank (its random state, metrics that are being added up) is kept under the rank's number.
"""

import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning import Trainer
from pytorch_lightning.trainer import call
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric

from shardwise.checkpoint.plain import from_plain, to_plain
from shardwise.checkpoint.reader import read_state
from shardwise.checkpoint.tensors import read_tensors, stored_tensors
from shardwise.data.order import step_after
from shardwise.errors import ConfigError
from shardwise.parallel.fsdp import reshard
from shardwise.parallel.pieces import Pieces, pieces_of
from shardwise.parallel.state import tied_names

PREFIX = "model."
"""Of every name in a LightningModule that is a wrapper around one plain model."""

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Key -> shape and format of what a checkpoint holds."""


# ---- the model -----------------------------------------------------------------------------------------------------


def plain_names(module: nn.Module) -> dict[str, Tensor]:
    """Name in the plain model -> parameter or persistent buffer; what is tied comes once, under its first name.

    The plain model of a task is its ``model``; a LightningModule that holds tensors elsewhere too is one itself.
    """
    reshard(module)
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    persistent = module.state_dict().keys()
    tensors |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    return tensors


def plain_ties(module: nn.Module) -> list[list[str]]:
    """The names, in the plain model, of each parameter that has several; the first is the one it is stored under."""
    ties, stored = tied_names(module), plain_names(module)
    if all(first in stored for first, *_ in ties):
        return ties
    return [[name.removeprefix(PREFIX) for name in names] for names in ties]


def model_pieces(module: nn.Module) -> dict[str, Pieces]:
    """Key in a checkpoint -> what this rank holds of the model."""
    return {f"model/{name}": pieces_of(tensor) for name, tensor in plain_names(module).items()}


def load_model(module: nn.Module, url: str, *, strict: bool = True) -> None:
    """Read the model of a checkpoint into the parts that this rank holds.

    Raises:
        ConfigError: the checkpoint is of another model; says what is missing, what is new, and what has another shape.
    """
    pieces, stored = model_pieces(module), stored_tensors(url)
    present = {key: shape for key, (shape, _) in stored.items() if key.startswith("model/")}
    check_same_model({key: tuple(p.shape) for key, p in pieces.items()}, present, where=url, strict=strict)
    read_tensors({key: value for key, value in pieces.items() if key in present}, url)


def check_same_model(
    wanted: Mapping[str, tuple[int, ...]], present: Mapping[str, tuple[int, ...]], *, where: str, strict: bool = True
) -> None:
    """Compare names and shapes of a model with those that are to be loaded into it.

    Raises:
        ConfigError: in one line, what is missing there, what is new there, and what has another shape.
    """
    said = []
    if strict:
        said += [_listed("it lacks", [name for name in wanted if name not in present])]
        said += [_listed("it has besides", [name for name in present if name not in wanted])]
    other = [
        f"{n} ({_shape(present[n])}, here {_shape(wanted[n])})"
        for n in wanted
        if present.get(n, wanted[n]) != wanted[n]
    ]
    said += [_listed("of another shape are", other)]
    if any(said):
        raise ConfigError(f"{where} is of another model: {'; '.join(filter(None, said))}")


def _listed(head: str, names: list[str]) -> str:
    names = [name.removeprefix("model/") for name in names]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{head} {', '.join(names[:4])}{more}" if names else ""


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def check_resumable(module: nn.Module, url: str, *, optimizer: str | None, global_size: int) -> None:
    """Whether a run can go on from a checkpoint; reads only.

    Args:
        module: not laid out yet; on any device.
        url: of the checkpoint.
        optimizer: kind of the optimizer that is to go on; None if only the module knows.
        global_size: samples of a step.

    Raises:
        ConfigError: another model, another optimizer, or a position in the data that is no step's border.
    """
    state, stored = read_state(url), stored_tensors(url)
    check_same_model(
        {f"model/{name}": tuple(tensor.shape) for name, tensor in plain_names(module).items()},
        {key: shape for key, (shape, _) in stored.items() if key.startswith("model/")},
        where=url,
        strict=getattr(module, "strict_loading", True),
    )
    if state.get("samples_seen") is not None:
        step_after(state["samples_seen"], global_size=global_size)
    if optimizer is not None:
        for saved in state["trainer"]["optimizers"]:
            check_optimizer(saved, optimizer, where=url)


# ---- the optimizer -------------------------------------------------------------------------------------------------


def optimizer_names(module: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Parameter -> its name in the plain model, for those that ``optimizer`` updates."""
    names = {id(tensor): name for name, tensor in plain_names(module).items()}
    return {p: names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}


def optimizer_pieces(module: nn.Module, optimizer: Optimizer, index: int) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """The tensors of an optimizer's state by key, and in plain values its groups and what of its state is no tensor."""
    pieces: dict[str, Pieces] = {}
    values: dict[str, dict[str, Any]] = {}
    names = optimizer_names(module, optimizer)
    for parameter, name in names.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                pieces[f"optimizer/{index}/{name}/{key}"] = pieces_of(value)
            else:
                values.setdefault(name, {})[key] = value
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [names[p] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return pieces, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def load_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    index: int,
    *,
    url: str,
    saved: Mapping[str, Any],
    now: list[dict[str, Any]],
) -> None:
    """Read an optimizer's state, and take over the values of its groups.

    Args:
        module: holds the parameters.
        optimizer: to fill.
        index: which of the run's optimizers it is.
        url: of the checkpoint.
        saved: what ``optimizer_pieces`` gave, with ``constructed``: the values of the groups when it was made.
        now: the values of the groups when ``optimizer`` was made. Those that differ were changed by the user since, and
            stay as they are.

    Raises:
        ConfigError: it is over other parameters.
    """
    check_optimizer(saved, type(optimizer).__name__, where=url)
    names = optimizer_names(module, optimizer)
    stored, pieces = stored_tensors(url), {}
    for parameter, name in names.items():
        state = dict(saved["values"].get(name, {}))
        prefix = f"optimizer/{index}/{name}/"
        for key in [key for key in stored if key.startswith(prefix) and "/" not in key[len(prefix) :]]:
            state[key.removeprefix(prefix)] = tensor = _state_tensor(parameter, *stored[key])
            pieces[key] = pieces_of(tensor)
        if state:
            optimizer.state[parameter] = state
    then = sorted(name for group in saved["groups"] for name in group["params"])
    if then != sorted(names.values()):
        raise ConfigError(f"{url} has an optimizer over other parameters: {len(then)} there, {len(names)} here")
    read_tensors(pieces, url)
    for group, theirs, made_then, made_now in zip(
        optimizer.param_groups, saved["groups"], saved["constructed"], now, strict=True
    ):
        group.update({k: v for k, v in theirs.items() if k != "params" and made_then.get(k) == made_now.get(k)})


def _state_tensor(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for a piece of an optimizer's state: placed as the parameter if it has its shape."""
    if dtype.is_floating_point and tuple(parameter.shape) == shape:
        dtype = parameter.dtype  # the run may go on in another precision
    if tuple(parameter.shape) != shape or not shape:
        # A count of steps stays on the CPU, where torch keeps it.
        return torch.zeros(shape, dtype=dtype, device=parameter.device if shape else "cpu")
    if isinstance(parameter, DTensor):
        return DTensor(torch.zeros_like(parameter.to_local(), dtype=dtype), parameter._spec, requires_grad=False)
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def check_optimizer(saved: Mapping[str, Any], kind: str, *, where: str) -> None:
    """Refuse to let one optimizer go on from the state of another.

    Raises:
        ConfigError: they are of different kinds.
    """
    if saved["kind"] != kind:
        raise ConfigError(
            f"{where} holds the state of {saved['kind']}, with which {kind} cannot go on: leave optimizer= out, or "
            f"start a new run from its weights, without resume= and with init_from={where}"
        )


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The values of an optimizer's groups, without the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def follow_schedule(scheduler: Any, *, optimizer: Optimizer) -> None:
    """Let a schedule that is a function of the step (ours is) set the rates of the step that it has come to.

    They are what they were unless the base rate or the schedule was changed since.
    """
    if type(scheduler) is not LambdaLR:
        return
    scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
    for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = base * factor(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


# ---- what belongs to a rank ----------------------------------------------------------------------------------------


def random_state() -> dict[str, Tensor]:
    """The state of every generator that training draws from, as tensors."""
    numpy: Any = np.random.get_state()
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([numpy[2], numpy[3], numpy[4], *numpy[1].tolist()], dtype=torch.float64),
        "python": torch.tensor([version, gauss is not None, gauss or 0.0, *words], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    """Put back what ``random_state`` gave."""
    torch.set_rng_state(states["torch"])
    position, has_gauss, cached, *words = states["numpy"].tolist()
    key = np.array(words, dtype=np.float64).astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), cached))
    version, has, gauss, *rest = states["python"].tolist()
    random.setstate((int(version), tuple(map(int, rest)), gauss if has else None))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _metrics(trainer: Trainer) -> Iterator[tuple[str, Metric]]:
    """Metrics that are being added up: the module's own, and what Lightning keeps of logged values in an epoch."""
    module: Any = trainer.lightning_module
    logged: Any = trainer.fit_loop.epoch_loop._results
    # Between two epochs Lightning still holds what it has logged at the end of the one, and resets it in the next.
    over = {id(entry.value) for entry in logged.values() if not entry.is_tensor} if _between_epochs(trainer) else set()
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric._update_count and id(metric) not in over:
            yield f"module/{name}", metric
    for name, entry in logged.items():
        if entry.is_tensor and entry.meta.on_epoch and entry._update_count and not _between_epochs(trainer):
            yield f"logged/{name}", entry


def _between_epochs(trainer: Trainer) -> bool:
    progress = trainer.fit_loop.epoch_progress.current
    return progress.completed == progress.ready


def metric_states(trainer: Trainer) -> dict[str, Tensor]:
    """What this rank has added up so far in metrics, as tensors by path."""
    states = {}
    for path, metric in _metrics(trainer):
        states[f"{path}/$updates"] = torch.tensor(metric._update_count)
        for name in metric._defaults:
            value = getattr(metric, name)
            if isinstance(value, Tensor):
                states[f"{path}/{name}"] = value.detach()
            elif isinstance(value, list):
                states |= {f"{path}/{name}/{i}": item.detach() for i, item in enumerate(value)}
    return states


def load_metric_states(trainer: Trainer, states: Mapping[str, Tensor]) -> None:
    """Put back what ``metric_states`` gave; a value that the module has yet to log waits until it does."""
    module, waiting = trainer.lightning_module, {}
    for path in [key.removesuffix("/$updates") for key in states if key.endswith("/$updates")]:
        own = {key[len(path) + 1 :]: value for key, value in states.items() if key.startswith(f"{path}/")}
        kind, _, name = path.partition("/")
        if kind == "logged":
            waiting[name] = own
        else:
            _load_metric(module.get_submodule(name), own)
    if not waiting:
        return
    results: Any = trainer.fit_loop.epoch_loop._results
    update = results.update_metrics

    def load_and_update(key: str, *args: Any) -> None:
        if key in waiting:
            _load_metric(results[key], waiting.pop(key))
        update(key, *args)

    results.update_metrics = load_and_update


def _load_metric(metric: Any, states: Mapping[str, Tensor]) -> None:
    metric._update_count = int(states["$updates"])
    metric._computed = None
    for name in metric._defaults:
        if name in states:
            setattr(metric, name, states[name].to(metric.device))
        elif isinstance(getattr(metric, name), list):
            count = sum(key.startswith(f"{name}/") for key in states)
            setattr(metric, name, [states[f"{name}/{i}"].to(metric.device) for i in range(count)])


# ---- the whole run -------------------------------------------------------------------------------------------------


def capture(trainer: Trainer, *, constructed: list[list[dict[str, Any]]]) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """The state of a run: what this rank holds of its tensors, and the rest in plain values (the first rank's count).

    Args:
        trainer: between two steps, with everything that belongs to the last one done.
        constructed: ``group_values`` of each optimizer when it was made.

    Raises:
        ConfigError: a module, data module or callback keeps something that is neither plain nor a tensor.
    """
    module, rank = trainer.lightning_module, trainer.global_rank
    pieces = model_pieces(module)
    plain: dict[str, Any] = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": pl.__version__,
        "loops": {"fit_loop": _loop_state(trainer)},
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
    }
    optimizers = []
    for index, optimizer in enumerate(trainer.optimizers):
        own, values = optimizer_pieces(module, getattr(optimizer, "_optimizer", optimizer), index)
        pieces |= own
        optimizers.append({**values, "constructed": constructed[index]})
    pieces |= {f"random/{rank}/{name}": pieces_of(own) for name, own in random_state().items()}
    pieces |= {f"metrics/{rank}/{name}": pieces_of(own) for name, own in metric_states(trainer).items()}
    # The hooks may say of themselves what they want to keep, in the dictionary that Lightning would save.
    hooks: dict[str, Any] = {"state_dict": {}, **plain, "callbacks": call._call_callbacks_state_dict(trainer)}
    plugin: Any = trainer.precision_plugin
    if state := plugin.state_dict():
        hooks[type(plugin).__qualname__] = state
    datamodule: Any = getattr(trainer, "datamodule", None)
    if datamodule is not None and (state := call._call_lightning_datamodule_hook(trainer, "state_dict")):
        hooks[type(datamodule).__qualname__] = state
    call._call_callbacks_on_save_checkpoint(trainer, hooks)
    call._call_lightning_module_hook(trainer, "on_save_checkpoint", hooks)
    hooks.pop("state_dict")
    extra: dict[str, Tensor] = {}
    state = {
        "lightning": to_plain(hooks, extra, at="extra"),
        "tied": plain_ties(module),
        "optimizers": to_plain(optimizers, extra, at="extra/optimizers"),
    }
    # What a hook keeps may differ between ranks: that of the first counts, as in Lightning.
    pieces |= {key: pieces_of(tensor) for key, tensor in extra.items() if rank == 0 or isinstance(tensor, DTensor)}
    return pieces, state


def _loop_state(trainer: Trainer) -> dict[str, Any]:
    """Lightning's counters; between two epochs, as they are when the next one begins."""
    state = trainer.fit_loop.state_dict()
    if _between_epochs(trainer):
        state["epoch_loop.batch_progress"]["is_last_batch"] = False
        state["epoch_loop.val_loop.batch_progress"]["total"] = dict.fromkeys(
            state["epoch_loop.val_loop.batch_progress"]["total"], 0
        )
        for name in ("batch_progress", "scheduler_progress"):
            current = state[f"epoch_loop.{name}"]["current"]
            state[f"epoch_loop.{name}"]["current"] = dict.fromkeys(current, 0)
        steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for kind in ("step", "zero_grad"):
            steps[kind]["current"] = dict.fromkeys(steps[kind]["current"], 0)
    return state


def lightning_checkpoint(state: Mapping[str, Any], url: str, stored: Stored) -> dict[str, Any]:
    """What Lightning takes for a loaded checkpoint: all but the model and the optimizers, which are read in parts.

    Args:
        state: the plain part, as ``capture`` gave it.
        url: of the checkpoint.
        stored: what it holds.

    Raises:
        ConfigError: ``state`` is damaged.
    """
    keys = [key for key in stored if key.startswith("extra/")]
    tensors = {key: torch.empty(stored[key][0], dtype=stored[key][1]) for key in keys}
    read_tensors({key: pieces_of(tensor) for key, tensor in tensors.items()}, url)
    try:
        checkpoint = from_plain(state["lightning"], tensors.__getitem__)
        optimizers = from_plain(state["optimizers"], tensors.__getitem__)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{url}/state.json is damaged: {error!r}") from error
    return {**checkpoint, "state_dict": {}, "optimizer_states": optimizers}


def rank_state(kind: str, rank: int, url: str, stored: Stored) -> dict[str, Tensor]:
    """What a checkpoint holds of one rank: its ``random`` or ``metrics`` states."""
    prefix = f"{kind}/{rank}/"
    keys = [key for key in stored if key.startswith(prefix)]
    tensors = {key: torch.empty(stored[key][0], dtype=stored[key][1]) for key in keys}
    read_tensors({key: pieces_of(tensor) for key, tensor in tensors.items()}, url)
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def continue_epoch(trainer: Trainer) -> None:
    """Let Lightning's epoch loop go on where the counters are, and nothing else.

    It tells from them what a checkpoint was saved in the middle of, and repeats validations and steps of the schedule
    by that; a checkpoint here is of a step that is done with all that belongs to it.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def reset_and_go_on() -> None:
        with warnings.catch_warnings():
            if hasattr(getattr(trainer, "datamodule", None), "samples_seen"):  # its stream goes on where it was
                warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epo")
            reset()
        loop.reset = reset
        trainer.fit_loop._restarting = False  # its property would make True of that
        loop.restarting = False  # and of all loops in it
        loop.reset_restart_stage()

    loop.reset = reset_and_go_on
