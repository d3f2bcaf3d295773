"""Whether what should be the same on several ranks still is."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardwise.parallel.collectives import gather_parts

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(root: nn.Module, optimizers: Iterable[Optimizer], *, mesh: DeviceMesh, step: int) -> None:
    """Compare, bit for bit, the parameters of ``root`` and their optimizer state between ranks; a collective.

    One number a tensor is exchanged: the sum of its bits read as integers.

    Args:
        root: its parameters are plain tensors, equal on all ranks, or DTensors, equal along every axis of ``mesh`` that
            does not shard them.
        optimizers: over parameters of ``root``.
        mesh: all ranks.
        step: for the message.

    Raises:
        RuntimeError: on every rank, naming the first tensor that differs, and where.
    """
    tensors = list(_named_tensors(root, optimizers))
    device = next((t.device for _, t in tensors), torch.device("cpu"))
    mine = torch.stack([_digest(t) for _, t in tensors]) if tensors else torch.zeros(0, dtype=torch.int64)
    everyone = mine.new_empty(dist.get_world_size() * len(mine), device=device)
    gather_parts(everyone, mine.to(device))
    digests = everyone.unflatten(0, (-1, len(mine))).tolist()
    axes, ranks = mesh.mesh_dim_names or (), mesh.mesh.flatten().tolist()
    for place, (name, tensor) in enumerate(tensors):
        sharding = _sharding_axes(tensor)
        holders: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for index, rank in enumerate(ranks):
            coordinates = np.unravel_index(index, mesh.mesh.shape)
            part = tuple(int(c) for axis, c in zip(axes, coordinates, strict=True) if axis in sharding)
            holders.setdefault(part, {}).setdefault(digests[rank][place], []).append(rank)
        for versions in holders.values():
            if len(versions) > 1:
                groups = " and ".join(
                    f"rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}" for r in versions.values()
                )
                raise RuntimeError(
                    f"{name} should be equal on {groups}, and is not after step {step}: something is computed "
                    f"differently on them (noise that is not shared, or an operation that is not deterministic)"
                )


def _named_tensors(root: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then what optimizers keep for each of them, in an order that is the same on all ranks."""
    names = {parameter: name for name, parameter in root.named_parameters()}
    yield from ((name, parameter.detach()) for parameter, name in names.items())
    for optimizer in optimizers:
        states = getattr(optimizer, "_optimizer", optimizer).state
        for parameter, name in names.items():
            for key, value in states.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{key} of {name}", value.detach()


def _digest(tensor: Tensor) -> Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.contiguous().view(_INTEGERS[part.element_size()]).sum(dtype=torch.int64)


def _sharding_axes(tensor: Tensor) -> set[str]:
    """The mesh axes along which ranks hold different parts of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    return {
        name for name, placement in zip(names, tensor.placements, strict=True) if not isinstance(placement, Replicate)
    }
