"""Sharding of parameters, gradients and optimizer state with FSDP2 (``fully_shard``)."""

from collections import Counter, defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def sharding_blocks(root: nn.Module) -> list[nn.Module]:
    """The blocks that are gathered one at a time.

    A submodule may name its own with a method ``sharding_blocks()``. Otherwise they are the repeated layers: members of
    a ModuleList or Sequential of which the same class appears there at least twice and which have submodules of their
    own. Blocks inside a block are left out, and so are those that share a parameter with what lies outside of them:
    FSDP wants all users of a parameter in one group.
    """
    named = [module for module in root.modules() if hasattr(module, "sharding_blocks")]
    blocks: dict[nn.Module, None] = {}  # in order, each once: a model may run the same block twice
    if named:
        blocks = dict.fromkeys(block for module in named for block in module.sharding_blocks())  # type: ignore[operator]
    else:
        taken: set[nn.Module] = set()
        for container in root.modules():
            if container in taken or not isinstance(container, (nn.ModuleList, nn.Sequential)):
                continue
            kinds = Counter(type(child) for child in container)
            for child in container:
                if kinds[type(child)] > 1 and any(child.children()) and any(True for _ in child.parameters()):
                    blocks[child] = None
                    taken.update(child.modules())
    users: dict[Tensor, set[nn.Module]] = defaultdict(set)
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter].add(module)
    return [block for block in blocks if all(users[p] <= set(block.modules()) for p in block.parameters())]


def shard_module(
    root: nn.Module, *, mesh: DeviceMesh, compute_dtype: torch.dtype | None, reshard_after_forward: bool
) -> FSDPModule:
    """Shard the parameters of ``root`` in place over ``mesh``: its blocks one by one, then the rest as one group.

    Args:
        root: a module; its class becomes a subclass of FSDPModule.
        mesh: one axis to shard over, or two: replicas (outer) of a sharded model (inner).
        compute_dtype: format of gathered parameters and of the computation, with reductions in float32; None keeps the
            format of the parameters for both.
        reshard_after_forward: free a block's gathered parameters after its forward pass.
    """
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in sharding_blocks(root):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # The root is needed at once in the backward pass: gathering it twice would only cost traffic.
    return fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def reshard(root: nn.Module) -> None:
    """Free all gathered parameters of ``root``.

    A forward pass without a backward pass leaves the root gathered, and its parameters plain tensors.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
