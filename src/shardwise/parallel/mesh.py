"""The device mesh of a run, its limits of time, and the agreement of all ranks on what they are part of."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.parallel.dims import ParallelDims

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes along which ranks see different samples, outermost first."""


def build_mesh(dims: ParallelDims, *, device_type: str) -> DeviceMesh:
    """The mesh of all ranks, with the axes whose degree is above 1, outermost first.

    Args:
        dims: degrees; their product is the size of the default process group.
        device_type: ``cpu`` or ``cuda``.
    """
    shape = {axis: degree for axis, degree in dims.shape.items() if degree > 1}
    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
    """The axes of ``mesh`` along which ranks see different samples; None if there are none."""
    names = mesh.mesh_dim_names or ()
    axes = tuple(axis for axis in DATA_AXES if axis in names)
    if not axes:
        return None
    return mesh if axes == names else mesh[axes]


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks of ``mesh`` that see different samples and hold the same part of each layer; a collective.

    None if all ranks see the same samples.
    """
    data = data_mesh(mesh)
    if data is None:
        return None
    if data is mesh:
        return dist.group.WORLD
    return data.get_group() if data.ndim == 1 else data._flatten("dp").get_group()


def limit_collectives(mesh: DeviceMesh, timeout: timedelta, *more: dist.ProcessGroup | None) -> None:
    """Let collectives of the default process group, of every axis of ``mesh``, and of ``more`` fail after ``timeout``.

    The groups of a mesh do not inherit the default group's limit: they start with the backend's own.
    """
    # torch before 2.14 has it under its old name only.
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in {dist.group.WORLD, *mesh.get_all_groups(), *more} - {None}:
        set_timeout(timeout, group)


def check_agreement(facts: dict[str, Any]) -> None:
    """Compare what every rank believes; a collective over the default process group.

    Args:
        facts: name -> plain value that has to be the same on every rank.

    Raises:
        RuntimeError: on every rank, naming which ranks hold which value.
    """
    everyone: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts)
    for name in sorted(set().union(*everyone)):
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyone):
            holders.setdefault(repr(theirs.get(name)), []).append(rank)
        if len(holders) > 1:
            shown = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in holders.items())
            raise RuntimeError(f"the ranks disagree about {name}: {shown}; start all of them with the same command")
