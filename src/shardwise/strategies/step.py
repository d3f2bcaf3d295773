"""One optimizer step: what each micro-batch counts, and the weight that its mean loss gets from that."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Step:
    """What is known of one optimizer step on this rank: its micro-batches, what they count, and their losses.

    Nothing here waits for the device: counts and weights stay tensors.

    Args:
        batches: the micro-batches.
        args: what ``training_step`` gets besides the batch.
        counts: what each micro-batch counts (numbers or 0-dim tensors), or None if that shows only in what
            ``training_step`` returns.
        assumed: whether ``counts`` are given up for the count that ``training_step`` returns, if it returns one.
        group: the ranks whose counts are added up; None for one rank.
        device: where to count.
    """

    def __init__(
        self,
        batches: list[Any],
        args: tuple,
        *,
        counts: Sequence[Tensor | float] | None,
        assumed: bool,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.batches = batches
        self.args = args
        self.late = counts is None
        """Whether ``training_step`` told what it counts only when it had counted it."""
        self.factor: Tensor | float = 1.0
        """What ``correction`` has said last, or 1."""
        self._assumed = assumed
        self._group = group
        self._dp_size = 1 if group is None else dist.get_world_size(group)
        self._device = device
        self._counts: list[Tensor] = []
        self._total: Tensor | None = None
        self._work: Any = None
        self._divisor: Tensor | None = None
        self._loss_sum: Tensor | None = None
        if counts is not None:
            self._counts = [self._on_device(count) for count in counts]
            self._add_up()

    def take(self, index: int, output: Any) -> Tensor:
        """The mean loss out of what ``training_step`` returned for micro-batch ``index``.

        Args:
            index: of the micro-batch; each is taken once, in order.
            output: a mean loss, a mapping with ``loss``, or (sum, count).

        Returns:
            A 0-dim tensor in float32 or wider, with its graph.

        Raises:
            TypeError: something else.
        """
        if isinstance(output, tuple) and len(output) == 2 and isinstance(output[0], Tensor):
            loss_sum, count = _wide(output[0]), output[1]
            if self.late or self._assumed:
                self.late = True
                self._take_count(index, self._on_device(count))
            self._remember(loss_sum.detach())
            return loss_sum / _not_zero(self._counts[index]).to(loss_sum.dtype)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or self.late:
            raise TypeError(
                f"training_step returned {type(output).__name__}: a mean loss (0-dim tensor), a mapping with 'loss', "
                f"or (sum, count) is needed, the same kind in every step"
            )
        loss = _wide(loss)
        self._remember(loss.detach() * self._counts[index])
        return loss

    def weigh(self, index: int, loss: Tensor) -> Tensor:
        """The mean ``loss`` of micro-batch ``index`` times its count over the mean count of a rank.

        Averaged over the ranks and added up over micro-batches, that is the mean over the global batch.
        """
        if self._dp_size == 1 and len(self.batches) == 1:
            return loss
        if self._divisor is None:
            self._divisor = _not_zero(self.total) / self._dp_size
        return loss * (self._counts[index] / self._divisor).to(loss.dtype)

    def count(self) -> Tensor:
        """What all micro-batches of this rank count: 0-dim, float64."""
        return torch.stack(self._counts).sum()

    def weights(self) -> Tensor:
        """What each micro-batch of this rank counts over what those of all ranks count: 1-dim, float64."""
        return torch.stack(self._counts) / _not_zero(self.total)

    def shares(self) -> list[Tensor]:
        """What each micro-batch counts, over what all of this rank's count: 0-dim, they add up to 1."""
        whole = _not_zero(self.count())
        return [count / whole for count in self._counts]

    @property
    def total(self) -> Tensor:
        """What all micro-batches of all ranks count: 0-dim, float64."""
        assert self._total is not None
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total

    def correction(self) -> Tensor | None:
        """Factor for the gradients where counts came late, and not all were as the first micro-batch had announced.

        A collective if there is one.
        """
        if not self.late or len(self.batches) == 1:
            return None
        announced = _not_zero(self.total)
        self._add_up()
        self.factor = announced / _not_zero(self.total)
        return self.factor

    @property
    def loss_sum(self) -> Tensor:
        """Sum of the losses of all micro-batches of this rank: 0-dim, float64."""
        assert self._loss_sum is not None
        return self._loss_sum

    def global_loss(self) -> Tensor:
        """Mean loss over the global batch: 0-dim, float64. A collective."""
        loss_sum = self.loss_sum.clone()
        if self._group is not None:
            dist.all_reduce(loss_sum, group=self._group)
        return loss_sum / _not_zero(self.total)

    def _on_device(self, count: Tensor | float) -> Tensor:
        if isinstance(count, Tensor):
            return count.detach().to(self._device, torch.float64)
        # A fill, not a copy from the host, which would wait for the device.
        return torch.full((), count, dtype=torch.float64, device=self._device)

    def _add_up(self) -> None:
        """Start adding up the counts of all ranks, beside what comes next."""
        self._total = torch.stack(self._counts).sum() if len(self._counts) > 1 else self._counts[0].clone()
        if self._group is not None:
            self._work = dist.all_reduce(self._total, group=self._group, async_op=True)

    def _take_count(self, index: int, count: Tensor) -> None:
        if index:
            self._counts[index] = count
        else:
            # Until the step ends, the other micro-batches are taken to count the same.
            if self._work is not None:
                self._work.wait()
            self._counts = [count] * len(self.batches)
            self._add_up()

    def _remember(self, loss_sum: Tensor) -> None:
        loss_sum = loss_sum.double()
        self._loss_sum = loss_sum if self._loss_sum is None else self._loss_sum + loss_sum


def _wide(loss: Tensor) -> Tensor:
    return loss if loss.dtype == torch.float64 else loss.float()


def _not_zero(count: Tensor) -> Tensor:
    """``count``, or 1 where nothing was counted: the sum that is divided by it is 0 then."""
    return torch.where(count == 0, 1.0, count)
