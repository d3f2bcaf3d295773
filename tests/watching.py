"""What tests of sweeps plug into the jobs: a callback that writes down who runs when, waits, or fails; and a source."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback

from shardwise.sweep.planning import common_of
from shardwise.sweep.source import Common, Outcome, Planned


class Watch(Callback):
    """Appends to ``folder/jobs`` when training begins and ends.

    Args:
        folder: where.
        seed: the job's, by which tests tell jobs apart.
        hold: seeds that wait in the midst of their third step until ``folder/go`` is there.
        fail: seeds that fail in their third step, and how often.
    """

    def __init__(self, folder: str, seed: int, hold: Sequence[int] = (), fail: dict[int, int] | None = None) -> None:
        self.folder, self.seed = Path(folder), seed
        self.hold, self.fail = hold, {int(key): times for key, times in (fail or {}).items()}

    def _write(self, trainer: Any, what: str) -> None:
        facts = {"what": what, "seed": self.seed, "rank": trainer.global_rank, "size": trainer.world_size}
        facts |= {"pid": os.getpid(), "parent": os.getppid(), "threads": torch.get_num_threads(), "time": time.time()}
        with (self.folder / "jobs").open("a") as file:
            file.write(json.dumps({**facts, "step": trainer.global_step}) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer, "start")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 2:
            return
        if self.seed in self.hold:
            (self.folder / f"held_{self.seed}_{trainer.global_rank}").touch()
            while not (self.folder / "go").exists():
                time.sleep(0.01)
        before = self.folder / f"failed_{self.seed}"
        if self.fail.get(self.seed, 0) > (len(before.read_text()) if before.exists() else 0):
            with before.open("a") as file:
                file.write(".")
            raise RuntimeError(f"planted for seed {self.seed}")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer, "end")


class LeavesAChild(Callback):
    """Is killed in its second step, and leaves a forked child, which lives until ``folder/go`` is there."""

    def __init__(self, folder: str) -> None:
        self.go = Path(folder) / "go"

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            if os.fork() == 0:
                end = time.monotonic() + 100
                while not self.go.exists() and time.monotonic() < end:
                    time.sleep(0.05)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)


class Pruning:
    """A source of two jobs that prunes the first once it reports its second step."""

    def __init__(self, planned: list[Planned], seen: Path) -> None:
        self.planned, self.seen, self.given = planned, seen, 0

    total = None
    ended_before = 0

    @property
    def finished(self) -> bool:
        return self.given == len(self.planned)

    def common(self) -> Common:
        return common_of(self.planned)

    def next(self) -> Planned:
        self.given += 1
        return self.planned[self.given - 1]

    def started(self, planned: Planned, job: Any) -> None:
        self._see("started", planned)

    def progress(self, planned: Planned, lines: Sequence[tuple[int, dict[str, float]]]) -> bool:
        self._see("progress", planned, [[step, sorted(values)] for step, values in lines])
        return planned.number == 1 and any(step >= 2 for step, _ in lines)

    def ended(self, planned: Planned, outcome: Outcome) -> None:
        self._see("ended", planned, outcome.status)

    def rest(self) -> list[Planned]:
        return []

    def closing(self, outcomes: Sequence[Outcome]) -> list[str]:
        return [f"the end: {' '.join(outcome.status for outcome in outcomes)}"]

    def _see(self, what: str, planned: Planned, more: Any = None) -> None:
        with self.seen.open("a") as file:
            file.write(json.dumps([what, planned.number, more]) + "\n")


def train_on_eight_cores(argv: list[str]) -> int:
    """``python train.py`` on a machine of eight cores, as far as the parent knows."""
    from shardwise.cli import train

    os.environ.pop("OMP_NUM_THREADS")
    os.sched_getaffinity = lambda _: set(range(8))
    return train(argv)


def train_an_hour_ago(argv: list[str]) -> int:
    """``python train.py`` that was typed an hour ago."""
    import shardwise.cli

    shardwise.cli.STARTED = time.time() - 3600
    return shardwise.cli.train(argv)


def run_pruning(_: list[str], folder: str, words: list[str]) -> int:
    """A sweep of two seeds whose source prunes the first; in a process of its own."""
    from shardwise.cli import experiment_of, status_of, sweep_planner
    from shardwise.hydra_setup import compose
    from shardwise.sweep.pool import run_jobs

    configs = [compose([*words, f"seed={seed}"]) for seed in (1, 2)]
    with contextlib.closing(sweep_planner(configs)) as planner:
        planned = [
            planner.plan(config, [f"seed={number}"], {"data": "digits"}, number=number)
            for number, config in enumerate(configs, 1)
        ]
    assert experiment_of(configs[0], {"data": "digits"}) == "digits"
    source = Pruning(planned, Path(folder) / "seen")
    return status_of(lambda: run_jobs(source, folder=Path(folder) / "sweep", sample=planned[0]) and 0)
