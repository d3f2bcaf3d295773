"""Where a rank's time goes: the clock by itself, and what it says of trainings in which the time is known."""

import _thread
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers.logger import DummyLogger
from pytorch_lightning.profilers import SimpleProfiler
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.utils.data import DataLoader, Dataset

from pool import RankPool
from shardwise.checkpoint.saving import SaveCheckpoints
from shardwise.errors import ConfigError
from shardwise.parallel.timed_collectives import time_collectives
from shardwise.step_clock import PHASES, StepClock
from shardwise.telemetry.loop import watch
from training import PLANS, Planned, Recorder, make_trainer, shares, world_size

DELAY = 0.05
"""Seconds by which something is slow."""
STEPS = 6
"""Of which the first two are not counted."""


# ---- the clock -------------------------------------------------------------------------------------------------------


class Moments:
    """Stand-ins for events of a GPU: a stream's time, which passes as a test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded = 0
        self.waited_for: list[float] = []

    def record(self) -> Any:
        self.recorded += 1
        return Moment(self, self.now)


class Moment:
    def __init__(self, moments: Moments, at: float) -> None:
        self.moments, self.at = moments, at

    def elapsed_time(self, end_event: Any) -> float:
        return 1000 * (end_event.at - self.at)

    def synchronize(self) -> None:
        self.moments.waited_for.append(self.at)


class Seconds:
    """A host's time, which passes as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


@pytest.fixture(params=["host", "events"])
def timed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[StepClock, Any]:
    """A clock that goes, and the time that it goes by."""
    clock = StepClock()
    if request.param == "host":
        source: Any = Seconds(monkeypatch)
    else:
        source = Moments()
        clock.record = source.record
    clock.start()
    return clock, source


def spent(clock: StepClock) -> dict[str, float]:
    """What is not zero."""
    seconds = clock.take()
    assert tuple(seconds) == PHASES
    return {name: pytest.approx(value) for name, value in seconds.items() if value}


def test_a_phase_takes_its_time_from_the_one_around_it(timed: tuple[StepClock, Any]) -> None:
    clock, source = timed
    source.now += 1
    with clock.phase("optimizer"):
        source.now += 2
        with clock.phase("forward"):
            source.now += 4
            assert clock.current == "forward"
        source.now += 8
        with clock.phase("optimizer"):
            source.now += 16
    source.now += 32
    assert spent(clock) == {"other": 33, "optimizer": 26, "forward": 4}
    assert spent(clock) == {}


def test_an_error_ends_a_phase(timed: tuple[StepClock, Any]) -> None:
    clock, source = timed

    def fail() -> None:
        with clock.phase("backward"):
            source.now += 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    source.now += 2
    assert (clock.current, spent(clock)) == ("other", {"backward": 1, "other": 2})


def test_what_is_taken_inside_of_a_phase_is_counted_once(timed: tuple[StepClock, Any]) -> None:
    clock, source = timed
    with clock.phase("logging"):
        source.now += 1
        assert spent(clock) == {"logging": 1}
        source.now += 2
    assert spent(clock) == {"logging": 2}


def test_waiting_is_charged_once_and_said_to_other_threads(timed: tuple[StepClock, Any]) -> None:
    clock, source = timed
    clock.step = 7
    with clock.phase("backward"):
        around = clock.begin_waiting("allreduce")
        assert clock.begin_waiting("part of it") is None
        source.now += 3
        clock.end_waiting(None)
        assert clock.collective is not None
        assert clock.collective[0] == "allreduce"
        assert clock.current == "communication"
        clock.end_waiting(around)
        source.now += 1
    assert clock.collective is None
    assert clock.last_collective is not None
    assert clock.last_collective[:3] == ("allreduce", "backward", 7)
    assert abs(clock.last_collective.since - time.monotonic()) < 60
    assert spent(clock) == {"communication": 3, "backward": 1}


def test_a_clock_stands_until_it_is_started_and_when_it_is_stopped(timed: tuple[StepClock, Any]) -> None:
    clock, source = timed
    source.now += 1
    clock.stop()
    source.now += 1
    assert clock.begin_waiting("allreduce") is None
    with clock.phase("data"):
        source.now += 1
    assert (spent(clock), clock.running) == ({"other": 1}, False)
    clock.start()
    source.now += 1
    assert (spent(clock), clock.running) == ({"other": 1}, True)


def test_events_are_waited_for_when_they_are_taken_and_not_before() -> None:
    clock, source = StepClock(), Moments()
    clock.record = source.record
    clock.start()
    for _ in range(3):
        source.now += 1
        with clock.phase("forward"), clock.phase("forward"):
            source.now += 1
    assert (source.waited_for, source.recorded) == ([], 7)  # a phase in itself is no switch
    clock.take()
    assert source.waited_for == [6.0]


# ---- trainings in which the time is known ----------------------------------------------------------------------------


class Timing(pl.Callback):
    """What the clock has counted, and the wall, from the end of the second step to that of the last."""

    def __init__(self) -> None:
        self.wall = 0.0
        self.split: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.clock = watch(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.clock.take()
            self.wall = time.perf_counter()
        elif batch_idx == STEPS - 1:
            self.split, self.wall = self.clock.take(), time.perf_counter() - self.wall

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        assert watch(trainer) is self.clock


class Patience(pl.Callback):
    """Rank 0 tells the others, in each step, that it has waited DELAY for one of them."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.clock, self.done = watch(trainer), threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        if trainer.is_global_zero:
            self.thread.start()

    def look(self) -> None:
        while not self.done.wait(0.002):
            waiting, last = self.clock.collective, self.clock.last_collective
            if waiting is not None and last is not None and time.monotonic() - waiting[1] > DELAY:
                store().set(f"waited in step {last.step}", "")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.done.set()
        if trainer.is_global_zero:
            self.thread.join()


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


class Slow(Planned):
    """Computes for so many seconds a step, and ``until_waited_for`` until rank 0 has waited as long as that."""

    def __init__(self, seconds: float, *, until_waited_for: bool = False, batch_norm: bool = False) -> None:
        super().__init__()
        self.seconds = seconds
        self.until_waited_for = until_waited_for
        if batch_norm:
            self.widen = nn.Sequential(nn.BatchNorm1d(6), self.widen)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.seconds)
        if self.until_waited_for:
            store().wait([f"waited in step {batch_idx}"])
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.seconds)


def timed_fit(
    layout: str, seconds: float = 0.0, *, late: float = 0.0, patient: bool = False, callbacks: Any = (), **options: Any
) -> tuple[dict[str, float], float]:
    """A training of which rank 1 takes so many seconds longer in each forward pass."""
    slow, timing = dist.get_rank() == 1, Timing()
    module = Slow(seconds + late * slow, until_waited_for=patient and slow, batch_norm=options.pop("batch_norm", False))
    callbacks = [timing, *([Patience()] if patient else []), *callbacks]
    options["strategy"] = {"plan": PLANS["plan"], **options.get("strategy", {})}
    trainer = make_trainer(layout, callbacks=callbacks, max_steps=STEPS, gradient_clip_val=1.0, **options)
    trainer.fit(module, shares("plain", STEPS, tp=trainer.strategy._degrees["tp"]))
    assert not trainer.strategy.clock.running
    return timing.split, timing.wall


LATE = (STEPS - 2) * DELAY
"""By how much the slow rank is late, altogether."""


def late_fit(layout: str, accumulate: int = 1) -> tuple[dict[str, float], float]:
    return timed_fit(layout, late=DELAY, patient=True, accumulate=accumulate)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2", "hsdp4", "fsdp+tp4"])
def test_a_rank_that_waits_for_a_slow_one_communicates_and_the_slow_one_computes(pool: RankPool, layout: str) -> None:
    ranks = pool.run(late_fit, layout, world_size=world_size(layout))
    for split, wall in ranks:
        assert sum(split.values()) == pytest.approx(wall, rel=0.05)
    slow = ranks[1][0]
    assert slow["forward"] > LATE
    for rank, (split, _) in enumerate(ranks):
        if rank != 1:
            assert split["communication"] > (LATE if rank == 0 else 0.5 * LATE)


def test_a_split_of_a_step_adds_up_to_its_wall(pool: RankPool) -> None:
    for split, wall in pool.run(timed_fit, "ddp2", 4 * DELAY, world_size=2):
        assert sum(split.values()) == pytest.approx(wall, rel=0.05)
        assert sum(split.values()) - split["other"] > 0.95 * wall


class Alone(pl.Callback):
    """Let no rank wait for another one: the same step, without communication."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        trainer.strategy.dp_group = None
        trainer.strategy._sync_gradients = lambda *_, **__: None
        trainer.strategy.model.require_backward_grad_sync = False
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def with_and_without(seconds: float) -> list[tuple[dict[str, float], float]]:
    return [timed_fit("ddp2", seconds, late=3 * DELAY, callbacks=callbacks) for callbacks in ([], [Alone()])]


def test_exposed_communication_is_what_a_step_without_communication_saves(pool: RankPool) -> None:
    ((split, wall), (alone, wall_alone)), _ = pool.run(with_and_without, 0.02, world_size=2)
    assert split["communication"] == pytest.approx(wall - wall_alone, rel=0.25)
    assert split["communication"] > 1.5 * LATE
    assert alone["communication"] < 0.01 * LATE


def test_micro_batches_compute_forward_and_wait_once(pool: RankPool) -> None:
    (fast, _), (slow, _) = pool.run(late_fit, "ddp2", 2, world_size=2)
    assert slow["forward"] > 2 * LATE, "that of the second micro-batch, which runs in backward, is one too"
    assert fast["communication"] > LATE


def slow_to_begin() -> tuple[dict[str, float], float]:
    """Rank 0 waits in its forward pass for the running statistics of rank 1."""
    return timed_fit("ddp2", callbacks=[Hesitates()], batch_norm=True)


class Hesitates(pl.Callback):
    """Rank 0, whose buffers go to the others, begins late."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        time.sleep(DELAY * (trainer.global_rank == 0))


def test_waiting_for_buffers_is_communication(pool: RankPool) -> None:
    (late, _), (waits, _) = pool.run(slow_to_begin, world_size=2)
    assert late["other"] > LATE
    assert waits["communication"] > 0.5 * LATE


# ---- each way to wait ------------------------------------------------------------------------------------------------


def eager() -> None:
    functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD) + 1


def as_compiled_code_does() -> None:
    started = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD.group_name)
    torch.ops._c10d_functional.wait_tensor.default(started)


def objects() -> None:
    dist.all_gather_object([None, None], "x")


def asynchronous() -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()


def a_barrier() -> None:
    dist.barrier()


def in_a_thread(collective: Callable[[], None]) -> None:
    thread = threading.Thread(target=collective)
    thread.start()
    thread.join()


def waits(collective: Callable[[], None], *, thread: bool = False) -> tuple[dict[str, float], list[Any], bool]:
    """Rank 1 comes to a collective when rank 0 has waited DELAY for it: what the clock says, what another thread of
    rank 0 has seen, and whether torch is afterwards what it was."""
    held = vars(dist.Work)["wait"], torch.ops._c10d_functional.wait_tensor._op
    clock, seen = StepClock(), list[Any]()
    end = time_collectives(clock)
    clock.start()
    dist.barrier()
    clock.take()
    looking = threading.Thread(target=tell_rank_1, args=(clock, seen, thread))
    if dist.get_rank() == 0:
        looking.start()
    else:
        store().wait(["come"])
    in_a_thread(collective) if thread else collective()
    split = clock.take()
    if dist.get_rank() == 0:
        looking.join()
    end()
    collective()
    again = vars(dist.Work)["wait"], torch.ops._c10d_functional.wait_tensor._op
    return split, seen, held == again and not clock.take()["communication"]


def tell_rank_1(clock: StepClock, seen: list[Any], in_vain: bool) -> None:
    while clock.collective is None and not in_vain:
        time.sleep(0.001)
    time.sleep(2 * DELAY)
    seen.append(clock.collective and clock.collective[0])
    store().set("come", "")


@pytest.mark.parametrize(
    ("collective", "name"),
    [
        (eager, "functional collective"),
        (as_compiled_code_does, "functional collective"),
        (objects, "allgather"),
        (asynchronous, "allreduce"),
        (a_barrier, "barrier"),
    ],
)
def test_each_way_to_wait_is_charged_and_undone(pool: RankPool, collective: Any, name: str) -> None:
    split, seen, undone = pool.run(waits, collective, world_size=2)[0]
    assert split["communication"] > DELAY
    assert seen == [name]
    assert undone


class Stream:
    """Stands in for a stream of a GPU."""

    device = None


def on_a_gpu() -> Any:
    """What a clock with events of stand-ins is charged: what was done with which stream, and all that it waited for."""
    ours, other, moments = Stream(), Stream(), Moments()
    current, found = [ours], dict[str, Any]()
    torch.cuda.current_stream = lambda device=None: current[0]  # type: ignore[assignment]
    held, clock = vars(torch.cuda.Stream)["wait_event"], StepClock()
    clock.record = moments.record
    group = dist.new_group()
    end = time_collectives(clock, [group], stream=ours)
    clock.start()

    class Passing:
        def wait(self, stream: Any) -> None:
            moments.now += 1

    def charged(label: str, act: Callable[[], Any]) -> None:
        clock.last_collective = None
        act()
        waited = clock.last_collective and clock.last_collective.name
        found[label] = waited, clock.take()["communication"], clock.collective

    event: Any = Passing()
    charged("event, our stream", lambda: torch.cuda.Stream.wait_event(ours, event))  # type: ignore[arg-type]
    charged("event, another stream", lambda: torch.cuda.Stream.wait_event(other, event))  # type: ignore[arg-type]
    # On gloo what is started at once has not been waited for: only the hooks see it.
    options = dist.AllreduceOptions()
    options.asyncOp = False
    charged("sync", lambda: group.allreduce([torch.ones(3)], options))
    options.asyncOp = True
    charged("async", lambda: group.allreduce([torch.ones(3)], options))
    charged("async, waited for", lambda: group.allreduce([torch.ones(3)], options).wait())
    current[0] = other
    charged("sync, another stream", lambda: dist.all_reduce(torch.ones(3), group=group))
    current[0] = ours
    charged("a thread of Python's", lambda: in_a_thread(lambda: dist.all_reduce(torch.ones(3), group=group)))
    charged("a thread of C++'s", lambda: in_a_foreign_thread(lambda: dist.all_reduce(torch.ones(3), group=group)))
    end()
    charged("ended", lambda: dist.all_reduce(torch.ones(3), group=group))
    return found, vars(torch.cuda.Stream)["wait_event"] is held


def in_a_foreign_thread(act: Callable[[], Any]) -> None:
    """In a thread that ``threading`` has not started, as those of autograd."""
    done = threading.Event()
    _thread.start_new_thread(lambda: (act(), done.set()), ())
    assert done.wait(30)


def test_on_a_gpu_only_the_stream_that_computes_waits(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    found, undone = pool.run(on_a_gpu, world_size=2)[0]
    assert undone
    assert found.pop("event, our stream") == ("event of another stream", 1.0, None)
    waited = {label: name for label, (name, _, _) in found.items()}
    assert waited == {
        "event, another stream": None,
        "sync": "allreduce",
        "async": None,
        "async, waited for": "allreduce",
        "sync, another stream": None,
        "a thread of Python's": None,
        "a thread of C++'s": "allreduce",
        "ended": None,
    }
    assert all(pending is None for _, _, pending in found.values())


def waits_in_a_thread() -> tuple[dict[str, float], list[Any], bool]:
    return waits(asynchronous, thread=True)


def test_what_another_thread_waits_for_is_not_charged(pool: RankPool) -> None:
    (split, seen, _), _ = pool.run(waits_in_a_thread, world_size=2)
    assert (split["communication"], seen) == (0, [None])


class Broken(Planned):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise RuntimeError("broken")
        return super().training_step(batch, batch_idx)


def breaks() -> bool:
    held = vars(dist.Work)["wait"]
    trainer = make_trainer("ddp2", callbacks=[Timing()], max_steps=STEPS)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Broken(), shares("plain", STEPS))
    return vars(dist.Work)["wait"] is held


def test_a_training_that_fails_leaves_torch_as_it_was(pool: RankPool) -> None:
    assert pool.run(breaks, world_size=2) == [True, True]


def ends(layout: str, timed: bool) -> dict[str, torch.Tensor]:
    recorder = Recorder()
    torch.manual_seed(11)
    options: dict[str, Any] = {"strategy": {"plan": PLANS["plan"]}, "max_steps": STEPS, "gradient_clip_val": 0.5}
    trainer = make_trainer(layout, callbacks=[recorder, *([Timing()] if timed else [])], accumulate=2, **options)
    trainer.fit(Planned(), shares("plain", STEPS, tp=trainer.strategy._degrees["tp"]))
    return recorder.record.end


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "tp2"])
def test_nothing_trained_differs_by_a_bit(pool: RankPool, layout: str) -> None:
    with_clock, without = (pool.run(ends, layout, timed, world_size=2)[0] for timed in (True, False))
    assert with_clock.keys() == without.keys()
    assert all(torch.equal(with_clock[name], without[name]) for name in without)


# ---- what the loop does around the step ------------------------------------------------------------------------------


class SlowData(Dataset):
    """Each batch takes DELAY."""

    def __init__(self) -> None:
        self.batches = shares("plain", STEPS).dataset

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        time.sleep(DELAY)
        return self.batches[index]


class SlowLogger(DummyLogger):
    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(DELAY)


class SlowSaving(SaveCheckpoints):
    def save(self, trainer: Any) -> None:
        time.sleep(DELAY)
        super().save(trainer)


def fit_one(
    *, slow_data: bool = False, slow_validation: bool = False, callbacks: Any = (), **options: Any
) -> dict[str, float]:
    """What the clock has counted of four steps on one device, each with a validation of one batch."""
    timing = Timing()
    trainer = make_trainer("one", callbacks=[timing, *callbacks], max_steps=STEPS, val_check_interval=1, **options)
    quick = shares("plain", STEPS)
    loaders = [DataLoader(SlowData(), batch_size=None) if slow else quick for slow in (slow_data, slow_validation)]
    trainer.fit(Slow(0.0), *loaders)
    return timing.split


def slow_phase(split: dict[str, float], name: str) -> bool:
    """Whether DELAY a step is charged to ``name``: at each moment one phase is charged, so to no other."""
    return split[name] > LATE


def test_waiting_for_a_batch_is_data() -> None:
    assert slow_phase(fit_one(slow_data=True, limit_val_batches=0), "data")


def test_validation_is_evaluation_with_its_data() -> None:
    assert slow_phase(fit_one(slow_validation=True, limit_val_batches=1), "evaluation")


def test_what_loggers_do_is_logging() -> None:
    assert slow_phase(fit_one(logger=SlowLogger(), log_every_n_steps=1, limit_val_batches=0), "logging")


def test_saving_is_checkpoint(tmp_path: Path) -> None:
    saving = SlowSaving(str(tmp_path / "checkpoints"), every_n_steps=1, at_end=False)
    assert slow_phase(fit_one(callbacks=[saving], limit_val_batches=0), "checkpoint")


def test_what_lightning_saves_is_checkpoint(tmp_path: Path) -> None:
    class Saves(pl.Callback):
        def on_save_checkpoint(self, *args: Any) -> None:
            time.sleep(DELAY)

    lightnings = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    split = fit_one(callbacks=[Saves(), lightnings], enable_checkpointing=True, limit_val_batches=0)
    assert split["checkpoint"] > LATE - DELAY  # the last one is made after the last time is taken


def test_lightnings_profiler_goes_on_working(tmp_path: Path) -> None:
    profiler = SimpleProfiler(tmp_path, "report")
    assert slow_phase(fit_one(slow_data=True, profiler=profiler, limit_val_batches=0), "data")
    report = next(tmp_path.glob("*report*")).read_text()
    assert "train_dataloader_next" in report
    assert sum(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) > STEPS * DELAY


def test_a_second_training_of_one_trainer_is_timed_as_the_first() -> None:
    timing = Timing()
    trainer = make_trainer("one", callbacks=[timing], max_steps=STEPS)
    loader = DataLoader(SlowData(), batch_size=None)
    for _ in range(2):
        timing.split = {}
        trainer.fit_loop.epoch_loop._batches_that_stepped = 0
        trainer.fit(Slow(0.0), loader)
        assert timing.split["data"] > LATE
        assert not trainer.strategy.clock.running
        trainer.fit_loop.epoch_loop.max_steps += STEPS


def test_a_strategy_without_a_clock_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(strategy=SingleDeviceStrategy\)"):
        watch(pl.Trainer(accelerator="cpu", devices=1, logger=False))
