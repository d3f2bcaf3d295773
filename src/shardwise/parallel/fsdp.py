"""Sharding of parameters, gradients and optimizer state with FSDP2 (``fully_shard``), and replicas of split layers."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise.errors import ConfigError


def shard_module(
    root: nn.Module,
    *,
    mesh: DeviceMesh,
    blocks: Iterable[nn.Module],
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
) -> FSDPModule:
    """Shard the parameters of ``root`` in place over ``mesh``: its blocks one by one, then the rest as one group.

    Args:
        root: a module; its class becomes a subclass of FSDPModule. Its parameters may be DTensors on another axis of
            the mesh that ``mesh`` is part of.
        mesh: ``dp_shard``, to shard over; with ``dp_replicate`` before it, replicas of a sharded model; or
            ``dp_replicate`` alone, replicas of a model whose layers are split.
        blocks: gathered one at a time. Those that share a parameter with what lies outside of them are left to the
            root: FSDP wants all users of a parameter in one group.
        compute_dtype: format of gathered parameters and of the computation, with reductions in float32; None keeps the
            format of the parameters for both.
        reshard_after_forward: free a block's gathered parameters after its forward pass.

    Raises:
        ConfigError: a split parameter that does not divide into even shards.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    blocks = self_contained(blocks, root)
    if mesh.mesh_dim_names == ("dp_replicate",):
        # DistributedDataParallel does not know DTensors; this is FSDP's machinery without the sharding.
        from torch.distributed._composable.replicate_with_fsdp import replicate

        for module in (*blocks, root):
            replicate(module, mesh=mesh, mp_policy=policy)
        assert isinstance(root, FSDPModule)
        return root
    ranks = mesh["dp_shard"].size()
    names = {parameter: name for name, parameter in root.named_parameters()}

    def placement(parameter: nn.Parameter) -> Shard | None:
        if not isinstance(parameter, DTensor):
            return None
        tp = parameter.device_mesh.size()
        dim = shard_dim(tuple(parameter.shape), parameter.placements[0], tp=tp, ranks=ranks)
        if dim is None:
            raise uneven(names[parameter], tuple(parameter.shape), parameter.placements[0], tp=tp, ranks=ranks)
        return Shard(dim)

    for block in blocks:
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placement,
        )  # fmt: skip
    # The root is needed at once in the backward pass: gathering it twice would only cost traffic.
    return fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=placement)


def shard_dim(shape: tuple[int, ...], split: Placement, *, tp: int, ranks: int) -> int | None:
    """The dim along which FSDP shards a parameter that tensor parallelism may have split; None if there is none.

    The first where that is possible: FSDP makes uneven shards only along the first dim, and of a dim that is split
    already only even shards of even parts. Rows of packed matrices, which are split part by part, are left alone.

    Args:
        shape: of the parameter.
        split: how it is placed on the tensor-parallel axis.
        tp: degree of that axis.
        ranks: dp_shard.
    """
    taken = getattr(split, "dim", None)
    packed = getattr(split, "split_factor", None) is not None
    for dim, size in enumerate(shape):
        if dim == taken:
            if not packed and size % (tp * ranks) == 0:
                return dim
        elif dim == 0 or size % ranks == 0:
            return dim
    return None


def uneven(name: str, shape: tuple[int, ...], split: Placement, *, tp: int, ranks: int) -> ConfigError:
    """The error for a split parameter that ``ranks`` shards do not fit."""
    shown = " x ".join(map(str, shape))
    legal = [d for d in range(2, 2 * ranks) if shard_dim(shape, split, tp=tp, ranks=d) is not None]
    fix = f"strategy.dp_shard={'|'.join(map(str, legal))}, or " if legal else ""
    return ConfigError(
        f"{name} ({shown}), split over strategy.tp={tp}, does not divide into strategy.dp_shard={ranks} even shards: "
        f"type {fix}strategy=ddp+tp"
    )


def self_contained(blocks: Iterable[nn.Module], root: nn.Module) -> list[nn.Module]:
    """The blocks whose parameters nothing outside of them uses."""
    users: dict[Tensor, set[nn.Module]] = defaultdict(set)
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter].add(module)
    return [block for block in blocks if all(users[p] <= set(block.modules()) for p in block.parameters())]


def reshard(root: nn.Module) -> None:
    """Free all gathered parameters of ``root``.

    A forward pass without a backward pass leaves the root gathered, and its parameters plain tensors.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
