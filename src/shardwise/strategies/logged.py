"""What a LightningModule logs itself, made into values of the whole step and of all ranks.

Lightning keeps what the last micro-batch of rank 0 has logged, unless ``sync_dist=True`` is typed at each call.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

EVALUATION = ("validation_step", "test_step")


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
            merged = _reduced(stacked, torch.stack(list(weights)).to(stacked), _reduction(metric))
            _put(metric, merged)

    def over_ranks(self, count: Tensor, group: dist.ProcessGroup) -> None:
        """Make the step's values those of all ranks, means weighted by each rank's ``count``; a collective.

        Objects are gathered, so that ranks which log different names are no trouble.
        """
        mine = {
            key: (float(metric._forward_cache), _reduction(metric))
            for key, metric in self._metrics()
            if not metric.meta.sync.should and not metric.meta.sync.rank_zero_only
        }
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (float(count), mine), group=group)
        for key, metric in self._metrics():
            if key not in mine:
                continue
            found = [(weight, values[key][0]) for weight, values in gathered if key in values]
            numbers = torch.tensor([value for _, value in found], dtype=torch.float64)
            weights = torch.tensor([weight for weight, _ in found], dtype=torch.float64)
            _put(metric, _reduced(numbers, weights / weights.sum(), mine[key][1]).to(metric._forward_cache))

    def _metrics(self) -> list[tuple[str, Any]]:
        results: Any = self._trainer._results or {}
        return [
            (key, metric)
            for key, metric in results.items()
            if key.startswith("training_step.") and metric.is_tensor and metric.meta.on_step
        ]


def log_over_ranks(module: LightningModule) -> None:
    """Let what ``module`` logs in evaluation be reduced over all ranks at the end of the loop, as if it had asked."""
    if "log" in vars(module):
        return  # once is enough
    log = module.log

    def log_reduced(name: str, value: Any, *args: Any, **options: Any) -> None:
        if module._current_fx_name in EVALUATION and not isinstance(value, Metric):
            # log_dict passes a False of its own, so that one cannot be told from a typed one.
            options["sync_dist"] = bool(options.get("sync_dist")) or not options.get("rank_zero_only", False)
        log(name, value, *args, **options)

    module.log = log_reduced  # type: ignore[method-assign]


def reduce_metrics_over(module: LightningModule, group: dist.ProcessGroup | None) -> None:
    """Let metrics that name no group be reduced over ``group``, or where that is None not at all: over all ranks, those
    that split a layer between them would count their samples several times."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.process_group is None:
            metric.process_group = group
            if group is None:
                metric.distributed_available_fn = _never


def _never() -> bool:
    return False


def _reduction(metric: Any) -> str:
    meta = metric.meta
    named = {"max": meta.is_max_reduction, "min": meta.is_min_reduction, "sum": meta.is_sum_reduction}
    return next((name for name, is_it in named.items() if is_it), "mean")


def _reduced(values: Tensor, weights: Tensor, reduction: str) -> Tensor:
    """One value out of several (1-dim); means by ``weights``, which add up to 1."""
    if reduction == "mean":
        return (values * weights).sum()
    return values.max() if reduction == "max" else values.min() if reduction == "min" else values.sum()


def _put(metric: Any, value: Tensor) -> None:
    metric._forward_cache = value
    if not metric.meta.on_epoch:
        metric.value = value
