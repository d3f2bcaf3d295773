"""An optimizer step that needs whole parameters: gathered one at a time, so that a rank has no more than one or two.

The stock optimizer runs on plain tensors, on every rank alike, and each rank keeps its part of what comes out. What it
keeps in the shape of the parameter is sharded as the parameter; anything else (row and column means) is whole on every
rank.
"""

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise.parallel.pieces import pieces_of

_REDISTRIBUTE = logging.getLogger("torch.distributed.tensor._redistribute")


@torch.no_grad()
def step_on_whole_parameters(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """One step of an optimizer that treats each parameter by itself, but as a whole.

    Two gathers a parameter that has a gradient, and one for each piece of its state that has its shape.

    Args:
        optimizer: over plain tensors, DTensors, or both; nothing in its groups changes with a step.
        step: its own.
    """
    shadow = _without_hooks(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            whole = _whole(parameter.detach())
            whole.grad = _whole(parameter.grad)
            shadow.param_groups = [{**group, "params": [whole]}]
            shadow.state = defaultdict(dict)
            if state:
                shadow.state[whole] = {key: _whole(value) for key, value in state.items()}
            type(optimizer).step(shadow)
            _keep_part(whole, parameter)
            for key, value in shadow.state[whole].items():
                known = state.get(key)
                if isinstance(known, DTensor):
                    _keep_part(value, known)
                else:
                    state[key] = _placed(value, parameter)
    _call_without_parameters(optimizer, step)


@torch.no_grad()
def step_on_whole_updates(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """One step of ``torch.optim.Muon``, which orthogonalises whole matrices: each on one of the ranks that share it.

    Its momentum is elementwise, so it stays in parts; only what is to be orthogonalised is gathered, in the bfloat16
    that it is turned into anyway. As many matrices as there are ranks are gathered, each rank orthogonalises one, and
    sends it around: a gather of 2 bytes an element and a broadcast in the parameter's format. A step of a GPT of 4
    million parameters on 2 ranks of a CPU took 276 ms so, and in another run 361 ms with all
    matrices orthogonalised on every rank; for 0.4 million parameters sharing them out was the slower way.

    Args:
        optimizer: over plain matrices, DTensors, or both.
        step: its own.
    """
    for group in optimizer.param_groups:
        alike: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                alike.setdefault(_workers(parameter), []).append(parameter)
        for workers, parameters in alike.items():
            size = 1 if workers is None else dist.get_world_size(workers)
            # Those that work at the same time are to have the same work; sorting is stable, so ranks agree.
            parameters.sort(key=lambda p: (min(p.shape) * p.numel(), p.numel()), reverse=True)
            for start in range(0, len(parameters), size):
                _orthogonalise(optimizer, group, parameters[start : start + size], workers)
    _call_without_parameters(optimizer, step)


def _orthogonalise(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[Any], workers: dist.ProcessGroup | None
) -> None:
    """Update one matrix for each of the ranks that work together."""
    me = 0 if workers is None else dist.get_rank(workers)
    change = None
    for worker, parameter in enumerate(parameters):
        whole = _gathered(_nesterov(optimizer.state[parameter], parameter, group).bfloat16(), parameter)
        if worker == me:
            change = _stock_change(optimizer, group, whole.to(parameter.dtype))
    for worker, parameter in enumerate(parameters):
        if workers is not None:
            shape, device = parameter.shape, _part(parameter).device
            received = change if worker == me else torch.empty(shape, dtype=parameter.dtype, device=device)
            assert received is not None
            dist.broadcast(received, group=workers, group_src=worker)
        else:
            received = change
        assert received is not None
        for part, view in _views(received, parameter):
            part.mul_(1 - group["lr"] * group["weight_decay"]).add_(view)


def _workers(parameter: Any) -> dist.ProcessGroup | None:
    """The ranks along the longest axis that shards ``parameter``."""
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter.device_mesh
    axes = [axis for axis, placed in enumerate(parameter.placements) if not isinstance(placed, Replicate)]
    return mesh.get_group(max(axes, key=mesh.size)) if axes else None


def _nesterov(state: dict[str, Any], parameter: Any, group: dict[str, Any]) -> Tensor:
    """What Muon makes of this rank's part of a gradient before it orthogonalises; updates the momentum."""
    gradient = _part(_placed_alike(parameter))
    if "momentum_buffer" not in state:
        zeros = torch.zeros_like(gradient)
        state["momentum_buffer"] = _as_part(zeros, parameter) if isinstance(parameter, DTensor) else zeros
    buffer = _part(state["momentum_buffer"])
    buffer.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def _stock_change(optimizer: Optimizer, group: dict[str, Any], update: Tensor) -> Tensor:
    """What a step of stock Muon adds to a matrix, for which ``update`` is the gradient and there is no momentum."""
    change = torch.zeros_like(update)
    change.grad = update
    shadow = _without_hooks(optimizer)
    shadow.param_groups = [{**group, "params": [change], "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}]
    shadow.state = defaultdict(dict)
    type(optimizer).step(shadow)
    return change.detach()


def _without_hooks(optimizer: Optimizer) -> Optimizer:
    """A second optimizer of the same kind, on whose steps nobody waits."""
    shadow = copy.copy(optimizer)
    shadow._optimizer_step_pre_hooks = OrderedDict()
    shadow._optimizer_step_post_hooks = OrderedDict()
    return shadow


def _call_without_parameters(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Let whoever hooks into the optimizer's step, as schedules do, see that there was one."""
    parameters = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    try:
        step()
    finally:
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"] = own


def _part(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _placed_alike(parameter: Any) -> Any:
    """The gradient of ``parameter``, brought to its placements."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient


def _whole(value: Any) -> Any:
    """A DTensor's full tensor: a collective where it is sharded, else the same memory."""
    return _gathered(value._local_tensor, value) if isinstance(value, DTensor) else value


def _gathered(part: Tensor, like: Any) -> Tensor:
    """The full tensor of which ``part``, in any format, is what this rank holds, placed as ``like``."""
    if not isinstance(like, DTensor):
        return part
    placed = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    # Over two axes torch gathers twice, and warns that sums might differ between ranks; there are none in this.
    level = _REDISTRIBUTE.level
    _REDISTRIBUTE.setLevel(logging.ERROR)
    try:
        return placed.full_tensor()
    finally:
        _REDISTRIBUTE.setLevel(level)


def _as_part(part: Tensor, parameter: Any) -> DTensor:
    return DTensor(part, parameter._spec, requires_grad=False)


def _placed(value: Any, parameter: Any) -> Any:
    """State in the shape of a sharded parameter becomes a DTensor that is placed as the parameter."""
    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.dim()):
        return value
    if value.shape != parameter.shape:
        return value
    placed = _as_part(torch.empty_like(parameter._local_tensor, dtype=value.dtype), parameter)
    _keep_part(value, placed)
    return placed


def _keep_part(whole: Tensor, placed: Any) -> None:
    """Copy this rank's part of ``whole`` into ``placed``."""
    if isinstance(placed, DTensor):
        for part, view in _views(whole, placed):
            part.copy_(view)
    elif whole is not placed:
        placed.detach().copy_(whole)


def _views(whole: Tensor, placed: Any) -> list[tuple[Tensor, Tensor]]:
    return [
        (part, whole[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))])
        for offset, part in pieces_of(placed).parts.items()
    ]
