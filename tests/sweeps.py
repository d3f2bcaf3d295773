"""Runs sweeps of tiny jobs in processes that are forked from one that has imported everything."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm import Started, Warm

TINY = [
    "model=mlp",
    "model.width=8",
    "model.dropout=0.2",
    "schedule.warmup_steps=0",
    "logger=none",
    "batch.global_size=16",
]
TINY += ["trainer.max_steps=5", "trainer.log_every_n_steps=1"]
EVERY_STEP = ["checkpoint.every_n_steps=1", "checkpoint.background=false"]


def wait_until(true: Callable[[], Any], *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@dataclass
class Field:
    """A folder in which sweeps are run, as ``field.run("-m", ...)``."""

    warm: Warm
    folder: Path

    def start(self, *words: str, watch: bool = True, target: str = "shardwise.cli:train") -> Started:
        command = ["-m", *TINY, *words, *(self.watch() if watch else [])]
        return self.warm.start(target, [command], cwd=self.folder, **self._files())

    def run(self, *words: str, status: int = 0, watch: bool = True) -> tuple[str, str]:
        """(standard output, errors) of a sweep that ends with ``status``."""
        found = self.start(*words, watch=watch).wait(120)
        assert found == status, self.out + self.errors
        return self.out, self.errors

    def watch(self) -> list[str]:
        words = ["_target_=watching.Watch", f"folder={self.folder}", "seed=${seed}"]
        return ["plugins=[watching]", *(f"+callbacks.watch.{word}" for word in words)]

    def _files(self) -> dict[str, Path]:
        return {"out": self.folder / "out", "err": self.folder / "err"}

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def errors(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def seen(self) -> list[dict[str, Any]]:
        """What the callback has written."""
        path = self.folder / "jobs"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def rows(self, name: str = "*") -> list[dict[str, Any]]:
        (path,) = (self.folder / "outputs" / "sweeps").glob(f"{name}/jobs.json")
        return json.loads(path.read_text())


def losses(row: dict[str, Any]) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (Path(row["run_folder"]) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]


def stamps(row: dict[str, Any]) -> dict[str, int]:
    """Every file of a run, and when it was last written."""
    folder = Path(row["run_folder"])
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
