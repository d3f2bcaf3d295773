"""What a module logs in each micro-batch, made into one value of the optimizer step."""

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor


class LoggedOnStep:
    """The values that ``training_step`` logs with ``on_step``: Lightning would keep those of the last micro-batch only.

    Args:
        trainer: whose training loop is running.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._values: dict[str, list[Tensor]] = {}

    def keep(self) -> None:
        """Remember what the micro-batch that has just run has logged."""
        for key, metric in self._metrics():
            self._values.setdefault(key, []).append(metric._forward_cache)

    def merge(self, weights: Sequence[Tensor]) -> None:
        """Put the step's values in their place: sums, largest, smallest, or means by ``weights``, which add up to 1."""
        for key, metric in self._metrics():
            values = self._values.get(key, [])
            if len(values) != len(weights):
                continue  # not logged in every micro-batch
            stacked = torch.stack(values)
            if metric.meta.is_max_reduction:
                merged = stacked.max()
            elif metric.meta.is_min_reduction:
                merged = stacked.min()
            elif metric.meta.is_sum_reduction:
                merged = stacked.sum()
            else:
                merged = (stacked * torch.stack(list(weights)).to(stacked)).sum()
            metric._forward_cache = merged
            if not metric.meta.on_epoch:
                metric.value = merged

    def _metrics(self) -> list[tuple[str, Any]]:
        results: Any = self._trainer._results or {}
        return [
            (key, metric)
            for key, metric in results.items()
            if key.startswith("training_step.") and metric.is_tensor and metric.meta.on_step
        ]
