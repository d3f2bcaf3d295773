"""What Lightning's loop does around a step, told to the strategy's clock: waiting for data, logging, evaluation."""

from typing import Any

from pytorch_lightning import Trainer

from shardwise.errors import ConfigError
from shardwise.step_clock import StepClock


def watch(trainer: Trainer) -> StepClock:
    """Start the clock of the trainer's strategy, if it stands, and let the loop tell it of its phases.

    To be called when training starts, or before it; again at will. The strategy stops the clock when it is torn down.

    Raises:
        ConfigError: the trainer's strategy has no clock.
    """
    strategy: Any = trainer.strategy
    clock = getattr(strategy, "clock", None)
    if not isinstance(clock, StepClock):
        raise ConfigError(
            f"Trainer(strategy={type(strategy).__name__}): the time of a step is told apart by MeshStrategy only: "
            f"Trainer(strategy=MeshStrategy())"
        )
    if not getattr(trainer, "_phases_told", False):
        trainer._phases_told = True  # type: ignore[attr-defined]
        _tell(trainer, clock)
    if not clock.running:
        strategy.start_clock()
    return clock


def _tell(trainer: Trainer, clock: StepClock) -> None:
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    # Also where the workers of a loader start anew with an epoch.
    _within(loop, "on_run_start", clock, "data")
    _between(loop, "_on_before_fetch", "_on_after_fetch", clock, "data")
    _within(loop.val_loop, "run", clock, "evaluation")
    for method in ("update_train_step_metrics", "update_train_epoch_metrics", "log_metrics"):
        _within(connector, method, clock, "logging")
    _within(loop, "_save_loggers_on_train_batch_end", clock, "logging")
    _within(trainer, "save_checkpoint", clock, "checkpoint")  # Lightning's own; the framework's knows the clock


def _within(owner: Any, method: str, clock: StepClock, phase: str) -> None:
    """Charge the time in ``owner.method`` to ``phase``."""
    inner = getattr(owner, method)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with clock.phase(phase):
            return inner(*args, **kwargs)

    setattr(owner, method, timed)


def _between(owner: Any, first: str, second: str, clock: StepClock, phase: str) -> None:
    """Charge the time from the call of ``owner.first`` to that of ``owner.second`` to ``phase``."""
    begin, end = getattr(owner, first), getattr(owner, second)
    around = "other"

    def timed_begin() -> None:
        nonlocal around
        around = clock.switch(phase)
        begin()

    def timed_end() -> None:
        end()
        clock.switch(around)

    setattr(owner, first, timed_begin)
    setattr(owner, second, timed_end)
