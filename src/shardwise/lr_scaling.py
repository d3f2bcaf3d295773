"""Rules that turn the learning rate of one batch size into that of another. Pure functions of numbers.

A rule reads the global batch (samples of one optimizer step over all data-parallel ranks and all micro-batches), never
a rank's share of it and never the world size: the rate is then the same under every layout. In the formulas
k = global_size / base_batch_size, and what a rule says besides the rate (weight decay, Adam's betas and eps, the length
of the warm-up) is what its source says, no more.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from shardwise.errors import ConfigError

BETAS, EPS = (0.9, 0.999), 1e-8
"""What Adam and AdamW take where nothing is typed."""

DECAYS_BY_RATE = ("SGD", "AdamW", "Adafactor", "Muon")
"""Ends of the names of optimizers of which one step takes lr * weight_decay of a weight away."""

DECAYS = {"torch.optim.AdamW": 0.01, "torch.optim.Muon": 0.1, "shardwise.optim.Muon": 0.1}
"""The weight decay that these take where none is typed; that of the others is 0, or not known here."""

OTHER_ADAMS = ("NAdam", "NAdamW", "RAdam", "SparseAdam")
"""Optimizers that are named like Adam and compute something else."""


class Change(NamedTuple):
    """An argument of the optimizer at the base batch, and at the batch of the training."""

    before: Any
    after: Any


@dataclass(frozen=True)
class Scaled:
    """What a rule makes of the arguments of an optimizer."""

    lr: float
    """The learning rate at the peak of the schedule."""
    changes: dict[str, Change] = field(default_factory=dict)
    """The other arguments that it changes (betas, eps, weight_decay)."""
    warmup_batch_size: int | None = None
    """Samples that a step of the warm-up stands for, where that is not the batch of the training."""


def no_scaling(
    optimizer: Mapping[str, Any], *, base_batch_size: int | None, global_size: int, corrections: bool = True
) -> Scaled:
    """lr' = lr, whatever the batch."""
    return Scaled(_lr(optimizer))


def linear_scaling(
    optimizer: Mapping[str, Any], *, base_batch_size: int, global_size: int, corrections: bool = True
) -> Scaled:
    """lr' = k lr, and nothing else.

    Goyal et al. 2017, "Accurate, large minibatch SGD: training ImageNet in 1 hour", arXiv 1706.02677, section 2.1: k
    small steps of SGD are close to one step on their k batches at k times the rate, as long as the gradient changes
    little between them, which is not so at first: use it with a warm-up.

    Weight decay stays (all other hyperparameters do; a step takes k times as much of a weight away, and there are k
    times fewer). So does momentum: their correction (section 3, remark 2) is for implementations that keep the rate
    inside the momentum buffer (equation 10), and torch.optim.SGD keeps it outside (equation 9).
    """
    return Scaled(_lr(optimizer) * (global_size / base_batch_size))


def sqrt_scaling(
    optimizer: Mapping[str, Any], *, base_batch_size: int, global_size: int, corrections: bool = True
) -> Scaled:
    """lr' = sqrt(k) lr, weight_decay' = sqrt(k) weight_decay.

    Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", arXiv 1404.5997, section 5, and
    Hoffer et al. 2017, "Train longer, generalize better", arXiv 1705.08741, section 3.3: the root keeps the variance of
    an update, which is lr^2 / batch times the variance of one sample's gradient, as it was at the base batch.

    The weight decay is Krizhevsky's: one step is to take as much of a weight away as k steps did, (1 - lr decay)^k =
    1 - lr' decay', so decay' = sqrt(k) decay where lr decay is small; momentum stays. It holds where a step does take
    lr * weight_decay of a weight away (DECAYS_BY_RATE, or decoupled_weight_decay=true). Others keep theirs: Adam's own
    weight decay is divided by the size of the gradients, which is sqrt(k) smaller where noise prevails, so that it
    needs no correction; a trust ratio (LARS, LAMB) changes it in its own way.

    Args:
        corrections: whether the weight decay follows.
    """
    root = math.sqrt(global_size / base_batch_size)
    changes = {}
    decay = optimizer.get("weight_decay", DECAYS.get(str(optimizer.get("_target_"))))
    by_rate = _name(optimizer).endswith(DECAYS_BY_RATE) or optimizer.get("decoupled_weight_decay") is True
    if corrections and by_rate and _is_number(decay) and decay and root != 1:
        changes["weight_decay"] = Change(decay, decay * root)
    return Scaled(_lr(optimizer) * root, changes)


def adam_sde(
    optimizer: Mapping[str, Any], *, base_batch_size: int, global_size: int, corrections: bool = True
) -> Scaled:
    """lr' = sqrt(k) lr, beta' = 1 - k (1 - beta) for both betas, eps' = eps / sqrt(k).

    Malladi et al. 2022, "On the SDEs and scaling rules for adaptive gradient algorithms", arXiv 2205.10287, the square
    root scaling rule for Adam: the stochastic differential equation that Adam approximates, in time lr^2 * steps, is
    then the same, so that equal numbers of samples lead to the same distribution of weights where the noise of the
    gradients prevails. The paper's rule has no weight decay in it, which stays.

    Raises:
        ConfigError: not Adam or AdamW, betas or eps that are none, or a batch so large that a beta is not above 0.
    """
    name = _name(optimizer)
    if not name.endswith(("Adam", "AdamW")) or name in OTHER_ADAMS:
        raise ConfigError(
            f"lr_scaling=adam_sde is derived for Adam and AdamW, not for {name or 'an optimizer without a name'}: type "
            f"lr_scaling=sqrt, or optimizer=adamw"
        )
    typed, eps = optimizer.get("betas", BETAS), optimizer.get("eps", EPS)
    pair = isinstance(typed, list | tuple) and len(typed) == 2
    if not pair or not all(_is_number(beta) and 0 <= beta < 1 for beta in typed):
        raise ConfigError(
            f"optimizer.betas={typed}: two numbers from 0 to below 1 are needed, such as optimizer.betas=[0.9,0.999]"
        )
    if not _is_number(eps) or eps < 0:
        raise ConfigError(f"optimizer.eps={eps}: a number of at least 0 is needed, such as optimizer.eps=1.0e-8")
    if global_size == base_batch_size:
        return Scaled(_lr(optimizer))
    # Exact in decimals: 10 times (1 - 0.9) is 1, and the beta then 0.
    betas = list(map(float, typed))
    exact = [1 - Fraction(global_size, base_batch_size) * (1 - Fraction(str(beta))) for beta in betas]
    if min(exact) <= 0:
        at = exact.index(min(exact))
        largest = max(base_batch_size, math.ceil(base_batch_size / (1 - Fraction(str(betas[at])))) - 1)
        raise ConfigError(
            f"batch.global_size={global_size}: lr_scaling=adam_sde from base batch {base_batch_size} would make "
            f"beta{at + 1}={betas[at]:g} {float(exact[at]):g}, and above 0 is needed: type "
            f"batch.global_size={largest} or less, or lr_scaling=sqrt"
        )
    root = math.sqrt(global_size / base_batch_size)
    changes = {"betas": Change(betas, list(map(float, exact))), "eps": Change(float(eps), eps / root)}
    return Scaled(_lr(optimizer) * root, changes)


def legw(optimizer: Mapping[str, Any], *, base_batch_size: int, global_size: int, corrections: bool = True) -> Scaled:
    """lr' = sqrt(k) lr, and a warm-up of k times as many epochs (or samples): of as many steps as at the base batch.

    You et al. 2019, "Large-batch training for LSTM and beyond", arXiv 1901.08584: linear-epoch gradual warm-up. Without
    a warm-up it says nothing that sqrt does not. It says nothing of weight decay, which stays.
    """
    return Scaled(
        _lr(optimizer) * math.sqrt(global_size / base_batch_size),
        warmup_batch_size=base_batch_size,
    )


RULES: dict[str, Callable[..., Scaled]] = {
    "none": no_scaling,
    "linear": linear_scaling,
    "sqrt": sqrt_scaling,
    "adam_sde": adam_sde,
    "legw": legw,
}


def scale(
    rule: str,
    *,
    optimizer: Mapping[str, Any],
    base_batch_size: int | None,
    global_size: int,
    corrections: bool = True,
) -> Scaled:
    """What a rule makes of an optimizer's arguments.

    Args:
        rule: a name in RULES.
        optimizer: its ``_target_`` and arguments, ``lr`` among them, as they were found good at base_batch_size.
        base_batch_size: the global batch, in samples, that they belong to. Not read by the rule none.
        global_size: samples of one optimizer step over all ranks.
        corrections: whether the weight decay follows, where the rule's source says how.

    Raises:
        ConfigError: an unknown rule, a rule without its base_batch_size or for other optimizers, or a number out of
            range.
    """
    if rule not in RULES:
        raise ConfigError(f"lr_scaling={rule} is not a rule: choose one of {', '.join(RULES)}")
    lr: Any = optimizer.get("lr")
    if not _is_number(lr) or lr < 0:
        raise ConfigError(f"optimizer.lr={lr} is no learning rate: it has to be finite and at least 0")
    if global_size < 1:
        raise ConfigError(f"batch.global_size={global_size} is no batch: it has to be at least 1")
    if rule != "none" and base_batch_size is None:
        raise ConfigError(
            f"lr_scaling={rule} needs lr_scaling.base_batch_size, the global batch that optimizer.lr was found at: "
            f"type lr_scaling.base_batch_size={global_size} to leave the rate as it is at this batch"
        )
    if rule != "none" and base_batch_size is not None and base_batch_size < 1:
        raise ConfigError(f"lr_scaling.base_batch_size={base_batch_size} is no batch: it has to be at least 1")
    return RULES[rule](optimizer, base_batch_size=base_batch_size, global_size=global_size, corrections=corrections)


def _lr(optimizer: Mapping[str, Any]) -> float:
    return float(optimizer["lr"])


def _name(optimizer: Mapping[str, Any]) -> str:
    """The class, as its ``_target_`` calls it: rules are applied before anything is imported."""
    return str(optimizer.get("_target_") or "").rpartition(".")[2]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
