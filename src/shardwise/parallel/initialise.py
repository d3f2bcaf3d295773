"""Initial weights that do not depend on the layout.

A model that defines ``init_parameter(name, tensor, generator)`` may be constructed on the meta device. Each of its
parameters is then drawn whole from a generator of its own, seeded by (seed, name), on the CPU, and a rank keeps its
part: one device and every sharded layout start from the same bits, one full parameter is in memory at a time, and no
collective is needed. A model that has values already (constructed on the CPU, or loaded) keeps them: those of the first
rank, whatever the others have drawn.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.errors import ConfigError
from shardwise.parallel.local_tensors import packed_part
from shardwise.parallel.state import tie, tied_names
from shardwise.seeds import stable_seed


def self_initialising(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Names and modules: the outermost submodules of ``root`` that define ``init_parameter``."""
    inside: set[nn.Module] = set()
    for name, module in root.named_modules():
        if module not in inside and hasattr(module, "init_parameter"):
            inside.update(module.modules())
            yield name, module


def share_values(root: nn.Module, *, device: torch.device) -> None:
    """Give every rank the first rank's values of all parameters and buffers that have any; a collective.

    Args:
        root: not yet sharded; the same module on every rank.
        device: where the default process group communicates; one tensor at a time is copied there.
    """
    for tensor in [*root.parameters(), *root.buffers()]:
        if not tensor.is_meta:
            shared = tensor.detach().to(device).contiguous()
            dist.broadcast(shared, src=0)
            tensor.detach().copy_(shared)


def materialise(root: nn.Module, *, seed: int, device: torch.device) -> None:
    """Move ``root`` to ``device``, sharded or not, and give what is on the meta device memory and its initial values.

    Raises:
        ConfigError: a parameter is on the meta device and no module defines how it starts.
    """
    owners = list(self_initialising(root))
    for path, owner in owners:
        if not any(tensor.is_meta for tensor in [*owner.parameters(), *owner.buffers()]):
            continue
        tied = tied_names(owner)
        owner.to_empty(device=device)  # gives each module a parameter of its own
        tie(owner, tied)
        if any(True for _ in owner.buffers()):
            owner.init_buffers()  # type: ignore[operator]
        # Two models side by side must not start as twins; a single one is drawn alike wherever it stands.
        prefix = f"{path}." if len(owners) > 1 else ""
        with torch.no_grad():
            for name, parameter in owner.named_parameters():
                _draw(owner, name, parameter, torch.Generator().manual_seed(stable_seed(seed, prefix + name)))
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if tensor.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and nothing says how it starts: define init_parameter(name, tensor, "
                f"generator) on the model, or construct it on the CPU"
            )
    root.to(device)


def _draw(owner: nn.Module, name: str, parameter: Tensor, generator: torch.Generator) -> None:
    # Formats below float32 are rounded from a float32 draw, so that bf16-true starts next to 32-true.
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    full = torch.empty(parameter.shape, dtype=dtype)
    owner.init_parameter(name, full, generator)  # type: ignore[operator]
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, list(parameter.placements)
        packed = getattr(placements[-1], "split_factor", None)  # of a matrix that packs several, on the innermost axis
        if packed is not None:
            placements[-1] = Replicate()
        shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        local = parameter.to_local()
        if local.numel():
            part = full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
            if packed is not None:
                axis = mesh.ndim - 1
                part = packed_part(part, parts=packed, rank=mesh.get_local_rank(axis), ranks=mesh.size(axis))
            local.copy_(part)
    else:
        parameter.copy_(full)
