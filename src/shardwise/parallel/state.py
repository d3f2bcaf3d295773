"""Model and optimizer state as whole tensors under the names of the parameters, the same for every layout."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from shardwise.parallel.fsdp import reshard
from shardwise.parallel.sharded_step import stepping_right

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def whole_model_state(root: nn.Module) -> dict[str, Any]:
    """The state of a model in parts on the first rank's CPU, empty elsewhere; a collective. What is tied stays tied."""
    reshard(root)
    state = get_model_state_dict(root, options=_WHOLE)
    for first, *others in tied_names(root):
        state.update({other: state[first] for other in others if other in state})
    return state


def load_whole_model_state(root: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load into a model in parts what every rank has whole."""
    reshard(root)
    set_model_state_dict(root, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))


def named_optimizer_state(root: nn.Module, optimizer: Optimizer, *, sharded: bool) -> dict[str, Any]:
    """``optimizer.state_dict()`` with names for numbers, so that it can be loaded under another layout.

    Args:
        root: holds the parameters.
        optimizer: over parameters of ``root``.
        sharded: gather whole tensors on the first rank's CPU; a collective, and the other ranks get nothing.
    """
    reshard(root)
    if optimizer.state:
        return get_optimizer_state_dict(root, optimizer, options=_WHOLE if sharded else None)
    # torch would make a step with zero gradients to have something to save: Adam would count it.
    names = parameter_names(root, optimizer)
    groups = optimizer.state_dict()["param_groups"]
    return {"state": {}, "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in groups]}


def load_sharded_optimizer_state(root: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what every rank has whole, by name (or by number, as a plain optimizer saves), into a sharded optimizer."""
    names = dict(enumerate(parameter_names(root, optimizer)))
    state = {
        "state": {names.get(key, key): dict(value) for key, value in state["state"].items()},
        "param_groups": [{**g, "params": [names.get(key, key) for key in g["params"]]} for g in state["param_groups"]],
    }
    if state["state"]:
        with stepping_right(optimizer):  # torch makes a step at rate 0, for there to be something to load into
            set_optimizer_state_dict(root, optimizer, state, options=StateDictOptions(full_state_dict=True))
        return
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def tied_names(root: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [several for several in names.values() if len(several) > 1]


def tie(root: nn.Module, names: list[list[str]]) -> None:
    """Make the parameters of each of these groups of names one again: the first."""
    for first, *others in names:
        parameter = root.get_parameter(first)
        for other in others:
            path, _, leaf = other.rpartition(".")
            root.get_submodule(path)._parameters[leaf] = parameter


def parameter_names(root: nn.Module, optimizer: Optimizer) -> list[str]:
    """The names of the optimizer's parameters in its own order, which is that of the numbers in its state."""
    names = {parameter: name for name, parameter in root.named_parameters()}
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
