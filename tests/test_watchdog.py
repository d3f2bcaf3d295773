"""A rank that hangs: where every rank is gets printed, the rank is named, and the job fails before its limit."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkout import ROOT, TrainRun
from pool import RankPool
from shardwise.parallel.flight_recorder import Collective, last_collective
from shardwise.telemetry.stacks import Place, all_stacks, culprits, main_stack, report, waits_in_collective
from shardwise.telemetry.watchdog import Ending, Watchdog

TORCHRUN = Path(sys.executable).with_name("torchrun")
LIMIT = 6

# ---- whom places give away -------------------------------------------------------------------------------------------

USERS = ("/home/user/train.py", 30, "on_train_batch_start", "time.sleep(600)")
TORCHS = ("/lib/torch/distributed/distributed_c10d.py", 5170, "all_reduce", "work.wait()")


def place(rank: int, *, waits: bool = True, collective: str = "all_reduce 13 of all ranks", **more: Any) -> Place:
    frames = (TORCHS,) if waits else (USERS,)
    values = {"host": f"host-{rank}", "step": 3, "phase": "communication", "quiet": 96.0, "frames": frames, **more}
    return Place(rank=rank, waits=waits, collective=collective, **values)


def told(places: list[Place], *, size: int, **more: Any) -> list[str]:
    hosts = [f"host-{rank}" for rank in range(size)]
    by_rank = {place.rank: place for place in places}
    return report(by_rank, size=size, hosts=hosts, why="no step has ended for 96 s", left={}, **more).splitlines()


def test_the_rank_that_is_in_no_collective_comes_first_and_equal_stacks_together() -> None:
    busy = place(2, waits=False, phase="data", collective="all_reduce 12 of all ranks")
    lines = told([place(0), place(1), busy, place(3)], size=4)
    assert lines == [
        "no step has ended for 96 s: where every rank is",
        "rank 2 (host-2), in data after step 3, last collective all_reduce 12 of all ranks:",
        '  File "/home/user/train.py", line 30, in on_train_batch_start',
        "    time.sleep(600)",
        "ranks 0, 1, 3, in communication after step 3, in all_reduce 13 of all ranks:",
        '  File "/lib/torch/distributed/distributed_c10d.py", line 5170, in all_reduce',
        "    work.wait()",
        "no step has ended for 96 s: rank 2 (host-2) hangs in data at on_train_batch_start, train.py:30, and the other "
        "3 wait for it (where a step may take that long: launch.collective_timeout=...)",
    ]


def test_a_rank_that_does_not_answer_is_named() -> None:
    lines = told([place(0), place(2)], size=3)
    assert lines[1] == "rank 1 (host-1) does not answer (stopped, stuck, or dead)"
    assert lines[-1].endswith("rank 1 (host-1) does not answer (stopped, stuck, or dead), and the other 2 wait")
    text = report({0: place(0)}, size=2, hosts=[], why="hung", left={1: "training"})
    assert text.splitlines()[-1] == "hung: rank 1 has ended training already, and rank 0 waits"


def test_a_rank_that_is_in_another_collective_than_most_is_named() -> None:
    odd = place(1, collective="all_gather 13 of all ranks")
    assert culprits({0: place(0), 1: odd, 2: place(2)}, size=3) == [1]
    assert told([place(0), odd, place(2)], size=3)[-1].endswith(
        "rank 1 (host-1) is in all_gather 13 of all ranks at all_reduce, distributed_c10d.py:5170, and the other 2 "
        "wait in another collective"
    )


def test_nobody_is_named_where_it_cannot_be_told() -> None:
    assert culprits({0: place(0), 1: place(1, collective="all_gather 13 of all ranks")}, size=2) == []
    assert "all ranks wait for one another" in told([place(0), place(1)], size=2)[-1]
    lines = told([place(0, waits=False), place(1, waits=False)], size=2)
    assert "no rank waits for another one, all are at work (launch.collective_timeout=..." in lines[-1]


def test_whether_a_main_thread_waits_for_others() -> None:
    under_way = Collective("all_reduce", 3, "all ranks", ended=False, seconds=1.0)
    ended = Collective("all_reduce", 3, "all ranks", ended=True, seconds=1.0)
    engine = ("/lib/torch/autograd/graph.py", 800, "_engine_run_backward", "")
    assert waits_in_collective([USERS, TORCHS], None)
    assert waits_in_collective([USERS, engine], under_way)
    assert not waits_in_collective([USERS, engine], ended)
    assert not waits_in_collective([TORCHS, USERS], under_way), "what is under way goes on while the user's code sleeps"


def test_a_place_survives_the_store() -> None:
    there = place(1, waits=False)
    assert Place.load(json.loads(json.dumps(there.dump()))) == there


def test_the_stacks_of_all_threads_are_told_the_main_one_first() -> None:
    go = threading.Event()

    def wait_for_it() -> None:
        go.wait(20)

    thread = threading.Thread(target=wait_for_it, name="a loader of mine", daemon=True)
    thread.start()
    text = all_stacks()
    go.set()
    assert text.index("thread MainThread") < text.index("thread a loader of mine")
    assert "in wait_for_it\n    go.wait(20)" in text
    assert any(frame[2] == "test_the_stacks_of_all_threads_are_told_the_main_one_first" for frame in main_stack())


def in_the_midst() -> Any:
    import torch
    import torch.distributed as dist

    value = torch.ones(2)
    dist.all_reduce(value)
    before = last_collective()
    work = dist.all_reduce(value, async_op=True) if dist.get_rank() == 0 else None
    during = last_collective()
    dist.distributed_c10d._get_default_store().set(f"seen{dist.get_rank()}", "")
    dist.distributed_c10d._get_default_store().wait(["seen0", "seen1"])
    if dist.get_rank() == 1:
        dist.all_reduce(value)
    else:
        work.wait()
    return before, during


def test_the_flight_recorder_knows_the_collective_that_a_rank_waits_in(pool: RankPool) -> None:
    before, during = pool.run(in_the_midst, world_size=2)[0]
    assert (before.name, before.group, before.ended) == ("all_reduce", "all ranks", True)
    assert (during.name, during.number, during.ended) == ("all_reduce", before.number + 1, False)


# ---- the thread ------------------------------------------------------------------------------------------------------


def watched(what: str) -> Any:
    """Two ranks under a limit of two seconds, of which nothing ends for three and a half; whether it was told."""
    import torch.distributed as dist

    from shardwise.parallel.timed_collectives import time_collectives
    from shardwise.step_clock import StepClock

    clock = StepClock()
    heard: list[str] = []
    dog = Watchdog(start_timeout=60, collective_timeout=2.5, ending=Ending(fail=lambda rank, text: heard.append(text)))
    ended: list[int] = []
    os._exit, leave = ended.append, os._exit  # type: ignore[assignment]
    strategy = type("Strategy", (), {"hosts": ["a", "b"], "clock": clock})()
    trainer: Any = type("Trainer", (), {"strategy": strategy, "global_step": 1})
    undo = time_collectives(clock)
    clock.start()
    try:
        dog.setup(trainer, None, "fit")  # type: ignore[arg-type]
        store = dog._store
        if what != "starting":
            dog.on_train_batch_end()
        end = time.monotonic() + 3.5
        if what == "saving":  # one rank writes, the other waits for it
            with clock.phase("checkpoint"):
                time.sleep(3.5 * dist.get_rank())
                dist.barrier()
        while time.monotonic() < end and not ended:
            time.sleep(0.05)
            if what == "validating":
                dog.on_validation_batch_end()
        dist.barrier()
        dog.teardown(trainer, None, "fit")  # type: ignore[arg-type]
        assert ended or store.check([f"left/{dist.get_rank()}"])
        dog.setup(trainer, None, "fit")  # type: ignore[arg-type]
        assert not dog._store.check(["left/0"]), "that was another training"
        dist.barrier()
        dog.teardown(trainer, None, "fit")  # type: ignore[arg-type]
        return heard, ended
    finally:
        undo()
        os._exit = leave


@pytest.mark.parametrize(
    ("what", "told"), [("starting", False), ("validating", False), ("saving", False), ("hanging", True)]
)
def test_the_alarm_is_raised_by_what_does_not_end_and_by_nothing_else(pool: RankPool, what: str, told: bool) -> None:
    results = pool.run(watched, what, world_size=2)
    assert sum(len(heard) for heard, _ in results) == (1 if told else 0), "one rank tells it"
    assert [ended for _, ended in results] == [[1] if told else []] * 2
    if told:
        (text,) = [text for heard, _ in results for text in heard]
        assert "(0.8 of launch.collective_timeout=2.5)" in text


# ---- whole jobs ------------------------------------------------------------------------------------------------------

HANGING = """
import os, signal, time
from pathlib import Path

from pytorch_lightning import Callback


class Hang(Callback):
    def __init__(self, rank, what="sleep", folder=None):
        self.rank, self.what, self.folder = rank, what, folder

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step != 3 or trainer.global_rank != self.rank:
            return
        if self.folder:
            mark = Path(self.folder) / "hung"
            if mark.exists():
                return
            mark.write_text(str(time.time()))
        getattr(self, self.what)()

    def sleep(self):
        while True:
            time.sleep(1)

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def slow(self):
        time.sleep(2)
"""
WORDS = ["model=mlp", "model.width=8", "schedule.warmup_steps=0", "logger=none", "trainer.max_steps=6"]
WORDS += ["plugins=[hanging]", "+callbacks.hang._target_=hanging.Hang", f"launch.collective_timeout={LIMIT}"]


@pytest.fixture
def hanging(tmp_path: Path) -> dict[str, str | None]:
    """The environment of a job with the callback above."""
    (tmp_path / "hanging.py").write_text(HANGING)
    return {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1", "HANG_MARK": str(tmp_path)}


def alive(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"HANG_MARK={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def gone(mark: str) -> bool:
    """Whether no process of a job is left, or none is soon: the helpers of multiprocessing end after their parent."""
    end = time.monotonic() + 10
    while alive(mark) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(mark)


def result_of(run: TrainRun | Path) -> dict[str, Any]:
    (path,) = (run if isinstance(run, Path) else run.output_root).rglob("result.json")
    return json.loads(path.read_text())


SLEEPS = r"rank 1 \(\S+\) hangs in \w+ at sleep, hanging.py:\d+, and the other 2 wait for it"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ends_the_job(
    train_py: Callable[..., TrainRun], tmp_path: Path, hanging: dict[str, str | None]
) -> None:
    words = [*WORDS, "+callbacks.hang.rank=1", f"+callbacks.hang.folder={tmp_path}"]
    run = train_py(*words, "trainer.devices=3", "batch.global_size=48", ok=False, env=hanging)
    text = run.stderr
    assert time.time() - float((tmp_path / "hung").read_text()) < LIMIT + 6, "with the end of the launcher"
    assert text.count("where every rank is") == 1
    blamed, waiting = text.index("rank 1 ("), text.index("ranks 0, 2, in ")
    assert blamed < waiting
    assert "in sleep\n    time.sleep(1)" in text[blamed:waiting]
    assert "all_reduce" in text[waiting:]
    assert re.search(SLEEPS, text), text
    assert re.search(r"rank 1 failed first; its log: \S+rank_1.log", text)
    (ranks,) = run.output_root.rglob("ranks")
    for rank in range(3):
        log = (ranks / f"rank_{rank}.log").read_text()
        assert "thread MainThread:" in log
        assert ("time.sleep(1)" in log) or rank != 1
    result = result_of(run)
    assert (result["status"], result["steps"]) == ("failed", 3)
    assert gone(str(tmp_path))


@pytest.mark.slow
def test_a_restart_goes_on_after_a_hang(
    train_py: Callable[..., TrainRun], tmp_path: Path, hanging: dict[str, str | None]
) -> None:
    words = [*WORDS, "+callbacks.hang.rank=0", f"+callbacks.hang.folder={tmp_path}", "launch.max_restarts=1"]
    run = train_py(*words, "trainer.devices=2", ok=True, env=hanging)
    assert re.search(r"rank 0 failed: .*rank 0 \(\S+\) hangs in .*restart 1 of 1", run.stderr), run.stderr
    assert (result_of(run)["status"], result_of(run)["steps"]) == ("completed", 6)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_named_by_the_others(
    train_py: Callable[..., TrainRun], tmp_path: Path, hanging: dict[str, str | None]
) -> None:
    words = [*WORDS, "+callbacks.hang.rank=0", "+callbacks.hang.what=stop", "strategy=fsdp"]
    run = train_py(*words, "trainer.devices=2", ok=False, env=hanging)
    assert re.search(r"rank 0 \(\S+\) does not answer \(stopped, stuck, or dead\), and rank 1 waits", run.stderr), (
        run.stderr
    )
    assert gone(str(tmp_path))


@pytest.mark.slow
def test_a_step_below_the_limit_is_left_alone(
    train_py: Callable[..., TrainRun], tmp_path: Path, hanging: dict[str, str | None]
) -> None:
    run = train_py(*WORDS, "+callbacks.hang.rank=1", "+callbacks.hang.what=slow", "trainer.devices=2", env=hanging)
    assert "no step has ended" not in run.stdout + run.stderr
    assert result_of(run)["status"] == "completed"


@pytest.mark.slow
def test_under_torchrun_the_hang_is_told_on_the_console_once(tmp_path: Path, hanging: dict[str, str | None]) -> None:
    root = tmp_path / "outputs"
    command = [str(TORCHRUN), "--nproc-per-node=2", str(ROOT / "train.py"), *WORDS, "+callbacks.hang.rank=1"]
    run = subprocess.Popen(
        [*command, f"output_root={root}"],
        env={**os.environ, **{name: value for name, value in hanging.items() if value is not None}},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = run.communicate(timeout=100)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 1, text
    assert text.count("where every rank is") == 1, text
    assert re.search(r"rank 1 \(\S+\) hangs in \w+ at sleep", text)
    assert result_of(root)["status"] == "failed"
    assert gone(str(tmp_path))
