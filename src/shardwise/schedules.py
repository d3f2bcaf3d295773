"""Learning-rate schedules: the factor on the peak rate as a pure function of the optimizer step.

A step is one update of the parameters, counted from 0, whatever the number of micro-batches in it. With T total steps,
of which w are warm-up:

    step 0 .. w-1       (step + 1) / w: 1/w at step 0, so that the first update is not wasted, and 1 at step w-1
    step w-1 .. T       from 1 down to min_ratio in the shape of the kind (from step 0 without warm-up)

min_ratio is reached exactly at step T, one after the last update: with min_ratio=0 the last update is not wasted
either, and its factor is as near to 0 as one step of the shape. After T the factor stays.
"""

import math
from collections.abc import Callable
from difflib import get_close_matches
from fractions import Fraction

from shardwise.errors import ConfigError


def cosine(progress: float) -> float:
    """(1 + cos(pi p)) / 2. Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, equation 5, without restarts."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def linear(progress: float) -> float:
    """1 - p. Goyal et al. 2017 call it linear decay; polynomial decay of power 1."""
    return 1.0 - progress


def constant(progress: float) -> float:
    """1."""
    return 1.0


SHAPES: dict[str, Callable[[float], float]] = {"cosine": cosine, "linear": linear, "constant": constant, "wsd": linear}
"""Kind -> the share that is left at progress p in [0, 1] of the way down. wsd (warmup-stable-decay, Hu et al. 2024,
"MiniCPM", arXiv 2404.06395, section 4.2) is 1 until the last part, which goes down linearly (Haegele et al. 2024, arXiv
2405.18392, find it as good as a cosine of the same length)."""


def check(
    kind: str, *, total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0, decay_fraction: float = 0.2
) -> None:
    """Raise ConfigError if no schedule can be made of these numbers (see multiplier for what they are)."""
    if kind not in SHAPES:
        near = get_close_matches(str(kind), SHAPES, n=1)
        hint = f"did you mean schedule={near[0]}?" if near else f"choose one of {', '.join(SHAPES)}"
        raise ConfigError(f"schedule={kind} is not a schedule: {hint}")
    if total_steps < 1:
        raise ConfigError(f"a schedule needs at least 1 optimizer step, not {total_steps}: type trainer.max_steps=...")
    if not 0 <= warmup_steps <= total_steps:
        raise ConfigError(
            f"schedule.warmup_steps={warmup_steps} does not fit a training of {total_steps} optimizer steps: "
            f"type a number from 0 to {total_steps}"
        )
    if not 0.0 <= min_ratio <= 1.0:
        raise ConfigError(f"schedule.min_ratio={min_ratio} is a share of the peak rate: type a number from 0 to 1")
    if not 0.0 <= decay_fraction <= 1.0:
        raise ConfigError(
            f"schedule.decay_fraction={decay_fraction} is a share of the steps: type a number from 0 to 1"
        )
    if kind == "wsd" and warmup_steps + _decay_steps(total_steps, decay_fraction) > total_steps:
        raise ConfigError(
            f"schedule=wsd: {warmup_steps} steps of warm-up and {_decay_steps(total_steps, decay_fraction)} of decay "
            f"(schedule.decay_fraction={decay_fraction}) are more than the training's {total_steps}: lower one of them"
        )


def multiplier(
    kind: str,
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    min_ratio: float = 0.0,
    decay_fraction: float = 0.2,
) -> float:
    """The factor on the peak learning rate for the update number `step`.

    Args:
        kind: cosine, linear, constant or wsd.
        step: optimizer steps done so far; 0 is the first update.
        total_steps: optimizer steps of the whole training.
        warmup_steps: how many of them are linear warm-up.
        min_ratio: the factor at step total_steps. Not read by constant.
        decay_fraction: the share of total_steps that wsd goes down in, at the end. Not read by the others.

    Raises:
        ConfigError: numbers that make no schedule, such as a warm-up that is longer than the training.
    """
    check(
        kind,
        total_steps=total_steps,
        warmup_steps=warmup_steps,
        min_ratio=min_ratio,
        decay_fraction=decay_fraction,
    )
    assert step >= 0, f"an optimizer step counts from 0, not {step}"
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind == "wsd":
        start = total_steps - _decay_steps(total_steps, decay_fraction)
    else:
        start = max(warmup_steps - 1, 0)
    if start == total_steps:  # wsd without decay
        return 1.0
    progress = min(max((step - start) / (total_steps - start), 0.0), 1.0)
    return min_ratio + (1.0 - min_ratio) * SHAPES[kind](progress)


def warmup_in_steps(samples: Fraction | int, *, batch_size: int, done_steps: int = 0, done_samples: int = 0) -> int:
    """Optimizer steps of a warm-up that is given in samples.

    A training that goes on with batches of another size keeps its place: what is left of the warm-up is made of batches
    of now, and a warm-up that lies behind is as many steps as it was, if all that is done was of one size.

    Args:
        samples: of the whole warm-up.
        batch_size: samples of an optimizer step from now on.
        done_steps: optimizer steps that are done.
        done_samples: samples of these.
    """
    if samples <= 0:
        return 0
    if done_samples >= samples:
        return math.ceil(Fraction(samples) * done_steps / done_samples)
    return done_steps + math.ceil(Fraction(samples - done_samples) / batch_size)


def _decay_steps(total_steps: int, decay_fraction: float) -> int:
    return round(decay_fraction * total_steps)
