"""Initial weights that do not depend on the layout.

A model that defines ``init_parameter(name, tensor, generator)`` has each parameter drawn whole from a generator of its
own, seeded by (seed, name), on the CPU; a rank keeps its part. So one device and every sharded layout start from the
same bits, one full parameter is in memory at a time, and no collective is needed. Any other model has been constructed
on the CPU of every rank under the same seed, and is moved or sharded as it is.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.errors import ConfigError


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from the parts; the same in every process and on every machine (``hash`` is salted)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def self_initialising(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost submodules of ``root`` that define ``init_parameter``."""
    inside: set[nn.Module] = set()
    for module in root.modules():
        if module not in inside and hasattr(module, "init_parameter"):
            inside.update(module.modules())
            yield module


def materialise(root: nn.Module, *, seed: int, device: torch.device) -> None:
    """Give every parameter and buffer of ``root`` memory on ``device`` and its initial value, sharded or not.

    Raises:
        ConfigError: a parameter is on the meta device and no module defines how it starts.
    """
    for owner in self_initialising(root):
        on_meta = any(tensor.is_meta for tensor in [*owner.parameters(), *owner.buffers()])
        owner.to_empty(device=device) if on_meta else owner.to(device)
        if on_meta and any(True for _ in owner.buffers()):
            owner.init_buffers()
        with torch.no_grad():
            for name, parameter in owner.named_parameters():
                _draw(owner, name, parameter, seed)
    for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
        if tensor.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and nothing says how it starts: define init_parameter(name, tensor, "
                f"generator) on the model, or construct it on the CPU"
            )
    root.to(device)


def _draw(owner: nn.Module, name: str, parameter: Tensor, seed: int) -> None:
    # Formats below float32 are rounded from a float32 draw, so that bf16-true starts next to 32-true.
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    full = torch.empty(parameter.shape, dtype=dtype)
    owner.init_parameter(name, full, torch.Generator().manual_seed(stable_seed(seed, name)))
    if isinstance(parameter, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        local = parameter.to_local()
        if local.numel():
            local.copy_(full[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))])
    else:
        parameter.copy_(full)
