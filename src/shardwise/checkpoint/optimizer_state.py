"""An optimizer's state by the names of its parameters, in pieces; read into any layout."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.model_state import plain_names
from shardwise.checkpoint.tensors import read_tensors
from shardwise.errors import ConfigError
from shardwise.parallel.pieces import Pieces, pieces_of


def optimizer_names(named: Mapping[str, Tensor], optimizer: Optimizer) -> dict[Tensor, str]:
    """Parameter -> its name, out of ``plain_names``, for those that ``optimizer`` updates."""
    names = {id(tensor): name for name, tensor in named.items()}
    return {p: names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names}


def optimizer_pieces(
    named: Mapping[str, Tensor], optimizer: Optimizer, index: int
) -> tuple[dict[str, Pieces], dict[str, Any]]:
    """The tensors of an optimizer's state by key, and in plain values its groups and what of its state is no tensor."""
    pieces: dict[str, Pieces] = {}
    values: dict[str, dict[str, Any]] = {}
    names = optimizer_names(named, optimizer)
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
    stored: StoredTensors,
    saved: Mapping[str, Any],
    now: list[dict[str, Any]],
) -> list[float]:
    """Read an optimizer's state, and take over the values of its groups.

    Returns:
        Of each group, the base rate now over that of then.

    Args:
        module: holds the parameters.
        optimizer: to fill.
        index: which of the run's optimizers it is.
        stored: the checkpoint.
        saved: what ``optimizer_pieces`` gave, with ``constructed``: the values of the groups when it was made.
        now: the values of the groups when ``optimizer`` was made. Those that differ were changed by the user since, and
            stay as they are.

    Raises:
        ConfigError: it is over other parameters.
    """
    check_optimizer(saved, type(optimizer).__name__, where=stored.url)
    names = optimizer_names(plain_names(module), optimizer)
    then = sorted(name for group in saved["groups"] for name in group["params"])
    if then != sorted(names.values()):
        raise ConfigError(f"{stored.url} has an optimizer over other parameters: {len(then)} there, {len(names)} here")
    groups = len(saved["groups"]), len(optimizer.param_groups)
    if groups[0] != groups[1]:
        raise ConfigError(
            f"{stored.url} has an optimizer of {groups[0]} groups of parameters, and here are {groups[1]}: leave "
            f"optimizer.decay as it was, or start a new run from its weights, without resume= and with "
            f"init_from={stored.url}"
        )
    keys: dict[str, list[str]] = {}
    for key in stored:
        owner, _, kind = key.removeprefix(f"optimizer/{index}/").rpartition("/")
        if key.startswith(f"optimizer/{index}/"):
            keys.setdefault(owner, []).append(kind)
    # torch keeps the count of steps with its parameter only if the step itself runs on a GPU.
    on_device = {
        p for group in optimizer.param_groups if group.get("capturable") or group.get("fused") for p in group["params"]
    }
    pieces = {}
    for parameter, name in names.items():
        state = dict(saved["values"].get(name, {}))
        for kind in keys.get(name, ()):
            shape, dtype = stored[f"optimizer/{index}/{name}/{kind}"]
            if kind != "step" and dtype.is_floating_point and dtype == stored[f"model/{name}"][1]:
                dtype = parameter.dtype  # it was as its parameter, and the run may go on in another precision
            device = torch.device("cpu") if kind == "step" and parameter not in on_device else parameter.device
            state[kind] = _state_tensor(parameter, shape, dtype, device)
            pieces[f"optimizer/{index}/{name}/{kind}"] = pieces_of(state[kind])
        if state:
            optimizer.state[parameter] = state
    read_tensors(pieces, stored)
    factors = []
    for group, theirs, made_then, made_now in zip(
        optimizer.param_groups, saved["groups"], saved["constructed"], now, strict=True
    ):
        base = "initial_lr" if "initial_lr" in made_then and "initial_lr" in made_now else "lr"
        same = made_then[base] == made_now[base] or not made_then[base]
        factors.append(1.0 if same else made_now[base] / made_then[base])
        kept = {key for key in theirs if key != "params" and made_then.get(key) == made_now.get(key)}
        group.update({key: theirs[key] for key in kept})
        group["lr"] = theirs["lr"] if same else theirs["lr"] * factors[-1]
    return factors


def _state_tensor(parameter: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a piece of an optimizer's state: placed as the parameter if it has its shape."""
    if not shape or tuple(parameter.shape) != shape or device != parameter.device:
        return torch.zeros(shape, dtype=dtype, device=device)
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


def follow_schedule(scheduler: Any, factors: list[float], *, optimizer: Optimizer) -> None:
    """Let a schedule that was restored go on from the base rates of now.

    One that is a function of the step (ours is) sets the rates of the step that it has come to; they are what they were
    unless the base rate or the schedule was changed since.

    Args:
        scheduler: as Lightning has restored it.
        factors: of each group, the base rate now over that of then.
        optimizer: its own.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        follow_schedule(inner, factors, optimizer=optimizer)
    if type(scheduler) is LambdaLR:
        scheduler.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        for group, base, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(scheduler.last_epoch)
        scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
    elif any(factor != 1.0 for factor in factors):
        for name in ("base_lrs", "_last_lr"):
            if len(rates := getattr(scheduler, name, ())) == len(factors):
                setattr(scheduler, name, [rate * factor for rate, factor in zip(rates, factors, strict=True)])
