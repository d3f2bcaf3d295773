"""Lightning's precision plugins with clipping that is right on a mesh, and without autocast where FSDP sets formats."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from pytorch_lightning.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import LBFGS

from shardwise.errors import ConfigError
from shardwise.parallel.grad_norm import clip_by_norm_, clip_by_value_
from shardwise.parallel.sharded_step import stepping_right, way_of
from shardwise.strategies.nonfinite import NonFinite

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Mixed precisions -> format of the computation."""


class MeshClipping:
    """Mixin: clips gradients whatever they are sharded over, and keeps their norm."""

    grad_norm: Tensor | None = None
    """0-dim: norm of the last step's gradients before clipping."""
    nonfinite: NonFinite | None = None
    """Looks at each step before it is made; None where nobody does."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.grad_norm = clip_by_norm_(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]
        if self.nonfinite is not None:
            self.nonfinite.see_norm(self.grad_norm)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        clip_by_value_(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Forward and backward pass, clipping, and the step, which is right on sharded parameters."""
        looks = self.nonfinite is not None and self.nonfinite.policy == "skip"
        if way_of(optimizer) is None and (not looks or isinstance(optimizer, LBFGS)):
            return super().optimizer_step(optimizer, model, closure, **kwargs)  # type: ignore[misc]
        if getattr(self, "scaler", None) is not None:  # it decides whether there is a step
            with stepping_right(optimizer):
                return super().optimizer_step(optimizer, model, closure, **kwargs)  # type: ignore[misc]
        result = self._wrap_closure(model, optimizer, closure)  # type: ignore[attr-defined]
        if self.nonfinite is not None and self.nonfinite.skips():
            optimizer._opt_called = True  # schedules go on all the same
            return result
        with stepping_right(optimizer):
            optimizer.step(**kwargs)
        return result

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss of a further micro-batch, scaled as the first one was."""
        scaler = getattr(self, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)


class MeshSinglePrecision(MeshClipping, Precision):  # type: ignore[misc]
    """float32 throughout."""

    precision = "32-true"


class MeshHalfPrecision(MeshClipping, HalfPrecision):  # type: ignore[misc]
    """bfloat16 throughout, except for the sums of metrics."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        # torchmetrics protects its sums from this, but not from the to(dtype=...) of the base class.
        return module.bfloat16()


class MeshDoublePrecision(MeshClipping, DoublePrecision):  # type: ignore[misc]
    """float64 throughout."""


class MeshMixedPrecision(MeshClipping, MixedPrecision):  # type: ignore[misc]
    """float32 parameters, computation in a lower format; one class for all layouts, for its name is in checkpoints.

    Args:
        name: a key of ``MIXED``.
        device_type: ``cpu`` or ``cuda``.
        autocast: False where FSDP's policy casts parameters and inputs: autocast would cast a second time.
        scaler: of the loss, for 16-mixed; None for a new one.
    """

    def __init__(self, name: Any, device_type: str, *, autocast: bool, scaler: Any = None) -> None:
        super().__init__(name, device_type, scaler)
        self._autocast = autocast

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        if not self._autocast:
            yield
            return
        with self.autocast_context_manager():
            yield


def mesh_precision(name: str, *, device_type: str, autocast: bool, scaler: Any = None) -> Any:
    """The precision plugin for ``name``, one of Lightning's names.

    Raises:
        ConfigError: a precision that is not supported.
    """
    if name in ("64-true", "64"):
        return MeshDoublePrecision()
    if name == "bf16-true":
        return MeshHalfPrecision("bf16-true")
    if name in MIXED:
        return MeshMixedPrecision(name, device_type, autocast=autocast, scaler=scaler)
    if name not in ("32-true", "32"):
        raise ConfigError(f"precision={name!r} is not supported: 32-true, bf16-mixed, bf16-true, 16-mixed or 64-true")
    return MeshSinglePrecision()
