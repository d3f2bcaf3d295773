"""Each rank's own gradient, seen in passing: before it is added to those of other micro-batches, or of other ranks.

Nothing is kept but norms, and no bit of what is trained changes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, _get_gradient_divide_factors


class OwnGradients:
    """Squared norms of this rank's own gradients, while they are ``wanted``."""

    def __init__(self) -> None:
        self.wanted = False
        """Whether what passes is looked at. All ranks need not agree: nothing here communicates."""
        self._squares: list[Tensor] = []
        self._shares: list[Tensor] = []

    def attach(self, model: nn.Module, *, dp_size: int) -> None:
        """Look at what each reduction of ``model`` takes in: all of this rank's gradient, if there is one a step.

        Args:
            model: sharded by ``fully_shard``, also in replicas. Its reductions stay what they are.
            dp_size: ranks that see different samples.
        """
        comm = _SeenReduceScatter(self, dp_size=dp_size)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(comm)

    def see(self, gradient: Tensor, *, divided_by: float = 1.0) -> None:
        """Take in a flat part of the gradient, which has been divided by ``divided_by``. Waits for nothing."""
        self._squares.append((_norm(gradient).double() * divided_by).square())

    @contextmanager
    def of_each(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Look, inside, at what one backward pass adds to the gradients of plain ``parameters``.

        Hooks on the parameters come before accumulation, and before DistributedDataParallel takes the gradient up. A
        communication hook would do as well, but costs on all steps.
        """
        handles = [p.register_hook(self.see) for p in parameters if p.requires_grad]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.end_share()

    def end_share(self) -> None:
        """What was seen since the last call is one gradient."""
        squares, self._squares = self._squares, []
        self._shares.append(torch.stack(squares).sum())

    def take(self) -> Tensor:
        """The squared norms of the gradients that were seen since the last call: 1-dim, float64."""
        if self._squares:
            self.end_share()
        shares, self._shares = self._shares, []
        return torch.stack(shares)


def _norm(gradient: Tensor) -> Tensor:
    narrow = gradient.dtype in (torch.bfloat16, torch.float16)
    return torch.linalg.vector_norm(gradient, dtype=torch.float32 if narrow else None)


class _SeenReduceScatter(DefaultReduceScatter):
    """FSDP's own reduction, whose input is the whole gradient of a group of parameters on this rank."""

    def __init__(self, own: OwnGradients, *, dp_size: int) -> None:
        super().__init__()
        self._own = own
        self._dp_size = dp_size

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if self._own.wanted:
            self._own.see(input_tensor, divided_by=self._divided_by(input_tensor, group))
        return super().__call__(output_tensor, input_tensor, group, op, async_op)

    def _divided_by(self, gradient: Tensor, group: dist.ProcessGroup) -> float:
        """FSDP divides formats other than float32 and bfloat16 in part before it adds up."""
        if gradient.dtype in (torch.float32, torch.bfloat16):
            return 1.0
        factors = _get_gradient_divide_factors(
            group, None, gradient.dtype, gradient.device.type, factor=float(self._dp_size)
        )
        return factors[0] or 1.0
