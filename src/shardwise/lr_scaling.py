"""Rules that turn the learning rate of one batch size into that of another. Pure functions of numbers.

A rule reads the global batch (samples of one optimizer step over all data-parallel ranks and all micro-batches), never
a rank's share of it and never the world size: the rate is then the same under every layout.
"""

import math
from collections.abc import Callable

from shardwise.errors import ConfigError


def no_scaling(base_lr: float, *, base_batch_size: int | None, global_size: int) -> float:
    """lr = base_lr, whatever the batch."""
    return base_lr


def linear_scaling(base_lr: float, *, base_batch_size: int | None, global_size: int) -> float:
    """lr = base_lr * global_size / base_batch_size.

    Goyal et al. 2017, "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv 1706.02677, section 2.1: k
    small steps of SGD are close to one step on their k batches at k times the rate, as long as the gradient changes
    little between them, which is not so at first: use it with a warm-up.
    """
    return base_lr * _batch_ratio("linear", base_batch_size=base_batch_size, global_size=global_size)


def sqrt_scaling(base_lr: float, *, base_batch_size: int | None, global_size: int) -> float:
    """lr = base_lr * sqrt(global_size / base_batch_size).

    Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997, section 5, and
    Hoffer et al. 2017, "Train longer, generalize better", arXiv 1705.08741, section 3.3: the root keeps the variance of
    an update, which is lr^2 / batch times the variance of one sample's gradient, as it was at the base batch.
    """
    return base_lr * math.sqrt(_batch_ratio("sqrt", base_batch_size=base_batch_size, global_size=global_size))


RULES: dict[str, Callable[..., float]] = {"none": no_scaling, "linear": linear_scaling, "sqrt": sqrt_scaling}


def effective_lr(rule: str, *, base_lr: float, base_batch_size: int | None, global_size: int) -> float:
    """The learning rate at the peak of the schedule.

    Args:
        rule: a name in RULES.
        base_lr: the rate that was found good at base_batch_size.
        base_batch_size: the global batch, in samples, that base_lr belongs to. Not read by the rule none.
        global_size: samples of one optimizer step over all ranks.

    Raises:
        ConfigError: an unknown rule, a rule without its base_batch_size, or a number out of range.
    """
    if rule not in RULES:
        raise ConfigError(f"lr_scaling={rule} is not a rule: choose one of {', '.join(RULES)}")
    if not (math.isfinite(base_lr) and base_lr >= 0):
        raise ConfigError(f"optimizer.lr={base_lr} is no learning rate: it has to be finite and at least 0")
    if global_size < 1:
        raise ConfigError(f"batch.global_size={global_size} is no batch: it has to be at least 1")
    return RULES[rule](base_lr, base_batch_size=base_batch_size, global_size=global_size)


def _batch_ratio(rule: str, *, base_batch_size: int | None, global_size: int) -> float:
    if base_batch_size is None:
        raise ConfigError(
            f"lr_scaling={rule} needs lr_scaling.base_batch_size, the global batch that optimizer.lr was found at: "
            f"type lr_scaling.base_batch_size={global_size} to leave the rate as it is at this batch"
        )
    if base_batch_size < 1:
        raise ConfigError(f"lr_scaling.base_batch_size={base_batch_size} is no batch: it has to be at least 1")
    return global_size / base_batch_size
