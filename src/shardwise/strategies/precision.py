"""Lightning's precision plugins with clipping that is right on a mesh, and without autocast where FSDP sets formats."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor

from shardwise.errors import ConfigError
from shardwise.parallel.grad_norm import clip_by_norm_, clip_by_value_

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Mixed precisions -> format of the computation."""


class _MeshClipping:
    """Mixin: clips gradients whatever they are sharded over, and keeps their norm."""

    grad_norm: Tensor | None = None
    """0-dim: norm of the last step's gradients before clipping."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.grad_norm = clip_by_norm_(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_by_value_(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss of a further micro-batch, scaled as the first one was."""
        scaler = getattr(self, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)


class _Single(_MeshClipping, Precision):
    precision = "32-true"


class _Half(_MeshClipping, HalfPrecision):
    pass


class _Double(_MeshClipping, DoublePrecision):
    pass


class _Mixed(_MeshClipping, MixedPrecision):
    pass


class _ShardedMixed(_Mixed):
    """Mixed precision in which FSDP's policy casts parameters and inputs: autocast would cast a second time."""

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        yield


def mesh_precision(name: str, *, device_type: str, sharded: bool) -> Any:
    """The precision plugin for ``name``, one of Lightning's names."""
    if name in ("64-true", "64"):
        return _Double()
    if name in ("bf16-true", "16-true"):
        return _Half(name)
    if name in MIXED:
        return (_ShardedMixed if sharded else _Mixed)(name, device_type)
    if name not in ("32-true", "32"):
        raise ConfigError(f"precision={name!r} is not supported: 32-true, bf16-mixed, bf16-true, 16-mixed or 64-true")
    return _Single()
