"""From the number of training samples to counts of optimizer steps: how long, how much of it warm-up.

Pure functions of numbers, as ``resolve.py``, which knows everything else.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from shardwise import schedules
from shardwise.config import Config
from shardwise.errors import ConfigError
from shardwise.resolve import Resolved, typed_warmup

DEFAULT_EPOCHS = 20
"""Passes over the samples where neither trainer.max_epochs nor trainer.max_steps is given."""


@dataclass(frozen=True)
class Steps:
    """What the number of training samples adds: counts in optimizer steps."""

    samples_per_epoch: int | None
    """None for a stream without a length."""
    steps_per_epoch: int | None
    total: int
    """Optimizer steps of the whole training."""
    scheduled: int
    """Optimizer steps over which the schedule stretches: those of the whole training, also where fast_dev_run stops."""
    val_check_interval: int | float | None
    """Lightning's argument: a number of steps, or 1.0 for the end of an epoch."""
    warmup: int = 0
    """Optimizer steps of the schedule's warm-up, whatever its length was typed in."""
    unscaled_warmup: int = 0
    """What these would be without the learning-rate rule."""
    warmup_samples: Fraction | None = None
    """Of a warm-up that was typed in samples or epochs."""


@dataclass(frozen=True)
class Done:
    """What of a training lies behind its checkpoint."""

    step: int
    """Optimizer steps."""
    samples_seen: int
    """Samples of these steps, whose batches may have been of another size than those to come."""
    warmup: tuple[Fraction, int] | None = None
    """Samples of the warm-up, and the steps (``Steps.unscaled_warmup``) that they were to be; None if not known."""


def resolve_steps(resolved: Resolved, num_samples: int | None, *, done: Done | None = None) -> Steps:
    """Turn epochs and fractions of an epoch into optimizer steps.

    With N samples, a global batch of B and E epochs, a training takes ceil(EN/B) steps. One that goes on from step s,
    where P samples were seen, ends at step s + ceil((EN-P)/B), which is the same unless B has changed; a typed
    max_steps counts steps from the start either way. So does warmup_steps, while a warm-up in samples or epochs ends
    with the sample that it would have ended with.

    Args:
        resolved: the resolved configuration.
        num_samples: training samples, or None where the data are a stream without a length.
        done: what lies behind a training that goes on from a checkpoint.

    Raises:
        ConfigError: a count needs the length that a stream does not have, epochs are limited to a number of batches
            whose size has changed, or the schedule does not fit.
    """
    trainer, size = resolved.config.trainer, resolved.batch.global_size
    whole = None if num_samples is None else math.ceil(num_samples / size)
    per_epoch = _limited(whole, trainer.limit_train_batches)
    limited = per_epoch is not None and per_epoch != whole
    warmup_samples = _warmup_samples(resolved.config, num_samples, size=size)
    warmup, unscaled_warmup = _warmup(resolved, num_samples, done=done)
    totals = [trainer.max_steps] if trainer.max_steps > 0 else []
    epochs = trainer.max_epochs
    if epochs is None and not totals:
        # Not a default of the field: whoever types max_steps means that many, not the smaller of two limits.
        epochs = DEFAULT_EPOCHS
    if epochs is not None:
        if done is not None:
            instead = "trainer.max_epochs=null trainer.max_steps=<all steps>"
            _check_limit(done, size, limit=trainer.limit_train_batches, instead=instead)
        if limited and per_epoch is not None:
            totals.append(max(epochs * per_epoch, 0 if done is None else done.step))
        elif num_samples is not None:
            step, seen = (0, 0) if done is None else (done.step, done.samples_seen)
            totals.append(step + max(0, math.ceil((epochs * num_samples - seen) / size)))
        elif not totals and trainer.fast_dev_run:
            totals.append(int(trainer.fast_dev_run) + warmup)
        elif not totals:
            raise ConfigError("an epoch of unknown length: type trainer.max_steps=...")
    interval = trainer.val_check_interval
    if isinstance(interval, float) and interval < 1:
        if per_epoch is None:
            raise ConfigError(
                f"trainer.val_check_interval={interval} of an epoch of unknown length: type a number of steps"
            )
        interval = max(1, int(per_epoch * interval))
    across = trainer.check_val_every_n_epoch is None
    if isinstance(interval, int) and not across and per_epoch is not None and interval > per_epoch:
        # Lightning counts from the start of each epoch, and would never get there.
        raise ConfigError(
            f"trainer.val_check_interval={interval} is more than the {per_epoch} steps of an epoch: type "
            f"trainer.check_val_every_n_epoch=null to count steps across epochs, or a number up to {per_epoch}"
        )
    scheduled = min(totals)
    schedule = resolved.config.schedule
    name = typed_warmup(resolved.config)
    if warmup > scheduled and name in ("warmup_samples", "warmup_epochs"):
        rule = f" with lr_scaling={resolved.config.lr_scaling.rule}" if warmup != unscaled_warmup else ""
        raise ConfigError(
            f"schedule.{name}={getattr(schedule, name)} is {warmup} steps{rule}, and does not fit a training of "
            f"{scheduled} optimizer steps: type fewer, or schedule.{name}=0 and schedule.warmup_steps=<a number up to "
            f"{scheduled}>"
        )
    schedules.check(
        schedule.kind,
        total_steps=scheduled,
        warmup_steps=warmup,
        min_ratio=schedule.min_ratio,
        decay_fraction=schedule.decay_fraction,
    )
    total = min(scheduled, int(trainer.fast_dev_run)) if trainer.fast_dev_run else scheduled
    return Steps(num_samples, per_epoch, total, scheduled, interval, warmup, unscaled_warmup, warmup_samples)


def _limited(whole: int | None, limit: int | float | None) -> int | None:
    """Optimizer steps in an epoch of ``whole`` (None: of unknown length) under ``trainer.limit_train_batches``."""
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return whole
    if isinstance(limit, int):
        return limit if whole is None else min(limit, whole)
    if whole is None:
        raise ConfigError(f"trainer.limit_train_batches={limit} of an epoch of unknown length: type a number of steps")
    return max(1, int(limit * whole))


def _check_limit(done: Done, size: int, *, limit: int | float | None, instead: str) -> None:
    """Refuse epochs of a number of batches that are no longer as large as those that such epochs were made of."""
    if done.samples_seen == done.step * size or limit is None or (isinstance(limit, float) and limit == 1.0):
        return
    then, rest = divmod(done.samples_seen, max(done.step, 1))
    same = f"batch.global_size={then}, or " if done.step and not rest else ""
    raise ConfigError(
        f"batch.global_size={size}: the {done.step} steps that are done saw {done.samples_seen} samples, and epochs of "
        f"trainer.limit_train_batches={limit} cannot go on with batches of another size: type {same}{instead}"
    )


def _warmup_samples(config: Config, num_samples: int | None, *, size: int) -> Fraction | None:
    """Samples of a warm-up that is typed in samples or epochs; None for one in steps, and for none.

    Args:
        config: the configuration.
        num_samples: training samples, or None where nobody knows.
        size: samples of a step, which an epoch of a limited number of steps is made of.
    """
    schedule, name = config.schedule, typed_warmup(config)
    if name is None or name == "warmup_steps":
        return None
    if name == "warmup_samples":
        return Fraction(schedule.warmup_samples or 0)
    whole = None if num_samples is None else math.ceil(num_samples / size)
    steps = _limited(whole, config.trainer.limit_train_batches)
    epoch_samples = num_samples if steps is None or steps == whole else steps * size
    if epoch_samples is None:
        raise ConfigError(
            f"schedule.warmup_epochs={schedule.warmup_epochs} of an epoch of unknown length: type "
            f"schedule.warmup_samples=... or schedule.warmup_steps=..."
        )
    return Fraction(str(schedule.warmup_epochs)) * epoch_samples


def _warmup(resolved: Resolved, num_samples: int | None, *, done: Done | None) -> tuple[int, int]:
    """Optimizer steps of warm-up, and what they would be without the rule.

    Args:
        resolved: the resolved configuration.
        num_samples: training samples, or None where nobody knows.
        done: what lies behind a training that goes on from a checkpoint.
    """
    config, size = resolved.config, resolved.batch.global_size
    samples = _warmup_samples(config, num_samples, size=size)
    if samples is None:
        return config.schedule.warmup_steps, config.schedule.warmup_steps
    base = resolved.scaled.warmup_batch_size
    if done is not None and base is None and typed_warmup(config) == "warmup_epochs":
        instead = "schedule.warmup_epochs=null schedule.warmup_samples=<all samples of the warm-up>"
        _check_limit(done, size, limit=config.trainer.limit_train_batches, instead=instead)
    if done is not None and done.warmup is not None and done.warmup[0] == samples <= done.samples_seen:
        unscaled = done.warmup[1]  # the steps behind may have been of several sizes: only who made them knows
    else:
        behind = {} if done is None else {"done_steps": done.step, "done_samples": done.samples_seen}
        unscaled = schedules.warmup_in_steps(samples, batch_size=size, **behind)
    if base is None:
        return unscaled, unscaled
    # As many steps as at the base batch, so that there is no place to be kept.
    samples = _warmup_samples(config, num_samples, size=base)
    assert samples is not None
    return schedules.warmup_in_steps(samples, batch_size=base), unscaled
