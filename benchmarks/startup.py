"""From the command to the first step, over what importing torch and Lightning takes; and how soon errors come."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TRAIN = [sys.executable, str(ROOT / "train.py")]
RUN = [*TRAIN, "trainer.max_steps=2", "trainer.limit_val_batches=0", "trainer.limit_test_batches=0"]

ARMS: dict[str, tuple[list[str], str | None]] = {
    "import torch, pytorch_lightning": (
        [sys.executable, "-c", "import torch, pytorch_lightning; print('imported', flush=True)"],
        "imported",
    ),
    "one device, logger=none": ([*RUN, "logger=none"], "formats after the first step"),
    "one device, logger=wandb (offline)": (
        [*RUN, "logger=wandb", "logger.mode=offline"],
        "formats after the first step",
    ),
    "2 processes, logger=none": ([*RUN, "logger=none", "trainer.devices=2"], "formats after the first step"),
    "--help": ([*TRAIN, "--help"], None),
    "a misspelt key": ([*TRAIN, "trainer.num_node=2"], None),
}
"""Name -> the command, and the line that marks the first step (None: the end of the process)."""


def seconds(command: list[str], mark: str | None, cwd: str) -> float:
    """Wall-clock seconds from the start of a command to its mark."""
    start = time.perf_counter()
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=cwd, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        reached = None
        for line in process.stdout:
            if mark is not None and mark in line and reached is None:
                reached = time.perf_counter() - start
        process.wait()
    if mark is None:
        return time.perf_counter() - start
    if reached is None:
        raise RuntimeError(f"{' '.join(command)} never printed {mark!r}")
    return reached


def measure(rounds: int, cwd: str) -> list[dict[str, Any]]:
    """A row a command: median seconds, and the ratios to the import of the same round."""
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(rounds):
        for name, (command, mark) in ARMS.items():
            times[name].append(seconds(command, mark, cwd))
    base = times["import torch, pytorch_lightning"]
    rows = []
    for name, measured in times.items():
        ratios = sorted(a / b for a, b in zip(measured, base, strict=True))
        rows.append(
            {
                "command": name,
                "seconds": statistics.median(measured),
                "ratio": (ratios[0], statistics.median(ratios), ratios[-1]),
            }
        )
        print(rows[-1], flush=True)
    return rows
