"""What a LightningModule logs itself, made into values of the whole step and of all ranks.

Lightning keeps what the last micro-batch of rank 0 has logged, unless ``sync_dist=True`` is typed at each call. A value
is reduced as its call of ``log`` says (``reduce_fx``: mean, sum, min or max) over the ranks that see different samples,
and over those of them that have logged it: each value by its name, never one with another.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from shardwise.errors import ConfigError
from shardwise.parallel.named_values import Gathered

log = logging.getLogger(__name__)

EVALUATION = ("validation_step", "test_step")
LOGGED = "logged/"
"""In front of the names of values that a module logs, among the numbers of a step."""
SEPARATOR = "|"
_NUMPY: dict[str, Callable[[np.ndarray], Any]] = {"max": np.max, "min": np.min, "sum": np.sum}


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

    def mine(self) -> dict[str, Tensor]:
        """This rank's values by names that also say how they are reduced: 0-dim tensors."""
        return {
            f"{LOGGED}{_reduction(metric)}{SEPARATOR}{key}": metric._forward_cache
            for key, metric in self._metrics()
            if not metric.meta.sync.should and not metric.meta.sync.rank_zero_only
        }

    def put(self, gathered: Gathered, weights: np.ndarray, dp_ranks: np.ndarray, warned: set[str]) -> dict[str, float]:
        """Make the step's values those of all ranks that have logged them.

        Args:
            gathered: what each rank's ``mine`` gave, among other numbers.
            weights: (ranks,) what each rank's step counts, for means.
            dp_ranks: (ranks,) which share of the global batch each rank has worked on: one rank of each is taken.
            warned: names of which has been said that not all ranks log them; grows.

        Returns:
            Values that other ranks have logged and this one has not, by the names that they were logged by.
        """
        own = dict(self._metrics())
        foreign = {}
        each = np.unique(dp_ranks, return_index=True)[1]  # a rank of each share, where all hold a value
        for number, name in enumerate(gathered.names):
            if not name.startswith(LOGGED):
                continue
            reduction, _, key = name.removeprefix(LOGGED).partition(SEPARATOR)
            held = gathered.held[:, number]
            ranks = each if held.all() else _of_each(dp_ranks, held)
            value = _over_ranks(gathered.values[ranks, number], weights[ranks], reduction)
            if key in own:
                cache = own[key]._forward_cache
                _put(own[key], torch.tensor(value, dtype=cache.dtype, device=cache.device))
            else:
                foreign[key.partition(".")[2]] = value
            if not held.all():
                _say_who_logs(key.partition(".")[2], held, reduction, warned)
        return foreign

    def _metrics(self) -> list[tuple[str, Any]]:
        results: Any = self._trainer._results or {}
        return [
            (key, metric)
            for key, metric in results.items()
            if key.startswith("training_step.")
            and metric.is_tensor
            and metric.meta.on_step
            and metric._forward_cache is not None  # not logged since the epoch began
        ]


def _of_each(dp_ranks: np.ndarray, held: np.ndarray) -> np.ndarray:
    """The first rank of those that hold a value, of each that has other samples."""
    holders = np.flatnonzero(held)
    return holders[np.unique(dp_ranks[holders], return_index=True)[1]]


def _over_ranks(values: np.ndarray, weights: np.ndarray, reduction: str) -> float:
    """One number out of several (1-dim each)."""
    if reduction == "mean":
        counting = weights > 0  # what a rank has logged of nothing need not be a number
        return float(np.average(values[counting], weights=weights[counting]) if counting.any() else values.mean())
    return float(_NUMPY[reduction](values))


def log_over_ranks(module: LightningModule, trainer: Trainer, group: dist.ProcessGroup) -> None:
    """Let what ``module`` logs over an evaluation or an epoch of training be reduced over ``group`` at its end.

    Lightning would do it for what is logged with ``sync_dist=True``, by a collective for each value, in which ranks
    that log different ones wait for each other for ever, or reduce one with another.
    """
    warned: set[str] = set()
    loops: list[tuple[Any, str]] = [
        (loop, "_store_dataloader_outputs")
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    ]
    for loop, ending in [(trainer.fit_loop, "on_advance_end"), *loops]:
        if ending not in vars(loop):  # once is enough
            setattr(loop, ending, _reducing_first(getattr(loop, ending), trainer, group, warned))
    if "log" in vars(module):
        return
    log = module.log

    def log_reduced(name: str, value: Any, *args: Any, **options: Any) -> None:
        # What is logged with each batch of an evaluation is reduced at once; the rest at the end, all together.
        each = options.get("on_step") and module._current_fx_name in EVALUATION and not isinstance(value, Metric)
        if each:
            # log_dict passes a False of its own, so that one cannot be told from a typed one.
            options["sync_dist"] = bool(options.get("sync_dist")) or not options.get("rank_zero_only", False)
        log(name, value, *args, **options)

    module.log = log_reduced  # type: ignore[method-assign]


def _reducing_first(
    end: Callable[[], Any], trainer: Trainer, group: dist.ProcessGroup, warned: set[str]
) -> Callable[[], Any]:
    def end_reduced() -> Any:
        _reduce_epoch(trainer, group, warned)
        return end()

    return end_reduced


def _reduce_epoch(trainer: Trainer, group: dist.ProcessGroup, warned: set[str]) -> None:
    """Reduce what has been added up over a loop; Lightning finds the results where it keeps its own. A collective.

    Raises:
        ConfigError: on every rank, where not all of them have logged a Metric, which has collectives of its own.
    """
    results: Any = trainer._results
    found = {} if results is None else dict(results.valid_items())
    mine: dict[str, tuple[str, float, float]] = {}
    for key, entry in found.items():
        if not entry.meta.on_epoch or entry.meta.sync.rank_zero_only or entry._computed is not None:
            continue
        if not entry.is_tensor:
            mine[key] = ("metric", 0.0, 0.0)
            continue
        reduction = _reduction(entry)
        count = float(entry.cumulated_batch_size) if reduction == "mean" else 1.0
        mine[key] = (reduction, float(entry.value), count)
    everyone: list[dict[str, tuple[str, float, float]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for key in dict.fromkeys(key for one in everyone for key in one):
        held = np.array([key in one for one in everyone])
        rows = [one[key] for one in everyone if key in one]
        reduction, name = rows[0][0], key.partition(".")[2]
        if reduction == "metric":
            if not held.all():
                raise ConfigError(
                    f"the metric {name!r} is logged by rank {_ranks(held, group)} and not by {_ranks(~held, group)}, "
                    f"but is computed by all of them together: log it on every rank"
                )
            continue
        if key in found:
            values, counts = np.array([row[1] for row in rows]), np.array([row[2] for row in rows])
            number = values.sum() / counts.sum() if reduction == "mean" else _NUMPY[reduction](values)
            # Where Lightning keeps what it has computed: what is added up stays this rank's own.
            found[key]._computed = torch.as_tensor(number, dtype=found[key].value.dtype, device=found[key].value.device)
        if not held.all():
            _say_who_logs(name, held, reduction, warned, group)


def _say_who_logs(
    name: str, held: np.ndarray, reduction: str, warned: set[str], group: dist.ProcessGroup | None = None
) -> None:
    if name in warned:
        return
    warned.add(name)
    if dist.get_rank() == 0:
        what = {"mean": "the mean", "sum": "the sum", "max": "the largest", "min": "the smallest"}[reduction]
        log.warning(
            "%s is logged by rank %s and not by %s: its value is %s over those that log it",
            name, _ranks(held, group), _ranks(~held, group), what,
        )  # fmt: skip


def _ranks(which: np.ndarray, group: dist.ProcessGroup | None = None) -> str:
    everyone = dist.get_process_group_ranks(group)
    numbers = [everyone[place] for place in np.flatnonzero(which)]
    return ", ".join(map(str, numbers)) if len(numbers) <= 8 else f"{numbers[0]} and {len(numbers) - 1} others"


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
