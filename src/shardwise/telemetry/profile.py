"""A window of training steps under PyTorch's profiler: a trace a rank, and a picture of one step."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.config import Config, ProfileConfig
from shardwise.errors import ConfigError
from shardwise.resolve import Resolved
from shardwise.step_clock import StepClock
from shardwise.telemetry.loop import watch
from shardwise.telemetry.trace import MARK, WAITING, add_phases

log = logging.getLogger(__name__)

FOLDER = "profile"
"""In the run's folder."""
MEMORY_EVENTS = 100_000
"""Allocations that a snapshot of a GPU's memory remembers."""


class ProfileSteps(Callback):
    """Looks at optimizer steps with PyTorch's profiler, on the ranks that are named; the others pay nothing.

    A profiled rank leaves ``rank_<k>.trace.json.gz`` (for ui.perfetto.dev or chrome://tracing), ``rank_<k>.html`` (the
    timeline of one step, and tables), and on a GPU ``rank_<k>.memory.pickle`` (for pytorch.org/memory_viz), as soon as
    the window is over. What the strategy's clock charges is a row of the trace. Nothing that is trained changes; a
    profiled step takes longer. No GPU has run the part about memory.

    Needs ``Trainer(strategy=MeshStrategy(...))``.

    Args:
        folder: where the files go; made if need be.
        start: optimizer steps of this process before the window, at least 1.
        steps: optimizer steps in the window.
        ranks: global ranks that are looked at.
        draw: writes the page: called with the path of the trace, that of the page, and keywords ``rank`` and ``world``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        start: int = 10,
        steps: int = 3,
        ranks: Sequence[int] = (0,),
        draw: Callable[..., None] | None = None,
    ) -> None:
        self.folder = folder
        self.start = start
        self.steps = steps
        self.ranks = tuple(ranks)
        self._draw = draw
        self._before = 0  # steps done when this process began to train
        self._mine = False
        self._profiler: profile | None = None
        self._started = False
        self._recording = contextlib.ExitStack()
        self._step = contextlib.ExitStack()
        self._notes: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before = trainer.global_step
        self._mine = trainer.global_rank in self.ranks
        self._mine = self._mine and not self._too_long(trainer)
        if self._mine and self.start == 1:
            self._prepare(trainer)

    def _too_long(self, trainer: Trainer) -> bool:
        """Whether training ends before the window does, as it can where a run goes on from a checkpoint."""
        return 0 <= trainer.max_steps < self._last

    @property
    def _first(self) -> int:
        """The first step of the window, as steps are counted from 1."""
        return self._before + self.start + 1

    @property
    def _last(self) -> int:
        return self._before + self.start + self.steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = trainer.global_step
        if not self._mine:
            return
        if done == self._first - 2:
            self._prepare(trainer)
        elif done == self._first - 1:
            self._begin(trainer)
        elif self._first <= done < self._last:
            self._step.close()
            self._step.enter_context(record_function(f"step {done + 1}"))
        elif done == self._last:
            self._finish(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None and trainer.global_step >= self._first:
            self._finish(trainer)  # a time limit or early stopping has cut the window short
        self._let_go()
        if trainer.is_global_zero:
            print(self._summary(trainer), flush=True)
        for note in self._notes:
            log.warning(note)
        self._notes = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go()

    # ---- the window --------------------------------------------------------------------------------------------------

    def _prepare(self, trainer: Trainer) -> None:
        """Load and set up what the profiler needs, so that the first step of the window does not."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if _on_gpu(trainer) else [])]
        with watch(trainer).phase("logging"), _quiet():
            self._profiler, self._started = profile(activities=activities), False
            self._profiler.prepare_trace()

    def _begin(self, trainer: Trainer) -> None:
        assert self._profiler is not None
        if _on_gpu(trainer):
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self._recording.callback(torch.cuda.memory._record_memory_history, enabled=None)
        with _quiet():
            self._profiler.start_trace()
        self._started = True
        self._step.enter_context(record_function(f"step {self._first}"))
        self._recording.enter_context(marked(watch(trainer)))

    def _finish(self, trainer: Trainer) -> None:
        """Write everything that this rank has seen; what cannot be written must not end the training."""
        self._step.close()
        profiler, rank = self._profiler, trainer.global_rank
        assert profiler is not None
        trace = self.folder / f"rank_{rank}.trace.json.gz"
        with watch(trainer).phase("logging"), _quiet():  # peers wait meanwhile: this is nobody's time of training
            if _on_gpu(trainer):
                torch.cuda.synchronize()
            profiler.stop()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                if _on_gpu(trainer):
                    torch.cuda.memory._dump_snapshot(str(self.folder / f"rank_{rank}.memory.pickle"))
                profiler.export_chrome_trace(str(trace))
                add_phases(trace, last_step=trainer.global_step)
            except (OSError, RuntimeError) as error:
                self._notes.append(f"no profile of rank {rank}: {' '.join(str(error).split())}")
            else:
                self._picture(trace, rank=rank, world=trainer.world_size)
        self._profiler = None
        self._let_go()

    def _picture(self, trace: Path, *, rank: int, world: int) -> None:
        if self._draw is None:
            return
        try:
            self._draw(trace, self.folder / f"rank_{rank}.html", rank=rank, world=world)
        except Exception as error:  # the trace is there, and a drawing is no reason to end a training
            self._notes.append(f"no picture of {trace}: {type(error).__name__}: {' '.join(str(error).split())}")

    def _let_go(self) -> None:
        """Leave the clock, the memory's history and the profiler as they were."""
        self._step.close()
        self._recording.close()
        if self._profiler is not None:
            with _quiet():
                if not self._started:  # what is prepared and not started cannot be stopped
                    self._profiler.start_trace()
                self._profiler.stop()
            self._profiler = None

    def _summary(self, trainer: Trainer) -> str:
        steps = trainer.global_step - self._before
        if steps <= self.start:
            return (
                f"profile=step: nothing was profiled, as the window begins after {self.start} steps and this process "
                f"made {steps}: type a smaller profile.start"
            )
        if self._too_long(trainer):
            return (
                f"profile=step: nothing was profiled, as its window (profile.start={self.start} profile.steps="
                f"{self.steps}) is longer than the {steps} steps that this process had left"
            )
        last = min(self._last, trainer.global_step)
        window = f"step {last}" if last == self._first else f"steps {self._first} to {last}"
        wanted = f" ({self.steps} were asked for)" if last < self._last else ""
        one = len(self.ranks) == 1
        ranks = f"rank{'' if one else 's'} {', '.join(map(str, self.ranks))}"
        files = self.folder / f"rank_{self.ranks[0] if one else '<k>'}.html"
        return f"profile of {window}{wanted} on {ranks}: {files} (traces beside it open in https://ui.perfetto.dev)"


def _on_gpu(trainer: Trainer) -> bool:
    return trainer.strategy.root_device.type == "cuda"


@contextlib.contextmanager
def marked(clock: StepClock) -> Iterator[None]:
    """Within this block the profiler is told what a clock charges, at each change."""
    switch = clock.switch

    def mark(name: str) -> None:
        collective = f" {clock.collective[0]}" if name == WAITING and clock.collective is not None else ""
        with record_function(f"{MARK}{name}{collective}"):
            pass

    def marking(name: str) -> str:
        before = switch(name)
        mark(name)
        return before

    mark(clock.current)
    clock.switch = marking  # type: ignore[method-assign]
    try:
        yield
    finally:
        del clock.switch  # the method of its class again


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within this block the profiler's library says nothing of its own inner life on stderr."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "9"
    try:
        yield
    finally:
        del os.environ[name]


# ---- what can be seen before -----------------------------------------------------------------------------------------


def check_profile(resolved: Resolved) -> None:
    """Whether the ranks exist, and the window fits where the number of steps is typed.

    Raises:
        ConfigError: one of them does not, or something else of the configuration excludes a profile.
    """
    config = resolved.config
    wanted, trainer, size = config.profile, config.trainer, resolved.world.size
    if wanted.kind == "none":
        return
    legal = f"profile.ranks=[{','.join(map(str, range(min(size, 3))))}{',...' if size > 3 else ''}]"
    if not wanted.ranks:
        raise ConfigError(f"profile.ranks=[]: no rank is left to be profiled: type {legal}, or profile=none")
    for rank in wanted.ranks:
        if not 0 <= rank < size:
            one = "1 rank, which is 0" if size == 1 else f"{size} ranks, from 0 to {size - 1}"
            raise ConfigError(f"profile.ranks: there is no rank {rank}: the run has {one}: type profile.ranks=[0]")
    if trainer.barebones:
        raise ConfigError(
            "trainer.barebones=true leaves everything optional out, and so profile=step: drop one of them"
        )
    if trainer.profiler == "pytorch":
        raise ConfigError(
            "trainer.profiler=pytorch beside profile=step: PyTorch has one profiler at a time: leave one of them out"
        )
    if trainer.max_steps > 0 or trainer.fast_dev_run:
        check_window(config, _typed_steps(config))


def _typed_steps(config: Config) -> int:
    limits = [config.trainer.max_steps] if config.trainer.max_steps > 0 else []
    return min([*limits, *([int(config.trainer.fast_dev_run)] if config.trainer.fast_dev_run else [])])


def check_window(config: Config, total: int) -> None:
    """Whether the window of a training from its beginning lies within its ``total`` optimizer steps.

    Raises:
        ConfigError: it does not.
    """
    wanted: ProfileConfig = config.profile
    if wanted.kind == "none" or wanted.start + wanted.steps <= total:
        return
    why = f"trainer.fast_dev_run={int(config.trainer.fast_dev_run)}" if config.trainer.fast_dev_run else "training"
    if total < 2:
        raise ConfigError(f"profile=step: {why} makes {total} optimizer step, and the first is never profiled: drop it")
    steps = min(wanted.steps, total - 1)
    raise ConfigError(
        f"profile.start={wanted.start} and profile.steps={wanted.steps} need {wanted.start + wanted.steps} optimizer "
        f"steps, and {why} makes {total}: type profile.start={total - steps} profile.steps={steps}, or less"
    )
