"""When checkpoints are written, which are kept, how training is asked to end, and what becomes of errors."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwise.checkpoint import files, writer
from shardwise.checkpoint.index import StoredTensors
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.saving import Preempted, SaveCheckpoints, Wish
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.tensors import read_below
from shardwise.errors import ConfigError
from training import build_module, make_trainer, shares

STEPS = 12


class Stop:
    requested: str | None = None


class AtStep(pl.Callback):
    """Calls something once a step is done, on one rank or all."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.act(trainer)


class Measured(pl.Callback):
    """A metric that says another thing on every rank, and is best at step 4 and at step 8 on rank 0."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        value = {4: 0.1, 8: 0.2}.get(trainer.global_step, 1.0) if trainer.global_rank == 0 else trainer.global_step
        trainer.callback_metrics["val/loss"] = torch.tensor(float(value))


def fit(folder: str, layout: str = "one", *, callbacks: Any = (), steps: int = STEPS, **settings: Any) -> Any:
    saving = SaveCheckpoints(folder, **{"every_minutes": None, "keep_last": None, "at_end": False, **settings})
    trainer = make_trainer(layout, callbacks=[*callbacks, saving], max_steps=steps)
    trainer.fit(build_module("mlp"), shares("mlp", steps))
    saving.wait()
    return trainer


def steps_in(folder: Any) -> list[int]:
    return [int(name.removeprefix("step_")) for name in Store(str(folder)).names()]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"every_n_steps": 5}, [5, 10]),
        ({"every_n_steps": 4}, [4, 8, 12]),
        ({"at_end": True}, [12]),
        ({"every_n_steps": 5, "at_end": True}, [5, 10, 12]),
        ({"every_n_steps": 2, "keep_last": 2}, [10, 12]),
        ({"every_n_steps": 1, "keep_last": 1, "keep_every_n_steps": 5}, [5, 10, 12]),
        ({"every_minutes": 0}, list(range(1, 12))),
        ({}, []),
    ],
)
def test_when_and_which(tmp_path, settings, expected):
    fit(str(tmp_path), **settings)
    assert steps_in(tmp_path) == expected
    assert Store(str(tmp_path)).last() == (f"step_{expected[-1]:08d}" if expected else None)


def best_of_two(folder: str) -> None:
    fit(folder, "ddp2", callbacks=[Measured()], every_n_steps=2, keep_last=1, keep_best=2, monitor="val/loss")


def test_the_first_rank_decides_which_is_best(pool, tmp_path):
    """The other rank has its own idea of the metric, and would keep others under other names."""
    pool.run(best_of_two, str(tmp_path), init=False)
    assert steps_in(tmp_path) == [4, 8, 12]
    assert Store(str(tmp_path)).best() == "step_00000004"


def stopped(folder: str, layout: str, who: int) -> tuple[str, int]:
    stop = Stop()

    def ask(trainer: Any) -> None:
        if trainer.global_rank == who:
            stop.requested = "SIGTERM"

    try:
        fit(folder, layout, callbacks=[AtStep(3, ask)], stop=stop)
    except Preempted as preempted:
        return str(preempted), steps_in(folder)[-1]
    return "went on", 0


@pytest.mark.parametrize(("layout", "ranks"), [("one", 1), ("ddp2", 2), ("fsdp4", 4)])
def test_a_request_on_any_rank_ends_all_at_one_step_with_a_checkpoint(pool, tmp_path, layout, ranks):
    if ranks == 1:
        assert stopped(str(tmp_path), layout, 0) == ("ended by SIGTERM after a checkpoint", 3)
        return
    said = pool.run(stopped, str(tmp_path), layout, ranks - 1, world_size=ranks, init=False)
    assert {step for _, step in said} == {4}, "one step after the request, on every rank"
    assert said[-1][0] == "ended by SIGTERM after a checkpoint"
    assert said[0][0] == "ended by another rank's request after a checkpoint"


def test_a_time_limit_ends_it_too(tmp_path):
    with pytest.raises(Preempted, match=r"launch\.time_limit"):
        fit(str(tmp_path), time_limit=time.time() - 1)
    assert steps_in(tmp_path) == [1]


def test_a_request_at_the_last_step_is_the_end_of_the_run(tmp_path):
    stop = Stop()
    fit(
        str(tmp_path),
        callbacks=[AtStep(STEPS, lambda _: setattr(stop, "requested", "SIGTERM"))],
        stop=stop,
        at_end=True,
    )
    assert steps_in(tmp_path) == [STEPS]


def test_training_goes_on_while_a_copy_is_written_and_a_second_save_waits(tmp_path, monkeypatch):
    """What is saved is the state of its step, although training has changed every parameter meanwhile."""
    begun, go, seen, write = threading.Event(), threading.Event(), [], writer.write_tensors

    def slow(*args: Any, **options: Any) -> Any:
        seen.append(("begun", threading.current_thread().name))
        begun.set()
        assert go.wait(20)
        return write(*args, **options)

    monkeypatch.setattr(writer, "write_tensors", slow)
    values: dict[int, Any] = {}

    def note(trainer: Any) -> None:
        values[trainer.global_step] = {
            n: p.detach().clone() for n, p in trainer.lightning_module.model.named_parameters()
        }
        if trainer.global_step == 4:
            assert begun.wait(20)  # on a busy machine the thread may be late
        seen.append(("step", trainer.global_step))
        if trainer.global_step == 5:
            go.set()

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            note(trainer)

    fit(str(tmp_path), callbacks=[Note()], every_n_steps=3, steps=6)
    assert seen.index(("begun", "save step_00000003")) < seen.index(("step", 4)) < seen.index(("step", 5))
    assert [name for kind, name in seen if kind == "begun"] == ["save step_00000003", "save step_00000006"]
    for step in (3, 6):
        saved = StoredTensors(f"{tmp_path}/step_{step:08d}")
        for name, value in values[step].items():
            assert torch.equal(read_below(f"model/{name}", saved)[f"model/{name}"], value), (step, name)
    assert any(not torch.equal(value, values[6][name]) for name, value in values[3].items())


def test_an_error_of_the_thread_is_raised_in_the_training(tmp_path, monkeypatch):
    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "write_tensors", fail)
    with pytest.raises(ConfigError, match=r"step_00000002 cannot be written to .* \(No space left on device\)"):
        fit(str(tmp_path), every_n_steps=2)
    assert steps_in(tmp_path) == []


def fails_on_the_second(folder: str) -> str:
    if os.environ["RANK"] == "1":
        inner = files.SummingStream.write
        files.SummingStream.write = _no_space  # type: ignore[method-assign]
    try:
        fit(folder, "fsdp2", every_n_steps=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if os.environ["RANK"] == "1":
            files.SummingStream.write = inner  # type: ignore[method-assign]
    return "went on"


def _no_space(stream: Any, data: Any) -> int:
    raise OSError(28, "No space left on device")


def test_an_error_of_one_rank_ends_all_and_publishes_nothing(pool, tmp_path):
    said = pool.run(fails_on_the_second, str(tmp_path), init=False)
    assert all("No space left on device" in text for text in said), said
    assert steps_in(tmp_path) == []


def test_a_callback_that_keeps_code_is_told_so(tmp_path):
    class Keeps(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"schedule": lambda step: step}

    with pytest.raises(ConfigError, match=r"schedule is a function, which no checkpoint takes"):
        fit(str(tmp_path), callbacks=[Keeps()], every_n_steps=2)


def wishes() -> list[list[int]]:
    wish, rank = Wish(dist.new_group(backend="gloo")), dist.get_rank()
    said = [wish.exchange(2 if (rank, step) == (1, 3) else 1 if (rank, step) == (0, 5) else 0) for step in range(8)]
    wish.end()
    return said


def test_the_largest_wish_is_known_to_all_at_the_same_step(pool):
    assert pool.run(wishes, world_size=3) == [[0, 0, 0, 0, 2, 0, 1, 0]] * 3


def test_object_stores_take_the_same(tmp_path):
    fit("memory://saving/run", every_n_steps=4, keep_last=2)
    assert steps_in("memory://saving/run") == [8, 12]
    url, state = open_checkpoint("memory://saving/run/last")
    assert (url, state["step"]) == ("memory://saving/run/step_00000012", 12)
    trainer = make_trainer("one", max_steps=STEPS + 2)
    with pytest.warns(UserWarning, match="You're resuming from a checkpoint that ended before the epoch ended"):
        trainer.fit(build_module("mlp"), shares("mlp", STEPS + 2), ckpt_path=url)
    assert trainer.global_step == STEPS + 2


def test_a_checkpoint_can_be_read_by_torchs_own_tools(tmp_path):
    """And nothing in it is pickled but torch.distributed.checkpoint's index."""
    fit(str(tmp_path), at_end=True)
    folder = Path(tmp_path) / f"step_{STEPS:08d}"
    name, (shape, dtype) = next(iter(StoredTensors(str(folder)).items()))
    found: dict[str, Any] = {name: torch.zeros(shape, dtype=dtype)}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found[name], read_below(name, StoredTensors(str(folder)))[name])
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "manifest.json", "state.json"}
